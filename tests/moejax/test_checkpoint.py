"""Loading, saving and restoring: strictness, round trips, meshes, dtypes, half-written files."""
import json
import logging
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from moejax.checkpoint import load, restore_orbax, save_hf, save_orbax
from moejax.hf_config import from_hf
from moejax.model import Transformer, abstract
from moejax.sharding import make_mesh, map_params, shard
from tests.moejax.hf_configs import CONFIGS
from tests.moejax.test_tokenizer import backend
from tests.tolerances import assert_close


def random_model(family: str) -> Transformer:
    """A model with random values in every parameter, exactly representable in bfloat16."""
    rng = np.random.default_rng(0)
    graphdef, shapes = abstract(from_hf(CONFIGS[family]))
    params = map_params(lambda path, leaf: jnp.asarray(
        rng.standard_normal(leaf.shape).astype(ml_dtypes.bfloat16).astype(np.float32)), shapes)
    return nnx.merge(graphdef, params)


def flat(model: Transformer) -> dict:
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}


def assert_same(a: Transformer, b: Transformer) -> None:
    assert a.config == b.config
    fa, fb = flat(a), flat(b)
    assert fa.keys() == fb.keys()
    for name in fa:
        assert fa[name].dtype == fb[name].dtype, name
        np.testing.assert_array_equal(fa[name], fb[name], err_msg=name)


@pytest.fixture
def folder(tmp_path):
    """A saved qwen2_moe: tied, mixed layers, shared experts."""
    save_hf(random_model("qwen2_moe"), tmp_path / "model", dtype="float32")
    return tmp_path / "model"


def edit_tensors(folder, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("shard_bytes", [2**30, 20_000])
def test_save_and_load(family, shard_bytes, tmp_path, caplog):
    model = random_model(family)
    save_hf(model, tmp_path / "model", shard_bytes=shard_bytes)
    files = sorted(p.name for p in (tmp_path / "model").glob("*.safetensors"))
    assert (len(files) == 1) == (shard_bytes == 2**30)
    with caplog.at_level(logging.INFO):
        loaded, tokenizer = load(tmp_path / "model", dtype=jnp.float32)
    assert tokenizer is None
    assert_same(loaded, model)
    assert f"{sum(a.size for a in flat(model).values()):,} parameters" in caplog.text


def test_files_hold_float32_routers_and_bfloat16_rest(tmp_path):
    model = random_model("mixtral")
    model.blocks[0].mlp.router.w_router_DE[...] = jnp.full((40, 3), 5.001, jnp.float32)
    save_hf(model, tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", "np") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert {dtypes[name] for name in dtypes if name.endswith("gate.weight")} == {"F32"}
    assert {dtypes[name] for name in dtypes if not name.endswith("gate.weight")} == {"BF16"}
    loaded, _ = load(tmp_path / "model", dtype=jnp.bfloat16)
    dtypes = {name: array.dtype for name, array in flat(loaded).items()}
    assert all((dtype == jnp.float32) == name.endswith("w_router_DE") for name, dtype in dtypes.items())
    np.testing.assert_array_equal(loaded.blocks[0].mlp.router.w_router_DE[...], np.float32(5.001))
    assert loaded.dtype == jnp.bfloat16


def test_default_dtype_on_cpu_is_float32(folder):
    assert load(folder)[0].dtype == jnp.float32


def test_save_leaves_nothing_behind_and_overwrites_nothing(folder, tmp_path):
    with pytest.raises(FileExistsError, match="model"):
        save_hf(random_model("llama"), folder)
    with pytest.raises(ValueError, match="float16"):
        save_hf(random_model("llama"), tmp_path / "other", dtype="float16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("edit, named", [
    (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing model.layers.1.mlp.up_proj.weight"),
    (lambda t: t.pop("model.layers.0.mlp.experts.4.up_proj.weight"), "missing model.layers.0.mlp.experts.4.up_proj.weight"),
    (lambda t: t.update({"model.layers.3.input_layernorm.weight": np.ones(40, np.float32)}),
     "unused model.layers.3.input_layernorm.weight"),
    (lambda t: t.update({"model.layers.0.mlp.experts.5.up_proj.weight": np.ones((24, 40), np.float32)}), "unused .*experts.5"),
    (lambda t: t.update({"model.norm.weight": np.ones(41, np.float32)}), r"model.norm.weight has shape \(41,\), expected \(40,\)"),
    (lambda t: t.update({"model.layers.0.mlp.experts.0.up_proj.weight": np.ones((40, 24), np.float32)}),
     r"shape \(40, 24\), expected \(24, 40\)"),
    (lambda t: t.update({"model.norm.weight": np.ones(40, np.int8)}), "model.norm.weight has dtype I8"),
    (lambda t: t.update({"lm_head.weight": np.ones((97, 40), np.float32)}), "lm_head.weight differs from the embedding"),
])
def test_strict(folder, edit, named):
    edit_tensors(folder, edit)
    with pytest.raises(ValueError, match=named):
        load(folder)


def test_a_stored_copy_of_the_tied_embedding_is_accepted(folder):
    before, _ = load(folder)
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert_same(load(folder)[0], before)


@pytest.fixture
def sharded(tmp_path):
    save_hf(random_model("qwen3_moe"), tmp_path / "sharded", shard_bytes=20_000)
    return tmp_path / "sharded"


def rewrite_index(folder, edit) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    edit(index["weight_map"])
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_sharded_faults(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    spare = load_file(first)
    name = next(iter(spare))
    save_file({**load_file(second), name: spare[name]}, second)
    with pytest.raises(ValueError, match=f"{name} is stored twice"):
        load(sharded)
    second.unlink()
    with pytest.raises(FileNotFoundError, match=second.name):
        load(sharded)


def test_index_that_names_the_wrong_file(sharded):
    files = sorted(p.name for p in sharded.glob("*.safetensors"))
    rewrite_index(sharded, lambda m: m.update({"model.norm.weight": next(f for f in files if f != m["model.norm.weight"])}))
    with pytest.raises(ValueError, match=r"places model\.norm\.weight"):
        load(sharded)


@pytest.mark.parametrize("index", [{}, {"weight_map": 3}, {"weight_map": {"model.norm.weight": 3}}])
def test_an_index_without_a_map_of_files(sharded, index):
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json: must hold a weight_map"):
        load(sharded)


def test_a_bad_config_is_named_with_its_folder(folder):
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    with pytest.raises(ValueError, match=f"{folder}: config.json: model_type='gpt_oss'"):
        load(folder)


def test_index_beside_a_single_file(sharded):
    shutil.copy(next(sharded.glob("*.safetensors")), sharded / "model.safetensors")
    with pytest.raises(ValueError, match="has both"):
        load(sharded)


def test_truncated_file(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:len(data) // 2])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load(folder)


@pytest.mark.parametrize("removed, named", [("config.json", r"config\.json"), ("model.safetensors", "neither model.safetensors")])
def test_missing_files(folder, removed, named):
    (folder / removed).unlink()
    with pytest.raises(FileNotFoundError, match=named):
        load(folder)


def test_config_that_is_not_json(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        load(folder)


def test_paths_that_are_nothing(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        load(tmp_path / "nothing")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"\.gguf"):
        load(tmp_path / "weights.bin")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: (_ for _ in ()).throw(ConnectionError("offline")))
    with pytest.raises(FileNotFoundError, match=r"owner/name.*hub.*offline"):
        load("owner/name")


def test_hub_id_loads_what_the_hub_gives(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo_id, **kwargs: str(folder))
    assert_same(load("owner/name")[0], load(folder)[0])


def test_tokenizer_decides_what_may_be_sampled(tmp_path):
    save_hf(random_model("llama"), tmp_path / "model", dtype="float32")
    tk = backend()
    tk.save(str(tmp_path / "model" / "tokenizer.json"))
    model, tokenizer = load(tmp_path / "model")
    assert tokenizer is not None and tokenizer.eos_ids == (2, 5)
    assert model.config.decodable_vocab_size == min(tk.get_vocab_size(), 97)


@pytest.mark.parametrize("mesh_shape", [{"tensor": 2}, {"expert": 5}, {"data": 2, "tensor": 2}, {"tensor": 7}])
def test_load_onto_a_mesh(mesh_shape, tmp_path):
    save_hf(random_model("qwen3_moe"), tmp_path / "model", dtype="float32")
    plain, _ = load(tmp_path / "model")
    mesh = make_mesh(**mesh_shape)
    model, _ = load(tmp_path / "model", mesh=mesh)
    assert_same(model, plain)
    experts = model.blocks[0].mlp.w_gate_EDF[...]
    assert experts.sharding.mesh == mesh
    split = (mesh.shape["expert"] if 5 % mesh.shape["expert"] == 0 else 1) * (
        mesh.shape["tensor"] if 24 % mesh.shape["tensor"] == 0 else 1)
    assert experts.addressable_shards[0].data.nbytes * split == experts.nbytes


def test_forward_on_a_mesh_equals_one_device():
    model = random_model("qwen3_moe")
    graphdef, params = nnx.split(model)
    params = map_params(lambda path, a: a / a.shape[-1] ** 0.5, params)
    forward = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens).logits)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 97, (2, 6)), jnp.int32)
    assert_close(forward(shard(params, make_mesh(data=1, expert=1, tensor=2)), tokens), forward(params, tokens), "model_f32")


@pytest.mark.parametrize("family", ["qwen2_moe", "llama"])
def test_orbax_round_trip(family, tmp_path):
    model = random_model(family)
    save_orbax(model, tmp_path / "ckpt")
    assert_same(restore_orbax(tmp_path / "ckpt"), model)
    with pytest.raises(ValueError, match="exists"):
        save_orbax(model, tmp_path / "ckpt")


def test_orbax_onto_another_mesh(tmp_path):
    model = random_model("qwen3_moe")
    graphdef, params = nnx.split(model)
    save_orbax(nnx.merge(graphdef, shard(params, make_mesh(tensor=4))), tmp_path / "ckpt")
    for mesh in (make_mesh(tensor=2), make_mesh(expert=5), make_mesh(data=2, tensor=4)):
        restored = restore_orbax(tmp_path / "ckpt", mesh=mesh)
        assert_same(restored, model)
        assert restored.blocks[0].mlp.w_up_EDF[...].sharding.mesh == mesh


def test_orbax_refuses_what_is_not_whole(tmp_path):
    save_orbax(random_model("llama"), tmp_path / "ckpt")
    with pytest.raises(FileNotFoundError, match="nothing"):
        restore_orbax(tmp_path / "nothing")
    (tmp_path / "ckpt" / "_CHECKPOINT_METADATA").unlink()
    with pytest.raises(ValueError, match="not a whole Orbax checkpoint"):
        restore_orbax(tmp_path / "ckpt")


def test_a_save_that_is_killed_leaves_no_checkpoint(tmp_path, monkeypatch):
    """The rename that makes a checkpoint visible is the last step; before it nothing lies under the final name."""
    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("moejax.checkpoint.save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        save_hf(random_model("llama"), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
