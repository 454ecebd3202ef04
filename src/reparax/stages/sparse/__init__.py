"""Masked, pruned and frozen weights; a mask is a fixed value, which ``update`` may change."""

from reparax.stages.sparse._masks import Freeze as Freeze
from reparax.stages.sparse._masks import Mask as Mask
from reparax.stages.sparse._masks import NByM as NByM
from reparax.stages.sparse._pruning import SET as SET
from reparax.stages.sparse._pruning import GlobalMagnitudePruning as GlobalMagnitudePruning
from reparax.stages.sparse._pruning import MagnitudePruning as MagnitudePruning
from reparax.stages.sparse._pruning import RandomPruning as RandomPruning
from reparax.stages.sparse._pruning import RigL as RigL
