"""Masked, pruned and frozen weights; a mask is a fixed value, which ``update`` may change."""

from reparax.stages.sparse._freeze import Freeze as Freeze
from reparax.stages.sparse._global_prune import GlobalPrune as GlobalPrune
from reparax.stages.sparse._mask import Mask as Mask
from reparax.stages.sparse._mask import NofM as NofM
from reparax.stages.sparse._prune import MagnitudePrune as MagnitudePrune
from reparax.stages.sparse._prune import RandomPrune as RandomPrune
from reparax.stages.sparse._regrow import SET as SET
from reparax.stages.sparse._regrow import RigL as RigL
