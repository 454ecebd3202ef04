"""Roles of the axes of weights, found in the program of a network.

``_reading`` goes through the program. It follows the axes of each value (``_values``) by a rule for each kind of
equation (``_rules``), and records where weights are multiplied with data (``_uses``). From these records, ``_roles``
finds the role of each axis of each parameter.
"""

from reparax.axes._roles import check_axes as check_axes
from reparax.axes._roles import roles as roles
from reparax.core.roles import Role as Role
