"""Provides transforms of a loss that save memory or operations or draw noise for each example, and reports on them.

``_remat`` (with three helper modules), ``_factored`` and ``_local`` define the transforms. Each of these modules starts
with a description of how it works. ``_explain`` and ``_saved_residuals`` define the reports. To write a new transform,
follow ``_factored``: check the function with ``check_call``, which also rejects a function that ``remat`` returned;
trace the function with ``Arguments.of(...).trace()``; and follow the weights with a class of ``Rules`` for the
``Interpreter``.
"""

from reparax.transforms._explain import explain as explain
from reparax.transforms._factored import factored as factored
from reparax.transforms._local import local_reparametrization as local_reparametrization
from reparax.transforms._remat import remat as remat
from reparax.transforms._saved_residuals import saved_residuals as saved_residuals
