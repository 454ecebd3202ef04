"""Provides formulas that work where naive ones fail: for rows of zeros, in half precision, for huge numbers."""
