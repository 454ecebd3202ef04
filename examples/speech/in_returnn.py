"""The recognizer of LSTMs in RETURNN's torch backend, with its own noise and dropout in the weights, and what it costs.

It needs RETURNN and torch, which the extra ``peers`` installs.
"""

from collections.abc import Callable
from typing import Any

import returnn.frontend as rf
import torch
from returnn.tensor import Dim, Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from examples.speech.costs import FRAMES, LABELS, RATE, STD
from examples.speech.features import BANDS
from examples.speech.model import Recognizer
from examples.speech.settings import SETTINGS

rf.select_backend_torch()
BATCH = Dim(SETTINGS.batch, name="batch")


class BiLSTM(rf.Module):
    """Two LSTMs, one of which reads from the end."""

    def __init__(self, in_dim: Dim, width: Dim):
        super().__init__()
        self.forward, self.backward = rf.LSTM(in_dim, width), rf.LSTM(in_dim, width)

    def __call__(self, x: Tensor, time: Dim) -> Tensor:
        outputs = []
        for lstm, turn in ((self.forward, lambda x: x), (self.backward, lambda x: rf.reverse_sequence(x, axis=time))):
            state = lstm.default_initial_state(batch_dims=[BATCH])
            y, _ = lstm(turn(x), spatial_dim=time, state=state)
            outputs.append((turn(y), lstm.out_dim))
        return rf.concat(*outputs)[0]


class InReturnn(rf.Module):
    """Two convolutions, two layers of LSTMs, and scores, as :class:`Recognizer`."""

    def __init__(self, words: int):
        super().__init__()
        width, bands = Dim(Recognizer.width, name="width"), Dim(BANDS, name="bands")
        self.conv_0, self.conv_1 = (rf.Conv1d(in_dim, width, 5, padding="same", strides=2) for in_dim in (bands, width))
        self.lstm_0 = BiLSTM(width, width)
        self.lstm_1 = BiLSTM(width + width, width)
        self.bands, self.scores = bands, rf.Linear(width + width, Dim(words + 1, name="scores"))

    def __call__(self, x: Tensor, time: Dim) -> tuple[Tensor, Dim]:
        for conv in (self.conv_0, self.conv_1):
            x, time = conv(x, in_spatial_dim=time)
            x = rf.relu(x)
        for layer in (self.lstm_0, self.lstm_1):
            x = layer(x, time)
        return self.scores(x), time


def noise(model: InReturnn) -> None:
    """Noise on all parameters."""
    for module in model.modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            rf.weight_noise(module, name, std=STD)


def weight_dropout(model: InReturnn) -> None:
    """Dropout of recurrent weights."""
    for layer in (model.lstm_0, model.lstm_1):
        for lstm in (layer.forward, layer.backward):
            rf.weight_dropout(lstm, "rec_weight", drop_prob=RATE)


WAYS: dict[str, Callable[[InReturnn], None]] = {
    "plain": lambda model: None,
    "noise": noise,
    "weight dropout": weight_dropout,
}


def step_of(way: str, words: int) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """The CTC loss of one batch in which every number is the same, and from the loss to its gradient."""
    rf.init_train_step_run_ctx(train_flag=True)
    model = InReturnn(words)
    parameters = [parameter.raw_tensor for parameter in model.parameters()]
    WAYS[way](model)
    n = SETTINGS.batch
    time, length = (Dim(rf.convert_to_tensor([size] * n, dims=[BATCH]), name="time") for size in (FRAMES, LABELS))
    frames = Tensor("frames", dims=[BATCH, time, model.bands], dtype="float32", feature_dim=model.bands)
    frames.raw_tensor = torch.ones(n, FRAMES, BANDS)
    labels = Tensor("labels", dims=[BATCH, length], dtype="int32", sparse_dim=Dim(words, name="words"))
    labels.raw_tensor = torch.ones(n, LABELS, dtype=torch.int32)

    def loss() -> Any:
        scores, left = model(frames, time)
        spatial = {"input_spatial_dim": left, "targets_spatial_dim": length}
        return rf.reduce_mean(rf.ctc_loss(logits=scores, targets=labels, blank_index=words, **spatial), axis=BATCH)

    return loss, lambda loss: torch.autograd.grad(loss.raw_tensor, parameters)


def memory(loss: Callable[[], Any], gradient: Callable[[Any], Any]) -> dict[str, float]:
    """MiB that a step holds at most beside its parameters, and what of it is kept for the backward pass."""
    tracker, found = MemTracker(), {}
    with tracker:
        value = loss()
        kept = tracker.get_tracker_snapshot("current")
        gradient(value)
        peak = tracker.get_tracker_snapshot("peak")
    for name, snapshot in (("temporary MiB", peak), ("kept MiB", kept)):
        found[name] = sum(of_device["Total"] for of_device in snapshot.values()) / 2**20
    return found
