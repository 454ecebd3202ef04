"""Statistics of the inputs of arrays, and starts of raw values that learn from them.

The core passes them on; it knows only the data of one array, and how ``init`` takes a tree of these.
"""
