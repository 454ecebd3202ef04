"""Statistics of data: what arrays are multiplied with, and starts of raw values that learn from it.

The core hands them on, and knows of them what one array has seen, and how ``init`` takes a tree of that.
"""
