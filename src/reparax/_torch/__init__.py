"""Networks of torch: their state dicts read and written, with the parametrizations that torch has too.

A state dict is read in two steps: by names alone into a plan, which is checked as a whole, and by values.
"""
