"""Reads, rewrites and runs jaxprs, the programs that JAX traces, for the packages ``transforms`` and ``axes``.

A jaxpr is a list of equations. This package does not depend on the transforms that use it. Each of its files imports
only files that are above it in this list:

- ``equations``: typed views of single equations.
- ``jaxprs``: all other assumptions about jaxprs, and functions that take them apart, rebuild them and run them.
- ``dependence``: which values depend on parameters and keys alone, and other facts about values.
- ``call``: flattens the arguments of the user's function and traces it. ``sources``: source lines and paths for
  reports.
- ``contractions``: how matrix products, convolutions and look-ups pair and keep axes.
- ``sums``: weights stored as sums of products. ``multiply``: computes their arrays in the cheapest order.
- ``rules``: how single equations change such sums. ``interpreter``: runs a jaxpr in which weights are such sums.
- ``steps``: computes the part of a stacked value that one step of a loop needs.
"""
