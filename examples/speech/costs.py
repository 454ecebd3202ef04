"""What noise and weight dropout cost: by hand, by a chain, and by a chain whose weights are computed when read.

Run: python -m examples.speech.costs. It puts the numbers on file: milliseconds of a gradient, its temporary memory, and
what of it is kept for the backward pass. Milliseconds need an idle machine. RETURNN's torch backend does the same in
the same process; the extra ``peers`` installs it. With --steps it puts on file what steps on recordings take of a core,
where XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" keeps them to one.
"""

import argparse
import dataclasses
import json
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import reparax as rpx
from benchmarks.common import by_hand
from benchmarks.common.timing import machine, of_programs
from examples.speech import features, settings, training
from examples.speech.features import BANDS
from examples.speech.model import BODIES, Recognizer
from examples.speech.protocol import RESULTS
from examples.speech.voices import SAMPLES_PER_SECOND

Weights = Callable[[Any, Array], Any]
"""From parameters and a key to the weights of a step."""
FRAMES, LABELS = 298, 7
"""Of the longest utterances of the digits."""
LETTERS, STEPS = 28, ("lstm", "attention")
"""Of recordings, and the recognizers whose steps are measured with them."""
STD, RATE = 0.02, 0.1
"""Of noise, and of dropout of recurrent weights."""


def noise_by_hand(params: Any, key: Array) -> Any:
    """Noise that somebody wrote."""
    return by_hand.noise(params, key, STD)


def dropout_by_hand(params: Any, key: Array, where: str = settings.RECURRENT) -> Any:
    """Weight dropout that somebody wrote, on the kernels at some paths."""
    pairs, treedef = jax.tree.flatten_with_path(params)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): w for path, w in pairs}
    chosen = {path: w for path, w in leaves.items() if re.fullmatch(where, path)}
    return treedef.unflatten((leaves | by_hand.dropout(chosen, key, RATE)).values())


def loss_of(model: Recognizer, weights: Weights) -> Any:
    """The loss of a step."""

    def loss(params: Any, key: Array, frames: Array, padding: Array, labels: Array) -> Array:
        return jnp.mean(model.apply({"params": weights(params, key)}, frames, padding, labels, method="losses"))

    return loss


def losses(model: Recognizer) -> dict[str, Any]:
    """The ways that are compared."""
    made = {"plain": loss_of(model, lambda params, key: params)}
    for name, chain, written in (
        ("noise", settings.noise(STD, model.body), noise_by_hand),
        ("weight dropout", settings.dropout(RATE, model.body), dropout_by_hand),
    ):
        by_chain = loss_of(model, chain.apply)
        made |= {f"{name}, by hand": loss_of(model, written), name: by_chain, f"{name}, remat": rpx.remat(by_chain)}
    return made


def example(model: Recognizer, size: int) -> tuple[Any, ...]:
    """Parameters, a key and a batch in which every number is the same."""
    batch = jnp.ones((size, FRAMES, BANDS)), jnp.zeros((size, FRAMES)), jnp.ones((size, LABELS), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), *batch[:2])["params"]
    return params, jax.random.key(0), *batch


def seconds_of_steps(body: str, seconds: float) -> float:
    """What a step of training on recordings takes of the processor, of letters and utterances of one length."""
    drawn, steps = np.random.default_rng(0), 14
    own = dataclasses.replace(settings.SETTINGS, steps=steps, start=0, buckets=(seconds,))
    sounds = [drawn.normal(size=int(seconds * SAMPLES_PER_SECOND)) for _ in range(own.batch)]
    labels = [drawn.integers(1, 1 + LETTERS, size=int(12 * seconds)) for _ in range(own.batch)]
    run = training.Run("SpecAugment, noise", BODIES[body](LETTERS), own)
    points = training.fit(run, features.speech(sounds, labels), rate=1e-3, value=STD, seed=0)
    ends = [time.process_time() for _ in points]
    return float(np.median(np.diff(ends)[2:]))


def main() -> None:
    """Compiles, runs, and writes."""
    parser = argparse.ArgumentParser(prog="python -m examples.speech.costs", description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--steps", action="store_true", help="only the steps of recordings")
    asked, model = parser.parse_args(), Recognizer(words=10)
    if asked.steps:
        told = {body: {f"{each:g} s": seconds_of_steps(body, each) for each in (4.0, 15.0)} for body in STEPS}
        (RESULTS / "steps.json").write_text(json.dumps(machine() | {"seconds": told}, indent=1) + "\n")
        return
    from examples.speech import in_returnn  # which needs torch, as nothing else here does

    given = example(model, settings.SETTINGS.batch)
    ways = losses(model)
    programs = {way: jax.jit(jax.grad(loss)).lower(*given).compile() for way, loss in ways.items()}
    found: dict[str, dict[str, Any]] = {
        "temporary MiB": {way: each.memory_analysis().temp_size_in_bytes / 2**20 for way, each in programs.items()},
        "kept MiB": {way: rpx.transforms.saved_residuals(loss, *given).bytes() / 2**20 for way, loss in ways.items()},
    }
    runs: dict[str, Any] = {way: (program, given) for way, program in programs.items()}
    for name in in_returnn.WAYS:
        way, (loss, gradient) = f"{name}, RETURNN", in_returnn.step_of(name, model.words)
        runs[way] = (lambda loss=loss, gradient=gradient: gradient(loss())), ()
        runs[way][0]()
        for title, number in in_returnn.memory(loss, gradient).items():
            found[title][way] = number
    found["ms"] = of_programs(runs, asked.repeats)
    (RESULTS / "costs.json").write_text(json.dumps(machine() | found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
