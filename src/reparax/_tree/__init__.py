"""What a raw tree is: plain dicts whose key paths say everything.

A parametrized array is a dict in the array's place, ``{"@weight_norm": {"g": ..., "v": ...}}``. Whose value an array
is, whether it trains, and under which path a stage may select it are read from its key path, so no tree needs a class,
and none is walked by hand.
"""
