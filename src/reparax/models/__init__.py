"""Models that hold a chain: what the four libraries share, and modules of nnx.

Each makes the effective tree once in each call, and hands it to the plain model; none knows what a stage does.
"""
