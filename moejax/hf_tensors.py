"""Tensors of a Hugging Face folder: which file tensor makes which parameter, found and checked by name and shape before reading.

Only headers are read when a folder is opened; tensors are read one at a time, so host memory holds one parameter.
"""
from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from moejax.config import ModelConfig
from moejax.hf_config import from_hf
from moejax.model import abstract

Path = tuple[Any, ...]
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = ("F64", "F32", "BF16", "F16")

_ATTENTION = {
    "attention_norm.scale": "input_layernorm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "attention.w_q_NHD": "self_attn.q_proj.weight",
    "attention.w_k_KHD": "self_attn.k_proj.weight",
    "attention.w_v_KHD": "self_attn.v_proj.weight",
    "attention.w_o_DNH": "self_attn.o_proj.weight",
    "attention.b_q_NH": "self_attn.q_proj.bias",
    "attention.b_k_KH": "self_attn.k_proj.bias",
    "attention.b_v_KH": "self_attn.v_proj.bias",
    "attention.b_o_D": "self_attn.o_proj.bias",
    "attention.q_norm.scale": "self_attn.q_norm.weight",
    "attention.k_norm.scale": "self_attn.k_norm.weight",
}
_MLP = {
    "mlp.w_gate_FD": "mlp.gate_proj.weight",
    "mlp.w_up_FD": "mlp.up_proj.weight",
    "mlp.w_down_DF": "mlp.down_proj.weight",
    "mlp.b_gate_F": "mlp.gate_proj.bias",
    "mlp.b_up_F": "mlp.up_proj.bias",
    "mlp.b_down_D": "mlp.down_proj.bias",
    "mlp.router.w_router_DE": "mlp.gate.weight",
    "mlp.w_gate_EDF": "mlp.experts.{e}.gate_proj.weight",
    "mlp.w_up_EDF": "mlp.experts.{e}.up_proj.weight",
    "mlp.w_down_EFD": "mlp.experts.{e}.down_proj.weight",
    "mlp.shared.w_gate_FD": "mlp.shared_expert.gate_proj.weight",
    "mlp.shared.w_up_FD": "mlp.shared_expert.up_proj.weight",
    "mlp.shared.w_down_DF": "mlp.shared_expert.down_proj.weight",
    "mlp.w_shared_gate_D": "mlp.shared_expert_gate.weight",
}
_MIXTRAL_MLP = {
    "mlp.router.w_router_DE": "block_sparse_moe.gate.weight",
    "mlp.w_gate_EDF": "block_sparse_moe.experts.{e}.w1.weight",
    "mlp.w_up_EDF": "block_sparse_moe.experts.{e}.w3.weight",
    "mlp.w_down_EFD": "block_sparse_moe.experts.{e}.w2.weight",
}
_OUTSIDE = {
    "embedding_VD": "model.embed_tokens.weight",
    "final_norm.scale": "model.norm.weight",
    "lm_head_VD": "lm_head.weight",
}
# Parameters whose matrices are the transpose of the file's [out, in].
_TRANSPOSED = ("w_router_DE", "w_gate_EDF", "w_up_EDF", "w_down_EFD")


@dataclasses.dataclass(frozen=True)
class Source:
    """The file tensors of one parameter: `names` stacked along a new first axis when `stacked`, each of `shape` in the file."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: bool
    transposed: bool

    def to_param(self, tensors: list[np.ndarray], shape: tuple[int, ...], dtype) -> np.ndarray:
        """The parameter, [*shape] in `dtype`, out of the file's tensors."""
        out = np.empty(shape, dtype)
        for i, tensor in enumerate(tensors):
            target = out[i] if self.stacked else out
            np.copyto(target, (tensor.T if self.transposed else tensor).reshape(target.shape), casting="unsafe")
        return out

    def to_file(self, param: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Inverse of `to_param`: (name, contiguous tensor) pairs."""
        for i, name in enumerate(self.names):
            matrix = param[i] if self.stacked else param
            yield name, np.ascontiguousarray(matrix.T if self.transposed else matrix.reshape(self.shape))


def source_of(path: Path, shape: tuple[int, ...], model_type: str) -> Source:
    """Where the parameter at `path` of a model's state, of `shape`, lives in checkpoints of `model_type`."""
    if path[0] == "blocks":
        key = ".".join(map(str, path[2:]))
        mlp = _MIXTRAL_MLP if model_type == "mixtral" else _MLP
        name = f"model.layers.{path[1]}." + (_ATTENTION | mlp)[key]
    else:
        name = _OUTSIDE[".".join(map(str, path))]
    stacked, transposed = "{e}" in name, path[-1] in _TRANSPOSED
    names = tuple(name.format(e=e) for e in range(shape[0])) if stacked else (name,)
    return Source(names, _file_shape(path[-1], shape[1:] if stacked else shape, transposed), stacked, transposed)


def _file_shape(name: str, shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    """Files hold matrices [out, in] and flat vectors: head axes are merged."""
    if transposed:
        return shape[::-1]
    if not name.startswith("w_"):
        return shape if len(shape) == 2 and name.endswith("_VD") else (math.prod(shape),)
    rows = 1 if name == "w_o_DNH" else len(shape) - 1
    return math.prod(shape[:rows]), math.prod(shape[rows:])


class HFSource:
    """An opened Hugging Face folder: config read, every tensor accounted for.

    Raises (on opening):
      ValueError: unsupported config; tensors that are missing, unused, of a wrong shape or dtype, or stored twice: all are named.
      FileNotFoundError: no folder, config.json, safetensors or shard.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.raw_config = read_json(folder / "config.json")
        try:
            self.config: ModelConfig = from_hf(self.raw_config)
        except ValueError as e:
            raise ValueError(f"{folder}: {e}") from None
        self._files = contextlib.ExitStack()
        self._tensors = self._read_headers()
        self._check()

    def close(self) -> None:
        self._files.close()

    def read(self, path: Path, shape: tuple[int, ...], dtype) -> np.ndarray:
        """The parameter at `path`, [*shape] in `dtype`."""
        source = source_of(path, shape, self.raw_config["model_type"])
        tensors = [self._tensors[name].get_tensor(name) for name in source.names]
        return source.to_param(tensors, shape, dtype)

    def _read_headers(self) -> dict[str, Any]:
        """Tensor name -> the open file that has it."""
        shards, index = self._shards()
        found: dict[str, Any] = {}
        home: dict[str, str] = {}
        for shard in shards:
            if not (self.folder / shard).is_file():
                raise FileNotFoundError(f"{self.folder}: {shard} is missing, {INDEX} lists it")
            try:
                file = self._files.enter_context(safe_open(self.folder / shard, framework="np"))
            except SafetensorError as e:
                raise ValueError(f"{self.folder / shard}: not a whole safetensors file ({e})") from None
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name in found:
                    raise ValueError(f"{self.folder}: tensor {name} is stored twice, in {home[name]} and {shard}")
                found[name], home[name] = file, shard
        wrong = [name for name, shard in (index or home).items() if home.get(name) != shard]
        if wrong:
            raise ValueError(f"{self.folder}: {INDEX} places {listed(wrong)} in files that do not hold them")
        return found

    def _shards(self) -> tuple[list[str], dict[str, str] | None]:
        has_index, has_single = (self.folder / INDEX).is_file(), (self.folder / SINGLE).is_file()
        if has_index and has_single:
            raise ValueError(f"{self.folder}: has both {INDEX} and {SINGLE}; remove the one that does not belong")
        if has_index:
            weight_map = read_json(self.folder / INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
                raise ValueError(f"{self.folder / INDEX}: must hold a weight_map from tensors to files")
            return sorted(set(weight_map.values())), weight_map
        if has_single:
            return [SINGLE], None
        raise FileNotFoundError(f"{self.folder}: has neither {SINGLE} nor {INDEX} (other weight formats are not read)")

    def _check(self) -> None:
        wanted: dict[str, tuple[int, ...]] = {}
        for path, leaf in nnx.to_flat_state(abstract(self.config)[1]):
            source = source_of(path, leaf.shape, self.raw_config["model_type"])
            wanted.update(dict.fromkeys(source.names, source.shape))
        stored = set(self._tensors) - ({"lm_head.weight"} if self._tied_copy() else set())
        problems = []
        if missing := sorted(wanted.keys() - stored):
            problems.append(f"missing {listed(missing)}")
        if unused := sorted(stored - wanted.keys()):
            problems.append(f"unused {listed(unused)}")
        for name in sorted(stored & wanted.keys()):
            header = self._tensors[name].get_slice(name)
            if tuple(header.get_shape()) != wanted[name]:
                problems.append(f"{name} has shape {tuple(header.get_shape())}, expected {wanted[name]}")
            if header.get_dtype() not in DTYPES:
                problems.append(f"{name} has dtype {header.get_dtype()}, accepted are {', '.join(DTYPES)}")
        if problems:
            raise ValueError(f"{self.folder}: tensors do not fit config.json: {listed(problems, '; ')}")
        if self._tied_copy():
            head, embedding = (self._tensors[name].get_tensor(name) for name in ("lm_head.weight", _OUTSIDE["embedding_VD"]))
            if not np.array_equal(head, embedding):
                raise ValueError(f"{self.folder}: tie_word_embeddings is true, but lm_head.weight differs from the embedding")

    def _tied_copy(self) -> bool:
        """Some writers store the tied embedding a second time."""
        return self.config.tie_word_embeddings and "lm_head.weight" in self._tensors


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object from a file. Raises FileNotFoundError, or ValueError naming the file when it is not one."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{path}: not JSON ({e})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return data


def listed(items: list[str], separator: str = ", ", most: int = 8) -> str:
    """The first few of `items`, and how many more there are."""
    return separator.join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
