"""Routing of random weights: frequencies asked for are frequencies seen, in the decode loop itself."""
import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from moejax import decode, routing
from moejax.config import DenseMLP, LayerConfig, ModelConfig, MoE
from moejax.random_model import filled_state, random_model
from pallas_kernels.fused_router import RouterRule
from pallas_kernels.kv_format import KVFormat

BATCH, STEPS = 12, 40
RULES = [RouterRule(num_experts_per_tok=3), RouterRule(num_experts_per_tok=3, score_fn="sigmoid", n_group=4, topk_group=2)]


def config(rule: RouterRule) -> ModelConfig:
    moe = MoE(num_experts=20, moe_intermediate_size=32, rule=rule)
    layers = (LayerConfig(mlp=moe), LayerConfig(mlp=DenseMLP(intermediate_size=64)), LayerConfig(mlp=moe))
    return ModelConfig(vocab_size=1000, hidden_size=128, num_heads=2, num_kv_heads=1, head_dim=32, max_position_embeddings=512,
                       layers=layers)


def observed(c: ModelConfig, frequencies: routing.Frequencies | None) -> routing.Observed:
    model = random_model(c, dtype=jnp.float32)
    if frequencies is not None:
        routing.skew(model, frequencies)
    spec, params = decode.split(model, KVFormat(page_size=32))
    state = filled_state(spec, [40] * BATCH, max_len=40 + STEPS)
    state, seen = routing.observe(spec, params, state, jnp.ones(c.vocab_size, bool), STEPS)
    assert np.all(np.asarray(state.kv_lens) == 40 + STEPS)
    return seen


@pytest.mark.parametrize("rule", RULES, ids=["softmax", "groups"])
def test_experts_are_chosen_as_often_as_asked_for(rule):
    c = config(rule)
    asked = routing.named("zipf:1.2", c)
    seen = observed(c, asked)
    assert seen.steps == STEPS and seen.hits[1] is None and seen.frequencies[1] is None
    for layer in (0, 2):
        f, wanted = seen.frequencies[layer], asked[layer]
        assert f.sum() == pytest.approx(3) and wanted.sum() == pytest.approx(3)
        assert np.corrcoef(f, wanted)[0, 1] > 0.9
        assert seen.hits[layer] == pytest.approx(routing.expected_hits(wanted, BATCH), rel=0.12)
    assert not np.allclose(asked[0], asked[2])  # another order of the experts in each layer
    plain = observed(c, None)
    assert plain.mean_hits > 1.15 * seen.mean_hits
    assert plain.mean_hits == pytest.approx(np.mean([plain.hits[0], plain.hits[2]]))


def test_hits_are_different_experts_of_each_step():
    c = config(RULES[0])
    sizes = np.zeros((2, 20), int)
    sizes[0, :3] = 2  # two tokens that chose the same three
    sizes[1, :6] = 1  # and two that chose different ones
    seen = routing._observed([sizes, None, sizes[:1].repeat(2, 0)], c)
    assert seen.hits == (4.5, None, 3.0) and seen.steps == 2
    np.testing.assert_allclose(seen.frequencies[0][:7], [0.75] * 3 + [0.25] * 3 + [0])


@pytest.mark.parametrize("exponent", [0, 0.7, 1, 3, 8])
def test_zipf(exponent):
    f = routing.zipf(30, 6, exponent)
    assert f.sum() == pytest.approx(6) and f.max() <= 1 and np.all(np.diff(f) <= 1e-12)
    rest = f[f < 1]  # those below the limit stay in proportion
    ranks = np.arange(31 - len(rest), 31)
    np.testing.assert_allclose(rest / rest[0], (ranks / ranks[0]) ** -float(exponent))


def test_expected_hits_of_a_batch():
    assert routing.expected_hits(np.array([1.0, 0.5, 0.0]), 2) == pytest.approx(1.75)


def test_recorded_frequencies_come_back(tmp_path):
    c = config(RULES[0])
    asked = routing.named("zipf:1", c, seed=3)
    (tmp_path / "file.json").write_text(routing.dump(asked, 100, "about"))
    got = routing.named(f"recorded:{tmp_path / 'file.json'}", c)
    assert got[1] is None
    np.testing.assert_array_equal(got[2], asked[2])


@pytest.mark.parametrize(("change", "words"), [
    (lambda d: d["frequencies"].pop("2"), "has experts in layers \\[0, 2\\]"),
    (lambda d: d["frequencies"].update({"2": [0.15] * 19}), "20 experts"),
    (lambda d: d["frequencies"].update({"2": [0.2] * 20}), "sum to num_experts_per_tok=3"),
    (lambda d: d["frequencies"].update({"2": [3.0] + [0.0] * 19}), "from 0 to 1"),
    (lambda d: d.pop("frequencies"), "not a file of recorded frequencies"),
])
def test_a_file_that_does_not_fit_is_refused(change, words, tmp_path):
    c = config(RULES[0])
    data = json.loads(routing.dump(routing.named("zipf:1", c), 100))
    change(data)
    (tmp_path / "file.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=words):
        routing.load(tmp_path / "file.json", c)


def test_a_model_without_experts_has_no_routing():
    dense = dataclasses.replace(config(RULES[0]), layers=(LayerConfig(mlp=DenseMLP(intermediate_size=64)),))
    assert routing.named("router", dense) is None
    with pytest.raises(ValueError, match="routing='zipf:1': the model has no experts"):
        routing.named("zipf:1", dense)
