"""The whole decode loop of a model, compiled for hardware that is not there, and what is then read from the compiler."""
from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re

from tests.aot import Array, Compiled

MODELS = pathlib.Path(__file__).parents[1] / "configs" / "models"
KERNELS = ("paged_attention", "close_page", "grouped_matmul", "fused_router")


@dataclasses.dataclass(frozen=True)
class StepPoint(Compiled):
    """`decode.generate` of a model of configs/models with packed experts and a full cache, on one device.

    Attributes:
      model: a config.json of configs/models.
      fmt: fields of the cache's format.
      num_layers: the first so many layers alone; None for all of them.
    """

    model: str
    fmt: tuple[tuple[str, object], ...]
    num_layers: int | None = None
    expert_weights: str = "int4"
    dense_weights: str = "bf16"
    max_batch: int = 16
    max_len: int = 4096

    layout = "linear"
    kernels = KERNELS

    @property
    def name(self) -> str:
        layers = "" if self.num_layers is None else f" {self.num_layers} layers"
        return f"step {self.model}{layers} {self.expert_weights} {self._kv_format().name} B={self.max_batch} {self.max_len} tokens"

    def _kv_format(self):
        from pallas_kernels import KVFormat

        return KVFormat(layout=self.layout, **dict(self.fmt))

    def lower(self, array: Array):
        import jax

        from moejax import decode

        spec, params, state = self._abstract()

        def on_device(tree):
            return jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), tree)

        return decode.generate.lower(
            spec, on_device(params), on_device(state), array((spec.config.vocab_size,), bool), num_steps=16)

    def _abstract(self):
        """(spec, params, state) without any memory."""
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from moejax import decode
        from moejax.hf_config import from_hf
        from moejax.model import Transformer
        from moejax.weight_rules import formats_of

        config = from_hf(json.loads((MODELS / f"{self.model}.json").read_text()))
        if self.num_layers is not None:
            config = dataclasses.replace(config, layers=config.layers[:self.num_layers])

        def make() -> Transformer:
            model = Transformer(config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
            model.pack(formats_of(config, self.expert_weights, self.dense_weights))
            return model

        spec, params = decode.split(nnx.eval_shape(make), self._kv_format())
        pages = self.max_batch * spec.closed_pages(self.max_len)
        state = jax.eval_shape(
            lambda: decode.init_state(spec, max_batch=self.max_batch, num_pages=pages, max_len=self.max_len))
        return spec, params, state

    def check(self, compiled) -> str:
        """Raises ValueError unless every kernel is in the program, the state is updated in place, and no array of the program but a
        parameter is as large as one matrix of a layer's experts, or as a layer's keys, in floats: neither is ever dequantised."""
        import jax

        text, memory = compiled.as_text(), compiled.memory_analysis()
        spec, params, state = self._abstract()
        if missing := set(self.kernels) - kernels_in(text):
            raise ValueError(f"no kernel of {', '.join(sorted(missing))} in the program")
        state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        if memory.alias_size_in_bytes < state_bytes:
            raise ValueError(f"{state_bytes:,} bytes of state, {memory.alias_size_in_bytes:,} updated in place")
        config, moe = spec.config, spec.config.layers[0].mlp
        matrix = moe.num_experts * config.hidden_size * moe.moe_intermediate_size
        keys = self.max_batch * self.max_len * config.num_kv_heads * config.head_dim
        if large := large_floats(text, min(matrix, keys)) - {leaf.shape for leaf in jax.tree.leaves(params)}:
            raise ValueError(f"floats as many as a layer's experts or keys: {sorted(large)}")
        return (f"{memory.argument_size_in_bytes / 1e9:.2f} GB of weights and state, "
                f"{memory.temp_size_in_bytes / 1e6:.1f} MB of temporaries")


def kernels_in(text: str) -> set[str]:
    """Those of KERNELS that are custom calls of a program in HLO."""
    calls = re.findall(r"%(\w+?)[.\d]* = .*custom-call\(.*custom_call_target=\"tpu_custom_call\"", text)
    calls += re.findall(r"custom_call_target=\"mosaic_gpu_v2\".*op_name=\"[^\"]*/(\w+)/mpmd_map\"", text)
    return {name for name in KERNELS if any(call.startswith(name) for call in calls)}


def large_floats(text: str, least: int) -> set[tuple[int, ...]]:
    """Shapes of the arrays of floats with at least so many elements in a program in HLO."""
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\b(?:bf16|f16|f32)\[([\d,]+)\]", text)}
    return {shape for shape in shapes if math.prod(shape) >= least}
