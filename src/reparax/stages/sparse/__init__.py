"""Stages for masked, pruned and frozen weights. A mask is a fixed value that ``update`` may change."""

from reparax.stages.sparse._sparse import SET as SET
from reparax.stages.sparse._sparse import Freeze as Freeze
from reparax.stages.sparse._sparse import GlobalMagnitudePruning as GlobalMagnitudePruning
from reparax.stages.sparse._sparse import MagnitudePruning as MagnitudePruning
from reparax.stages.sparse._sparse import Mask as Mask
from reparax.stages.sparse._sparse import NByM as NByM
from reparax.stages.sparse._sparse import RandomPruning as RandomPruning
from reparax.stages.sparse._sparse import RigL as RigL
