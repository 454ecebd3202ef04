"""The example of speech: what is said, features, recognizers, decoding and a step, at tiny sizes."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import signal, stats

from benchmarks.evidence.record import Size
from examples.speech import cells, costs, decoding, features, report, training, voices
from examples.speech.model import Recognizer
from examples.speech.voices import SAMPLES_PER_SECOND, VOICES, Utterance


@pytest.fixture(autouse=True)
def promotion():
    """The networks are those of flax, whose biases have one axis. So is optax."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def test_a_seed_says_the_same_each_time_and_another_seed_says_something_else():
    one, again, other = (voices.utterances.__wrapped__("digits", "training", 2, seed) for seed in (1, 1, 2))
    for mine, same, another in zip(one, again, other, strict=True):
        np.testing.assert_array_equal(mine.samples, same.samples)
        np.testing.assert_array_equal(mine.words, same.words)
        assert mine.samples.shape != another.samples.shape
        assert 3 <= len(mine.words) <= 7
        assert 0.5 < len(mine.samples) / SAMPLES_PER_SECOND <= voices.SECONDS


def test_an_unknown_voice_a_missing_and_a_damaged_file_are_errors(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"The voice 'en-US\+nobody' is not one of espeakng-loader: expected"):
        voices.speak([("one", "en-US+nobody", 170, 50)])
    file = tmp_path / "m1"
    monkeypatch.setattr("importlib.metadata.PackagePath.locate", lambda self: file)
    with pytest.raises(RuntimeError, match=r"need .*m1, which is missing\. Install it again with: pip install"):
        voices.check(["en-US+m1"])
    file.write_bytes(b"language variant")
    with pytest.raises(RuntimeError, match=r"m1, which is damaged: its sha256 is .*, and that of the package is"):
        voices.check(["en-US+m1"])


def test_a_speaker_that_fails_tells_why(monkeypatch):
    monkeypatch.setattr(voices, "check", lambda names: None)
    with pytest.raises(RuntimeError, match=r"failed to speak 1 sentences: 'xx\+m1' could not say 'one'"):
        voices.speak([("one", "xx+m1", 170, 50)])


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(voices, "PACKAGE", "a-package-that-nobody-has")
    with pytest.raises(RuntimeError, match=r"not installed\. Install it with: pip install a-package-that-nobody-has"):
        voices.check(VOICES["unseen"])


def test_noise_has_the_asked_power():
    speech = np.sin(np.arange(40000) / 7)
    noise = voices.noisy(speech, 5.0, np.random.default_rng(0)) - speech * math.sqrt(2)
    assert 10 * np.log10(np.mean(noise**2)) == pytest.approx(-5, abs=0.1)


def test_log_mel_is_that_of_scipy():
    samples = np.random.default_rng(0).normal(size=3000)
    window = np.hanning(features.WINDOW)
    _, _, spectra = signal.stft(
        samples,
        window=window,
        nperseg=features.WINDOW,
        noverlap=features.WINDOW - features.HOP,
        boundary=None,
        padded=False,
    )
    power = np.abs(spectra.T * window.sum()) ** 2  # scipy divides by the sum
    mel = 2595 * np.log10(1 + np.array([60, SAMPLES_PER_SECOND / 2]) / 700)
    edges = 700 * (10 ** (np.linspace(*mel, 42) / 2595) - 1)
    hertz = np.fft.rfftfreq(features.WINDOW, 1 / SAMPLES_PER_SECOND)
    bands = [np.interp(hertz, edges[i : i + 3], [0, 1, 0]) for i in range(40)]
    np.testing.assert_allclose(features.log_mel(samples), np.log(power @ np.array(bands).T + 1e-3), rtol=1e-3)


def test_a_batch_has_frames_labels_and_their_padding():
    drawn = np.random.default_rng(0)
    spoken = [
        Utterance(drawn.normal(size=size), np.array(words)) for size, words in ((5000, [0, 9, 3]), (9000, [1] * 7))
    ]
    batch = features.batch(spoken, (5, 20), seed=0)
    lengths = [1 + (size - features.WINDOW) // features.HOP for size in (5000, 9000)]
    np.testing.assert_array_equal((1 - batch.padding).sum(1), lengths)
    assert batch.labels.tolist() == [[1, 10, 4, 0, 0, 0, 0], [2] * 7]
    assert batch.label_padding.sum(1).tolist() == [4, 0]
    real = batch.frames[0, : lengths[0]]
    np.testing.assert_allclose(real.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(real.std(0), 1, atol=0.01)
    assert not batch.frames[0, lengths[0] :].any()


def brute_force(found, spoken):
    """By all three moves at each word."""
    if not found or not spoken:
        return len(found) + len(spoken)
    same = brute_force(found[1:], spoken[1:]) + (found[0] != spoken[0])
    return min(same, 1 + brute_force(found[1:], spoken), 1 + brute_force(found, spoken[1:]))


def test_wrong_words_of_known_strings():
    assert decoding.distance("kitten", "sitting") == 3
    assert decoding.distance("", "abc") == decoding.distance("abc", "") == 3
    drawn = np.random.default_rng(0)
    for _ in range(30):
        found, spoken = (drawn.integers(3, size=drawn.integers(6)).tolist() for _ in range(2))
        assert decoding.distance(found, spoken) == brute_force(found, spoken)
    # One of four is replaced, and one too many; of five, one is left out.
    assert decoding.word_error_rate(["1245", "7999"], ["134", "79999"][:2]) == pytest.approx(100 * 3 / 8)


def test_greedy_decoding_merges_repetitions_and_drops_blanks_and_padding():
    best = [[0, 3, 3, 0, 3, 1, 1, 2], [2, 2, 1, 1, 1, 1, 1, 1]]
    scores = np.eye(4)[best]
    assert decoding.greedy(scores, np.array([[0] * 8, [0, 0, 1, 1, 1, 1, 1, 1]])) == [[3, 3, 1, 2], [2]]


@functools.cache
def data():
    """Words that are tones, each of them 0.2 seconds long: the frames of eight utterances of three to five."""
    drawn, time = np.random.default_rng(0), np.arange(4400) / SAMPLES_PER_SECOND
    spoken = []
    for _ in range(8):
        words = drawn.integers(10, size=drawn.integers(3, 6))
        tones = [np.sin(2 * np.pi * 200 * 1.4**word * time) * np.hanning(4400) for word in words]
        spoken.append(Utterance(np.concatenate(tones), words))
    return features.batch(spoken, (20, 20), seed=0)


def network(body, layers=1):
    return Recognizer(words=10, body=body, width=16, layers=layers)


@pytest.mark.parametrize("body", ["conformer", "lstm"])
def test_scores_do_not_depend_on_what_is_padding(body):
    model, batch = network(body), data()
    params = training.start(training.Setting("plain", model), batch, 0)
    other = batch.frames + 5 * batch.padding[..., None]
    scores = training.scores_of(model)
    (one, padding), (two, _) = (scores(params, frames, batch.padding) for frames in (batch.frames, other))
    np.testing.assert_allclose(one * (1 - padding[..., None]), two * (1 - padding[..., None]), atol=1e-4)
    assert one.shape == (8, math.ceil(features.FRAMES / 4), 11)
    assert float(jnp.min(optax.ctc_loss(one, padding, batch.labels, batch.label_padding))) < 100


@pytest.mark.parametrize("body", ["lstm", "conformer"])
def test_ways_act_where_they_say(body):
    batch, model = data(), network(body, layers=2)
    init = functools.partial(model.init, train=False)
    shapes = jax.eval_shape(init, jax.random.key(0), batch.frames, batch.padding)["params"]
    params = jax.tree.map(lambda x: np.ones((4,) * x.ndim, np.float32), shapes)  # of few shapes
    moved = {}
    for way in ("plain", "noise", "weight dropout"):
        p = training.Setting(way, model).chain(1.0)
        got = p.apply(p.init(params), jax.random.key(0))
        paths = jax.tree_util.tree_leaves_with_path(jax.tree.map(lambda x, y: bool((x != y).any()), got, params))
        moved[way] = {jax.tree_util.keystr(path, simple=True, separator="/") for path, other in paths if other}
    assert not moved["plain"]
    assert len(moved["noise"]) == len(jax.tree.leaves(params))
    kernels = {path for path in moved["noise"] if path.endswith("/kernel")}
    recurrent = {
        f"lstm_{i}/{direction}/h{gate}/kernel"
        for i in range(2)
        for direction in ("forward", "backward")
        for gate in "ifgo"
    }
    inner = kernels - {"conv_0/kernel", "conv_1/kernel", "scores/kernel"}
    assert moved["weight dropout"] == (recurrent if body == "lstm" else inner)


@pytest.mark.parametrize("body", ["lstm", "conformer"])
def test_every_way_starts_from_weights_that_it_gives_back(body):
    """Weight norm has a length for each output, of attention one for each head and size."""
    batch, model = data(), network(body)
    params = training.start(training.Setting("plain", model), batch, 0)
    for way in training.CHAINS:
        setting = training.Setting(way, model)
        raw = training.start(setting, batch, 0)
        jax.tree.map(lambda w, x: np.testing.assert_allclose(w, x, atol=1e-6), setting.chain(1.0).fold(raw), params)
        if way.startswith("weight norm"):
            assert raw["scores"]["kernel"]["@weight_norm"]["g"].shape == (1, 11)
    if body == "conformer":
        assert raw["conformer_0"]["attention"]["query"]["kernel"]["@weight_norm"]["g"].shape == (1, 4, 4)


def test_from_its_first_step_on_noise_moves_the_loss_and_the_network_learns():
    """One program takes both strengths."""
    setting = training.Setting("noise", network("lstm"), steps=30, start=28, batch=4)
    without, noisy = (
        [loss for loss, _ in training.fit(setting, data(), rate=0.02, strength=strength, seed=0)]
        for strength in (0.0, 1.0)
    )
    np.testing.assert_allclose(noisy[: setting.start], without[: setting.start], rtol=1e-4)
    assert abs(noisy[setting.start] - without[setting.start]) > 1e-3 * without[setting.start]
    assert without[-1] < 0.8 * without[0]


def on_file(way, value, development, rates):
    """The cells of a way at a value, with the same number of wrong words in each of its tests."""
    columns = [
        f"{voices}, {level} dB, {bits}"
        for voices in report.VOICES
        for level in report.LEVELS
        for bits in report.ROUNDED
    ]
    return {
        report.name_of(way, value, seed): {"development": [development], **{column: [rate] for column in columns}}
        for seed, rate in enumerate(rates)
    }


@pytest.fixture
def written(tmp_path):
    """A table of four ways; the second value of noise is worse on development voices and better on the tested ones."""
    kept = (
        on_file("plain", 0.001, 9, [8.0])
        | on_file("plain", 0.003, 5, [6.0, 7.0, 8.0])
        | on_file("noise", 0.5, 4, [5.0, 6.5, 5.0])
        | on_file("noise", 1, 6, [1.0])
        | on_file("both", 1, 5, [4.0, 5.1, 6.0])
        | on_file("weight dropout", 1, 5, [6.0])
    )
    text = {name: {"seeds": 1, "seconds": 0, "values": cell} for name, cell in kept.items()}
    (tmp_path / "digits_lstm.json").write_text(json.dumps({"cells": text}))
    return tmp_path


def test_values_are_chosen_on_development_voices_and_verdicts_are_those_of_a_paired_t_test(written):
    table = report.table("digits_lstm", written).splitlines()
    assert [line.split(" | ")[1] for line in table[2:]] == [
        "learning rate 0.003",
        "noise 0.0375",
        "dropout 0.3, noise 0.075",
        "dropout 0.3",
    ]
    assert table[3].startswith("| noise | noise 0.0375 | 5.5 ± 0.5 |")
    noise, both = report.verdicts("digits_lstm", written)
    p = stats.ttest_rel([5.0, 6.5, 5.0], [6.0, 7.0, 8.0]).pvalue
    assert noise == (f"With noise, 5.5 ± 0.5 %: no significant difference from plain (-1.5 ± 0.8 points, p = {p:.3f}).")
    p = stats.ttest_rel([4.0, 5.1, 6.0], [6.0, 7.0, 8.0]).pvalue
    assert p < 0.001
    assert both == ("With both, 5.0 ± 0.6 %: lower than plain (-2.0 ± 0.0 points, p < 0.001).")
    assert report.rounding_table("digits_lstm", written).splitlines()[2].startswith("| plain | 7.0 ± 0.6 | 7.0 ± 0.6 |")


def test_a_way_is_run_once_its_base_is_tuned_and_seeds_once_it_is_itself(written):
    asked = functools.partial(cells.cells, "digits_lstm", Size(seeds=1))
    first = list(asked(written / "nothing"))
    assert {name.partition(",")[0] for name in first} == {"plain", "weight norm"}
    assert len(first) == 2 * len(cells.RATES)
    kept = on_file("plain", 0.001, 9, [8.0]) | on_file("plain", 0.003, 5, [6.0]) | on_file("plain", 0.006, 7, [6.0])
    text = {name: {"seeds": 1, "seconds": 0, "values": cell} for name, cell in kept.items()}
    (written / "digits_lstm.json").write_text(json.dumps({"cells": text}))
    second = set(asked(written)) - set(first)
    more = {report.name_of("plain", 0.003, seed) for seed in range(1, 5)}
    others = ("dropout of activations", "weight dropout", "noise", "both")
    assert second == more | {report.name_of(way, value, 0) for way in others for value in cells.STRENGTHS}


def test_the_ways_by_hand_draw_as_the_chains_do():
    params = {"lstm_0": {"forward": {"hf": {"kernel": jnp.ones((200, 200))}, "if": {"kernel": jnp.ones((200, 200))}}}}
    chains = (training.noise(1.0, "lstm"), training.weight_dropout(1.0, "lstm"))
    for chain, by_hand in zip(chains, (costs.noise_by_hand, costs.dropout_by_hand), strict=True):
        one, other = (draw(params, jax.random.key(0))["lstm_0"]["forward"] for draw in (chain.apply, by_hand))
        for cell in ("hf", "if"):
            ours, theirs = one[cell]["kernel"], other[cell]["kernel"]
            np.testing.assert_allclose(ours.mean(), theirs.mean(), atol=0.02)  # of 40,000 numbers
            np.testing.assert_allclose(ours.std(), theirs.std(), rtol=0.02)
    assert set(np.unique(other["hf"]["kernel"])) == {np.float32(0), np.float32(1) / np.float32(0.7)}
    assert set(np.unique(other["if"]["kernel"])) == {np.float32(1)}
