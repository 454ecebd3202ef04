"""The demo: its pieces against hand-computed values, its command line, and its claim on a short training."""

import importlib.util
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx

for extra in ("matplotlib", "optax", "rich", "sklearn"):
    if importlib.util.find_spec(extra) is None:  # which imports none of them
        pytest.skip(f"The demo needs {extra}.", allow_module_level=True)

demo = importlib.import_module("reparax.demo")


def test_quantize_rounds_matrices_to_evenly_spaced_values():
    # Two bits between -3 and 3 are -3, -1, 1 and 3.
    params = {"kernel": jnp.array([[-3.0, -2.1, -1.9], [0.5, 1.9, 2.1]]), "bias": jnp.array([0.3, 5.0])}
    rounded = demo.EvenlySpaced(2).apply(params)
    np.testing.assert_allclose(rounded["kernel"], [[-3, -3, -1], [1, 1, 3]], rtol=1e-6)
    np.testing.assert_array_equal(rounded["bias"], params["bias"])


def test_accuracy_is_the_share_of_rows_whose_largest_logit_is_the_label():
    logits = jnp.array([[1.0, 3.0, 2.0], [9.0, 0.0, 1.0], [0.0, 1.0, 2.0], [5.0, 4.0, 0.0]])
    assert demo.accuracy(logits, jnp.array([1, 0, 2, 1])) == 75
    assert demo.accuracy(logits, jnp.array([0, 1, 0, 2])) == 0


def test_a_verdict_names_the_configurations_whose_intervals_are_clear_of_plain():
    plain, near, far = jnp.array([90.0, 92.0]), jnp.array([92.0, 94.0]), jnp.array([86.0, 88.0])
    assert demo.verdict("clean", {"plain": plain, "near": near}) == (
        "Clean accuracy shows no difference from plain (91.0 ± 1.4) beyond the spread over seeds."
    )
    assert demo.verdict("noisy", {"plain": plain, "near": near, "far": far}) == (
        "Noisy accuracy shows a difference from plain (91.0 ± 1.4) beyond the spread over seeds: far (87.0 ± 1.4)."
    )


@pytest.mark.thorough
def test_main_prints_the_table_and_writes_the_plot(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "SIZES", (64, 10))
    path = tmp_path / "plot.png"
    demo.main(["--steps", "10", "--seeds", "2", "--plot", str(path)])
    printed = capsys.readouterr().out
    assert printed.startswith("Networks learn to read handwritten digits from 300 images")
    assert "Read next: docs/quickstart.md" in " ".join(printed.split())
    assert (Path(__file__).parents[2] / "docs/quickstart.md").is_file()
    for name in demo.CONFIGURATIONS:
        assert re.search(rf"│ {re.escape(name)} +│( +\d+\.\d ± \d+\.\d │){{3}}", printed)
    assert "2 seeds, 10 steps each" in printed
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.stat().st_size > 20_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0."),
        (["--seeds", "1"], "--seeds must be at least 2, for a standard deviation, got 1."),
        (["--plot", "nowhere/demo.png"], "--plot: there is no directory 'nowhere'."),
    ],
)
def test_a_wrong_command_line_is_refused_before_training(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        demo.main(arguments)
    assert message in capsys.readouterr().err


def test_a_missing_extra_ends_in_one_sentence(monkeypatch):
    monkeypatch.delitem(sys.modules, "reparax.demo")
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(SystemExit, match=r"^The demo needs optax\. Install it with: pip install 'reparax\[demo\]'$"):
        importlib.import_module("reparax.demo")


@pytest.mark.thorough
def test_weights_trained_under_noise_stand_noise_better(key):
    training, test = demo.load()
    init_keys, test_keys = jax.random.split(key, (2, 2))
    params, drawn = jax.vmap(demo.initial)(init_keys), demo.draw(key, 2, 250, len(training.labels))

    def noisy(p):
        trained = demo.train(p, params, training, drawn)
        return jax.vmap(demo.perturbed_accuracy, (0, None, 0, None))(trained, 0.2, test_keys, test).mean()

    assert noisy(rpx.VarNoise(0.075)) > noisy(rpx.Chain()) + 8
