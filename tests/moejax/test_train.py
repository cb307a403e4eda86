"""The trainer: losses worked by hand, resuming bit for bit, half-written checkpoints, data parallelism, weight decay."""
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax import train
from moejax.model import Transformer
from moejax.sharding import make_mesh
from moejax.train import TrainConfig, Trainer
from moejax.train_checkpoints import Checkpoints
from pallas_kernels.fused_router import Routing
from tests.moejax import tiny
from tests.tolerances import assert_close

CONFIG = TrainConfig(num_steps=8, batch_size=4, seq_len=12, warmup_steps=2, steps_per_call=2, eval_every=2, save_every=2,
                     dtype="float32", learning_rate=1e-2, final_learning_rate=1e-2)


def make_trainer(devices: int = 1, config: TrainConfig = CONFIG) -> Trainer:
    model = Transformer(tiny.config(), rngs=nnx.Rngs(0))
    model.set_attributes(all_experts=True, raise_if_not_found=False)
    return Trainer(model, config, make_mesh(data=devices))


def batches(step: int, steps: int = 2) -> np.ndarray:
    rng = np.random.default_rng(step)
    starts = rng.integers(0, 50, (steps, 4, 1))
    return (starts + np.arange(13)) % tiny.config().vocab_size  # learnable: each token follows its predecessor


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return make_trainer()


def leaves(state) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def test_losses_by_hand():
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]]))
    np.testing.assert_allclose(train.next_token_loss(logits, jnp.array([[1, 2]])), [[math.log(4), -math.log(0.7)]], rtol=1e-6)
    # two tokens, two experts, top-1, both choose expert 0: f = (1, 0), p_0 = (0.9 + 0.6) / 2
    routing = Routing(topk_idx=jnp.zeros((2, 1), jnp.int32), topk_weights=jnp.ones((2, 1)),
                      router_logits=jnp.log(jnp.array([[0.9, 0.1], [0.6, 0.4]])) + 2.0, group_sizes=jnp.array([2, 0]))
    np.testing.assert_allclose(train.load_balancing_loss(routing), 2 * 0.75, rtol=1e-6)
    np.testing.assert_allclose(train.router_z_loss(routing), 4.0, rtol=1e-6)


def test_it_learns(trainer):
    state, first = trainer.run(trainer.init(), batches(0))
    for step in range(2, 40, 2):
        state, last = trainer.run(state, batches(step))
    assert float(first["loss"][0]) > math.log(tiny.config().vocab_size) - 1
    assert float(last["loss"][-1]) < 0.5 * float(first["loss"][0])
    assert all(np.isfinite(x).all() for x in leaves(state))


def test_resuming_gives_the_uninterrupted_run_bit_for_bit(trainer, tmp_path):
    state = trainer.init()
    for step in range(0, 8, 2):
        state, _ = trainer.run(state, batches(step))
    whole = leaves(state)

    state = trainer.init()
    for step in (0, 2):
        state, _ = trainer.run(state, batches(step))
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(state)
    checkpoints.close()

    fresh = make_trainer()
    checkpoints = Checkpoints(tmp_path / "run")
    state = checkpoints.restore(fresh)
    assert int(state.step) == 4
    for step in (4, 6):
        state, _ = fresh.run(state, batches(step))
    checkpoints.close()
    for a, b in zip(whole, leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_half_written_checkpoint_is_never_taken(trainer, tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.restore(trainer) is None
    state, _ = trainer.run(trainer.init(), batches(0))
    checkpoints.save(state)
    checkpoints.close()
    # what a kill in the middle of a save leaves behind: the temporary folder of the next step
    half = tmp_path / "run" / "newest" / "4.orbax-checkpoint-tmp-123"
    (half / "default").mkdir(parents=True)
    (half / "default" / "manifest.ocdbt").write_bytes(b"half")
    checkpoints = Checkpoints(tmp_path / "run")
    assert int(checkpoints.restore(trainer).step) == 2
    checkpoints.close()


def damage(checkpoint):
    """What a full disk or a lost machine leaves of a checkpoint: files of no length."""
    for path in checkpoint.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken(trainer, tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path / "run")
    state, _ = trainer.run(trainer.init(), batches(0))
    kept = leaves(state)
    checkpoints.save(state)
    state, _ = trainer.run(state, batches(2))
    checkpoints.save(state)
    checkpoints.save_best(state, 3.0)
    checkpoints.close()
    damage(tmp_path / "run" / "newest" / "4")
    damage(tmp_path / "run" / "best" / "4")
    checkpoints = Checkpoints(tmp_path / "run")
    restored = checkpoints.restore(trainer)
    for a, b in zip(kept, leaves(restored), strict=True):
        np.testing.assert_array_equal(a, b)
    assert checkpoints.best_loss(trainer) == math.inf
    assert "step 4 is damaged" in caplog.text
    assert {path.name for path in (tmp_path / "run" / "damaged").iterdir()} == {"newest-4", "best-4"}
    state, _ = trainer.run(restored, batches(2))
    again = leaves(state)
    checkpoints.save(state)  # under the step of the damaged one
    for a, b in zip(again, leaves(checkpoints.restore(trainer)), strict=True):
        np.testing.assert_array_equal(a, b)
    checkpoints.close()


def test_where_no_checkpoint_can_be_read_all_stay(trainer, tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    state, _ = trainer.run(trainer.init(), batches(0))
    checkpoints.save(state)
    damage(tmp_path / "run" / "newest" / "2")
    with pytest.raises(ValueError, match=r"newest: none of the checkpoints \[2\] can be read; move the folder away"):
        checkpoints.restore(trainer)
    checkpoints.close()
    assert (tmp_path / "run" / "newest" / "2").is_dir()


def test_best_keeps_the_lowest_loss(trainer, tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.best_loss(trainer) == math.inf
    state, _ = trainer.run(trainer.init(), batches(0))
    kept = leaves(state.params)
    checkpoints.save_best(state, 3.5)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.best_loss(trainer) == 3.5
    params, step = checkpoints.restore_best(trainer)
    checkpoints.close()
    assert step == 2
    for a, b in zip(kept, leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_rerun_that_finds_better_parameters_at_an_earlier_step_keeps_them(trainer, tmp_path):
    # a run that was killed after its best step, resumed from before it, and on a GPU did not walk the same path bit for bit
    checkpoints = Checkpoints(tmp_path / "run")
    state, _ = trainer.run(trainer.init(), batches(0))
    state, _ = trainer.run(state, batches(2))
    checkpoints.save_best(state, 3.0)
    state, _ = trainer.run(trainer.init(), batches(7))
    kept = leaves(state.params)
    checkpoints.save_best(state, 2.0)
    assert checkpoints.best_loss(trainer) == 2.0
    params, step = checkpoints.restore_best(trainer)
    checkpoints.close()
    assert step == 2
    for a, b in zip(kept, leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_data_parallel_equals_one_device(trainer):
    parallel = make_trainer(devices=4)
    one, four = trainer.init(), parallel.init()
    for step in (0, 2):
        one, m1 = trainer.run(one, batches(step))
        four, m4 = parallel.run(four, batches(step))
    assert len(jax.tree.leaves(four.params)[0].sharding.device_set) == 4
    assert_close(m4["loss"], m1["loss"], "train_loss_f32")
    assert_close(parallel.evaluate(four.params, batches(9)[0]), trainer.evaluate(one.params, batches(9)[0]), "train_loss_f32")


def test_a_restored_state_may_lie_on_another_mesh(trainer, tmp_path):
    state, _ = trainer.run(trainer.init(), batches(0))
    before = leaves(state)
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(state)
    restored = checkpoints.restore(make_trainer(devices=2))
    checkpoints.close()
    assert len(jax.tree.leaves(restored.params)[0].sharding.device_set) == 2
    for a, b in zip(before, leaves(restored), strict=True):
        np.testing.assert_array_equal(a, b)


def test_evaluate_ignores_the_padding_rows(trainer):
    params = trainer.init().params
    windows = np.concatenate([batches(1)[0], batches(2)[0]])[:5]  # batches of 4: the second has three padding rows
    alone = [trainer.evaluate(params, windows[i:i + 1]) for i in range(5)]
    assert_close(trainer.evaluate(params, windows), np.mean(alone), "train_loss_f32")


def test_norm_scales_and_biases_are_not_decayed():
    flat = nnx.to_flat_state(nnx.state(Transformer(tiny.config(), rngs=nnx.Rngs(0))))
    kept = {path[-1] for path, _ in flat if not train.is_decayed(path)}
    decayed = {path[-1] for path, _ in flat if train.is_decayed(path)}
    assert "scale" in kept and all(name == "scale" or name.startswith("b_") for name in kept)
    assert {"embedding_VD", "w_router_DE", "w_gate_EDF"} <= decayed


@pytest.mark.parametrize("field, value", [
    ("num_steps", 0), ("batch_size", 2.5), ("learning_rate", 0), ("learning_rate", math.nan), ("dtype", "float16"),
    ("warmup_steps", 8), ("eval_every", 3), ("weight_decay", -1), ("beta1", 1.0), ("beta2", 1.5)])
def test_bad_settings_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        dataclasses.replace(CONFIG, **{field: value})


def test_a_batch_that_the_mesh_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="batch_size=4: must be a multiple of the mesh's data=3"):
        make_trainer(devices=3)
