"""Paths of the parameters from which a weight is computed."""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from reparax.programs import jaxprs
from reparax.programs.call import Arguments, Traced


def paths_of(arguments: Arguments, call: Traced) -> dict[int, str]:
    """The path of each input of a program that is an argument, but for keys."""
    paths = dict(enumerate(arguments.paths, start=len(call.inputs) - len(arguments.paths)))
    types = [jaxprs.type_of(v).dtype for v in call.program.invars]
    return {i: path for i, path in paths.items() if not jnp.issubdtype(types[i], jax.dtypes.prng_key)}


def common_path(origins: Iterable[int], paths: Mapping[int, str]) -> str:
    """The common start of the paths of all arguments of a weight, without the stages' own values."""
    split_paths = [paths[i].split("/") for i in sorted(origins) if i in paths]
    if len({names[0] for names in split_paths}) > 1:  # several arguments hold parts of one tree
        split_paths = [names[1:] for names in split_paths]
    common: list[str] = []
    for names in zip(*split_paths, strict=False):
        if len(set(names)) > 1 or names[0].startswith("@"):
            break
        common.append(names[0])
    return "/".join(common) or ("of several parameters" if split_paths else "closed over")
