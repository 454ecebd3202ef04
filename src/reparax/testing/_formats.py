"""Writes a raw tree to a file and reads it back, with each installed library; for the law of checkpoints."""

import importlib.util
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import all_leaves

from reparax.core.paths import PyTree, flatten_with_names, path_text

Way = Callable[[PyTree], PyTree]


def by_pickle(raw: PyTree) -> PyTree:
    """Pickle of numpy arrays."""
    return pickle.loads(pickle.dumps(jax.tree.map(np.asarray, raw)))


def by_flax(raw: PyTree) -> PyTree:
    """Flax's msgpack bytes, with a target."""
    from flax import serialization

    return serialization.from_bytes(jax.tree.map(jnp.zeros_like, raw), serialization.to_bytes(raw))


def by_orbax(raw: PyTree) -> PyTree:
    """Orbax, with a template of shapes and dtypes."""
    import orbax.checkpoint as ocp

    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "raw", raw)
        checkpointer.wait_until_finished()
        return checkpointer.restore(Path(folder) / "raw", jax.tree.map(ocp.utils.to_shape_dtype_struct, raw))


def by_orbax_alone(raw: PyTree) -> PyTree:
    """Orbax, without a template."""
    import orbax.checkpoint as ocp

    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "raw", raw)
        checkpointer.wait_until_finished()
        return checkpointer.restore(Path(folder) / "raw")


def by_safetensors(raw: PyTree) -> PyTree:
    """Safetensors, flat, under the paths of the raw tree."""
    from safetensors import numpy

    paths, leaves, treedef = flatten_with_names(raw)
    names = [path_text(path) or "." for path in paths]
    arrays = numpy.load(numpy.save({name: np.asarray(w) for name, w in zip(names, leaves, strict=True)}))
    return treedef.unflatten([arrays[name] for name in names])


def installed_formats(raw: PyTree) -> dict[str, Way]:
    """The formats whose library is installed and takes the dtypes of ``raw``."""
    ways: dict[str, Way] = {"pickle": by_pickle}
    leaves = jax.tree.leaves(raw)
    plain = all(issubclass(np.asarray(w).dtype.type, np.floating | np.integer) for w in leaves)
    if importlib.util.find_spec("flax"):
        ways["flax"] = by_flax
    if importlib.util.find_spec("orbax"):
        ways |= {"orbax": by_orbax} | ({"orbax without a template": by_orbax_alone} if _is_of_dicts(raw) else {})
    if importlib.util.find_spec("safetensors") and plain:
        ways["safetensors"] = by_safetensors
    return ways


def _is_of_dicts(raw: PyTree) -> bool:
    """Whether a file that knows no classes can hold the tree: boxes and modules come back as dicts."""
    return all(map(_is_of_dicts, raw.values())) if isinstance(raw, dict) else all_leaves([raw])
