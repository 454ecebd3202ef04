"""Roles and groups of the axes of weights, found in the program of a network."""

from reparax._axes.misfit import Misfit as Misfit
from reparax._axes.misfit import Misfits as Misfits
from reparax._axes.roles import Role as Role
from reparax._axes.roles import Use as Use
from reparax.geometry._check import check_axes as check_axes
from reparax.geometry._groups import Group as Group
from reparax.geometry._groups import Groups as Groups
from reparax.geometry._groups import Member as Member
from reparax.geometry._groups import axis_groups as axis_groups
from reparax.geometry._permute import permute as permute
from reparax.geometry._roles import roles as roles
from reparax.geometry._shrink import prune_units as prune_units
from reparax.geometry._shrink import shrink as shrink
