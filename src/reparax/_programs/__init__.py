"""Traced programs: how JAX writes them down, what depends on what in them, and where weights start."""
