"""Reads, changes and runs programs that JAX has traced, for ``transforms`` and ``axes``.

A program is a jaxpr, which is a list of equations. Nothing here knows which transform uses it. The files, each of which
imports only those above it:

- ``equations``: one equation as a typed view.
- ``jaxprs``: all else that is assumed about programs of JAX, and how they are taken apart, rebuilt and run.
- ``dependence``: which values depend on parameters and keys alone, and other facts about values.
- ``call``: the arguments of the user's function, and its program. ``sources``: source lines and paths, for reports.
- ``contractions``: what products, convolutions and look-ups do with axes.
- ``sums``: weights as sums of products. ``multiply``: their arrays, computed in the cheapest order.
- ``rules``: what single equations do to sums. ``interpreter``: runs a program in which weights are sums.
- ``steps``: one step's part of a stacked value.
"""
