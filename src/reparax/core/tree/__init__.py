"""Raw trees: plain dicts whose key paths describe their arrays.

A parametrized array is replaced by a dict, ``{"@weight_norm": {"g": ..., "v": ...}}``. The key path of a raw array
shows its parameter, whether it trains, and under which path a stage can select it. So trees need no classes of their
own.
"""
