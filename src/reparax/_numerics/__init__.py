"""Formulas that several families share, safe where the naive one fails: rows of zeros, half precision, huge numbers."""
