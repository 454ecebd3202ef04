"""Formulas shared by many stages, also safe where naive ones fail: zero rows, half precision, huge numbers."""
