"""The axes of arrays: each raw axis follows the axis of its parameter that it grows with.

From this, raw values get the axis names and shardings of their parameters. It is found by tracing, unless a stage
states it. Also here: axes by number and by name, and axes along which independent arrays are stacked.
"""
