"""GGUF files: a tiny one written here must load to the same model as the Hugging Face folder with the same weights."""
import dataclasses
import json

import gguf
import numpy as np
import pytest
from flax import nnx

from moejax.checkpoint import load, save_hf
from moejax.config import DenseMLP, LayerConfig, ModelConfig, RopeConfig
from moejax.hf_tensors import source_of
from moejax.model import Transformer, abstract, num_params
from moejax.sharding import map_params
from tests.moejax.test_checkpoint import assert_same
from tests.moejax.test_tokenizer import TEXT, backend

CONFIG = ModelConfig(
    vocab_size=310, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, max_position_embeddings=128, rms_norm_eps=1e-6,
    rope=RopeConfig(theta=5000.0), layers=(LayerConfig(mlp=DenseMLP(intermediate_size=96)),) * 2, bos_token_id=0,
    eos_token_ids=(1,))
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
         "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
         "lm_head": "output", "model.layers.": "blk."}


def random_model(config: ModelConfig) -> Transformer:
    rng = np.random.default_rng(0)
    graphdef, shapes = abstract(config)
    return nnx.merge(graphdef, map_params(lambda path, leaf: rng.standard_normal(leaf.shape).astype(np.float32), shapes))


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (first halves, second halves) to pairs, the order of GGUF's q and k."""
    out = np.empty_like(rows)
    size = rows.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + i + size // 2]
    return out


def write_gguf(path, model: Transformer, *, drop=(), extra=(), quantise=None, architecture="llama", pre="gpt-2",
               merges=None, **settings):
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(96)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    for name, value in settings.items():
        getattr(writer, name)(value)
    tk = backend()
    tokens = [tk.id_to_token(i) for i in range(tk.get_vocab_size())]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config.vocab_size)]
    kinds = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (tk.get_vocab_size() - 2)
    kinds += [gguf.TokenType.UNUSED] * (config.vocab_size - len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges or [" ".join(merge) for merge in json.loads(tk.to_str())["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, tensor in extra:
        writer.add_tensor(name, tensor)
    for param_path, leaf in nnx.to_flat_state(nnx.state(model)):
        array = np.asarray(leaf.get_value())
        [(name, tensor)] = source_of(param_path, array.shape, "llama").to_file(array)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleaved(tensor, config.num_heads if "q_proj" in name else config.num_kv_heads)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        if name in drop:
            continue
        if quantise is not None and tensor.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(tensor, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [False, True])
def test_same_model_as_the_hugging_face_folder(tied, tmp_path):
    model = random_model(dataclasses.replace(CONFIG, tie_word_embeddings=tied))
    write_gguf(tmp_path / "model.gguf", model)
    save_hf(model, tmp_path / "hf", dtype="float32")
    from_gguf, tokenizer = load(tmp_path / "model.gguf")
    from_hf, _ = load(tmp_path / "hf")
    decodable = backend().get_vocab_size()
    assert decodable < 310 and tokenizer is not None
    assert from_gguf.config == dataclasses.replace(from_hf.config, decodable_vocab_size=decodable,
                                                   rms_norm_eps=float(np.float32(1e-6)))
    from_gguf.config = from_hf.config
    assert_same(from_gguf, from_hf)


def test_tokenizer(tmp_path):
    write_gguf(tmp_path / "model.gguf", random_model(CONFIG), add_add_bos_token=True)
    _, tokenizer = load(tmp_path)  # a folder with one .gguf
    assert tokenizer is not None
    assert tokenizer.encode(TEXT, add_bos=False) == backend().encode(TEXT).ids
    assert tokenizer.encode("the fox")[0] == tokenizer.bos_id == 0
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.eos_ids == (1,) and tokenizer.encode("</s>", add_bos=False) == [1]
    assert tokenizer.num_decodable == backend().get_vocab_size()
    with pytest.raises(ValueError, match="token id 309"):
        tokenizer.decode([309])


def test_smollm_splits_digits(tmp_path):
    write_gguf(tmp_path / "model.gguf", random_model(CONFIG), pre="smollm")
    _, tokenizer = load(tmp_path / "model.gguf")
    assert tokenizer is not None
    assert len(tokenizer.encode("0123456789")) == 10


def test_quantised_tensors_are_close(tmp_path):
    model = random_model(CONFIG)
    write_gguf(tmp_path / "model.gguf", model, quantise=gguf.GGMLQuantizationType.Q8_0)
    loaded, _ = load(tmp_path / "model.gguf")
    assert num_params(nnx.state(loaded)) == num_params(nnx.state(model))
    got, want = (np.asarray(m.blocks[1].attention.w_k_KHD[...]) for m in (loaded, model))
    step = np.abs(want).max() / 127
    assert np.abs(got - want).max() <= 0.51 * step
    assert np.abs(got - want).max() > 0


@pytest.mark.parametrize("options, named", [
    ({"architecture": "qwen2"}, "'qwen2'"),
    ({"drop": ("blk.1.ffn_up.weight",)}, "missing blk.1.ffn_up.weight"),
    ({"extra": [("rope_freqs.weight", np.ones(8, np.float32))]}, "unused rope_freqs.weight"),
    ({"add_expert_count": 4}, "expert_count=4"),
    ({"add_rope_dimension_count": 8}, "rope.dimension_count=8"),
    ({"add_rope_scaling_type": gguf.RopeScalingType.YARN}, "'yarn'"),
    ({"pre": "tekken"}, "'tekken'"),
    ({"merges": ["\n 9zq"]}, "tokenizer.ggml.merges do not fit"),
])
def test_refused_by_name(options, named, tmp_path):
    write_gguf(tmp_path / "model.gguf", random_model(CONFIG), **options)
    with pytest.raises(ValueError, match=named):
        load(tmp_path / "model.gguf")


def test_wrong_shape_and_truncation(tmp_path):
    write_gguf(tmp_path / "model.gguf", random_model(CONFIG), drop=("output_norm.weight",),
               extra=[("output_norm.weight", np.ones(63, np.float32))])
    with pytest.raises(ValueError, match=r"output_norm.weight has shape \(63,\), expected \(64,\)"):
        load(tmp_path / "model.gguf")
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "half.gguf").write_bytes(data[:len(data) // 2])
    with pytest.raises(ValueError, match=r"half\.gguf"):
        load(tmp_path / "half.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ValueError, match=r"text\.gguf"):
        load(tmp_path / "text.gguf")
