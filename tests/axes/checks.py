"""The law of groups of axes: the function of a network does not depend on the order of its units."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax.axes import permute
from reparax.axes._groups import Group
from reparax.core.paths import PyTree, flatten_with_names, path_text

Order = np.ndarray[Any, Any]

ROUNDING = 1e-4
"""The largest change of the outputs, as a share of the largest of them, that is rounding."""


def check_groups(
    fun: Callable[..., Any], params: PyTree, *args: Any, groups: Iterable[Group], key: Array | None = None
) -> None:
    """Checks that each group of axes is complete, and has no superfluous members.

    Permuting all members of a group in the same way changes the result of ``fun`` only by rounding, and permuting all
    but one changes it by more, unless the array of that one has no effect at all. Noise is added to the parameters
    first, so that no two units are equal.
    """
    # Drawn and permuted by numpy, as each operation of JAX would be compiled.
    random = np.random.default_rng(np.asarray(jax.random.key_data(jax.random.key(0) if key is None else key)))
    names, arrays, treedef = flatten_with_names(params)
    paths = list(map(path_text, names))
    noisy = [_add_noise(w, random) for w in arrays]
    compute = jax.jit(lambda arrays: jax.tree.leaves(fun(treedef.unflatten(arrays), *args)))
    want, shapes = compute(noisy), dict(zip(paths, map(jnp.shape, noisy), strict=True))

    def change(group: Group, order: Order) -> float:
        return _distance(compute(jax.tree.leaves(permute(treedef.unflatten(noisy), group, order))), want)

    def counts(path: str) -> bool:
        changed = [_add_noise(w, random) if own_path == path else w for own_path, w in zip(paths, noisy, strict=True)]
        return _distance(compute(changed), want) > ROUNDING

    for group in groups:
        order = _make_permutation(group, shapes, random)
        if (far := change(group, order)) > ROUNDING:
            raise AssertionError(
                f"{_name_group(group)} is not a group: permuting it changes outputs by {far:.1g} of them."
            )
        for member in group.members if len(group.members) > 1 else ():
            smaller = replace(group, members=tuple(item for item in group.members if item != member))
            if change(smaller, order) <= ROUNDING and counts(member.path):
                raise AssertionError(
                    f"{_name_group(group)} need not hold {tuple(member)}: without it, outputs stay the same."
                )


def _add_noise(w: Any, random: np.random.Generator) -> Any:
    """``w`` plus normal numbers of standard deviation 0.3; integers do not change."""
    if not jnp.issubdtype(jnp.result_type(w), jnp.floating):
        return w
    return np.asarray(w) + (0.3 * random.standard_normal(jnp.shape(w))).astype(jnp.result_type(w))


def _make_permutation(group: Group, shapes: dict[str, tuple[int, ...]], random: np.random.Generator) -> Order:
    """A permutation that leaves no index in place; another one for each step, where steps may differ."""
    steps = {tuple(shapes[member.path][axis] for axis in member.steps) for member in group.members}
    shape = steps.pop() if group.by_step and len(steps) == 1 else ()
    places = random.permuted(np.broadcast_to(np.arange(group.size), (*shape, group.size)), axis=-1)
    return np.take_along_axis(places, (np.argsort(places) + 1) % group.size, axis=-1)


def _distance(actual: list[Array], want: list[Array]) -> float:
    """The largest difference of the outputs, as a share of the largest output."""
    pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in zip(actual, want, strict=True)]
    return max(float(np.max(np.abs(x - y)) / max(np.max(np.abs(y)), 1e-30)) for x, y in pairs)


def _name_group(group: Group) -> str:
    """A group, by its first members."""
    members = [tuple(member) for member in group.members]
    return f"{members[:3]}" if len(members) <= 3 else f"{members[:3]} with {len(members) - 3} more"
