"""Shared formulas, also safe where naive ones fail: rows of zeros, half precision, huge numbers."""
