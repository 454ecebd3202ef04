"""Formulas shared by many stages, which also work where naive ones fail: zero rows, half precision, huge numbers."""
