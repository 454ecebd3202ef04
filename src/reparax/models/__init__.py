"""Models that hold a chain: modules of nnx, linen, equinox and haiku.

Each wrapper computes the effective weights from its raw values once per call, and runs the plain model with them. The
wrappers do not depend on what individual stages do.
"""
