"""Reads and writes state dicts of torch modules, including torch's own parametrizations.

A state dict is read in two steps: first the names, as a plan that is checked as a whole, and then the values.
"""
