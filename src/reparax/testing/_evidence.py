"""Provides helpers for ``check_laws``: compiled functions, comparisons of trees, errors and file formats."""

import functools
import importlib.util
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import all_leaves

from reparax.core.chain import Chain, Mean, Parametrization
from reparax.core.initialization import initialize
from reparax.core.leaf import Perturbation, Reparametrization
from reparax.core.paths import PyTree, flatten_with_names, items, path_text
from reparax.core.plan import Stages, plan_stages, run_steps
from reparax.core.raw import flatten, nest
from reparax.core.values import Values, main
from reparax.numerics.arithmetic import is_inexact, widened
from reparax.training import combine, partition, transfer


def apply_raw(stages: Stages, raw: PyTree, key: Array | None = None) -> PyTree:
    """Returns the effective tree of ``stages`` for a raw tree; without a key, random stages give their means."""
    chain = Chain(tuple(stages))
    planned = plan_stages("apply", tuple(chain.deterministic if key is None else chain), flatten(raw))
    return nest(planned.effective_of(run_steps(planned.steps, planned.raw.arrays, key)))


def init_stage(stage: Parametrization, tree: PyTree, key: Array) -> PyTree:
    """Returns the raw tree of a single stage, initialized from the arrays of ``tree``."""
    return nest(initialize((stage,), flatten(tree), key))


def update_raw(p: Parametrization, raw: PyTree, key: Array) -> PyTree:
    """Returns the raw tree after one ``p.update``; the effective weights serve as gradients if the chain needs any."""
    reads = any("grad" in stage.update_reads for stage in stages_of(p))
    return p.update(raw, key, p.fold(raw)) if reads else p.update(raw, key)


compiled = partial(jax.jit, static_argnums=0)
"""Compiles a function whose first argument is a chain. Equal chains share a program for arguments of equal types."""
compiled_init = compiled(lambda p, params, key: p.init(params, key))
compiled_apply = compiled(lambda p, raw, key: p.apply(raw, key))
compiled_update = compiled(update_raw)
compiled_update_base = compiled(lambda p, raw: p.update_base(raw))
# Passing `like` prevents a raw tree that is a tuple from being mistaken for an optimizer state. Passing `nearest` skips
# the comparison of weights, because the law itself compares every bit.
compiled_transfer = compiled(lambda p, raw: transfer(p, p, raw, raw, nearest=True))


def compiled_fold(p: Parametrization, raw: PyTree) -> PyTree:
    """Computes ``p.fold(raw)`` with the program that applies the deterministic chain."""
    return compiled_apply(p.deterministic, raw, None)


class RoundTrip(NamedTuple):
    """A tree, and the result of applying a stage's ``init`` and then its ``apply`` to the tree."""

    tree: PyTree
    result: PyTree


@compiled
def compiled_stages(p: Parametrization, params: PyTree, key: Array) -> tuple[list[RoundTrip], list[RoundTrip]]:
    """Applies ``init`` and then ``apply`` of each stage alone to two trees, starting with the last stage.

    Returns:
      Two lists of round trips, with an entry for each stage. The first list starts from the trees that the stages get
      when ``params`` are initialized. The second list starts from points in the images of the stages.
    """
    starts = list[RoundTrip]()
    images = list[RoundTrip]()
    tree = params
    for stage in reversed(stages_of(p)):
        raw = init_stage(stage, tree, key)
        starts.append(RoundTrip(tree, apply_raw([stage], raw)))
        point = apply_raw([stage], _move_traced(raw))
        if jax.tree.leaves(partition(raw)[1]):  # Fixed values fit only their own initial point.
            point = apply_raw([stage], init_stage(stage, point, key))
        images.append(RoundTrip(point, apply_raw([stage], init_stage(stage, point, key))))
        tree = raw
    return starts, images


def _move_traced(raw: PyTree) -> PyTree:
    """Adds pseudorandom numbers to the trainable values of a raw tree, which may be traced."""
    rng = np.random.default_rng(0)
    free, rest = trainable(raw)
    moved = jax.tree.map(lambda w: w + jnp.asarray(0.1 * rng.normal(size=w.shape)).astype(w.dtype), free)
    return combine(moved, rest)


@compiled
def slope(p: Parametrization, raw: PyTree, key: Array) -> tuple[Array, PyTree]:
    """Returns a random linear function of the effective tree, and its gradient with respect to the trainable values."""
    free, rest = trainable(raw)

    def objective(free: PyTree) -> Array:
        rng = np.random.default_rng(0)
        arrays = [widened(w) for _, w in named_arrays(p.apply(combine(free, rest), key)) if is_inexact(w)]
        terms = [jnp.sum(jnp.asarray(rng.normal(size=w.shape)).astype(w.dtype) * w).real for w in arrays]
        return sum((term.astype(float) for term in terms), jnp.zeros((), float))

    return jax.value_and_grad(objective)(free)


@compiled
def transformed(p: Parametrization, params: PyTree, raw: PyTree, raws: PyTree, keys: Array) -> dict[str, PyTree]:
    """Returns a dict with results of ``init`` and ``apply`` under ``vmap``, ``scan`` and ``shard_map``, keyed by name.

    One program computes all results, because compilation takes most of the time.
    """
    mesh = Mesh(np.array(jax.devices()[:1]), ("devices",))
    apply_shard = jax.shard_map(p.apply, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    apply_batch = jax.vmap(jax.checkpoint(p.apply))

    def step(carry: int, key: Array) -> tuple[int, PyTree]:
        return carry, apply_batch(raws, jnp.stack([key, keys[1]]))

    return {
        "vmap of init": jax.vmap(p.fold)(jax.vmap(p.init, in_axes=(0, None))(params, keys[0])),
        "scan of vmap of checkpoint": jax.lax.scan(step, 0, keys)[1],
        "shard_map": apply_shard(raw, keys[0]),
    }


@compiled
def compiled_results(p: Parametrization, params: PyTree, key: Array) -> dict[str, PyTree]:
    """Returns a dict with the results of a chain's methods and the gradient of ``apply``, keyed by name."""
    raw = p.init(params, key)
    return {
        "init": raw,
        "apply": p.apply(raw, key),
        "fold": p.fold(raw),
        "update": p.fold(update_raw(p, raw, key)),
        "the gradient": slope(p, raw, key)[1],
    }


class Doubled(Reparametrization):
    """A stage that doubles its raw value, except integers. The law ``chains`` puts it before and behind a chain."""

    kind: ClassVar[str] = "doubled_in_a_law"  # The name is unusual, so that no tested stage has the same kind.
    raw_values: ClassVar[Values] = {"x": main(aligned=True)}
    dtypes: ClassVar[type] = np.generic

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": w / 2 if is_inexact(w) else w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["x"] * 2 if is_inexact(values["x"]) else values["x"]


@compiled
def beside_another(p: Parametrization, params: PyTree, key: Array) -> dict[str, tuple[PyTree, PyTree]]:
    """Returns pairs of actual and expected effective trees of ``p`` "behind" and "before" a ``Doubled`` stage."""
    doubled = Doubled()
    # A stage that moves weights cannot move weights that an earlier stage computes, so the chain is not updated.
    moves_weights = any(stage.moves_weights for stage in stages_of(p))

    def after_update(chain: Parametrization, params: PyTree) -> PyTree:
        raw = chain.init(params, key)
        return chain.apply(raw if moves_weights else update_raw(chain, raw, key), key if p.stochastic else None)

    halves = jax.tree.map(lambda w: doubled.init_leaf(w)["x"], params)
    return {
        "behind": (after_update(doubled >> p, params), after_update(p, params)),
        "before": (
            after_update(p >> doubled, params),
            jax.tree.map(lambda w: doubled.apply_leaf({"x": w}), after_update(p, halves)),
        ),
    }


@partial(jax.jit, static_argnums=(0, 1))
def deviations(p: Parametrization, index: int, raw: PyTree, keys: Array) -> tuple[PyTree, PyTree, PyTree]:
    """Returns the mean that a random stage claims, and sums of the deviations of its draws from this mean.

    The stage at ``index`` is applied to the output of the earlier stages without noise. In the result, marker dicts of
    raw values still stand for the parameters that later stages compute.

    Returns:
      The claimed mean, and the sums over ``keys`` of the deviations (see ``_deviations_of_draw``) and of their squares.
    """
    stage = stages_of(p)[index]
    tree = apply_raw(stages_of(p)[:index], raw)
    claimed_mean = apply_raw([stage], tree)
    comparable_mean = jax.tree.map(comparable, claimed_mean)
    zeros = jax.tree.map(lambda m: jnp.zeros(m.size + 2, m.dtype), comparable_mean)

    def add(sums: tuple[PyTree, PyTree], key: Array) -> tuple[tuple[PyTree, PyTree], None]:
        differences = jax.tree.map(_deviations_of_draw, apply_raw([stage], tree, key), comparable_mean)
        squares = jax.tree.map(lambda d: jnp.square(jnp.abs(d)).astype(d.dtype), differences)
        return jax.tree.map(jnp.add, sums, (differences, squares)), None

    return claimed_mean, *jax.lax.scan(add, (zeros, zeros), keys)[0]


def _deviations_of_draw(draw: Array, mean: Array) -> Array:
    """Returns the deviation of each entry of a draw, then the average deviation, plain and weighted by the mean."""
    entries = jnp.ravel(comparable(draw) - mean)
    largest = jnp.maximum(jnp.max(jnp.abs(mean), initial=0.0), jnp.finfo(mean.dtype).tiny)
    units = jnp.ravel(jnp.conj(mean)) / largest.astype(mean.dtype)
    totals = jnp.stack([jnp.sum(entries), jnp.sum(entries * units)])
    return jnp.concatenate([entries, totals / max(1, mean.size)])


def deviation(total: np.ndarray, squares: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes the mean of ``n`` deviations and its standard error from their sum and the sum of their squares.

    The draws of an entry may miss rare events, so the variance of each entry is taken to be at least the average
    variance.
    """
    mean = total / n
    variance = np.real(squares) / n - np.square(np.abs(mean))
    of_entries, of_averages = variance[:-2], variance[-2:]
    least = np.mean(of_entries) if of_entries.size else 0.0
    variance = np.concatenate([np.maximum(of_entries, least), of_averages])
    return mean, np.sqrt(np.maximum(variance, 0.0) / n)


def comparable(w: Array) -> Array:
    """Converts ``w`` to single precision or wider, so that sums are accurate."""
    return widened(w) if is_inexact(w) else w.astype(jnp.float32)


@dataclass(frozen=True)
class Case:
    """A law to check for one chain, one tree of parameters and one key.

    Attributes:
      law: The name of the law, as it appears in errors.
      chain: The chain, or a single stage.
      params: The model's parameters.
      key: The key of all draws.
    """

    law: str
    chain: Parametrization
    params: PyTree
    key: Array

    @functools.cached_property
    def raw(self) -> PyTree:
        """The raw tree that ``init`` returns for the parameters."""
        return compiled_init(self.chain, self.params, self.key)

    @functools.cached_property
    def moved(self) -> PyTree:
        """The raw tree with random changes to its trainable values."""
        return move_randomly(self.raw, self.key)

    def of_stage(self, stage: Parametrization) -> "Case":
        """Returns the same case for one stage of the chain, so that errors name this stage."""
        return replace(self, chain=stage)

    def require(self, holds: object, message: str) -> None:
        """Raises an AssertionError that contains ``message`` if ``holds`` is false."""
        if not holds:
            raise self.error(message)

    def error(self, message: str) -> AssertionError:
        """Returns an error that says that the law does not hold, followed by ``message``."""
        return AssertionError(f"{self.chain!r} breaks the law of {self.law}: {message}.")

    def require_raises(self, call: Callable[[], object], message: str) -> None:
        """Requires that a call raises a ValueError or a TypeError. Any other error breaks the law too."""
        try:
            call()
        except (ValueError, TypeError):
            return
        except Exception as error:
            raise self.error(f"{message}, and raises {error!r} instead of a ValueError or TypeError") from error
        raise self.error(message)

    def require_close(self, actual: PyTree, expected: PyTree, bound: float, message: str) -> None:
        """Requires that arrays differ by at most ``bound``, relative to the largest entry of each expected array."""
        for path, error in errors(actual, expected):
            self.require(error <= bound, f"{message} at {path!r}, by {error:.1e} of the largest entry")

    def require_same_types(self, actual: PyTree, expected: PyTree, who: str) -> None:
        """Requires that two trees have the same structure, and that arrays have the same shape, dtype and weak type."""
        structure, expected_structure = jax.tree.structure(actual), jax.tree.structure(expected)
        self.require(structure == expected_structure, f"{who} returns {structure}, not {expected_structure}")
        for path, *arrays in paired(actual, expected):
            type, expected_type = map(_describe_type, arrays)
            self.require(type == expected_type, f"{who} returns {path!r} as {type}, but its input was {expected_type}")


def is_close(actual: PyTree, expected: PyTree, bound: float) -> bool:
    """Returns whether arrays differ by at most ``bound``, relative to the largest entry of each expected array."""
    return all(error <= bound for _, error in errors(actual, expected))


def errors(actual: PyTree, expected: PyTree) -> Iterator[tuple[str, float]]:
    """Yields the path of each expected array and its largest deviation, relative to the array's largest entry."""
    for path, *arrays in paired(actual, expected):
        x, y = (np.asarray(w).astype(complex) for w in arrays)
        if x.shape == y.shape:
            yield path, largest_entry(x - y) / max(1e-30, largest_entry(y))
        else:
            yield path, np.inf


def largest_entry(x: np.ndarray) -> float:
    """Returns the largest magnitude in an array, or 0 if it is empty."""
    return float(np.max(np.abs(x), initial=0.0))


def named_arrays(tree: PyTree) -> list[tuple[str, Array]]:
    """Returns a list with a pair of path and array for each leaf of a tree."""
    return [(path_text(path), leaf) for path, leaf in items(tree)]


def paired(tree: PyTree, other: PyTree) -> Iterator[tuple[str, Any, Any]]:
    """Yields a path of the first tree, its leaf, and the leaf of the second tree, for all leaves in order."""
    leaves = zip(named_arrays(tree), named_arrays(other), strict=True)
    return ((path, x, y) for (path, x), (_, y) in leaves)


def rounding(*trees: PyTree) -> float:
    """Returns 64 times the machine epsilon of the coarsest dtype in the trees, or 0 if all are integers."""
    dtypes = [w.dtype for tree in trees for _, w in named_arrays(tree) if jnp.issubdtype(w.dtype, jnp.inexact)]
    return 64 * max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)


def equal(a: PyTree, b: PyTree) -> bool:
    """Returns whether two trees hold the same bits at the same paths."""
    return _bits(a) == _bits(b)


def _bits(tree: PyTree) -> list[tuple[str, Any, tuple[int, ...], bytes]]:
    """Returns a list with the path, dtype, shape and bytes of each array in a tree."""
    arrays = [(path, np.asarray(w)) for path, w in named_arrays(tree)]
    return [(path, x.dtype, x.shape, x.tobytes()) for path, x in arrays]


def array_paths(tree: PyTree) -> list[str]:
    """Returns the paths of all leaves of a tree, in order."""
    return [path for path, _ in named_arrays(tree)]


def _describe_type(w: Array) -> str:
    """Returns the dtype and shape of an array as text, such as "float32[4, 3]", with a note if its type is weak."""
    weak = "weakly typed " if jax.typeof(w).weak_type else ""
    return f"{weak}{w.dtype}{list(w.shape)}"


# The functions below use NumPy, because JAX would compile a program for each operation and shape.
def trainable(raw: PyTree) -> tuple[PyTree, PyTree]:
    """Splits a raw tree into the values that an optimizer trains, and the rest: fixed values and integers."""
    free = jax.tree.map(lambda w: w if is_inexact(w) else None, partition(raw)[0])
    rest = jax.tree.map(lambda w, x: x if w is None else None, free, raw, is_leaf=lambda x: x is None)
    return free, rest


def move_randomly(raw: PyTree, key: Array) -> PyTree:
    """Adds random numbers to the trainable values of a raw tree, because initial values are often special points."""
    free, rest = trainable(raw)
    return combine(move_along(free, normal(free, key), 0.1), rest)


def normal(tree: PyTree, key: Array) -> PyTree:
    """Returns a tree of standard normal numbers with the structure, shapes and dtypes of ``tree``."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())

    def draw(w: Array) -> Array:
        numbers = rng.normal(size=w.shape) + (1j * rng.normal(size=w.shape) if jnp.iscomplexobj(w) else 0)
        return jnp.asarray(numbers.astype(w.dtype))

    return jax.tree.map(draw, tree)


def move_along(tree: PyTree, direction: PyTree, by: float) -> PyTree:
    """Computes ``tree + by * direction`` in float32 or wider, and casts the result back."""

    def step(w: Array, d: Array) -> Array:
        wide = np.promote_types(w.dtype, np.float32)
        return jnp.asarray((np.asarray(w).astype(wide) + by * np.asarray(d).astype(wide)).astype(w.dtype))

    return jax.tree.map(step, tree, direction)


def wrong_trees(raw: PyTree) -> Iterator[PyTree]:
    """Yields copies of a raw tree with one wrong leaf each: a missing leaf, a wrong shape or a wrong dtype.

    Each leaf is wrong in at least one copy, and each of the three errors occurs, unless the tree has no leaves.
    """
    leaves, treedef = jax.tree.flatten(raw)
    for count in range(max(3, len(leaves)) if leaves else 0):
        i = count % len(leaves)
        leaf = np.asarray(leaves[i])
        other_dtype = np.int16 if leaf.dtype == np.int8 else np.int8
        wrong_leaf = (None, leaf[None], np.zeros(leaf.shape, other_dtype))[count % 3]
        yield treedef.unflatten([*leaves[:i], wrong_leaf, *leaves[i + 1 :]])


def batch_of_two(tree: PyTree) -> PyTree:
    """Stacks two equal copies of each array in a tree."""
    return jax.tree.map(lambda w: jnp.asarray(np.stack([w, w])), tree)


def clear_first_row(w: Array) -> np.ndarray:
    """Returns a copy of ``w`` with zeros in its first row. A scalar does not change."""
    with_zeros = np.array(w)
    if with_zeros.size and with_zeros.ndim:
        with_zeros[0] = 0
    return with_zeros


def large(w: Array) -> Array:
    """Scales real ``w`` to a largest magnitude of 300 and casts it to float16; returns other arrays unchanged."""
    if not jnp.issubdtype(w.dtype, jnp.floating):
        return w
    wide = np.asarray(w).astype(np.float32)
    return jnp.asarray((wide * (300 / max(1e-9, largest_entry(wide)))).astype(np.float16))


def widened_if_inexact(w: Array) -> Array:
    """Converts ``w`` to float32 or wider. Integers do not change."""
    return jnp.asarray(np.asarray(w).astype(np.promote_types(w.dtype, np.float32))) if is_inexact(w) else w


def in_double_precision(w: Array) -> Array:
    """Converts ``w`` to double precision. Integers do not change."""
    return jnp.asarray(np.asarray(w).astype(complex if jnp.iscomplexobj(w) else float)) if is_inexact(w) else w


def keeps_precision(p: Parametrization, params: PyTree, key: Array, bits: int) -> bool:
    """Returns whether ``p`` accepts ``params``, and has at least ``bits`` bits in all trainable values and weights."""
    try:
        trees = jax.eval_shape(lambda w: (trainable(p.init(w, key))[0], p.fold(p.init(w, key))), params)
    except (ValueError, TypeError):
        return False
    return all(jnp.finfo(w.dtype).bits >= bits for _, w in named_arrays(trees) if is_inexact(w))


def picklable(p: Parametrization) -> bool:
    """Returns whether pickle finds the classes and functions in ``p`` by name."""
    classes = [type(stage) for stage in stages_of(p)]
    classes_by_name = [getattr(sys.modules.get(c.__module__), c.__qualname__, None) for c in classes]
    return not has_functions(p) and classes_by_name == classes


def has_functions(p: Parametrization) -> bool:
    """Returns whether ``p`` cannot be written as JSON, because it holds a predicate or a function not from JAX."""
    try:
        p.to_json()
    except ValueError:
        return True
    return False


def stages_of(p: Parametrization) -> tuple[Parametrization, ...]:
    """Returns the stages of a chain. A single stage is returned in a tuple."""
    return p.stages if isinstance(p, Chain) else (p,)


def without_means(p: Parametrization) -> Parametrization:
    """Removes random stages whose mean differs from the input array; ``init`` does not account for that mean."""

    def has_other_mean(stage: Parametrization) -> bool:
        mean = stage.deterministic
        return isinstance(mean, Mean) and isinstance(mean.stage, Perturbation)

    kept_stages = tuple(stage for stage in stages_of(p) if not has_other_mean(stage))
    return p if len(kept_stages) == len(stages_of(p)) else Chain(kept_stages)


def by_pickle(raw: PyTree) -> PyTree:
    """Writes a raw tree with pickle, as NumPy arrays, and returns what pickle reads back."""
    return pickle.loads(pickle.dumps(jax.tree.map(np.asarray, raw)))


def by_flax(raw: PyTree) -> PyTree:
    """Writes a raw tree as flax's msgpack bytes, and returns what flax reads back into a target of equal structure."""
    from flax import serialization

    return serialization.from_bytes(jax.tree.map(jnp.zeros_like, raw), serialization.to_bytes(raw))


def by_orbax(raw: PyTree, *, alone: bool = False) -> PyTree:
    """Writes a raw tree with orbax and reads it back, with a template of shapes and dtypes unless ``alone``."""
    import orbax.checkpoint as ocp

    like = () if alone else (jax.tree.map(ocp.utils.to_shape_dtype_struct, raw),)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "raw", raw)
        checkpointer.wait_until_finished()
        return checkpointer.restore(Path(folder) / "raw", *like)


def by_safetensors(raw: PyTree) -> PyTree:
    """Writes a raw tree with safetensors, as a flat dict from paths to arrays, and returns the tree read back."""
    from safetensors import numpy

    paths, leaves, treedef = flatten_with_names(raw)
    names = [path_text(path) for path in paths]
    arrays = numpy.load(numpy.save({name: np.asarray(w) for name, w in zip(names, leaves, strict=True)}))
    return treedef.unflatten([arrays[name] for name in names])


def installed_formats(raw: PyTree) -> dict[str, Callable[[PyTree], PyTree]]:
    """Maps each file format that is installed and can store ``raw`` to a function that writes and reads back a tree."""
    dtypes = [np.asarray(w).dtype.type for w in jax.tree.leaves(raw)]
    is_plain = all(issubclass(dtype, np.floating | np.integer) for dtype in dtypes)
    formats: list[tuple[str, Callable[[PyTree], PyTree], str, bool]] = [
        ("pickle", by_pickle, "pickle", True),
        ("flax", by_flax, "flax", True),
        ("orbax", by_orbax, "orbax", True),
        ("orbax without a template", partial(by_orbax, alone=True), "orbax", _is_of_dicts(raw)),
        ("safetensors", by_safetensors, "safetensors", is_plain),
    ]
    return {name: way for name, way, library, takes_raw in formats if takes_raw and importlib.util.find_spec(library)}


def _is_of_dicts(raw: PyTree) -> bool:
    """Returns whether a tree consists of dicts and leaves. Without a template, orbax restores only such trees."""
    return all(map(_is_of_dicts, raw.values())) if isinstance(raw, dict) else all_leaves([raw])
