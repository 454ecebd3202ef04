"""Programs that JAX has traced, read as data. Nothing here knows which transform asks.

The files, each of which imports only those above it:

- ``equations``: one equation as a typed view.
- ``jaxprs``: all else that is assumed about programs of JAX; how they are taken apart, rebuilt and run.
- ``dependence``: which values depend on parameters and keys alone, and other facts about values.
- ``call``: the arguments of the user's function, and its program. ``sources``: lines and paths, for reports.
- ``contractions``: what products, convolutions and look-ups do with axes.
- ``sums``: weights as sums of products. ``multiply``: the arrays of these, in the cheapest order.
- ``rules``: what equations make of sums. ``interpreter``: a program in which weights are sums.
- ``steps``: one step's part of a stacked value.
"""
