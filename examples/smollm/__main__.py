"""From a download to a tuned model that other programs read; run: make example."""

import json
import resource
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from rich.console import Console
from rich.progress import track
from safetensors.numpy import save_file

import reparax as rpx
from examples.smollm import files, model, speech, texts, tuning

OUT = Path("build") / "smollm"
STEPS, RATE, LENGTH = 60, 3e-3, 65


def main() -> None:
    """Reads, speaks, measures, tunes, and writes."""
    console, begin = Console(), time.perf_counter()
    reader = files.Reader(files.fetch())
    config, tokenizer, params = reader.config, reader.tokenizer(), reader.params()
    count = sum(x.size for x in jax.tree.leaves(params))
    console.print(f"{count:,} weights in {config.layers} layers\n", highlight=False)

    question = "What is the capital of France?"
    console.print(f"> {question}\n{speech.answer(params, tokenizer, config, question)}\n", highlight=False)

    new, unseen, old = (texts.windows(name, tokenizer, LENGTH) for name in ("new", "new, held out", "prose"))

    def measured(when: str, weights: model.Params) -> None:
        on_new, on_old = (tuning.held_out(weights, rows, config) for rows in (unseen, old))
        console.print(
            f"{when}: perplexity {np.exp(on_new):.2f} on programs of JAX, {np.exp(on_old):.1f} on English prose",
            highlight=False,
        )

    measured("Before", params)
    p = tuning.lora(8)
    raw = p.init(params, jax.random.key(0))
    trained = sum(x.size for x in jax.tree.leaves(rpx.partition(raw)[0]))
    console.print(f"Tuning by {p}: {trained:,} parameters train", highlight=False)
    run = tuning.fit(p, raw, new, config, steps=STEPS, rate=RATE, seed=0)
    for _, _, trained_raw in track(run, "Training", STEPS, console=console, transient=True):
        raw = trained_raw
    weights = p.fold(raw)
    measured("After", weights)

    OUT.mkdir(parents=True, exist_ok=True)
    tensors, settings = rpx.io.to_peft(p, raw, names=tuning.NAMES)
    save_file(tensors, OUT / "adapter_model.safetensors", {"format": "pt"})
    (OUT / "adapter_config.json").write_text(json.dumps(settings | {"task_type": "CAUSAL_LM"}, indent=1))
    written = rpx.partition(raw)[0]
    del raw  # whose base is as large as the model
    again, read = rpx.io.from_peft(tensors, settings, params, names=tuning.NAMES)
    same = jax.tree.all(jax.tree.map(np.array_equal, rpx.partition(read)[0], written))
    console.print(f"Written for PEFT to {OUT}; read again as {again}, bit for bit: {same}", highlight=False)

    tokens = jnp.asarray(unseen[:1, :-1])
    here = jax.jit(lambda weights, tokens: model.logits(weights, tokens, config))
    program = export.export(here)(weights, tokens).serialize()
    (OUT / "logits.stablehlo").write_bytes(program)
    there = export.deserialize(bytearray(program)).call(weights, tokens)
    apart = float(jnp.max(jnp.abs(there - here(weights, tokens))))
    console.print(f"Exported in {len(program) / 1024:.0f} KiB; its logits differ by {apart:.1g}", highlight=False)

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    console.print(f"{time.perf_counter() - begin:.0f} s, {peak / 2**30:.1f} GiB", highlight=False)


if __name__ == "__main__":
    main()
