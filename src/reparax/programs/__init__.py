"""Traced programs: how JAX represents them, which values depend on which inputs, and where weights start."""
