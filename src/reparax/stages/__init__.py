"""The stages of the library, one family per folder. They are only formulas; the base classes are in ``core``."""
