"""Trains a MoE: `python -m experiments.train --gin_file=configs/runs/train_tiny.gin --run_dir=DIR`."""
from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys
import time
from typing import BinaryIO

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from experiments import cli, inputs, results
from moejax import data
from moejax.checkpoint import save_hf
from moejax.config import DenseMLP, LayerConfig, ModelConfig, MoE, RopeConfig, repeat_layers, require_int
from moejax.hf_config import to_hf
from moejax.hf_tensors import read_json
from moejax.model import Transformer, num_params
from moejax.sharding import make_mesh
from moejax.tokenizer import Tokenizer
from moejax.train import TrainConfig, Trainer, TrainState
from moejax.train_checkpoints import Checkpoints
from pallas_kernels.fused_router import RouterRule

cli.register(ModelConfig, LayerConfig, MoE, DenseMLP, RouterRule, RopeConfig)
cli.register_function(repeat_layers)


@cli.configurable
def train(
    run_dir: str,
    model: ModelConfig,
    data_dir: str = "data/prepared",
    export_dir: str | None = None,
    data_parallel: int = 1,
    max_minutes: float | None = None,
    max_steps: int | None = None,
    train_config: TrainConfig = TrainConfig(),
):
    """Trains a model on prepared token files (make data), resuming from the newest checkpoint of the run.

    Args:
      run_dir: checkpoints, metrics.jsonl and run.json of this run.
      model: the model's config, bound by gin (configs/models/).
      data_dir: holds train.bin, heldout_*.bin, tokenizer.json, data.json.
      export_dir: writes the best parameters there at the end, in the Hugging Face format; must not exist.
      data_parallel: devices the batch is split over.
      max_minutes: stops cleanly after this long, evaluates, saves and exports.
      max_steps: stops after this many steps of num_steps (to test resuming).
      train_config: the rest, see TrainConfig.
    """
    run = pathlib.Path(run_dir)
    results.require_writable_file(f"{run_dir=!s}", run / "run.json")
    if export_dir is not None:
        require_exportable(export_dir, run, model)
    with inputs.naming("data_dir", data_dir):
        corpus = Corpus(pathlib.Path(inputs.locate(data_dir)), model.vocab_size, train_config.seq_len)
    if train_config.seq_len > model.max_position_embeddings:
        raise ValueError(f"seq_len={train_config.seq_len}: the model has "
                         f"max_position_embeddings={model.max_position_embeddings}")
    if max_minutes is not None and max_minutes <= 0:
        raise ValueError(f"max_minutes={max_minutes}: must be positive")
    if max_steps is not None and (max_steps < 1 or max_steps % train_config.steps_per_call):
        raise ValueError(f"max_steps={max_steps}: must be a positive multiple of steps_per_call={train_config.steps_per_call}")
    require_int("data_parallel", data_parallel)
    mesh = make_mesh(data=data_parallel)
    transformer = Transformer(model, rngs=nnx.Rngs(train_config.seed), dtype=train_config.dtype)
    transformer.set_attributes(all_experts=True, raise_if_not_found=False)
    trainer = Trainer(transformer, train_config, mesh)
    stop_at = min(train_config.num_steps, max_steps or train_config.num_steps)
    lock = claim(run, {"model": model.to_dict(), "train_config": dataclasses.asdict(train_config), "data": corpus.record})
    try:
        resumed = Run(run, lock, trainer, corpus, stop_at, max_minutes)
    except ValueError:
        lock.close()
        raise
    return lambda: resumed.work(export_dir)


def require_exportable(export_dir: str, run: pathlib.Path, model: ModelConfig) -> None:
    """Raises ValueError for what would fail at the export, after the training."""
    export = pathlib.Path(export_dir)
    if export.exists():
        raise ValueError(f"export_dir={export_dir}: exists already")
    if run.absolute().is_relative_to(export.absolute()):
        raise ValueError(f"export_dir={export_dir}: holds run_dir={run}, must be a folder of its own")
    results.require_writable_folder(f"{export_dir=!s}", export)
    try:
        to_hf(model)
    except ValueError as e:
        raise ValueError(f"export_dir={export_dir}: {e}") from None


class Corpus:
    """Token files of one prepared folder. Raises ValueError or OSError when one is missing or does not fit."""

    def __init__(self, folder: pathlib.Path, vocab_size: int, seq_len: int):
        self.tokens = data.read_tokens(folder / "train.bin", vocab_size)
        if len(self.tokens) <= seq_len + 1:
            raise ValueError(f"train.bin: {len(self.tokens)} tokens, need more than {seq_len=}")
        files = sorted(folder.glob("heldout_*.bin"))
        if not files:
            raise FileNotFoundError(f"{folder}: no heldout_*.bin (make data writes them)")
        self.held_out = {f.stem.removeprefix("heldout_"): data.evaluation_windows(data.read_tokens(f, vocab_size), seq_len)
                         for f in files}
        self.record = read_json(folder / "data.json")
        for name in self.held_out:
            for unit in ("tokens", "bytes"):
                require_int(f"data.json: heldout_{name}_{unit}", self.record.get(f"heldout_{name}_{unit}"))
        self.tokenizer = Tokenizer.from_folder(folder)

    def bits_per_byte(self, name: str, nats_per_token: float) -> float:
        tokens, size = (self.record[f"heldout_{name}_{unit}"] for unit in ("tokens", "bytes"))
        return nats_per_token / math.log(2) * tokens / size


def claim(run: pathlib.Path, settings: dict) -> BinaryIO:
    """Makes the run's folder, or checks that it was made with the same settings (else resuming would mix two runs).

    Returns the lock that keeps other processes out of the folder for as long as it is open.
    """
    settings = json.loads(json.dumps(settings))
    path = run / "run.json"
    with inputs.naming("run_dir", str(run)):
        before = read_json(path) if path.exists() else settings
        if not all(isinstance(before.get(group), dict) for group in settings):
            raise ValueError(f"run.json must hold the objects {', '.join(settings)}; use another folder")
        changed = sorted(f"{group}.{key}" for group, values in settings.items() for key in values
                         if before[group].get(key) != values[key])
        if changed:
            raise ValueError(f"was started with other settings ({', '.join(changed)})")
        lock = results.locked(run / "run.lock", "another process is training into it; use another folder, or wait for its end")
    results.write_atomic(path, json.dumps(settings, indent=1) + "\n")
    return lock


class Run:
    """One run from its newest checkpoint on: steps, evaluations, checkpoints, export."""

    def __init__(self, folder: pathlib.Path, lock: BinaryIO, trainer: Trainer, corpus: Corpus, stop_at: int,
                 max_minutes: float | None):
        self.folder, self.lock, self.trainer, self.corpus, self.stop_at = folder, lock, trainer, corpus, stop_at
        self.max_minutes = max_minutes
        self.checkpoints = Checkpoints(folder)
        self.state = self.checkpoints.restore(trainer)
        self.best_loss = self.checkpoints.best_loss(trainer)

    def work(self, export_dir: str | None) -> dict:
        """Trains, exports and gives the folder free. Raises FileExistsError where there is something at `export_dir` by now."""
        with self.lock:
            if export_dir is not None and pathlib.Path(export_dir).exists():
                raise FileExistsError(f"export_dir={export_dir}: exists by now")
            self.deadline = math.inf if self.max_minutes is None else time.monotonic() + 60 * self.max_minutes
            result = self.train()
            if export_dir is not None:
                result.update(self.export(pathlib.Path(export_dir)))
            self.checkpoints.close()
        return result

    def train(self) -> dict:
        config = self.trainer.config
        resumed_at = 0 if self.state is None else int(self.state.step)
        state, self.state = self.trainer.init() if self.state is None else self.state, None  # the steps donate it
        size = num_params(state.params)
        print(f"{size:,} parameters, {len(self.corpus.tokens):,} training tokens, from step {resumed_at}", file=sys.stderr)
        started, step, held_out, evaluated_at = time.monotonic(), resumed_at, {}, -1
        with tqdm(total=self.stop_at, initial=step, unit="step", file=sys.stderr, dynamic_ncols=True) as bar:
            while step < self.stop_at and time.monotonic() < self.deadline:
                state, metrics = self.trainer.run(state, self.batches(step))
                step += config.steps_per_call
                self.log(step, {name: float(values.mean()) for name, values in jax.device_get(metrics).items()}, bar)
                if step % config.eval_every == 0:
                    held_out, evaluated_at = self.evaluate(state, step), step
                if step % config.save_every == 0:
                    self.checkpoints.save(state)
        seconds = time.monotonic() - started
        self.checkpoints.save(state)
        if evaluated_at != step:
            held_out = self.evaluate(state, step)
        result = {"steps": step, "resumed_at": resumed_at, "parameters": size, "train_s": seconds,
                  "tokens": (step - resumed_at) * config.batch_size * config.seq_len, "best_held_out_loss": self.best_loss,
                  "stopped_early": step < self.stop_at, **held_out}
        result["tok_per_s"] = result["tokens"] / seconds
        return result

    def batches(self, first: int) -> np.ndarray:
        c = self.trainer.config
        return np.stack([data.training_batch(self.corpus.tokens, seed=c.seed, step=first + i, batch_size=c.batch_size,
                                             seq_len=c.seq_len) for i in range(c.steps_per_call)])

    def log(self, step: int, metrics: dict, bar: tqdm) -> None:
        bar.update(self.trainer.config.steps_per_call)
        bar.set_postfix(loss=f"{metrics['loss']:.3f}", balance=f"{metrics['balance']:.2f}")
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError(f"the loss is {metrics['loss']} at step {step}; the last checkpoint is kept")
        results.append_jsonl(self.folder / "metrics.jsonl", {"step": step, **metrics})

    def evaluate(self, state: TrainState, step: int) -> dict:
        """Held-out perplexity and bits a byte, per text; keeps the best parameters by the mean loss over the texts."""
        record, losses = {}, self.held_out_losses(state.params)
        for name, loss in losses.items():
            record[f"{name}_perplexity"] = math.exp(loss)
            record[f"{name}_bits_per_byte"] = self.corpus.bits_per_byte(name, loss)
        mean = sum(losses.values()) / len(losses)
        results.append_jsonl(self.folder / "metrics.jsonl", {"step": step, "held_out_loss": mean, **record})
        if mean < self.best_loss:
            self.best_loss = mean
            self.checkpoints.save_best(state, mean)
        return record

    def held_out_losses(self, params: nnx.State) -> dict[str, float]:
        return {name: self.trainer.evaluate(params, windows) for name, windows in self.corpus.held_out.items()}

    def export(self, folder: pathlib.Path) -> dict:
        """Best parameters, in bfloat16, as a Hugging Face folder with its tokenizer and train_record.json."""
        params, step = self.checkpoints.restore_best(self.trainer)
        save_hf(nnx.merge(self.trainer.graphdef, params), folder, tokenizer=self.corpus.tokenizer)
        losses = self.held_out_losses(params)
        record = {"step": step, "seq_len": self.trainer.config.seq_len, "device": jax.devices()[0].device_kind}
        for name, loss in losses.items():
            record[f"{name}_perplexity"] = math.exp(loss)
            record[f"{name}_bits_per_byte"] = self.corpus.bits_per_byte(name, loss)
        settings = json.loads((self.folder / "run.json").read_text())
        results.write_atomic(folder / "train_record.json", json.dumps({"exported": record, **settings}, indent=1) + "\n")
        return {"exported_step": step, "export_dir": str(folder)}


if __name__ == "__main__":
    cli.main(train)
