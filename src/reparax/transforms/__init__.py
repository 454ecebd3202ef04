"""Functions of a loss: less memory, fewer operations, noise for each example, and reports of what they do.

``_remat``, with three files beside it, ``_factored`` and ``_local`` each say at the start how they work; ``_explain``
and ``_saved_residuals`` are the reports. A new one checks its argument by ``check_call``, traces it by
``Arguments.of(...).trace()``, and follows weights by a class of ``Rules`` for the ``Interpreter``; ``_factored`` is the
pattern. ``check_call`` says what may wrap what.
"""

from reparax.transforms._explain import explain as explain
from reparax.transforms._factored import factored as factored
from reparax.transforms._local import local_reparametrization as local_reparametrization
from reparax.transforms._remat import remat as remat
from reparax.transforms._saved_residuals import saved_residuals as saved_residuals
