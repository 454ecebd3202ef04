"""Roles of the axes of weights, found in the program of a network."""

from reparax.axes._roles import check_axes as check_axes
from reparax.axes._roles import roles as roles
from reparax.core.roles import Role as Role
