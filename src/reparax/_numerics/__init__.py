"""Formulas that several families share: lengths, linear algebra, and arithmetic that half precision survives."""
