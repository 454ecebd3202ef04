"""Reads and writes state dicts of torch modules, also with those parametrizations that torch has.

A state dict is read in two steps: first the names, as a plan that is checked as a whole, and then the values.
"""
