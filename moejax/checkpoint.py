"""Load, save and restore models: Hugging Face folders and hub ids, GGUF files, Orbax checkpoints."""
from __future__ import annotations

import collections
import dataclasses
import functools
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from safetensors.numpy import save_file

from moejax import accounting
from moejax.config import ModelConfig
from moejax.gguf_checkpoint import GGUFSource
from moejax.hf_config import to_hf
from moejax.hf_tensors import INDEX, SINGLE, HFSource, source_of
from moejax.model import Transformer, abstract, num_params, packed_shapes
from moejax.sharding import make_mesh, map_params, param_shardings, param_spec
from moejax.tokenizer import Tokenizer
from moejax.weight_rules import Formats, formats_of, of_layer

log = logging.getLogger(__name__)

SHARD_BYTES = 4 * 2**30
FILE_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def default_dtype() -> jnp.dtype:
    """float32 on a CPU, whose bfloat16 matrix products are about ten times slower; bfloat16 elsewhere."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def load(path_or_id: str | os.PathLike, *, dtype=None, mesh: Mesh | None = None, expert_weights: str = "bf16",
         dense_weights: str = "bf16", weight_rules: Sequence[str] = ()) -> tuple[Transformer, Tokenizer | None]:
    """Loads a model and, where the checkpoint has one, its tokenizer.

    Weights are read, and packed where they are to be, block by block: at most one block is held as it is read.

    Args:
      path_or_id: a Hugging Face folder, a .gguf file or a folder with one, or a hub id "owner/name".
      dtype: dtype of parameters and computation; `default_dtype()` by default. Router weights stay float32.
      mesh: lays the parameters out over it (`moejax.sharding`) as they are read; None puts them on the default device.
      expert_weights: what routed experts are kept in: "int8", "int4", "int3", "int2" or "packed_bf16", for the kernels of Hopper
        and TPU, with group size and zero points behind it ("int4:g64:asym"); "bf16" leaves them in `dtype`.
      dense_weights: the same for all other matrices but the router and the embedding.
      weight_rules: PATTERN=FORMAT each (`moejax.weight_rules`), which win over the two: "embedding=int8", "layers.0=bf16".

    Returns:
      (model, tokenizer or None).

    Raises:
      ValueError: unsupported config or settings; rules that match nothing or do not fit; tensors missing, unused, stored twice, of
        a wrong shape; more weights than the device has memory (`accounting.DoesNotFitError`): the message names them.
      FileNotFoundError, OSError: nothing at that path, or no hub to be reached for that id.
    """
    source = open_source(path_or_id)
    try:
        return load_source(source, dtype=dtype, mesh=mesh,
                           formats=formats_of(source.config, expert_weights, dense_weights, weight_rules))
    finally:
        source.close()


def open_source(path_or_id: str | os.PathLike) -> HFSource | GGUFSource:
    """Finds a checkpoint and checks it by its headers, without reading weights. Errors as `load`."""
    path = pathlib.Path(path_or_id)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path}: must be a folder or a .gguf file")
        return GGUFSource(path)
    if not path.is_dir():
        path = _download(str(path_or_id))
    ggufs = sorted(path.glob("*.gguf"))
    if not (path / "config.json").is_file() and len(ggufs) == 1:
        return GGUFSource(ggufs[0])
    return HFSource(path)


def load_source(source: HFSource | GGUFSource, *, dtype=None, mesh: Mesh | None = None,
                formats: Formats | None = None) -> tuple[Transformer, Tokenizer | None]:
    """`load` of what `open_source` gave, with the formats of packed matrices (`weight_rules.resolve`)."""
    formats = {} if formats is None else formats
    if formats and mesh is not None:
        raise ValueError(f"{next(iter(formats))}: packed weights cannot be laid out over a mesh")
    tokenizer = _tokenizer_of(source)
    config = _with_decodable(source.config, tokenizer)
    param_dtype = default_dtype() if dtype is None else jnp.dtype(dtype)
    graphdef, shapes = abstract(config, param_dtype=param_dtype)
    if mesh is None:
        _require_memory(config, shapes, formats, param_dtype)

    def read(path, leaf):
        array = source.read(path, leaf.shape, leaf.dtype)
        if mesh is None:
            return jnp.asarray(array)
        sharding = NamedSharding(mesh, param_spec(path, leaf.shape, mesh))
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: array[index])

    def read_in(module: tuple, path, leaf):
        return read((*module, *path), leaf)

    model = nnx.merge(graphdef, shapes)
    for layer, block in enumerate(model.blocks):
        nnx.update(block, map_params(functools.partial(read_in, ("blocks", layer)), nnx.state(block)))
        if of_block := of_layer(formats, layer):
            block.pack(of_block)
            jax.block_until_ready(nnx.state(block))  # before the next one is read
    rest = nnx.from_flat_state([item for item in nnx.to_flat_state(shapes) if item[0][0] != "blocks"])
    nnx.update(model, map_params(read, rest))
    model.pack_ends(formats)
    log.info("loaded %s parameters", f"{num_params(shapes):,}")
    return model, tokenizer


def _require_memory(config: ModelConfig, shapes: nnx.State, formats: Formats, dtype) -> None:
    """Refuses weights that do not fit: of these shapes, or packed, with the largest block as it is read."""
    kept = nnx.state(packed_shapes(config, formats, param_dtype=dtype)) if formats else shapes
    parts = accounting.held_bytes(config, kept)
    if formats:
        blocks: collections.Counter[Any] = collections.Counter()
        for path, leaf in nnx.to_flat_state(shapes):
            if path[0] == "blocks":
                blocks[path[1]] += accounting.nbytes(leaf)
        parts["a block before it is packed"] = max(blocks.values())
    accounting.require_memory("the model", parts)


def save_hf(model: Transformer, path: str | os.PathLike, *, tokenizer: Tokenizer | None = None,
            dtype: str = "bfloat16", shard_bytes: int = SHARD_BYTES) -> None:
    """Writes a folder that `load` and transformers read: config.json, safetensors, tokenizer.json.

    The folder appears whole or not at all. Router weights are written in float32 whatever `dtype`.

    Args:
      path: must not exist yet, or be empty.
      dtype: "bfloat16" or "float32".
      shard_bytes: files grow to at most this size, unless one parameter is larger; one file needs no index.

    Raises:
      ValueError: no Hugging Face architecture can express the config; unknown dtype; packed experts.
      FileExistsError: there is something at `path`.
    """
    if dtype not in FILE_DTYPES:
        raise ValueError(f"{dtype=}: accepted are {', '.join(FILE_DTYPES)}")
    if model.is_packed:
        raise ValueError("weights are packed: a folder holds only what they were before")
    path = pathlib.Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path}: exists and is not an empty folder")
    config = {**to_hf(model.config), "torch_dtype": dtype}
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_shards(model, partial, config["model_type"], FILE_DTYPES[dtype], shard_bytes)
    if tokenizer is not None:
        tokenizer.save(partial)
        generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.eos_ids) or None}
        (partial / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
        (partial / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": tokenizer.add_bos}) + "\n", encoding="utf-8")
    if path.exists():
        path.rmdir()
    partial.rename(path)


def _write_shards(model: Transformer, folder: pathlib.Path, model_type: str, dtype: np.dtype, shard_bytes: int) -> None:
    """Writes parameters in order, a file at a time, so that one file's worth is in host memory."""
    shards: list[list[str]] = []
    tensors: dict[str, np.ndarray] = {}
    held = 0

    def flush() -> None:
        nonlocal tensors, held
        if tensors:
            save_file(tensors, folder / f"part-{len(shards)}", metadata={"format": "pt"})
            shards.append(list(tensors))
        tensors, held = {}, 0

    for param_path, leaf in nnx.to_flat_state(nnx.state(model)):
        array = np.asarray(leaf[...])
        array = array.astype(np.float32 if param_path[-1] == "w_router_DE" else dtype)
        if held + array.nbytes > shard_bytes:
            flush()
        tensors.update(source_of(param_path, array.shape, model_type).to_file(array))
        held += array.nbytes
    flush()
    if len(shards) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, file in enumerate(files):
        (folder / f"part-{i}").rename(folder / file)
    weight_map = {name: file for file, names in zip(files, shards) for name in names}
    total = sum((folder / file).stat().st_size for file in files)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def save_orbax(model: Transformer, path: str | os.PathLike) -> None:
    """Writes config and parameters as one Orbax checkpoint; it appears under `path` only once it is whole.

    Raises:
      ValueError: there is something at `path`.
    """
    items = ocp.args.Composite(
        params=ocp.args.PyTreeSave(nnx.to_pure_dict(nnx.state(model))),
        config=ocp.args.JsonSave({"model": model.config.to_dict(), "dtype": model.dtype.name}))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(pathlib.Path(path).absolute(), items)


def restore_orbax(path: str | os.PathLike, *, mesh: Mesh | None = None) -> Transformer:
    """The model that `save_orbax` wrote, laid out over `mesh`, which may differ from the one it was saved from.

    Raises:
      FileNotFoundError: nothing at `path`.  ValueError: what is there is no whole checkpoint.
    """
    path = pathlib.Path(path).absolute()
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such Orbax checkpoint")
    if not (path / "_CHECKPOINT_METADATA").is_file() or ".orbax-checkpoint-tmp" in path.name:
        raise ValueError(f"{path}: not a whole Orbax checkpoint (unfinished, or something else)")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        saved = checkpointer.restore(path, ocp.args.Composite(config=ocp.args.JsonRestore())).config
        config = ModelConfig.from_dict(saved["model"])
        graphdef, shapes = abstract(config, dtype=saved["dtype"])
        shardings = param_shardings(shapes, mesh or make_mesh())
        restore_args = jax.tree.map(lambda s: ocp.ArrayRestoreArgs(sharding=s, strict=True), nnx.to_pure_dict(shardings))
        pure = checkpointer.restore(path, ocp.args.Composite(params=ocp.args.PyTreeRestore(
            item=nnx.to_pure_dict(shapes), restore_args=restore_args))).params
    nnx.replace_by_pure_dict(shapes, pure)
    return nnx.merge(graphdef, shapes)


def _download(repo_id: str) -> pathlib.Path:
    """Fetches config, tokenizer and safetensors of a hub id. Raises FileNotFoundError when it is neither a path nor reachable."""
    import huggingface_hub

    if repo_id.count("/") != 1 or repo_id.startswith((".", "/", "~")):
        raise FileNotFoundError(f"{repo_id}: no such file or folder (a hub id would be owner/name)")
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as e:  # offline, unknown id, gated: many types, one meaning here
        raise FileNotFoundError(f"{repo_id}: no such folder, and the hub gave no model of this id "
                                f"({type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''})") from None


def _tokenizer_of(source: HFSource | GGUFSource) -> Tokenizer | None:
    if isinstance(source, GGUFSource):
        return source.tokenizer()
    return Tokenizer.from_folder(source.folder) if (source.folder / "tokenizer.json").is_file() else None


def _with_decodable(config: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    if tokenizer is None:
        return config
    if tokenizer.num_decodable > config.vocab_size:
        log.info("the tokenizer has ids up to %d, the model %d rows", tokenizer.num_decodable - 1, config.vocab_size)
    return dataclasses.replace(config, decodable_vocab_size=min(tokenizer.num_decodable, config.vocab_size))

