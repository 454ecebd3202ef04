"""Formulas for many stages, which also work where naive formulas fail: zero rows, half precision, huge numbers."""
