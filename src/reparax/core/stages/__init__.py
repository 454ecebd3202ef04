"""Base classes of stages: you write a formula on arrays, and no code for trees.

``leaf`` applies a formula to each array that ``where`` selects, ``joint`` applies one to groups of arrays.
``constraint`` is for stages with a constraint set as image, ``matrices`` for formulas on rows and columns.
"""
