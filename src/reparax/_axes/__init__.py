"""Axes of arrays: their numbers and names, what is stacked along them, and where they lie on a mesh."""
