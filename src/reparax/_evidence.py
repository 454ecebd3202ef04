"""What the laws are judged by: programs compiled once for all laws, comparisons, and the errors that say what broke."""

import sys
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax import _paths
from reparax._core import Chain, Parametrization
from reparax._paths import PyTree
from reparax._precision import widened
from reparax._raw import combine, partition


@partial(jax.jit, static_argnums=0)
def compiled_init(p: Parametrization, params: PyTree, key: Array) -> PyTree:
    return p.init(params, key)


@partial(jax.jit, static_argnums=0)
def compiled_apply(p: Parametrization, raw: PyTree, key: Array | None) -> PyTree:
    return p.apply(raw, key)


@partial(jax.jit, static_argnums=0)
def compiled_fold(p: Parametrization, raw: PyTree) -> PyTree:
    return p.fold(raw)


@partial(jax.jit, static_argnums=0)
def objective(p: Parametrization, raw: PyTree, key: Array) -> Array:
    """A generic linear function of the effective tree."""
    rng = np.random.default_rng(0)
    wide = [widened(w) for _, w in arrays(p.apply(raw, key)) if inexact(w)]
    terms = [jnp.sum(jnp.asarray(rng.normal(size=w.shape)).astype(w.dtype) * w).real for w in wide]
    return jnp.sum(jnp.stack([term.astype(jnp.result_type(float)) for term in terms]))


@partial(jax.jit, static_argnums=0)
def gradient(p: Parametrization, raw: PyTree, key: Array) -> PyTree:
    free, fixed = partition(raw)
    return jax.grad(lambda x: objective(p, combine(x, fixed), key))(free)


def require(p: Parametrization, law: str, holds: object, otherwise: str) -> None:
    if not holds:
        raise AssertionError(f"{p!r} breaks the law of {law}: {otherwise}.")


def require_raises(p: Parametrization, law: str, call: Callable[[], object], otherwise: str) -> None:
    try:
        call()
    except (ValueError, TypeError):
        return
    except Exception as error:
        raise AssertionError(f"{p!r} breaks the law of {law}: {otherwise}, and ends in a bare {error!r}.") from error
    raise AssertionError(f"{p!r} breaks the law of {law}: {otherwise}.")


def require_close(p: Parametrization, law: str, got: PyTree, want: PyTree, bound: float, otherwise: str) -> None:
    for (path, a), (_, b) in zip(arrays(got), arrays(want), strict=True):
        x, y = (np.asarray(w).astype(complex) for w in (a, b))
        size = max(1e-30, float(np.max(np.abs(y), initial=0.0)))
        error = float(np.max(np.abs(x - y), initial=0.0)) / size if x.shape == y.shape else np.inf
        require(p, law, error <= bound, f"{otherwise} at {path!r}, by {error:.1e} of the largest entry")


def arrays(tree: PyTree) -> list[tuple[str, Array]]:
    paths, leaves, _ = _paths.named(tree)
    return [(_paths.text(path), leaf) for path, leaf in zip(paths, leaves, strict=True)]


def rounding(*trees: PyTree) -> float:
    """64 units in the last place of the coarsest dtype in the trees."""
    dtypes = [w.dtype for tree in trees for _, w in arrays(tree) if jnp.issubdtype(w.dtype, jnp.inexact)]
    return 64 * max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)


def equal(a: PyTree, b: PyTree) -> bool:
    """Whether two trees hold the same bits at the same paths."""
    left, right = ([(path, np.asarray(w)) for path, w in arrays(tree)] for tree in (a, b))
    return [path for path, _ in left] == [path for path, _ in right] and all(
        (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
        for (_, x), (_, y) in zip(left, right, strict=True)
    )


def paths(tree: PyTree) -> list[str]:
    return [path for path, _ in arrays(tree)]


def types(tree: PyTree) -> list[tuple[str, tuple[int, ...], np.dtype]]:
    return [(path, w.shape, w.dtype) for path, w in arrays(tree)]


def twice(tree: PyTree) -> PyTree:
    """A batch of two, both the same."""
    return jax.tree.map(lambda w: jnp.stack([w, w]), tree)


def moved(tree: PyTree, key: Array, by: float = 0.1) -> PyTree:
    """The tree with normal noise on its arrays. Numpy draws it, which compiles nothing for each shape."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())

    def move(w: Array) -> np.ndarray:
        x = np.asarray(w)
        wide = x.astype(complex if np.iscomplexobj(x) else float)
        return (wide + by * rng.normal(size=x.shape)).astype(x.dtype)

    return jax.tree.map(move, tree)


def stepped(tree: PyTree, direction: PyTree, step: float) -> PyTree:
    """The tree, a step along a direction."""
    return jax.tree.map(lambda x, d: np.asarray(x) + np.asarray(step, x.dtype) * np.asarray(d), tree, direction)


def zeros(params: PyTree) -> PyTree:
    return jax.tree.map(lambda w: np.zeros(w.shape, w.dtype), params)


def without_row(w: Array) -> np.ndarray:
    x = np.array(w)
    if x.ndim > 0 and x.shape[0] > 0:
        x[0] = 0
    return x


def doubled(w: Array) -> np.ndarray:
    """``w`` in double precision, integers as they are."""
    x = np.asarray(w)
    return x.astype(complex if np.iscomplexobj(x) else float) if inexact(w) else x


def inexact(w: Array) -> bool:
    return jnp.issubdtype(w.dtype, jnp.inexact)


def picklable(p: Parametrization) -> bool:
    """Whether Python can find the classes and functions in ``p`` again by name."""
    classes = [type(stage) for stage in stages(p)]
    found = [getattr(sys.modules.get(c.__module__), c.__qualname__, None) for c in classes]
    return not has_functions(p) and found == classes


def has_functions(p: Parametrization) -> bool:
    """Whether it holds what has no form in JSON: a predicate, or a function that is not one of jax."""
    try:
        p.to_json()
    except ValueError:
        return True
    return False


def stages(p: Parametrization) -> tuple[Parametrization, ...]:
    return p.stages if isinstance(p, Chain) else (p,)
