"""Roles of the axes of weights, found in the program of a network.

``_reading`` goes through the program. Of each value it follows the axes (``_values``), as ``_rules`` say for each kind
of equation, and notes where weights meet data (``_uses``); ``_roles`` sums up what was noted of each parameter.
"""

from reparax.axes._roles import check_axes as check_axes
from reparax.axes._roles import roles as roles
from reparax.core.roles import Role as Role
