"""The axes of arrays: a raw axis follows the axis of its parameter that it grows with.

That one fact gives raw values the names and the shardings of their parameters. A stage is asked for it by tracing
alone, or says it itself. Here too: axes by number and by name, and those along which independent arrays are stacked.
"""
