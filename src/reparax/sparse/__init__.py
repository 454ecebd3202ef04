"""Masked, pruned and frozen weights; a mask is a fixed value, which ``update`` may change."""

from reparax.sparse._freeze import Freeze as Freeze
from reparax.sparse._global_prune import GlobalPrune as GlobalPrune
from reparax.sparse._mask import Mask as Mask
from reparax.sparse._mask import NofM as NofM
from reparax.sparse._prune import MagnitudePrune as MagnitudePrune
from reparax.sparse._prune import RandomPrune as RandomPrune
from reparax.sparse._regrow import SET as SET
from reparax.sparse._regrow import RigL as RigL
