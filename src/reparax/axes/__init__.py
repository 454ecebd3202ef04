"""Finds the role (input, output or stacked) of each axis of each weight in the program of a network.

``_reading`` goes through the program. It describes the axes of each array by the parameter axes that they come from
(``_values``), with a rule for each kind of equation (``_rules``), and records where weights are multiplied with data
(``_uses``). From these records, ``_roles`` finds the role of each axis of each parameter.
"""

from reparax.axes._roles import check_axes as check_axes
from reparax.axes._roles import roles as roles
from reparax.core.roles import Role as Role
