"""Defines the laws of parametrizations, and ``check_laws``, which checks them for any stage or chain.

A broken law raises an ``AssertionError`` that names the stage, the path and the size of the deviation.
"""

import copy
import dataclasses
import itertools
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reparax.core.calls import require_chains
from reparax.core.chain import Chain, Parametrization, from_json
from reparax.core.checks import WrongType
from reparax.core.config import code
from reparax.core.paths import PyTree, is_empty
from reparax.core.raw import flatten, flatten_leaves, parameter_path
from reparax.core.where import all_but, selected
from reparax.numerics.arithmetic import is_array
from reparax.testing import _evidence as evidence
from reparax.testing._evidence import Case
from reparax.training import combine, partition

LAWS: dict[str, Callable[[Case], None]] = {}
"""Maps the names of the laws to their checks, in the order in which they run."""


def law(check: Callable[[Case], None]) -> Callable[[Case], None]:
    """Adds a function that checks a law to :data:`LAWS`, under the function's name; use it as a decorator."""
    LAWS[check.__name__] = check
    return check


def check_laws(
    p: Parametrization, params: PyTree, key: Array | None = None, *, laws: Iterable[str] | None = None
) -> None:
    """Checks that ``p`` obeys the laws of parametrizations; use it to test your own stages.

    If the gradient of your stage intentionally differs from the gradient of its formula, as for rounding, set
    ``straight_through = True``. If the mean of a random stage is not the array itself, define ``mean_leaf``. Give a
    random stage a nonzero strength, because its draws must differ.

    Args:
      p: A stage or a chain.
      params: A tree of arrays that ``p`` takes, with generic values, such as normal random numbers, rather than zeros
        or symmetric matrices. Use small arrays: the laws draw a thousand times, and compile about ten programs.
      key: The key of all draws. The default is ``jax.random.key(0)``.
      laws: The names of the laws to check, such as ``("gradients",)``. By default, all laws are checked:
        ``right_inverse``, ``types``, ``half_precision``, ``value_semantics``, ``transformations``, ``keys``, ``mean``,
        ``purity``, ``gradients``, ``update``, ``update_base``, ``transfer``, ``chains``, ``selection``,
        ``checkpoints`` and ``plain_trees``.

    Raises:
      AssertionError: If a law is broken. The error says which law, where and by how much.
      ValueError: If ``laws`` contains a name that no law has.

    Example:
      >>> import jax, reparax as rpx
      >>> from reparax.testing import check_laws
      >>> params = {"w": jax.random.normal(jax.random.key(1), (4, 3))}
      >>> check_laws(rpx.WeightNorm() >> rpx.VarNoise(0.1), params, laws=("right_inverse", "mean", "update"))
    """
    require_chains("testing.check_laws(p, params)", p)
    names = LAWS if laws is None else [laws] if isinstance(laws, str) else list(laws)
    if unknown := [name for name in names if name not in LAWS]:
        raise ValueError(f"check_laws got {unknown[0]!r} as a law. Choose from {', '.join(map(repr, LAWS))}.")
    for name in names:
        LAWS[name](Case(name.replace("_", " "), p, params, jax.random.key(0) if key is None else key))


@law
def right_inverse(case: Case) -> None:
    """Requires ``fold(init(w)) == w``, up to rounding, if each stage can represent the values that it gets from ``w``.

    First, ``apply(init(w)) == w`` must hold for each stage alone if ``w`` is in the stage's image, that is, if its
    ``apply`` can compute ``w``. Such a ``w`` is found by changing raw values at random. If a stage has fixed values,
    these belong to the point from which they were initialized. Therefore, ``apply(init(...))`` must be a projection:
    applying it twice must give the same result.

    Then the chain must return a weight unchanged if each stage returns its own input tree unchanged. The last stage
    gets the weight, and each earlier stage gets the raw tree of the stage after it. If a stage changes its input, as
    ``Symmetric`` in ``Symmetric() >> WeightNorm()`` does for most weights, the initial weight may differ from the given
    one. Random stages whose mean is not the array itself (``mean_leaf``) are left out, because ``init`` does not
    account for their mean. A chain that contains a stage with ``starts_elsewhere = True`` is not checked.
    """
    if any(stage.starts_elsewhere for stage in case.chain):
        return
    message = "for a w that `apply` can return, apply(init(w)) differs from w"
    chain = evidence.without_means(case.chain)

    def round_trip(params: PyTree) -> PyTree:
        return evidence.compiled_fold(chain, evidence.compiled_init(case.chain, params, case.key))

    point = evidence.compiled_fold(chain, case.moved)
    if jax.tree.leaves(partition(case.raw)[1]):
        point = round_trip(point)
    starts: list[evidence.RoundTrip] = []
    if len(chain) > 1:
        starts, images = evidence.compiled_stages(chain, point, case.key)
        for stage, (tree, result) in zip(reversed(evidence.stages_of(chain)), images, strict=True):
            case.of_stage(stage).require_close(result, tree, evidence.rounding(result, tree), message)
    if all(evidence.is_close(result, tree, evidence.rounding(result, tree)) for tree, result in starts):
        case.require_close(round_trip(point), point, evidence.rounding(case.raw, point), message)


@law
def types(case: Case) -> None:
    """Requires effective arrays to keep paths and shardings, and also shapes and dtypes unless ``changes_type``."""
    p, params = case.chain, case.params
    key = case.key if p.stochastic else None  # If the chain is deterministic, reuse the program compiled for fold.
    for effective in (jax.eval_shape(p.fold, case.raw), evidence.compiled_apply(p, case.raw, key)):
        paths, expected_paths = evidence.array_paths(effective), evidence.array_paths(params)
        case.require(paths == expected_paths, f"the effective tree has the paths {paths}, not {expected_paths}")
        for path, actual, expected in evidence.paired(effective, params):
            type, expected_type = (f"{w.dtype}{w.shape}" for w in (actual, expected))
            case.require(type == expected_type or p.changes_type, f"{path!r} is {type}, but must be {expected_type}")
    _require_shardings(case, key)


def _require_shardings(case: Case, key: Array | None) -> None:
    """Requires an array to keep its sharding if a raw value of the same path and shape has the same sharding."""
    devices = jax.devices()[:2]
    mesh = Mesh(np.array(devices), ("devices",))

    def place(w: Array) -> Array:
        is_split = w.ndim > 0 and w.size > 0 and w.shape[0] % len(devices) == 0
        return jax.device_put(w, NamedSharding(mesh, PartitionSpec("devices") if is_split else PartitionSpec()))

    placed = jax.tree.map(place, case.params)
    raw = evidence.compiled_init(case.chain, placed, case.key)
    leaves, slots, _ = flatten_leaves(raw)
    sharding_of = {(slot.path, w.shape): w.sharding for w, slot in zip(leaves, slots, strict=True)}
    for path, actual, expected in evidence.paired(evidence.compiled_apply(case.chain, raw, key), placed):
        source = sharding_of.get((path, expected.shape))
        follows = source != expected.sharding or actual.sharding.is_equivalent_to(expected.sharding, actual.ndim)
        case.require(follows, f"{path!r} has the sharding {actual.sharding}, but its raw value has {source}")


@law
def half_precision(case: Case) -> None:
    """Requires equal results in float16 and float32 for entries of a few hundred, whose squares overflow in float16.

    The tolerance is a quarter of the largest entry, because a rounded number may move by one step of its grid. Results
    that float16 cannot hold are left out, and so are stages that do not take float16. A stage that takes float16 and
    returns another type breaks the law.
    """
    half = jax.tree.map(evidence.large, case.params)
    try:
        jax.eval_shape(partial(evidence.compiled_results, case.chain), half, case.key)
    except (ValueError, TypeError) as error:
        case.require(not _is_wrong_type(error), str(error).removesuffix("."))
        return
    single = jax.tree.map(evidence.widened_if_inexact, half)
    narrow, wide = (evidence.compiled_results(case.chain, params, case.key) for params in (half, single))
    for method in ("init", "fold", "apply", "the gradient", "update"):
        for path, *arrays in evidence.paired(narrow[method], wide[method]):
            x, y = (np.asarray(w).astype(complex) for w in arrays)
            largest, expected = evidence.largest_entry(x), evidence.largest_entry(y)
            if expected < float(jnp.finfo(jnp.float16).max):
                is_close = method not in ("fold", "update") or np.all(np.abs(x - y) <= expected / 4)
                text = f"{method} gives {largest:.3g} as the largest entry of {path!r}, but {expected:.3g} in float32"
                is_right = is_close and np.all(np.isfinite(x))
                case.require(is_right, f"{text}; compute in float32, and cast the result back")


def _is_wrong_type(error: BaseException | None) -> bool:
    """Returns whether an error is a WrongType, or was raised because of one."""
    return error is not None and (isinstance(error, WrongType) or _is_wrong_type(error.__cause__))


@law
def value_semantics(case: Case) -> None:
    """Requires that a chain has no pytree leaves, and that its copies are equal, hash equally and share one trace."""
    p = case.chain
    copies = [copy.deepcopy(p)]
    if evidence.picklable(p):
        copies.append(pickle.loads(pickle.dumps(p)))
    case.require(jax.tree.leaves(p) == [], "it has pytree leaves, so it cannot be a static argument of `jax.jit`")
    traces: list[Parametrization] = []
    compiled_once = jax.jit(traces.append, static_argnums=0)
    for equal in [p, *copies]:
        case.require(equal == p and hash(equal) == hash(p), "a copy of it is not equal to it, or has another hash")
        compiled_once(equal)
    case.require(len(traces) == 1, f"{len(copies) + 1} equal copies were traced {len(traces)} times, not once")


@law
def transformations(case: Case) -> None:
    """Requires ``jit``, ``scan`` of ``vmap`` of ``jax.checkpoint`` and ``shard_map`` to agree with eager results."""
    p, params, key = case.chain, case.params, case.key
    raw, keys = p.init(params, key), jnp.stack([key, jax.random.fold_in(key, 1)])
    results = {
        "jit": evidence.compiled_apply(p, raw, key),
        "jit of init": evidence.compiled_fold(p, case.raw),
        "jit of update": evidence.compiled_fold(p, evidence.compiled_update(p, raw, key)),
        **evidence.transformed(p, evidence.batch_of_two(params), raw, evidence.batch_of_two(raw), keys),
    }
    first_draw, mean = p.apply(raw, key), p.fold(raw)
    second_draw = evidence.compiled_apply(p, raw, keys[1])
    eager = {
        "jit of init": mean,
        "jit of update": p.fold(evidence.update_raw(p, raw, key)),
        "vmap of init": evidence.batch_of_two(mean),
        "scan of vmap of checkpoint": jax.tree.map(lambda a, b: np.array([[a, b], [b, b]]), first_draw, second_draw),
    }
    for way, actual in results.items():
        bound = evidence.rounding(raw, first_draw)
        case.require_close(actual, eager.get(way, first_draw), bound, f"{way} differs from eager evaluation")
    abstract = jax.eval_shape(p.init, params, key)
    named_trees = map(evidence.named_arrays, (abstract, raw))
    types, expected_types = ([(path, w.shape, w.dtype) for path, w in arrays] for arrays in named_trees)
    case.require(types == expected_types, f"eval_shape of init gives {types}, not {expected_types}")


@law
def keys(case: Case) -> None:
    """Requires that equal keys give equal values, and that deterministic chains need no key.

    The noise on an array must not correlate with the noise on other arrays, and must not change if the model gets new
    parameters.
    """
    p, raw, key = case.chain, case.raw, case.key
    draw, mean_draw = (evidence.compiled_apply(chain, raw, key) for chain in (p, p.deterministic))
    is_fixed = not p.deterministic.stochastic and evidence.equal(evidence.compiled_fold(p, raw), mean_draw)
    case.require(is_fixed, "`p.deterministic` gives other values with a key than without, or needs a key")
    case.require(evidence.equal(p.apply(raw, key), p.apply(raw, key)), "equal keys give different values")
    changes = not evidence.equal(evidence.compiled_apply(p, raw, jax.random.fold_in(key, 1)), draw)
    values = "the same values" if p.stochastic else "other values"
    case.require(changes == p.stochastic, f"`stochastic` is {p.stochastic}, but another key gives {values}")
    if p.stochastic:
        case.require_raises(lambda: p.apply(raw), "`apply` draws random numbers although it gets no key")
        _require_independent(case)
        if isinstance(case.params, dict):
            _require_draws_beside_new_parameter(case, case.params)


def _require_draws_beside_new_parameter(case: Case, params: dict[str, PyTree]) -> None:
    """Requires that the draws of parameters do not change if a new parameter is added to the model."""
    p, key = case.chain, case.key
    raw = p.init(params, key)
    larger_raw = p.init({**params, "a new parameter": {"kernel": jnp.ones((3, 3))}}, key)

    def are_equal(a: PyTree, b: PyTree) -> bool:
        return all(evidence.equal(a[name], b[name]) for name in params)

    # If arrays are parametrized together, a new array may change the others even without noise. In that case, the draws
    # are not checked.
    if are_equal(p.fold(larger_raw), p.fold(raw)):
        same_draws = are_equal(p.apply(larger_raw, key), p.apply(raw, key))
        case.require(same_draws, "the draws of the parameters change if a new parameter is added")


def _require_independent(case: Case) -> None:
    """Requires the noise on arrays of equal shape to be uncorrelated, up to sampling error. Tied arrays are left out.

    The entries of one draw may depend on each other, so the correlation is estimated over 128 keys.
    """
    tied_paths = {parameter_path(path) for path, x in flatten(case.raw).arrays.items() if is_empty(x)}
    keys = jax.random.split(case.key, 128)
    drawn_trees = jax.jit(jax.vmap(case.chain.apply, in_axes=(None, 0)))(case.raw, keys)
    draws = {
        path: np.asarray(w).astype(complex).reshape(len(keys), -1)
        for path, w in evidence.named_arrays(drawn_trees)
        if path not in tied_paths
    }
    noise = {path: draw - draw.mean(axis=0) for path, draw in draws.items() if np.any(draw != draw[0])}
    for (path, x), (other_path, y) in itertools.combinations(noise.items(), 2):
        if x.shape == y.shape:
            products = np.sum(x * np.conj(y), axis=1)
            correlation = abs(np.sum(products)) / (np.linalg.norm(x) * np.linalg.norm(y))
            is_small = abs(np.mean(products)) <= 6 * np.std(products) / np.sqrt(len(keys))
            case.require(is_small, f"the noise of {path!r} and of {other_path!r} has correlation {correlation:.2f}")


@law
def mean(case: Case) -> None:
    """Requires the mean of each random stage's draws to equal the result of its replacement in ``p.deterministic``.

    Each stage is tested alone, on the output of the earlier stages without noise, because noise before a nonlinear
    stage changes the mean after it. The mean over 1024 keys may deviate by six standard errors, which are estimated
    from the draws. The test covers each entry, the average of an array, and the average weighted by the claimed mean.
    """
    for index, stage in enumerate(evidence.stages_of(case.chain)):
        if stage.stochastic:
            _require_mean(case, index, case.of_stage(stage))


def _require_mean(case: Case, index: int, case_of_stage: Case) -> None:
    """Requires the mean of 1024 draws of the stage at ``index`` to be the mean that the stage claims."""
    claimed_mean, sums, squares = evidence.deviations(case.chain, index, case.raw, jax.random.split(case.key, 1024))
    rounding = evidence.rounding(claimed_mean)
    triples = zip(evidence.paired(claimed_mean, sums), evidence.named_arrays(squares), strict=True)
    for (path, mean, total), (_, square) in triples:
        deviation, error = evidence.deviation(np.asarray(total), np.asarray(square), n=1024)
        excess = np.abs(deviation) - 6 * error - rounding * evidence.largest_entry(np.asarray(mean))
        worst = int(np.argmax(excess))
        size = f"by {abs(deviation[worst]):.1e}, with a standard error of {error[worst]:.1e}"
        message = f"at {path!r}, the mean of 1024 draws differs from `p.deterministic` {size}"
        case_of_stage.require(excess[worst] <= 0, f"{message}; define `mean_leaf` or `deterministic`")


@law
def purity(case: Case) -> None:
    """Requires that a chain's methods do not change their inputs, and that random stages do not change the raw tree."""
    p, key = case.chain, case.key
    copies = jax.tree.map(np.array, case.params), jax.tree.map(np.array, case.raw)
    originals = jax.tree.map(np.array, copies)
    p.init(copies[0], key)
    p.apply(copies[1], key)
    evidence.update_raw(p, copies[1], key)
    case.require(evidence.equal(originals, copies), "`init`, `apply` or `update` changes the arrays that it gets")
    raw_of_mean = evidence.compiled_init(p.deterministic, case.params, key)
    case.require(evidence.equal(raw_of_mean, case.raw), "`p.init` returns another raw tree than `p.deterministic.init`")


@law
def gradients(case: Case) -> None:
    """Requires that gradients agree with finite differences, are finite even at zero, and are nonzero for each array.

    Gradients must be nonzero only at a generic point, because the initial gradient of a factor is zero if another
    factor is zero. Finite differences use double precision, or single precision if the chain does not support double
    precision. A chain with ``straight_through = True`` is not compared with finite differences.
    """
    p, params, key = case.chain, case.params, case.key
    for where, point in {
        "its initial values": case.raw,
        "parameters with a zero row": evidence.compiled_init(p, jax.tree.map(evidence.clear_first_row, params), key),
        "zero parameters": evidence.compiled_init(p, jax.tree.map(np.zeros_like, params), key),
    }.items():
        for path, g in evidence.named_arrays(evidence.slope(p, point, key)[1]):
            case.require(np.all(np.isfinite(g)), f"the gradient of {path!r} is not finite at {where}")
    for path, g in evidence.named_arrays(evidence.slope(p, case.moved, key)[1]):
        case.require(g.size == 0 or np.any(g), f"the gradient of {path!r} is zero, so no optimizer can train it")
    if p.straight_through:
        return
    with jax.enable_x64():
        double = replace(case, params=jax.tree.map(evidence.in_double_precision, params))
        if evidence.keeps_precision(p, double.params, key, 64):
            _require_slope(double, step=1e-6, bound=1e-6)
            return
    if evidence.keeps_precision(p, params, key, 32):
        _require_slope(case, step=1e-2, bound=1e-2)


def _require_slope(case: Case, step: float, bound: float) -> None:
    """Requires the gradient in a random direction to agree with a central difference with the given step."""
    free, rest = evidence.trainable(case.moved)
    direction = evidence.normal(free, jax.random.fold_in(case.key, 1))

    def value_at(distance: float) -> float:
        point = combine(evidence.move_along(free, direction, distance), rest)
        return float(evidence.slope(case.chain, point, case.key)[0])

    difference = (value_at(step) - value_at(-step)) / (2 * step)
    pairs = evidence.paired(evidence.slope(case.chain, case.moved, case.key)[1], direction)
    gradient = float(sum(np.real(np.sum(np.asarray(g) * np.asarray(d))) for _, g, d in pairs))
    if not abs(gradient - difference) < bound * (1 + abs(difference)):
        text = f"finite differences give the slope {difference:.8g}, but the gradient gives {gradient:.8g}"
        raise case.error(f"{text}; {_advice_on_slope(case)}")


def _advice_on_slope(case: Case) -> str:
    """Returns a clause that says what to do if a gradient differs from finite differences."""
    has_doubles = any(x.dtype == np.float64 for _, x in evidence.named_arrays(evidence.trainable(case.moved)[0]))
    # Rounding to float32 turns the result into a step function, which the gradient does not show.
    if has_doubles and "new_dtype=float32" in str(jax.make_jaxpr(case.chain.apply)(case.moved, case.key)):
        return "the formula casts float64 to float32; cast to `jnp.promote_types(w.dtype, jnp.float32)` instead"
    return "if that is intended, set `straight_through = True`"


@law
def update(case: Case) -> None:
    """Requires ``update`` to change only entries of fixed values, and to give equal results for equal trees and keys.

    Stages with ``moves_weights = True`` may also change trainable values.
    """
    p, key, raw = case.chain, case.key, case.moved
    first_result, second_result = evidence.update_raw(p, raw, key), evidence.update_raw(p, raw, key)
    case.require(evidence.equal(first_result, second_result), "equal raw trees and keys give different results")
    compiled_step = partial(evidence.compiled_update, p, key=key)
    ways = {
        "update": lambda: first_result,
        "update under jit": lambda: compiled_step(raw),
        "a second update": lambda: compiled_step(compiled_step(raw)),
    }
    for who, step in ways.items():  # Keep this order: the second update needs a correct first one.
        actual = step()
        case.require_same_types(actual, raw, who)
        if not any(stage.moves_weights for stage in evidence.stages_of(p)):
            for path, w, old in evidence.paired(partition(actual)[0], partition(raw)[0]):
                case.require(evidence.equal(w, old), f"{who} changes the free value {path!r}")


@law
def update_base(case: Case) -> None:
    """Requires ``update_base`` to keep the effective tree, up to rounding, and the types of the raw tree."""
    rebased, effective = (
        evidence.compiled_update_base(case.chain, case.moved),
        evidence.compiled_fold(case.chain, case.moved),
    )
    case.require_same_types(rebased, case.moved, "update_base")
    bound = evidence.rounding(case.moved, effective)
    case.require_close(evidence.compiled_fold(case.chain, rebased), effective, bound, "it changes the effective tree")


@law
def transfer(case: Case) -> None:
    """Requires that ``transfer(p, p, raw)`` returns a tree with the same paths and the same bits as ``raw``."""
    actual = evidence.compiled_transfer(case.chain, case.moved)
    same_paths = evidence.array_paths(actual) == evidence.array_paths(case.moved)
    case.require(same_paths, "`transfer(p, p, raw)` returns other paths than `raw` has")
    for path, w, old in evidence.paired(actual, case.moved):
        case.require(evidence.equal(w, old), f"`transfer(p, p, raw)` changes {path!r}")


@law
def chains(case: Case) -> None:
    """Requires a chain to give the same results before and behind another stage as alone, even after an update.

    The other stage doubles its raw value. Behind the other stage, the tested chain has raw values that the other stage
    computes. Before the other stage, the tested chain acts on the other stage's raw values instead of the model's
    arrays. In both positions, the draws must be the same as without the other stage.
    """
    try:
        results = evidence.beside_another(case.chain, case.params, case.key)
    except Exception as error:
        text = f"in a chain with another stage, it raises {type(error).__name__}: {error}"
        raise case.error(text.removesuffix(".")) from error
    for position, (actual, expected) in results.items():
        has_same_paths = evidence.array_paths(actual) == evidence.array_paths(expected)
        case.require(has_same_paths, f"{position} another stage, its effective tree has other paths")
        message = f"{position} another stage, it gives another array"
        case.require_close(actual, expected, evidence.rounding(expected), message)


@law
def selection(case: Case) -> None:
    """Requires ``init`` to raise an error if ``where`` selects no array, for every form of ``where``."""
    name = "no such path"

    def none(path: str, array: Any) -> bool:
        del path, array
        return False

    def init_where(stage: Any, where: Any) -> PyTree:
        return replace(stage, where=where).init(case.params, case.key)

    selections = (name, none, selected({name: True}), all_but(name))
    for stage, where in itertools.product(evidence.stages_of(case.chain), selections):
        if any(field.name == "where" for field in dataclasses.fields(stage)):
            message = f"init accepts where={code(where)}, which matches no array"
            case.require_raises(partial(init_where, stage, where), message)


@law
def checkpoints(case: Case) -> None:
    """Requires raw trees and configurations to survive every installed file format, and wrong trees to raise errors."""
    p, params, raw = case.chain, case.params, case.raw
    for way, there_and_back in evidence.installed_formats(raw).items():
        raw_again = there_and_back(raw)
        case.require(evidence.equal(raw_again, raw), f"the raw tree differs after it was written and read with {way}")
        p.check(raw_again, like=params)
    if not evidence.has_functions(p):
        case.require(from_json(p.to_json()) == p, "from_json(p.to_json()) is not equal to p")
    for wrong_raw in evidence.wrong_trees(raw):
        case.require_raises(partial(p.check, wrong_raw, like=params), "check accepts a raw tree with a wrong leaf")
    if evidence.array_paths(raw) != evidence.array_paths(params):
        case.require_raises(lambda: p.apply(params, case.key), "apply accepts a tree that never went through init")
        case.require_raises(lambda: p.init(raw, case.key), "init accepts a raw tree")
        case.require_raises(lambda: Chain().apply(raw), "a chain without stages accepts its raw tree")


@law
def plain_trees(case: Case) -> None:
    """Requires ``p.fold(raw)`` to be a tree of plain arrays with the structure of the model's parameters."""
    effective = case.chain.fold(case.raw)
    structure = jax.tree.structure(effective)
    expected = jax.tree.structure(case.params)
    case.require(structure == expected, f"fold returns the structure {structure}, but the parameters have {expected}")
    for path, w in evidence.named_arrays(effective):
        case.require(is_array(w), f"fold returns {path!r} as {type(w).__name__}, which is not an array")
