"""Functions of a loss: less memory, fewer operations, noise for each example, and reports of what they do."""

from reparax.core.names import dir_of
from reparax.transforms.draws._explained import ExplainedDraws as ExplainedDraws
from reparax.transforms.draws._local import local as local
from reparax.transforms.memory._remat import remat as remat
from reparax.transforms.memory._saved import Saved as Saved
from reparax.transforms.memory._saved import saved as saved
from reparax.transforms.products._explained import Explained as Explained
from reparax.transforms.products._explained import explain as explain
from reparax.transforms.products._factored import factored as factored

__dir__ = dir_of("transforms")
