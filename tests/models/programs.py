"""Programs of the libraries' guides, run as they are and with lines replaced."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

import reparax as rpx

FOLDER = Path(__file__).parent / "guides"


def run(name: str, edits: Mapping[str, str], p: rpx.Parametrization) -> Any:
    """What a program has made, with its lines replaced by those of ``edits``; it finds ``rpx``, ``p``, ``placed``."""
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    for old in edits:
        assert [line.strip() for line in lines].count(old) == 1, old
    new = [line.replace(line.strip(), edits.get(line.strip(), line.strip())) for line in lines]
    made: dict[str, Any] = {"rpx": rpx, "p": p, "placed": placed, "__name__": name}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile("\n".join(new), name, "exec"), made)
    return made


def placed(tree: Any) -> Any:
    """The same tree on eight devices, each array along its first axis that eight divides: FSDP, and data parallel."""
    mesh = Mesh(np.array(jax.devices()), ("all",))
    assert mesh.size == 8

    def place(x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray):
            return x
        cut = next((i for i, n in enumerate(x.shape) if n and n % 8 == 0), None)
        spec = Spec() if cut is None else Spec(*([None] * cut), "all")
        return jax.device_put(x, NamedSharding(mesh, spec))

    split = jax.tree.map(place, tree)
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(split) if isinstance(x, jax.Array))
    return split
