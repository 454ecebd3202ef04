"""Two processes that share a mesh over ``jax.distributed`` train as one process does."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import processes
import pytest


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder in which two processes have saved what they trained."""
    folder, port = tmp_path_factory.mktemp("processes"), free_port()
    settings = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, processes.__file__, str(port)]
    both = [
        subprocess.Popen([*command, str(i), str(folder)], env=settings, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    errors = [process.communicate(timeout=240)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    return folder


@pytest.mark.thorough
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("kind", processes.KINDS)
def test_ten_steps_of_two_processes_are_those_of_one_which_restores_what_they_saved(kind, saved):
    expected = processes.trained(processes.mesh(kind))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(saved / kind, jax.tree.map(ocp.utils.to_shape_dtype_struct, expected))
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert got.sharding == want.sharding
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
