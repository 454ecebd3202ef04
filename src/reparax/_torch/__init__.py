"""Networks of torch: their state dicts read and written, with the parametrizations that torch has too."""
