"""The stages of the library, one family per folder. They define only formulas; their base classes are in ``core``."""
