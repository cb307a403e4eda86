"""Checkpoints of a training run, which resumes from the newest that can be read."""
from __future__ import annotations

import logging
import math
import pathlib

import jax
import orbax.checkpoint as ocp
from flax import nnx

from moejax.train import Trainer, TrainState

log = logging.getLogger(__name__)


class Checkpoints:
    """Checkpoints of a run under one folder: the newest ones to resume from, and the best one by held-out loss.

    A checkpoint is written beside and renamed when whole (Orbax), so a half-written one is never found. One that is damaged all
    the same (a full disk, a lost machine) is moved to the run's folder `damaged`, and a warning says so.
    """

    def __init__(self, folder: str | pathlib.Path, keep: int = 2):
        self.folder = pathlib.Path(folder).absolute()
        self.newest = ocp.CheckpointManager(self.folder / "newest", options=_options(max_to_keep=keep))
        self.best = ocp.CheckpointManager(self.folder / "best", options=_options(max_to_keep=1))

    def save(self, state: TrainState) -> None:
        """Saves the whole state under its step number."""
        step = int(state.step)
        if step not in self.newest.all_steps():
            self.newest.save(step, args=ocp.args.StandardSave(_pure(state)))

    def restore(self, trainer: Trainer) -> TrainState | None:
        """The newest state that can be read, laid out over the trainer's mesh; None when there is none.

        Raises:
          ValueError: there are checkpoints, and none can be read; all stay where they are.
        """
        steps = sorted(self.newest.all_steps(), reverse=True)
        like = trainer.init() if steps else None
        for i, step in enumerate(steps):
            pure = _read(self.newest, step, ocp.args.StandardRestore(_abstract(like)))
            if pure is not None:
                self._set_aside(self.newest, steps[:i])
                return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(pure))
        if steps:
            raise ValueError(f"{self.newest.directory}: none of the checkpoints {steps} can be read; move the folder away to start "
                             "from step 0")
        return None

    def best_loss(self, trainer: Trainer) -> float:
        """Held-out loss of the best checkpoint, once that has been read whole; infinity when there is none."""
        step = self.best.latest_step()
        if step is None:
            return math.inf
        found = _read(self.best, step, _best_args(trainer))
        if found is None:
            self._set_aside(self.best, [step])
            return math.inf
        return float(found.loss["loss"])

    def save_best(self, state: TrainState, loss: float) -> None:
        """Replaces the best parameters."""
        for later in self.best.all_steps():  # a resumed run may come back to an earlier step, which Orbax would silently skip
            if later >= int(state.step):
                self.best.delete(later)
        self.best.save(int(state.step), args=ocp.args.Composite(
            params=ocp.args.StandardSave(_pure(state.params)), loss=ocp.args.JsonSave({"loss": loss})))

    def restore_best(self, trainer: Trainer) -> tuple[nnx.State, int]:
        """(parameters, step) of the best checkpoint."""
        step = self.best.latest_step()
        pure = self.best.restore(step, args=_best_args(trainer)).params
        return jax.tree.unflatten(jax.tree.structure(trainer.init().params), jax.tree.leaves(pure)), step

    def close(self) -> None:
        self.newest.close()
        self.best.close()

    def _set_aside(self, manager: ocp.CheckpointManager, steps: list[int]) -> None:
        """Moves damaged checkpoints out of the manager's way, which would keep them and not save at their steps again."""
        for step in steps:
            place = self.folder / "damaged" / f"{manager.directory.name}-{step}"
            place.parent.mkdir(exist_ok=True)
            while place.exists():
                place = place.with_name(place.name + "-again")
            (pathlib.Path(manager.directory) / str(step)).rename(place)
            log.warning("the checkpoint of step %d is damaged, moved to %s", step, place)
        manager.reload()


def _read(manager: ocp.CheckpointManager, step: int, args):
    """What is saved under a step; None, with a warning, where it cannot be read."""
    try:
        return manager.restore(step, args=args)
    except Exception as e:  # Orbax raises bare Exception for data that it cannot read
        log.warning("%s/%d cannot be read: %s", manager.directory, step, (str(e).splitlines() or [type(e).__name__])[0][:200])
        return None


def _best_args(trainer: Trainer) -> ocp.args.Composite:
    return ocp.args.Composite(params=ocp.args.StandardRestore(_abstract(trainer.init().params)), loss=ocp.args.JsonRestore())


def _options(max_to_keep: int) -> ocp.CheckpointManagerOptions:
    return ocp.CheckpointManagerOptions(max_to_keep=max_to_keep, enable_async_checkpointing=False)


def _pure(tree):
    """The tree as lists of arrays keyed by position, which Orbax restores whatever classes the state is made of."""
    return {f"{i:05d}": leaf for i, leaf in enumerate(jax.tree.leaves(tree))}


def _abstract(tree):
    """Shapes, dtypes and shardings of `_pure(tree)`: what Orbax restores into."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _pure(tree))
