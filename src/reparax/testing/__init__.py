"""Tests for your own stages: ``check_laws`` checks the laws of parametrizations.

Imports core, numerics and training; nothing imports it.
"""

from reparax.testing._laws import check_laws as check_laws
