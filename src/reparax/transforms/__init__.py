"""Functions of a loss: less memory, fewer operations, noise for each example, and reports of what they do."""

from reparax.transforms._remat import remat as remat
from reparax.transforms._saved_residuals import saved_residuals as saved_residuals
from reparax.transforms.draws._explained import ExplainedDraws as ExplainedDraws
from reparax.transforms.draws._local import local as local
from reparax.transforms.products._explained import Explained as Explained
from reparax.transforms.products._explained import explain as explain
from reparax.transforms.products._factored import factored as factored
