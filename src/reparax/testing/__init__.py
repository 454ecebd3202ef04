"""Tests for your own stages: ``check_laws`` checks the laws of parametrizations.

A law is a function of a chain, parameters and a key that raises an error if the chain breaks it.
"""

from reparax.testing._laws import LAWS as LAWS
from reparax.testing._laws import Law as Law
from reparax.testing._laws import check_laws as check_laws
from reparax.testing._laws import checkpoints as checkpoints
from reparax.testing._laws import gradients as gradients
from reparax.testing._laws import half_precision as half_precision
from reparax.testing._laws import in_chains as in_chains
from reparax.testing._laws import keys as keys
from reparax.testing._laws import mean as mean
from reparax.testing._laws import plain_trees as plain_trees
from reparax.testing._laws import purity as purity
from reparax.testing._laws import rebase as rebase
from reparax.testing._laws import right_inverse as right_inverse
from reparax.testing._laws import selection as selection
from reparax.testing._laws import transfers as transfers
from reparax.testing._laws import transformations as transformations
from reparax.testing._laws import types_kept as types_kept
from reparax.testing._laws import update as update
from reparax.testing._laws import value_semantics as value_semantics
