"""Stages: who writes one writes a formula on an array, and no code on trees.

``leaf`` maps such a formula over the arrays that ``where`` selects, ``joint`` one on several arrays over groups of
them. ``constraint`` is for formulas with an image, ``matrices`` for those that see rows and columns.
"""
