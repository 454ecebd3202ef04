"""Raw trees and JSON that older commits wrote: today's package reads them, and gets from them what the commits got.

The arrays are those of the commits; stages that have other names since are written with them.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from jax.tree_util import keystr, tree_leaves_with_path
from safetensors import safe_open
from safetensors.numpy import load_file

import reparax as rpx

FOLDER = Path(__file__).with_name("checkpoints")
COMMITS = {"569beba": 11, "7cdfc56": 19, "4578e63": 19}
"""How many chains each file holds."""


def _read(commit: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configurations and the trees, by the names of chains."""
    file = FOLDER / f"{commit}.safetensors"
    with safe_open(file, "np") as opened:
        chains = json.loads(opened.metadata()["chains"])
    return chains, unflatten_dict({tuple(name.split("/")): x for name, x in load_file(file).items()})


def _by_path(tree: Any) -> dict[str, Any]:
    return {keystr(path): x for path, x in tree_leaves_with_path(tree)}


@pytest.mark.thorough
@pytest.mark.parametrize("commit", COMMITS)
def test_what_older_commits_wrote(commit: str) -> None:
    chains, trees = _read(commit)
    assert len(chains) == COMMITS[commit]
    for name, settings in chains.items():
        p, wrote = rpx.from_json(json.dumps(settings)), trees[name]
        again = {
            "fold": p.fold(wrote["raw"]),
            "apply": p.apply(wrote["raw"], jax.random.key(2)),
            "updated": p.update(wrote["raw"], jax.random.key(3)),
        }
        if any(isinstance(stage, rpx.sparse.SET) for stage in p):
            del again["updated"]  # which draws otherwise than ``init`` since
        for what, tree in again.items():
            got, want = _by_path(tree), _by_path(wrote[what])
            assert got.keys() == want.keys(), (name, what)
            for path, x in want.items():
                assert got[path].dtype == x.dtype, (name, what, path)
                np.testing.assert_allclose(got[path], x, rtol=2e-6, atol=2e-6, err_msg=f"{name} {what} {path}")
