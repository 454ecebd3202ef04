"""Models that hold a chain: modules of nnx, linen, equinox and haiku.

Each wrapper computes the effective tree once per call and hands it to the plain model. The wrappers do not depend on
what individual stages do.
"""
