"""The stages of the library, a family in each folder: formulas and numbers alone, on the base classes of ``core``."""
