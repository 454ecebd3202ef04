"""The example of speech: what is said, features, recognizers, a step and what is decided by the numbers on file."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import signal, stats

from examples.speech import cells, costs, features, protocol, replicates, report, settings, training, voices
from examples.speech.features import Masks, Speech
from examples.speech.model import BODIES, Attender, BiLSTM, Recognizer
from examples.speech.protocol import Cell
from examples.speech.settings import WAYS, Settings
from examples.speech.voices import SAMPLES_PER_SECOND

TINY = Settings(steps=4, start=2, batch=2, buckets=(0.6, 1.0), selections=2, replicates=3, look=2, more=4)


@pytest.fixture(autouse=True)
def promotion():
    """The networks are those of flax, whose biases have one axis. So is optax."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


# What is said ---------------------------------------------------------------------------------------------------------


def test_drawn_voices_are_those_of_their_seed_and_sound_otherwise_than_each_other():
    files, again = (voices.drawn_voices(3, np.random.default_rng(0)) for _ in range(2))
    assert files == again
    assert voices.drawn_voices(3, np.random.default_rng(1)) != files
    said = [voices.speak([("nine nine nine", name, 170, 50) for name in files], files) for _ in range(2)]
    for one, same in zip(*said, strict=True):
        np.testing.assert_array_equal(one, same)
    spectra = [np.log(np.abs(np.fft.rfft(each, 2**15))[:8192].reshape(64, -1).mean(1) + 1e-3) for each in said[0]]
    likeness = np.corrcoef(spectra)[np.triu_indices(3, 1)]
    assert max(likeness) < 0.99


def test_every_voice_says_as_many_strings_as_asked_and_no_longer_ones(monkeypatch):
    files = voices.drawn_voices(2, np.random.default_rng(0))
    found = voices.utterances(files, 3, np.random.default_rng(1), files)
    assert [each.voice for each in found] == [0, 0, 0, 1, 1, 1]
    assert all(3 <= len(each.words) <= 7 for each in found)
    assert all(0.5 < len(each.samples) / SAMPLES_PER_SECOND <= voices.SECONDS for each in found)
    monkeypatch.setattr(voices, "SECONDS", 0.1)
    with pytest.raises(ValueError, match=r"drawn0 was asked for 3 strings, and only 0 of them last up to 0\.1 s\."):
        voices.utterances(files, 3, np.random.default_rng(1), files)


def test_named_voices_can_be_found_by_their_names():
    named = voices.named_voices()
    assert len(named) == len({name.partition("+")[2] for name in named}) == 103
    voices.check(named)


def test_named_voices_that_sound_alike_are_a_family():
    assert replicates.families(["en-029+klatt", "en-US+f3", "en-GB-scotland+klatt2"]) == [0, 1, 0]
    on_file = json.loads((protocol.RESULTS / "families.json").read_text())
    assert list(on_file) == voices.named_voices()
    assert on_file["en-029+klatt"] == on_file["en-GB-scotland+klatt2"]


def test_resampling_keeps_a_tone():
    there = np.sin(2 * np.pi * 440 * np.arange(22050) / 22050)
    here = voices.resampled(there, 22050)
    assert len(here) == SAMPLES_PER_SECOND
    middle = slice(2000, -2000)
    np.testing.assert_allclose(here[middle], np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)[middle], atol=2e-3)


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
        voices.named_voices()


# Features -------------------------------------------------------------------------------------------------------------


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
    expected = np.log(power @ np.array(bands).T + 1e-3)
    np.testing.assert_allclose(jax.jit(features.log_mel)(samples), expected, rtol=1e-3, atol=1e-3)


def test_frames_are_normal_where_they_are_real_and_zero_elsewhere():
    drawn = np.random.default_rng(0)
    samples = [drawn.normal(size=size) for size in (5000, 9000)]
    batch = features.speech(samples, [np.array([1, 10, 4]), np.full(7, 2)])
    frames, padding = map(np.asarray, jax.jit(features.frames)(batch.samples, batch.lengths))
    lengths = [1 + (size - features.WINDOW) // features.HOP for size in (5000, 9000)]
    np.testing.assert_array_equal((1 - padding).sum(1), lengths)
    assert batch.labels.tolist() == [[1, 10, 4, 0, 0, 0, 0], [2] * 7]
    real = frames[0, : lengths[0]]
    np.testing.assert_allclose(real.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(real.std(0), 1, atol=0.01)
    assert not frames[0, lengths[0] :].any()


def test_noise_of_the_room_has_a_power_between_the_levels_and_ends_with_the_speech():
    pool, lengths = training.noise_pool(), np.array([16000, 32000])
    silence = np.zeros((2, 32000), np.float16)
    in_room = jax.jit(features.in_room, static_argnums=3)
    one, other = (np.asarray(in_room(jax.random.key(i), silence, lengths, (5.0, 6.0), pool)) for i in range(2))
    assert not one[0, 16000:].any()
    for real in (one[0, :16000], one[1], other[1]):
        assert -6.2 < 10 * np.log10(np.mean(real**2)) < -4.8
    assert abs(np.corrcoef(one[1], other[1])[0, 1]) < 0.1


def test_spec_augment_hides_spans_within_its_bounds():
    masks, count, frames = Masks(), 400, np.ones((400, 80, features.BANDS), np.float32)
    padding = np.zeros((count, 80), np.float32)
    padding[:, 60:] = 1
    hidden = np.asarray(jax.jit(features.masked, static_argnums=3)(jax.random.key(0), frames, padding, masks)) == 0
    bands, times = hidden.all(1), hidden.all(2)
    assert not times[:, 60:].any()
    for found, most, size in ((bands, masks.bands, features.BANDS), (times, 12, 60)):  # a fifth of sixty frames
        many = found[:, :size].sum(1)
        assert many.max() <= 2 * most
        np.testing.assert_allclose(many.mean(), most, atol=0.12 * most)  # two of half of it, less what overlaps
        runs = (np.diff(np.pad(found.astype(int), ((0, 0), (1, 1)))) == 1).sum(1)
        assert set(runs) == {0, 1, 2}
    assert not (hidden & ~bands[:, None] & ~times[..., None]).any()


# Recognizers ----------------------------------------------------------------------------------------------------------


def frames_of_two():
    """Random frames of two utterances, the second of which is shorter, and labels."""
    drawn = np.random.default_rng(0)
    frames, padding = drawn.normal(size=(2, 40, features.BANDS)).astype(np.float32), np.zeros((2, 40), np.float32)
    padding[1, 24:] = 1
    return frames, padding, np.array([[1, 3, 3], [2, 0, 0]])


def small(body):
    return Attender(10, width=8, layers=1) if body == "attention" else Recognizer(10, body, width=8, layers=1)


def test_the_lstm_is_that_of_linen_in_values_and_gradients():
    drawn = np.random.default_rng(0)
    x, padding = drawn.normal(size=(3, 9, 5)).astype(np.float32), np.zeros((3, 9), np.float32)
    padding[1, 4:] = 1
    weights = drawn.normal(size=(3, 9, 12)).astype(np.float32) * (1 - padding[..., None])

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x, padding):
            forward = nn.RNN(nn.OptimizedLSTMCell(6, name="forward"))
            backward = nn.RNN(nn.OptimizedLSTMCell(6, name="backward"), reverse=True, keep_order=True)
            lengths = jnp.sum(1 - padding, axis=1).astype(jnp.int32)
            return jnp.concatenate([layer(x, seq_lengths=lengths) for layer in (forward, backward)], axis=-1)

    variables = jax.jit(Linen().init)(jax.random.key(0), x, padding)
    found = []
    for module in (Linen(), BiLSTM(6)):
        start = jax.jit(module.init)(jax.random.key(0), x, padding)
        jax.tree.map(np.testing.assert_array_equal, start, variables)

        def loss(variables, x, module=module):
            return jnp.sum(weights * module.apply(variables, x, padding))

        found.append(jax.jit(jax.value_and_grad(loss, (0, 1)))(variables, x))
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-5), *found)


@pytest.mark.parametrize("body", list(BODIES))
def test_losses_and_words_do_not_depend_on_what_is_padding(body):
    model, (frames, padding, labels) = small(body), frames_of_two()
    params = jax.jit(lambda *given: model.init(jax.random.key(0), *given, method="losses"))(frames, padding, labels)

    @jax.jit
    def both(frames):
        given = params, frames, padding
        return model.apply(*given, labels, method="losses"), model.apply(*given, method="recognize")

    (losses, words), (others, again) = both(frames), both(frames + 5 * padding[..., None])
    np.testing.assert_allclose(losses, others, rtol=1e-5)
    np.testing.assert_array_equal(words, again)
    assert losses.shape == (2,)
    assert ((losses > 0) & (losses < 100)).all()


def test_what_the_decoder_recognizes_are_its_best_words_after_those_before():
    model, (frames, padding, labels) = small("attention"), frames_of_two()
    params = jax.jit(lambda *given: model.init(jax.random.key(1), *given, method="losses"))(frames, padding, labels)
    words = np.asarray(jax.jit(lambda: model.apply(params, frames, padding, method="recognize"))())
    scores = np.asarray(jax.jit(lambda: model.apply(params, frames, padding, words))())
    best, ended = scores.argmax(-1)[:, :-1], np.cumsum(np.pad(words == 0, ((0, 0), (1, 0)))[:, :-1], axis=1) > 0
    np.testing.assert_array_equal(np.where(ended, 0, best), words)
    with_labels = np.asarray(jax.jit(lambda: model.apply(params, frames, padding, labels))())
    logs = np.log(np.exp(with_labels) / np.exp(with_labels).sum(-1, keepdims=True))
    expected = [-(logs[0, 0, 1] + logs[0, 1, 3] + logs[0, 2, 3] + logs[0, 3, 0]), -(logs[1, 0, 2] + logs[1, 1, 0])]
    losses = jax.jit(lambda: model.apply(params, frames, padding, labels, method="losses"))()
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_words_of_ctc_are_merged_and_without_blanks_and_padding():
    class Scores(Recognizer):
        def __call__(self, frames, padding):
            return frames, padding

    best = np.array([[0, 3, 3, 0, 3, 1, 1, 2], [2, 2, 1, 1, 1, 1, 1, 1]])
    padding = np.array([[0] * 8, [0, 0, 1, 1, 1, 1, 1, 1]])
    found = np.asarray(Scores(3).apply({}, jnp.asarray(np.eye(4)[best]), padding, method="recognize"))
    assert [[each for each in line if each] for line in found.tolist()] == [[3, 3, 1, 2], [2]]


# Training -------------------------------------------------------------------------------------------------------------


def tones():
    """Words that are tones, each of them a tenth of a second long: twelve utterances of three to seven."""
    drawn, time = np.random.default_rng(0), np.arange(1600) / SAMPLES_PER_SECOND
    words = [drawn.integers(1, 11, size=drawn.integers(3, 8)) for _ in range(12)]
    sound = [np.concatenate([np.sin(2 * np.pi * 200 * 1.3**word * time) for word in each]) for each in words]
    return features.speech(sound, words)


def test_ways_act_where_they_say_and_start_from_weights_that_they_give_back():
    frames, padding, labels = frames_of_two()
    for body in ("lstm", "conformer"):
        model = small(body)
        init = functools.partial(model.init, method="losses")
        shapes = jax.eval_shape(init, jax.random.key(0), frames, padding, labels)
        params = jax.tree.map(lambda x: np.full((4,) * x.ndim, 2.0, np.float32), shapes["params"])  # of few shapes
        moved = {}
        for way in ("plain", "weight noise", "weight dropout", "SpecAugment, noise, weight norm"):
            p = WAYS[way].chain(0.5, body)
            raw = p.init(params)
            jax.tree.map(lambda w, x: np.testing.assert_allclose(w, x, atol=1e-6), p.fold(raw), params)
            got = p.apply(raw, jax.random.key(0))
            paths = jax.tree_util.tree_leaves_with_path(jax.tree.map(lambda x, y: bool((x != y).any()), got, params))
            moved[way] = {jax.tree_util.keystr(path, simple=True, separator="/") for path, other in paths if other}
        assert not moved["plain"]
        assert (
            len(moved["weight noise"]) == len(moved["SpecAugment, noise, weight norm"]) == len(jax.tree.leaves(params))
        )
        kernels = {path for path in moved["weight noise"] if path.endswith("/kernel")}
        recurrent = {
            f"encoder/lstm_0/{direction}/h{gate}/kernel" for direction in ("forward", "backward") for gate in "ifgo"
        }
        inner = {path for path in kernels if "conformer_0" in path}
        assert moved["weight dropout"] == (recurrent if body == "lstm" else inner)
    lengths = settings.normed_noise(0.0, "conformer").init(
        jax.tree.map(lambda x: np.ones(x.shape, np.float32), shapes["params"])
    )
    assert lengths["encoder"]["conformer_0"]["attention"]["query"]["kernel"]["@weight_norm"]["g"].shape == (1, 4, 2)


def test_from_its_first_step_on_dropout_moves_the_loss_and_a_stopped_run_goes_on_as_if_it_had_not():
    """One program for each bucket takes all values."""
    run, data = training.Run("weight dropout", small("lstm"), TINY), tones()

    def fit(value, resume=None):
        return training.fit(run, data, rate=0.02, value=value, seed=0, resume=resume)

    without, dropped = ([point.loss for point in fit(value)] for value in (0.0, 0.5))
    np.testing.assert_allclose(dropped[: TINY.start], without[: TINY.start], rtol=1e-4)
    assert abs(dropped[TINY.start] - without[TINY.start]) > 1e-3 * without[TINY.start]
    kept = None
    for point in fit(0.5):
        if point.steps == 2:
            kept = point._replace(raw=jax.tree.map(np.array, point.raw), state=jax.tree.map(np.array, point.state))
    assert [point.loss for point in fit(0.5, kept)] == dropped[2:]
    assert training.step_of(run)._cache_size() <= 2 * len(TINY.buckets)  # arrays of numpy count once more


def test_a_step_moves_plain_and_decayed_weights_as_adam_does():
    """At first Adam moves each weight by the rate times the schedule; decay takes its share of kernels alone."""

    class Probe(nn.Module):
        body = "lstm"

        @nn.compact
        def losses(self, frames, padding, labels):
            kernel = self.param("kernel", nn.initializers.constant(2.0), (4, 4))
            bias = self.param("bias", nn.initializers.constant(2.0), (4,))
            return jnp.full(len(frames), 1e-3 * (jnp.sum(kernel) + jnp.sum(bias)))

    quick = Settings(steps=10, start=0, batch=2, buckets=(1.0,))
    ends = {}
    for way, value in (("plain", 0.0), ("weight decay", 0.5)):
        points = training.fit(training.Run(way, Probe(), quick), tones(), rate=0.1, value=value, seed=0)
        next(points)  # whose rate is zero
        ends[way] = jax.tree.map(float, jax.tree.map(np.mean, next(points).raw))
    moved = 2 - ends["plain"]["kernel"]
    np.testing.assert_allclose(moved, 0.1, rtol=1e-3)
    np.testing.assert_allclose(ends["weight decay"]["kernel"], 2 - moved - 0.1 * 0.5 * 2, rtol=1e-3)
    np.testing.assert_allclose(ends["weight decay"]["bias"], ends["plain"]["bias"], rtol=1e-6)


def test_batches_are_of_one_bucket_and_each_epoch_has_what_filled_one():
    lengths = np.array([0.5] * 5 + [0.9] * 4) * SAMPLES_PER_SECOND
    rows = training.batches(lengths, TINY, np.random.default_rng(0))
    first = [next(rows) for _ in range(4)]
    for batch, seconds in first:
        assert {lengths[row] / SAMPLES_PER_SECOND <= 0.6 for row in batch} == {seconds == 0.6}
        assert len(batch) == TINY.batch
    assert len({row for batch, _ in first for row in batch}) == 8
    second = [next(rows) for _ in range(5)]
    seen = {row for batch, _ in first + second for row in batch}
    assert seen == set(range(9))


def test_all_utterances_are_recognized_whatever_their_bucket():
    model, data = small("lstm"), tones()
    params = training.start(training.Run("plain", model, TINY), 0)
    found = training.recognized(model, params, data, TINY)
    assert len(found) == 12
    for row in (0, 5):
        alone = Speech(*(each[row : row + 1] for each in data))
        assert training.recognized(model, params, alone, TINY) == [found[row]]
    said = [[each for each in line if each] for line in data.labels.tolist()]
    expected = [training.distance(ours, words) for ours, words in zip(found, said, strict=True)]
    assert training.wrong(model, params, data, TINY).tolist() == expected


def brute_force(found, spoken):
    """By all three moves at each word."""
    if not found or not spoken:
        return len(found) + len(spoken)
    same = brute_force(found[1:], spoken[1:]) + (found[0] != spoken[0])
    return min(same, 1 + brute_force(found[1:], spoken), 1 + brute_force(found, spoken[1:]))


def test_wrong_words_of_known_strings():
    assert training.distance("kitten", "sitting") == 3
    assert training.distance("", "abc") == training.distance("abc", "") == 3
    drawn = np.random.default_rng(0)
    for _ in range(30):
        found, spoken = (drawn.integers(3, size=drawn.integers(6)).tolist() for _ in range(2))
        assert training.distance(found, spoken) == brute_force(found, spoken)


# What is decided by the numbers on file -------------------------------------------------------------------------------


def numbers(way, value, kind, rates):
    """Cells of replicates whose voices have these word error rates at all levels; a named one has 30 points more."""
    more = {"development": [0, 0], "unseen": [0, 0], "seen": [0, 0], "named": [0, 0, 0, 30]}
    return {
        Cell(way, value, kind, i): {
            name: {"words": [100] * len(each)} | {f"{level} dB": [rate + one for one in each] for level in TINY.levels}
            for name, each in more.items()
        }
        for i, rate in enumerate(rates)
    }


def test_bases_are_tuned_first_and_an_edge_asks_for_one_more_value_twice_at_most():
    first = protocol.left({}, TINY)
    assert {cell.way for cell, _ in first} == {"plain", "SpecAugment"}
    assert len(first) == 2 * 3 * TINY.selections
    assert all(rate == cell.value for cell, rate in first)
    found = {}
    for value, rate in ((5e-4, 9), (1e-3, 8), (2e-3, 7)):
        found |= numbers("plain", value, "selection", [rate, rate])
    assert {cell.value for cell in protocol.tried(found, "plain", TINY)[1]} == {4e-3}
    found |= numbers("plain", 4e-3, "selection", [6, 6])
    assert {cell.value for cell in protocol.tried(found, "plain", TINY)[1]} == {8e-3}
    found |= numbers("plain", 8e-3, "selection", [5, 5])
    assert protocol.tried(found, "plain", TINY) == ({5e-4: 9, 1e-3: 8, 2e-3: 7, 4e-3: 6, 8e-3: 5}, [])
    assert protocol.chosen(found, TINY) == {"plain": 8e-3}
    after = protocol.left(found, TINY)
    assert {(cell.way, rate) for cell, rate in after if WAYS[cell.way].base} == {
        (way, 8e-3) for way in ("weight decay", "weight noise", "weight dropout")
    }


def test_the_lower_edge_asks_for_half_of_it():
    found = {}
    for value, rate in ((5e-4, 7), (1e-3, 8), (2e-3, 9)):
        found |= numbers("plain", value, "selection", [rate, rate])
    assert {cell.value for cell in protocol.tried(found, "plain", TINY)[1]} == {2.5e-4}


def selected():
    """Every way is tuned, and its middle value is best."""
    found = {}
    for way, told in WAYS.items():
        for value, rate in zip(told.grid, (9, 7, 8), strict=True):
            found |= numbers(way, value, "selection", [rate] * TINY.selections)
    return found


def compared(spread=0.0):
    """All ways have replicates; noise is better by two points in the mean, and SpecAugment by twelve."""
    found = selected()
    plain = [20.0, 24.0, 22.0]
    gaps = {way: [-2 - spread, -2.1 + spread, -1.9] for way in WAYS if "noise" in way} | {"plain": [0.0, 0.0, 0.0]}
    gaps["SpecAugment"] = [-12.0, -12.5, -11.5]
    for way in WAYS:
        both = zip(plain, gaps.get(way, [0.5, -0.4, 0.1]), strict=True)
        found |= numbers(way, WAYS[way].grid[1], "replicate", [rate + gap for rate, gap in both])
    return found


def test_replicates_are_run_once_all_is_chosen_and_more_of_them_where_differences_spread():
    left = protocol.left(selected(), TINY)
    assert [cell.number for cell, _ in left] == [i for i in range(3) for _ in WAYS]
    assert {rate for cell, rate in left} == {1e-3}
    assert protocol.left(compared(), TINY) == []
    assert {cell.number for cell, _ in protocol.left(compared(spread=2.0), TINY)} == {3}


def test_contrasts_are_paired_t_tests_with_holm():
    found = compared()
    told = protocol.contrasts(found, protocol.chosen(found, TINY))
    assert [(each.way, each.against) for each in told] == [(way, WAYS[way].against) for way in WAYS if way != "plain"]
    noise = next(each for each in told if each.way == "weight noise")
    gaps = np.array([-2.0, -2.1, -1.9])
    expected = stats.ttest_1samp(gaps, 0)
    np.testing.assert_allclose([noise.low, noise.high], expected.confidence_interval(0.95), rtol=1e-6)
    raw = sorted(
        [
            stats.ttest_1samp(protocol.differences(found, protocol.chosen(found, TINY), e.way, e.against), 0).pvalue
            for e in told
        ]
    )
    holm = np.maximum.accumulate([min(1, (6 - i) * p) for i, p in enumerate(raw)])
    np.testing.assert_allclose(sorted(each.p for each in told), holm, rtol=1e-6)


def written(found, folder, table="digits_lstm"):
    (folder / "families.json").write_text(json.dumps({"a": 0, "b": 0, "c": 1, "d": 2}))
    (folder / table).mkdir()
    for cell, told in found.items():
        (folder / table / f"{cell}.json").write_text(json.dumps(cell._asdict() | told))


def test_a_page_shows_a_comparison_only_once_it_is_finished(tmp_path):
    found = compared()
    last = max((cell for cell in found if cell.kind == "replicate"), key=lambda cell: cell.number)
    written({cell: told for cell, told in found.items() if cell != last}, tmp_path)
    text = report.shown("digits_lstm", tmp_path, TINY)
    assert text.startswith("**digits_lstm is not finished**: `python -m examples.speech.cells digits_lstm` trains")
    assert "|" not in text
    assert report.tuning("digits_lstm", tmp_path, TINY) == ""
    assert report.headline("digits_lstm", tmp_path, TINY) == "A comparison of word error rates is not finished."
    (tmp_path / "digits_lstm" / f"{last}.json").write_text(json.dumps(last._asdict() | found[last]))
    assert protocol.read("digits_lstm", tmp_path) == {cell: cell._asdict() | told for cell, told in found.items()}
    text = report.shown("digits_lstm", tmp_path, TINY)
    assert text.startswith("**LSTM with CTC**: 63 recognizers; 3 replicates, each with 48 unseen voices.")
    values = report.tuning("digits_lstm", tmp_path, TINY)
    assert "| weight noise | noise | 0.01: 9.0, **0.02: 7.0**, 0.04: 8.0 | of plain |" in values
    assert "| plain | 22.0 (17.0 to 27.0) | 22.0 | 22.0 | 22.0 | 22.0 | 32.0 | 22.0 |" in text
    assert "| SpecAugment | plain | -12.0 | -13.2 to -10.8 | 0.003 |" in text
    assert report.headline("digits_lstm", tmp_path, TINY) == (
        "On digits from 48 unseen voices in each of 3 replicates, weight noise changed the word error rate by -2.0 "
        "points (95 % interval -2.2 to -1.8), and by +10.0 (+9.0 to +11.0) on top of SpecAugment."
    )


def test_a_second_recognizer_is_compared_in_fewer_ways():
    few = dataclasses.replace(settings.TABLES["digits_attention"], selections=2, look=2)
    assert {cell.way for cell, _ in protocol.left({}, few)} == {"plain", "SpecAugment"}
    found = {cell: told for cell, told in compared(spread=2.0).items() if cell.way in few.ways}
    assert {(cell.way, cell.number) for cell, _ in protocol.left(found, few)} == {
        (way, number) for way in few.ways for number in (3, 4)
    }  # five whatever the spread is
    told = protocol.contrasts(found, protocol.chosen(found, few))
    assert [each.way for each in told] == ["SpecAugment", "weight noise", "SpecAugment, noise"]


def test_the_page_says_what_the_settings_are_and_its_chain_has_the_values_that_are_chosen():
    text = " ".join((Path(__file__).parents[2] / "docs" / "recognizer.md").read_text().split())
    told = settings.SETTINGS
    fewer, families = settings.TABLES["digits_attention"], json.loads((protocol.RESULTS / "families.json").read_text())
    words = {4: "four", 5: "five", 10: "ten", 12: "twelve", 16: "sixteen"}
    for said in (
        f"{told.utterances} strings, {told.voices} voices for training and {told.unseen} for the test with "
        f"{words[told.each]} strings each at {told.levels[0]}, {told.levels[1]} and {told.levels[2]} dB",
        f"There are {words[told.replicates]}; if after {words[told.look]} the standard deviation of a difference "
        f"exceeds {told.spread} points, {words[told.more]}",
        f"Strengths** were chosen on three other replicates with {told.development} voices each",
        f"two masks of at most {told.masks.bands} of {features.BANDS} bands",
        f"and two of at most {told.masks.frames} frames",
        f"Each step adds white noise at {told.decibels[0]:g} to {told.decibels[1]:g} dB SNR",
        f"From step {told.start} of {told.steps} on, all weights get noise",
        f"on = jnp.where(step < {told.start}, 0.0, 1.0)",
        f"WeightDropout({protocol.settled('weight dropout')[1]:g} * on, where=RECURRENT)",
        f"VarNoise({protocol.settled('weight noise')[1]:g} * on)",
        f'RECURRENT = "{settings.RECURRENT}"',
        f"The {len(families)} voices that espeak-ng ships are a second test, in {len({*families.values()})} families",
        f"correlate by at least {replicates.ALIKE}",
        f"{words[fewer.replicates]} replicates of {words[len(fewer.ways)]} ways",
    ):
        assert said in text
    assert (told.selections, told.masks.of_bands, told.masks.of_frames) == (3, 2, 2)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("digits_lstm", "SpecAugment lowers the word error rate of unseen voices from {} % to {} %."),
        ("digits_attention", "With an attention decoder, SpecAugment lowers it from {} to {} %"),
    ],
)
def test_the_result_on_the_page_is_that_of_the_table(table, said):
    found = protocol.read(table)
    best = protocol.chosen(found, settings.TABLES[table])
    plain, masked = (
        report.over(protocol.of_replicates(found, best, way), "unseen").mean() for way in ("plain", "SpecAugment")
    )
    text = " ".join((Path(__file__).parents[2] / "docs" / "recognizer.md").read_text().split())
    assert said.format(f"{plain:.1f}", f"{masked:.1f}") in text
    told = protocol.contrasts(found, best)
    assert [each.way for each in told if each.p < 0.05] == ["SpecAugment"]
    result = text[text.index("**Result.**") : text.index("**LSTM with CTC**")]
    gains = {each.way: -each.low for each in told if each.way not in ("SpecAugment", "SpecAugment, noise, weight norm")}
    assert [way for way, gain in gains.items() if gain >= 0.05 and f"{gain:.1f}" not in result] == []


def test_cells_are_files_and_those_of_another_process_are_left_to_it(tmp_path, monkeypatch):
    """Two cells of one table: the first is locked by another process, so the second one is run."""
    done = []
    monkeypatch.setattr(cells, "trained", lambda model, cell, rate, settings: done.append(cell) or {"rate": rate})
    asked = [(Cell("plain", 1e-3, "selection", i), 1e-3) for i in range(2)]
    monkeypatch.setattr(cells, "left", lambda found, settings: [each for each in asked if each[0] not in found])
    (tmp_path / "digits_lstm").mkdir()
    with (tmp_path / "digits_lstm" / f"{asked[0][0]}.part").open("w") as part:
        cells.fcntl.flock(part, cells.fcntl.LOCK_EX)
        running = cells.runs("digits_lstm", tmp_path, TINY)
        assert next(running)[0] == asked[1][0]
    assert [cell for cell, _ in running] == [asked[0][0]]
    assert done == [asked[1][0], asked[0][0]]
    assert len(protocol.read("digits_lstm", tmp_path)) == 2
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.thorough
def test_a_cell_is_trained_and_tested_on_voices_that_are_drawn():
    tiny = Settings(
        steps=50, start=20, batch=2, utterances=6, voices=2, unseen=2, development=2, each=2, levels=(5,), replicates=2
    )
    cell = Cell("SpecAugment, noise", 0.02, "selection", 0)
    told = cells.trained(small("lstm"), cell, 1e-3, tiny)
    assert len(told["curve"]) == 1
    assert math.isfinite(told["curve"][0])
    assert len(told["development"]["words"]) == len(told["development"]["5 dB"]) == 2
    assert "unseen" not in told


def test_the_ways_by_hand_draw_as_the_chains_do():
    params = {"lstm_0": {"forward": {"hf": {"kernel": jnp.ones((200, 200))}, "if": {"kernel": jnp.ones((200, 200))}}}}
    chains = (settings.noise(costs.STD, "lstm"), settings.dropout(costs.RATE, "lstm"))
    for chain, by_hand in zip(chains, (costs.noise_by_hand, costs.dropout_by_hand), strict=True):
        one, other = (draw(params, jax.random.key(0))["lstm_0"]["forward"] for draw in (chain.apply, by_hand))
        for cell in ("hf", "if"):
            ours, theirs = one[cell]["kernel"], other[cell]["kernel"]
            np.testing.assert_allclose(ours.mean(), theirs.mean(), atol=0.02)  # of 40,000 numbers
            np.testing.assert_allclose(ours.std(), theirs.std(), rtol=0.02)
    assert set(np.unique(other["hf"]["kernel"])) == {np.float32(0), np.float32(1) / np.float32(0.9)}
    assert set(np.unique(other["if"]["kernel"])) == {np.float32(1)}
