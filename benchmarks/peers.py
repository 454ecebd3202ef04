"""How fast is a training step with a parametrization, here and in other libraries?

One step of gradient descent of a network of six dense layers of 1024 units on 64 examples, in plain JAX by hand, by
reparax, and by each peer that is installed and has the parametrization: torch (eager and compiled), RETURNN, flax, nnx,
equinox and paramax. All start from the same weights. Before anything is timed, noise and dropout are off, and the
losses must be the same: at the start, after as many steps as power iteration needs, and, where the raw values are the
same too, after three steps of descent. Then all calls of a table run in one process and in shuffled order.

Run: python benchmarks/peers.py [repeats]
"""

import functools
import importlib.util
import shutil
import sys
from collections.abc import Callable

import jax
import numpy as np
from common import peers_jax
from common.peers_jax import Make, Step
from common.timing import Calls, Rows, heading, rows, show, shuffled

import reparax as rpx

WIDTH, LAYERS, BATCH = 1024, 6, 64
RATE = 0.01
STRENGTHS = {"noise": 0.075, "weight norm and noise": 0.075, "weight dropout": 0.1}
SETTLING = 15
"""Steps without learning before losses are compared, in which power iteration comes to its end."""
APART = {"cpu": 1e-3, "gpu": 1e-2}
"""How far apart losses may be: a GPU multiplies in TF32, which has three digits."""

Ways = dict[str, tuple[str, Callable[[], Make]]]
"""For each name the package that it needs, and a function that imports it and gives the way."""
OTHER_RAW_VALUES = {
    ("weight norm", "flax nnx"): "its lengths do not train",
    ("weight norm", "paramax"): "its lengths are softplus of numbers",
    ("orthogonal", "torch"): "its free values are a triangle",
}
"""Ways that take another course in training; only the start of these is compared."""


def ours(task: str) -> dict[str, Make]:
    """The ways of reparax to do a task."""
    chains: dict[str, Callable[[float], rpx.Parametrization]] = {
        "plain": lambda strength: rpx.Chain(),
        "weight norm": lambda strength: rpx.WeightNorm(axis=-1),
        "noise": rpx.VarNoise,
        "weight norm and noise": lambda std: rpx.WeightNorm(axis=-1) >> rpx.VarNoise(std),
        "weight dropout": rpx.WeightDropout,
        "spectral norm": lambda strength: rpx.SpectralNorm(),
        "orthogonal": lambda strength: rpx.Orthogonal(),
    }
    ways = {"reparax": peers_jax.ours(chains[task])}
    if task in STRENGTHS:
        ways["reparax, remat"] = peers_jax.ours(chains[task], rpx.remat)
    if task == "weight dropout":
        ways["reparax, remat, masks kept"] = peers_jax.ours(chains[task], functools.partial(rpx.remat, keep="masks"))
    return ways


def in_torch(task: str) -> Ways:
    """The ways of torch and RETURNN."""

    def by_torch(*, compiled: bool) -> Make:
        from common import peers_torch

        return peers_torch.of_torch(task, compiled=compiled)

    def by_returnn() -> Make:
        from common import peers_torch

        return peers_torch.of_returnn(task)

    ways: Ways = {"torch": ("torch", lambda: by_torch(compiled=False))}
    if task in ("weight norm", "weight norm and noise", "weight dropout") and shutil.which("c++"):
        ways["torch.compile"] = ("torch", lambda: by_torch(compiled=True))
    return ways | ({"RETURNN": ("returnn", by_returnn)} if task in ("noise", "weight dropout") else {})


def in_jax(task: str) -> Ways:
    """The ways of other libraries of JAX."""
    if task not in ("weight norm", "spectral norm"):
        return {}
    spectral = task == "spectral norm"
    ways: Ways = {
        "flax linen": ("flax", lambda: peers_jax.linen(spectral=spectral)),
        "flax nnx": ("flax", lambda: peers_jax.nnx(spectral=spectral)),
        "equinox": ("equinox", lambda: peers_jax.equinox(spectral=spectral)),
    }
    return ways if spectral else ways | {"paramax": ("paramax", lambda: peers_jax.paramax)}


def contestants(task: str) -> dict[str, Make]:
    """All ways of a task that are installed here."""
    found = peers_jax.TASKS[task] | ours(task)
    for name, (package, way) in (in_torch(task) | in_jax(task)).items():
        if importlib.util.find_spec(package):
            found[name] = way()
        else:
            print(f"{task}: {name} is left out, as {package} is not installed")
    return found


def problem(task: str, width: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Weights, inputs and targets: weights are orthogonal or have one large singular value where the task asks so."""
    draw = np.random.default_rng(0)
    weights = [draw.standard_normal((width, width)) / np.sqrt(width) for _ in range(LAYERS)]
    if task == "orthogonal":
        weights = [np.linalg.qr(w)[0] for w in weights]
    if task == "spectral norm":
        weights = [w + 8 * np.outer(*draw.standard_normal((2, width))) / width for w in weights]
    x, y = draw.standard_normal((2, BATCH, width))
    return [w.astype(np.float32) for w in weights], x.astype(np.float32), y.astype(np.float32)


def compare(task: str, steps: dict[str, Step]) -> None:
    """Raises where two ways do not come to the same loss."""
    start = {name: [step(0.0, 0.0) for _ in range(SETTLING)][-1] for name, step in steps.items()}
    trained = {name: [step(0.0, RATE) for _ in range(4)][-1] for name, step in steps.items()}
    close = functools.partial(np.testing.assert_allclose, rtol=APART.get(jax.default_backend(), 1e-2))
    for name in steps:
        message = f"{task}: {name} and by hand differ"
        close(start[name], start["by hand"], err_msg=f"{message} at the start")
        if (task, name) not in OTHER_RAW_VALUES:
            close(trained[name], trained["by hand"], err_msg=f"{message} in training")


def timed(task: str, steps: dict[str, Step], repeats: int) -> Rows:
    """Times of steps with noise and dropout on."""
    strength = STRENGTHS.get(task, 0.0)
    calls: Calls = {name: lambda step=step: step(strength, RATE) for name, step in steps.items()}
    shuffled(calls, 1)  # torch compiles anew for another strength
    return rows(shuffled(calls, repeats))


def measure(repeats: int, width: int = WIDTH) -> dict[str, Rows]:
    """A table for each task."""
    found: dict[str, Rows] = {}
    for task in peers_jax.TASKS:
        size = width // 2 if task == "orthogonal" else width
        given = problem(task, size)
        steps = {name: make(*given) for name, make in contestants(task).items()}
        compare(task, steps)
        found[f"{task}, {LAYERS} layers of {size}"] = timed(task, steps, repeats)
    return found


if __name__ == "__main__":
    given = int(sys.argv[1]) if len(sys.argv) > 1 else 25
    heading(given)
    show(measure(given))
