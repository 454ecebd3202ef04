"""Provides checks for your own tests: ``check_laws`` for the laws of a stage, and ``check_step`` for a training step.

This package imports ``core``, ``numerics`` and ``training``. No other package of reparax imports it.
"""

from reparax.testing._laws import check_laws as check_laws
from reparax.testing._step import check_step as check_step
