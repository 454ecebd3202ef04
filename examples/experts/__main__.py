"""Trains a mixture of experts, tunes its experts, and rounds and prunes them; run: python -m examples.experts."""

import argparse
import inspect
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import reparax as rpx
from examples.experts import model, tuning
from examples.smollm.texts import prose

OUT, RESULTS = Path("build") / "experts", Path(__file__).parent / "results" / "experts.json"
CONFIG, RANK, LENGTH, BATCH, RATE = model.Config(), 4, 33, 8, 1e-2
LARGE = model.Config(layers=1, experts=64, chosen=2, width=512, inner=1024)
"""Of which only programs are made."""


def windows(text: str) -> np.ndarray:
    """The characters of ASCII as numbers, in windows one after the other."""
    numbers = np.frombuffer(text.encode("ascii", "ignore"), np.uint8).astype(np.int32)
    return numbers[: numbers.size // LENGTH * LENGTH].reshape(-1, LENGTH)


def split(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What is trained on, and at most 128 windows from the end that are held out."""
    held = min(128, len(rows) // 8)
    return rows[:-held], rows[-held:]


def costs(loss: Any, free: Any, fixed: Any, rows: Any) -> dict[str, float]:
    """Operations and planned temporary memory of a gradient."""
    program = jax.jit(jax.grad(loss)).lower(free, fixed, rows).compile()
    size = program.memory_analysis().temp_size_in_bytes
    return {"GFLOP": program.cost_analysis()["flops"] / 1e9, "temporary MiB": size / 2**20}


def large() -> dict[str, dict[str, float]]:
    """What the three ways of LoRA cost with 64 experts of 512 x 2048 and 1024 x 512."""
    p = tuning.lora(RANK)
    params = jax.eval_shape(lambda: model.init(LARGE, jax.random.key(0)))
    free, fixed = rpx.partition(jax.eval_shape(p.init, params, jax.random.key(0)))
    rows, apply = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32), tuning.by_apply(p, LARGE)
    return {
        "apply": costs(apply, free, fixed, rows),
        "factored": costs(rpx.factored(apply), free, fixed, rows),
        "by hand": costs(tuning.by_hand(LARGE), *tuning.hand(params, free), rows),
    }


def compressed(weights: model.Params, held: np.ndarray) -> dict[str, float]:
    """The loss with experts that are rounded or pruned."""
    lost = jax.jit(lambda w: model.loss(w, held, CONFIG))
    found = {"as tuned": float(lost(weights))}
    for name, p in tuning.COMPRESSED.items():
        found[name] = float(lost(jax.jit(lambda w, p=p: p.fold(p.init(w)))(weights)))
    return found


def main() -> None:
    """Trains, tunes, writes, rounds and prunes, and puts the numbers on file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs=2, default=(400, 60), help="of training and of tuning")
    first, steps = parser.parse_args().steps
    begin, say = time.perf_counter(), lambda text: print(text, flush=True)

    (old, old_held), (new, new_held) = (split(windows(text)) for text in (prose(), inspect.getsource(argparse)))
    params = model.init(CONFIG, jax.random.key(0))

    def plain(free: Any, fixed: Any, rows: Any) -> Any:
        del fixed
        return model.loss(free, rows, CONFIG)

    params, _ = tuning.fit(plain, params, {}, old, steps=first, batch=BATCH, rate=3e-3)
    lost = jax.jit(lambda w, rows: model.loss(w, rows, CONFIG))

    def both(weights: model.Params) -> dict[str, float]:
        return {"prose": float(lost(weights, old_held)), "code": float(lost(weights, new_held))}

    found: dict[str, Any] = {
        "steps": [first, steps],
        "before": both(params),
        "layers": CONFIG.layers,
        "experts": CONFIG.experts,
    }
    say(f"Trained on prose: {found['before']}")

    p = tuning.lora(RANK)
    raw = p.init(params, jax.random.key(1))
    free, fixed = rpx.partition(raw)
    apply, by_hand = tuning.by_apply(p, CONFIG), tuning.by_hand(CONFIG)
    ways = {
        "apply": (apply, free, fixed),
        "factored": (rpx.factored(apply), free, fixed),
        "by hand": (by_hand, *tuning.hand(params, free)),
    }
    found["tuned"], tuned = {}, {}
    for name, args in ways.items():
        row = costs(*args, new[:BATCH])
        tuned[name], curve = tuning.fit(*args, new, steps=steps, batch=BATCH, rate=RATE)
        found["tuned"][name] = row | {"curve": curve}
        say(f"{name}: {row}, loss {curve[0]:.4f} to {np.mean(curve[-10:]):.4f}")
    raw = rpx.combine(tuned["factored"], fixed)
    weights = p.fold(raw)
    found["after"] = both(weights)
    found["trained"] = sum(x.size for x in jax.tree.leaves(free))
    found["parameters"] = sum(x.size for x in jax.tree.leaves(params))
    found["explained"] = repr(rpx.explain(rpx.factored(apply, (0, 1)), free, fixed, new[:BATCH])).splitlines()[0]
    say(f"Tuned on code: {found['after']}")

    tensors, settings = rpx.io.to_peft(p, raw, **tuning.FILE)
    OUT.mkdir(parents=True, exist_ok=True)
    np.savez(OUT / "adapter_model.npz", **tensors)
    (OUT / "adapter_config.json").write_text(json.dumps(settings, indent=1))
    again, read = rpx.io.from_peft(tensors, settings, params, **tuning.FILE)
    same = jax.tree.map(np.array_equal, again.fold(read), weights)
    found["file"] = {
        "tensors": {name: list(x.shape) for name, x in sorted(tensors.items())},
        "target_parameters": settings["target_parameters"],
        "read again": str(again),
        "same weights": all(jax.tree.leaves(same)),
    }
    say(f"Written to {OUT} and read again: {found['file']['read again']}, equal: {found['file']['same weights']}")

    found["compressed"] = compressed(weights, new_held)
    say(f"Compressed: {found['compressed']}")
    found["large"] = large()
    say(f"64 experts of 512 x 2048 and 1024 x 512: {found['large']}")
    found["seconds"] = time.perf_counter() - begin
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    say(f"{found['seconds']:.0f} s")


if __name__ == "__main__":
    main()
