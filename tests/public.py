"""The public names of the package: those of its families, which have all of them."""

import reparax as rpx
from reparax.core import names

WRAPPED = tuple(names.LIBRARIES)
"""Modules that each need a library."""
FAMILIES = {family: getattr(rpx, family) for family in names.FAMILIES if family not in WRAPPED}
TOP = {name: getattr(rpx, name) for name in names.TOP}
PUBLIC = {name: getattr(FAMILIES[family], name) for name, family in names.family_by_name().items()}
TYPES = ("Axes", "Number", "Where")
"""Types in signatures."""
