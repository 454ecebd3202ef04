"""Masked, pruned and frozen weights; a mask is a fixed value, which ``update`` may change."""

from reparax.stages.sparse._freeze import Freeze as Freeze
from reparax.stages.sparse._global_prune import GlobalMagnitudePruning as GlobalMagnitudePruning
from reparax.stages.sparse._mask import Mask as Mask
from reparax.stages.sparse._mask import NByM as NByM
from reparax.stages.sparse._prune import MagnitudePruning as MagnitudePruning
from reparax.stages.sparse._prune import RandomPruning as RandomPruning
from reparax.stages.sparse._regrow import SET as SET
from reparax.stages.sparse._regrow import RigL as RigL
