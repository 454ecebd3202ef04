"""The laws of parametrizations, for whoever writes a stage: run ``check_laws`` on it, on parameters that it takes.

Each law is a function of a parametrization, a tree of arrays and a key that raises an ``AssertionError`` where the
law is broken, naming the stage, the path and by how much.
"""

import copy
import itertools
import pickle
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reparax import _paths, _raw, _roundtrip
from reparax._core import Chain, Parametrization
from reparax._evidence import (
    arrays,
    compiled_apply,
    compiled_fold,
    compiled_init,
    doubled,
    equal,
    gradient,
    has_functions,
    inexact,
    moved,
    objective,
    paths,
    picklable,
    require,
    require_close,
    require_raises,
    rounding,
    stages,
    stepped,
    twice,
    types,
    without_row,
    zeros,
)
from reparax._json import from_json
from reparax._paths import PyTree
from reparax._raw import combine, partition
from reparax._stage import Stage

Law = Callable[[Parametrization, PyTree, Array], None]


def check_laws(
    p: Parametrization, params: PyTree, key: Array | None = None, *, laws: Iterable[Law] | None = None
) -> None:
    """Runs the laws of parametrizations on ``p``.

    Args:
      p: A stage or a chain.
      params: A tree of arrays that ``p`` takes, of a generic value: not zero, not symmetric.
      key: The key of all draws; ``jax.random.key(0)`` where there is none.
      laws: Some of ``LAWS``; all of them where there is none.

    Raises:
      AssertionError: Naming the law, and where and by how much it is broken.

    Example:
      >>> import jax, reparax as rpx
      >>> from reparax.testing import check_laws
      >>> check_laws(rpx.WeightNorm() >> rpx.VarNoise(0.1), {"w": jax.random.normal(jax.random.key(1), (4, 3))})
    """
    for law in LAWS if laws is None else laws:
        law(p, params, jax.random.key(0) if key is None else key)


def right_inverse(p: Parametrization, params: PyTree, key: Array) -> None:
    """``apply(init(w)) == w`` for every ``w`` on the image, within the rounding of the coarsest dtype involved.

    A point of the image is made by moving the free values at random. Where a stage holds fixed values, these belong
    to the point from which they were made; there ``apply(init(...))`` must be a projection: twice is once.
    """
    raw = compiled_init(p, params, key)
    free, fixed = partition(raw)
    point = compiled_fold(p, combine(moved(free, key), fixed))
    if jax.tree.leaves(fixed):
        point = compiled_fold(p, compiled_init(p, point, key))
    again = compiled_fold(p, compiled_init(p, point, key))
    require_close(p, "right inverse", again, point, rounding(raw, point), "apply(init(w)) is not w")


def types_kept(p: Parametrization, params: PyTree, key: Array) -> None:
    """Structure, shapes, dtypes and shardings are those of the model, unless the stage exists to change them."""
    raw = compiled_init(p, params, key)
    for effective in (compiled_fold(p, raw), compiled_apply(p, raw, key)):
        require(p, "types", paths(effective) == paths(params), "the effective tree has other paths")
        for (path, got), (_, want) in zip(arrays(effective), arrays(params), strict=True):
            same = (got.shape, got.dtype) == (want.shape, want.dtype) or p.changes_type
            require(p, "types", same, f"{path!r} is {got.dtype}{got.shape}, but was {want.dtype}{want.shape}")
    _require_shardings(p, params, key)


def _require_shardings(p: Parametrization, params: PyTree, key: Array) -> None:
    """An effective array has its sharding, where a raw value of its path and shape has it."""
    devices = jax.devices()[:2]
    mesh = Mesh(np.array(devices), ("devices",))

    def placed(w: Array) -> Array:
        split = w.ndim > 0 and w.size > 0 and w.shape[0] % len(devices) == 0
        return jax.device_put(w, NamedSharding(mesh, PartitionSpec("devices") if split else PartitionSpec()))

    sharded = jax.tree.map(placed, params)
    raw = compiled_init(p, sharded, key)
    leaves, slots, _ = _raw.flatten(raw)
    kept = {(slot.path, w.shape): w.sharding for w, slot in zip(leaves, slots, strict=True)}
    for (path, got), (_, want) in zip(arrays(compiled_apply(p, raw, key)), arrays(sharded), strict=True):
        source = kept.get((path, want.shape))
        follows = source is None or source != want.sharding or got.sharding.is_equivalent_to(want.sharding, got.ndim)
        require(p, "types", follows, f"{path!r} has the sharding {got.sharding}, but its raw value {want.sharding}")


def value_semantics(p: Parametrization, params: PyTree, key: Array) -> None:
    """Equal builds are equal, hash equal and trace once; a parametrization holds no array, and copies are equal."""
    twins = [copy.deepcopy(p)] + [pickle.loads(pickle.dumps(p)) for _ in range(picklable(p))]
    require(p, "value semantics", jax.tree.leaves(p) == [], "it holds leaves, so it cannot be static to JAX")
    traces: list[Parametrization] = []

    def traced(q: Parametrization, raw: PyTree) -> PyTree:
        traces.append(q)
        return q.fold(raw)

    jitted = jax.jit(traced, static_argnums=0)
    for twin in [p, *twins]:
        require(p, "value semantics", twin == p and hash(twin) == hash(p), "a copy of it is not equal to it")
        jitted(twin, compiled_init(p, params, key))
    require(p, "value semantics", len(traces) == 1, f"{len(twins) + 1} equal builds were traced {len(traces)} times")


def transformations(p: Parametrization, params: PyTree, key: Array) -> None:
    """``jit``, ``vmap``, ``jax.checkpoint``, ``scan`` and ``shard_map`` agree with eager evaluation."""
    raw = p.init(params, key)
    keys = jnp.stack([key, jax.random.fold_in(key, 1)])
    mesh = Mesh(np.array(jax.devices()[:1]), ("devices",))
    everywhere = PartitionSpec()
    apply_shard = jax.shard_map(p.apply, mesh=mesh, in_specs=everywhere, out_specs=everywhere)

    def ways(params: PyTree, raw: PyTree, key: Array) -> dict[str, PyTree]:
        return {
            "jit": p.apply(raw, key),
            "jit of init": p.fold(p.init(params, key)),
            "jit of update": p.fold(p.update(raw, key)),
            "checkpoint": jax.checkpoint(p.apply)(raw, key),
            "shard_map": apply_shard(raw, key),
            "vmap": jax.vmap(p.apply)(twice(raw), keys),
            "vmap of init": jax.vmap(p.fold)(jax.vmap(p.init)(twice(params), jnp.stack([key, key]))),
            "scan": jax.lax.scan(lambda carry, k: (carry, p.apply(raw, k)), 0, keys)[1],
        }

    first, folded = p.apply(raw, key), p.fold(raw)
    both = jax.tree.map(lambda a, b: np.stack([a, b]), first, compiled_apply(p, raw, keys[1]))
    eager = {
        "jit of init": folded,
        "jit of update": p.fold(p.update(raw, key)),
        "vmap": both,
        "scan": both,
        "vmap of init": twice(folded),
    }
    for way, got in jax.jit(ways)(params, raw, key).items():
        want = eager.get(way, first)
        require_close(p, "transformations", got, want, rounding(raw, first), f"{way} differs from eager evaluation")
    abstract = jax.eval_shape(p.init, params, key)
    require(
        p,
        "transformations",
        types(abstract) == types(raw),
        "eval_shape of init gives other shapes or dtypes",
    )


def keys(p: Parametrization, params: PyTree, key: Array) -> None:
    """The same key gives the same values, and what is deterministic needs none; leaves are drawn independently."""
    raw, mean = compiled_init(p, params, key), p.deterministic
    drawn = compiled_apply(p, raw, key)
    fixed = not mean.stochastic and equal(compiled_apply(mean, raw, None), compiled_apply(mean, raw, key))
    require(p, "keys", fixed, "its deterministic chain is random")
    require(p, "keys", equal(p.apply(raw, key), p.apply(raw, key)), "the same key gives different values")
    changes = not equal(compiled_apply(p, raw, jax.random.fold_in(key, 1)), drawn)
    said = "" if p.stochastic else "not "
    require(p, "keys", changes == p.stochastic, f"it says that it is {said}stochastic, but draws otherwise")
    if p.stochastic:
        require_raises(p, "keys", lambda: p.apply(raw), "it draws without a key")
        _require_independent(p, raw, key)
    if p.stochastic and isinstance(params, dict):
        grown = {**params, "a new parameter": jnp.ones((3, 3), jnp.float32)}
        draws = p.apply(p.init(grown, key), key)
        same = equal({name: draws[name] for name in params}, p.apply(p.init(params, key), key))
        require(p, "keys", same, "the draws of old parameters change with a new one")


def _require_independent(p: Parametrization, raw: PyTree, key: Array) -> None:
    """Noise on arrays of equal shape, each with raw values of its own, is uncorrelated within sampling error."""
    shared = {_raw.parameter(path) for path in _raw.empty_nodes(raw)}
    many = jax.jit(jax.vmap(p.apply, in_axes=(None, 0)))(raw, jax.random.split(key, 64))
    means = {path: np.asarray(w) for path, w in arrays(compiled_fold(p, raw)) if path not in shared}
    noise = {path: np.asarray(w).astype(complex) - means[path] for path, w in arrays(many) if path in means}
    drawn = [path for path, d in noise.items() if np.any(d)]
    for a, b in itertools.combinations(drawn, 2):
        if means[a].shape == means[b].shape:
            x, y = (np.ravel(noise[path] - noise[path].mean()) for path in (a, b))
            correlation = float(abs(np.vdot(x, y)) / (np.linalg.norm(x) * np.linalg.norm(y)))
            require(
                p,
                "keys",
                correlation < 6 / np.sqrt(x.size),
                f"the noise of {a!r} and of {b!r} has correlation {correlation:.2f}",
            )


def purity(p: Parametrization, params: PyTree, key: Array) -> None:
    """Inputs are the same afterwards, and what draws leaves the raw tree alone."""
    raw = compiled_init(p, params, key)
    mine = jax.tree.map(np.array, params), jax.tree.map(np.array, raw)
    before = jax.tree.map(np.array, mine)
    p.init(mine[0], key)
    p.apply(mine[1], key)
    p.update(mine[1], key)
    require(p, "purity", equal(before, mine), "it changes its input")
    require(
        p,
        "purity",
        equal(compiled_init(p.deterministic, params, key), raw),
        "its random stages change the raw tree",
    )


def gradients(p: Parametrization, params: PyTree, key: Array) -> None:
    """Gradients of the free values are those of finite differences, finite at zero, and move every free array."""
    name = "gradients"
    for where, point in {
        "a row of zeros": jax.tree.map(without_row, params),
        "zero": zeros(params),
    }.items():
        for path, g in arrays(gradient(p, compiled_init(p, point, key), key)):
            require(p, name, np.all(np.isfinite(g)), f"that of {path!r} is not finite at {where}")
    for path, g in arrays(gradient(p, compiled_init(p, params, key), key)):
        require(p, name, g.size == 0 or np.any(np.asarray(g)), f"that of {path!r} is zero, so no optimizer moves it")
    with jax.enable_x64():
        _require_slope(p, jax.tree.map(doubled, params), key)


def _require_slope(p: Parametrization, params: PyTree, key: Array) -> None:
    raw = compiled_init(p, params, key)
    free, fixed = partition(raw)
    rounds = any(jnp.finfo(w.dtype).bits < 64 for _, w in arrays(compiled_fold(p, raw)) if inexact(w))
    if rounds or not jax.tree.leaves(free):
        return
    direction = moved(zeros(free), key, 1.0)
    step = 1e-6

    def value(t: float) -> Array:
        return objective(p, combine(stepped(free, direction, t), fixed), key)

    slope = float(value(step) - value(-step)) / (2 * step)
    pairs = zip(arrays(gradient(p, raw, key)), arrays(direction), strict=True)
    along = float(sum(np.sum(np.asarray(g) * np.asarray(d)).real for (_, g), (_, d) in pairs))
    close = abs(along - slope) < 1e-6 * (1 + abs(slope))
    require(p, "gradients", close, f"the slope is {slope:.8g}, but {along:.8g} by the gradient")


def checkpoints(p: Parametrization, params: PyTree, key: Array) -> None:
    """Raw trees and configurations come back from every file format that is installed; wrong ones are refused."""
    raw, name = compiled_init(p, params, key), "checkpoints"
    for way, there_and_back in _roundtrip.installed(raw).items():
        restored = there_and_back(raw)
        require(p, name, equal(restored, raw), f"{way} gives another raw tree back")
        p.check(restored, like=params)
    if not has_functions(p):
        require(p, name, from_json(p.to_json()) == p, "to_json and from_json give another one back")
    leaves, treedef = jax.tree.flatten(raw)
    for i, leaf in enumerate(leaves):
        for wrong in (None, np.asarray(leaf)[None], np.zeros(leaf.shape, np.int8)):
            spoilt = treedef.unflatten([*leaves[:i], wrong, *leaves[i + 1 :]])
            require_raises(p, name, lambda spoilt=spoilt: p.check(spoilt, like=params), "check takes a wrong tree")
    if paths(raw) != paths(params) and all(isinstance(stage, Stage) for stage in stages(p)):
        require_raises(p, name, lambda: p.apply(params, key), "apply takes a tree that never went through init")
        require_raises(p, name, lambda: p.init(raw, key), "init takes a raw tree")
        require_raises(p, name, lambda: Chain().apply(raw), "another chain takes its raw tree")


def plain_trees(p: Parametrization, params: PyTree, key: Array) -> None:
    """``p.fold(raw)`` is an ordinary tree of plain arrays, as the model had before."""
    folded = p.fold(compiled_init(p, params, key))
    same = jax.tree.structure(folded) == jax.tree.structure(params)
    require(p, "plain trees", same, f"fold gives {jax.tree.structure(folded)}, not {jax.tree.structure(params)}")
    require(p, "plain trees", all(_paths.is_array(w) for _, w in arrays(folded)), "fold gives what is no array")


LAWS: tuple[Law, ...] = (
    right_inverse,
    types_kept,
    value_semantics,
    transformations,
    keys,
    purity,
    gradients,
    checkpoints,
    plain_trees,
)
