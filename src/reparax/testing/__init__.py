"""Checks for your own tests: ``check_laws`` checks the laws of a stage, and ``check_step`` a training step.

It imports core, numerics and training; nothing imports it.
"""

from reparax.testing._laws import check_laws as check_laws
from reparax.testing._step import check_step as check_step
