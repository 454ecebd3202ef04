"""What the model says."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.smollm import model
from examples.smollm.model import Config, Params

ASSISTANT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def answer(params: Params, tokenizer: Any, config: Config, question: str, longest: int = 32) -> str:
    """The likeliest answer, word by word; the whole text is computed again for each word."""
    turns = {"system": ASSISTANT, "user": question}
    asked = "".join(f"<|im_start|>{who}\n{text}<|im_end|>\n" for who, text in turns.items())
    ids = tokenizer.encode(asked + "<|im_start|>assistant\n").ids
    stop, begin, length = tokenizer.token_to_id("<|im_end|>"), len(ids), len(ids) + longest
    following = jax.jit(functools.partial(model.logits, config=config))
    while len(ids) < length:
        padded = np.zeros((1, length), int)  # one shape, so that one program is compiled
        padded[0, : len(ids)] = ids
        ids.append(int(following(params, jnp.asarray(padded))[0, len(ids) - 1].argmax()))
        if ids[-1] == stop:
            break
    return tokenizer.decode(ids[begin:])
