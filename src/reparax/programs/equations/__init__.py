"""Equations as typed views: what each says, by the names that JAX's functions give it."""
