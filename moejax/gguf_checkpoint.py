"""GGUF files of the `llama` architecture: config, weights (dequantised tensor by tensor) and tokenizer.

GGUF stores the rows of the q and k projections so that RoPE pairs are neighbours (2i, 2i+1); here channel i turns with i + H/2,
so the rows are put back.
"""
from __future__ import annotations

import pathlib
from typing import Any

import gguf
import numpy as np
import tokenizers
from flax import nnx
from gguf.quants import dequantize
from tokenizers import decoders, models, pre_tokenizers

from moejax.config import DenseMLP, ModelConfig, RopeConfig, repeat_layers
from moejax.config import LayerConfig as Layer
from moejax.hf_tensors import Path, listed
from moejax.model import abstract
from moejax.tokenizer import Tokenizer

_BLOCK = {
    "attention_norm.scale": "attn_norm.weight",
    "mlp_norm.scale": "ffn_norm.weight",
    "attention.w_q_NHD": "attn_q.weight",
    "attention.w_k_KHD": "attn_k.weight",
    "attention.w_v_KHD": "attn_v.weight",
    "attention.w_o_DNH": "attn_output.weight",
    "mlp.w_gate_FD": "ffn_gate.weight",
    "mlp.w_up_FD": "ffn_up.weight",
    "mlp.w_down_DF": "ffn_down.weight",
}
_OUTSIDE = {"embedding_VD": "token_embd.weight", "final_norm.scale": "output_norm.weight", "lm_head_VD": "output.weight"}
_LLAMA_BPE = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
              r"|\s+(?!\S)|\s+")


def _byte_level(*first) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=len(first) == 0
                                                                    or isinstance(first[0], pre_tokenizers.Digits))])


_PRE_TOKENIZERS = {
    "smollm": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "gpt-2": lambda: _byte_level(),
    "llama-bpe": lambda: _byte_level(pre_tokenizers.Split(tokenizers.Regex(_LLAMA_BPE), "isolated")),
}
_SPECIAL, _UNUSED = (gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN), (gguf.TokenType.UNUSED,)


class _Reader(gguf.GGUFReader):
    """Holds the file as a plain array over the same mapping: slices of a memmap, one a token of the vocabulary, take 5 s more."""

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, np.asarray(value) if name == "data" else value)


class GGUFSource:
    """An opened GGUF file: config read, every tensor accounted for. Same interface as `hf_tensors.HFSource`.

    Raises (on opening):
      ValueError: not GGUF, another architecture, unsupported settings, tensors missing, unused or of a wrong shape: all named.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        try:
            self._reader = _Reader(path)
        except (ValueError, IndexError, KeyError, MemoryError) as e:  # MemoryError: a damaged count
            raise ValueError(f"{path}: not a whole GGUF file ({e})") from None
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.config = self._read_config()
        self._check()

    def close(self) -> None:
        del self._reader

    def read(self, path: Path, shape: tuple[int, ...], dtype) -> np.ndarray:
        """The parameter at `path`, [*shape] in `dtype`, dequantised."""
        tensor = self._tensors[_name_of(path)]
        array = dequantize(tensor.data, tensor.tensor_type).astype(dtype)
        if path[-1] in ("w_q_NHD", "w_k_KHD"):
            heads, head_dim, width = shape
            array = array.reshape(heads, head_dim // 2, 2, width).swapaxes(1, 2)
        return np.ascontiguousarray(array.reshape(shape))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the file. Raises ValueError for kinds other than byte-level BPE with a known pre-tokenizer."""
        kind, pre = self._get("tokenizer.ggml.model"), self._get("tokenizer.ggml.pre", "")
        if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
            raise ValueError(f"{self.path}: tokenizer.ggml.model={kind!r} with pre={pre!r} is not supported; accepted is "
                             f"'gpt2' with {', '.join(_PRE_TOKENIZERS)}")
        tokens, types = self._get("tokenizer.ggml.tokens"), self._get("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ", 1)) for merge in self._get("tokenizer.ggml.merges")]
        try:
            backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        except Exception as e:  # the library raises bare Exception
            raise ValueError(f"{self.path}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens ({e})") from None
        backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([token for token, kind in zip(tokens, types) if kind in _SPECIAL])
        added = [token for token, kind in zip(tokens, types) if kind == gguf.TokenType.USER_DEFINED]
        backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in added])
        return Tokenizer(backend, bos_id=self.config.bos_token_id, eos_ids=self.config.eos_token_ids,
                         add_bos=self._get("tokenizer.ggml.add_bos_token", False),
                         undecodable=[i for i, kind in enumerate(types) if kind in _UNUSED])

    def _get(self, key: str, *default) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            if default:
                return default[0]
            raise ValueError(f"{self.path}: metadata {key} is missing")
        return field.contents()

    def _read_config(self) -> ModelConfig:
        architecture = self._get("general.architecture")
        if architecture != "llama":
            raise ValueError(f"{self.path}: general.architecture={architecture!r} is not supported; accepted is 'llama'")
        for key, off in (("llama.expert_count", 0), ("llama.attention.sliding_window", 0)):
            if self._get(key, off) != off:
                raise ValueError(f"{self.path}: {key}={self._get(key)} is not supported")
        width, heads = self._get("llama.embedding_length"), self._get("llama.attention.head_count")
        head_dim = self._get("llama.attention.key_length", width // heads)
        for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
            if self._get(key, head_dim) != head_dim:
                raise ValueError(f"{self.path}: {key}={self._get(key)}: must equal the head dimension {head_dim}")
        eos = self._get("tokenizer.ggml.eos_token_id", None)
        layer = Layer(mlp=DenseMLP(intermediate_size=self._get("llama.feed_forward_length")))
        return ModelConfig(
            vocab_size=int(self._tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in self._tensors
            else self._get("llama.vocab_size"),
            hidden_size=width,
            num_heads=heads,
            num_kv_heads=self._get("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            layers=repeat_layers(self._get("llama.block_count"), layer),
            max_position_embeddings=self._get("llama.context_length"),
            rms_norm_eps=float(self._get("llama.attention.layer_norm_rms_epsilon")),
            rope=self._read_rope(),
            tie_word_embeddings="output.weight" not in self._tensors,
            bos_token_id=self._get("tokenizer.ggml.bos_token_id", None),
            eos_token_ids=() if eos is None else (eos,),
            pad_token_id=self._get("tokenizer.ggml.padding_token_id", None),
        )

    def _read_rope(self) -> RopeConfig:
        kind = self._get("llama.rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise ValueError(f"{self.path}: llama.rope.scaling.type={kind!r} is not supported; accepted are 'none', 'linear'")
        theta = float(self._get("llama.rope.freq_base", 10000.0))
        if kind == "none":
            return RopeConfig(theta=theta)
        return RopeConfig(theta=theta, kind="linear", factor=float(self._get("llama.rope.scaling.factor")))

    def _check(self) -> None:
        problems, wanted = [], set()
        for path, leaf in nnx.to_flat_state(abstract(self.config)[1]):
            name = _name_of(path)
            wanted.add(name)
            if name not in self._tensors:
                problems.append(f"missing {name}")
                continue
            shape = tuple(int(n) for n in self._tensors[name].shape[::-1])
            rows = 1 if path[-1] == "w_o_DNH" else len(leaf.shape) - 1
            expected = tuple(int(np.prod(part)) for part in (leaf.shape[:rows], leaf.shape[rows:]) if part)
            if shape != expected:
                problems.append(f"{name} has shape {shape}, expected {expected}")
        problems += [f"unused {name}" for name in sorted(self._tensors.keys() - wanted)]
        if problems:
            raise ValueError(f"{self.path}: tensors do not fit the metadata: {listed(problems, '; ')}")


def _name_of(path: Path) -> str:
    if path[0] == "blocks":
        return f"blk.{path[1]}." + _BLOCK[".".join(map(str, path[2:]))]
    return _OUTSIDE[".".join(map(str, path))]
