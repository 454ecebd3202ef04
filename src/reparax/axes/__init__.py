"""Roles and groups of the axes of weights, found in the program of a network."""

from reparax.axes._groups import axis_groups as axis_groups
from reparax.axes._groups import permute as permute
from reparax.axes._groups import prune_units as prune_units
from reparax.axes._groups import shrink as shrink
from reparax.axes._roles import check_axes as check_axes
from reparax.axes._roles import roles as roles
from reparax.core.roles import Role as Role
