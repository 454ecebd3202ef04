"""Functions of a loss: less memory, fewer operations, noise for each example, and reports of what they do.

``_remat`` (with three files of its own), ``_factored`` and ``_local`` hold the transforms; each starts with a
description of how it works. ``_explain`` and ``_saved_residuals`` hold the reports. To write a new transform, follow
``_factored``: check the function with ``check_call``, which also rejects a function that ``remat`` returned, trace it
with ``Arguments.of(...).trace()``, and follow weights with a class of ``Rules`` for the ``Interpreter``.
"""

from reparax.transforms._explain import explain as explain
from reparax.transforms._factored import factored as factored
from reparax.transforms._local import local_reparametrization as local_reparametrization
from reparax.transforms._remat import remat as remat
from reparax.transforms._saved_residuals import saved_residuals as saved_residuals
