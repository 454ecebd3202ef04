"""The public names of the package: those of its families, which have all of them."""

import inspect

import reparax as rpx

WRAPPED = ("nnx", "linen", "equinox", "haiku")
"""Modules that are imported when they are named, each with its library."""
ALONE = ("testing", "demo", *WRAPPED)
"""Modules that are imported by themselves."""
ROOMS = ("core", "stages", "programs", "models", "numerics")
"""Folders of the package that have no public names of their own."""
FAMILIES = {
    name: x for name, x in vars(rpx).items() if inspect.ismodule(x) and name[0] != "_" and name not in (*ALONE, *ROOMS)
}
TOP = {name: x for name, x in vars(rpx).items() if name[0] != "_" and not inspect.ismodule(x)}
PUBLIC = {
    name: x
    for family in FAMILIES.values()
    for name, x in vars(family).items()
    if name[0] != "_" and not inspect.ismodule(x)
}
TYPES = ("Axes", "Number", "PyTree", "Where")
"""Types in signatures."""
