"""Models that hold a chain: modules of nnx, linen, equinox and haiku.

Each makes the effective tree once in each call, and hands it to the plain model; none knows what a stage does.
"""
