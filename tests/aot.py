"""Points at which kernels are compiled for hardware that is not there: what `aot_hopper` and `aot_tpu` have in common."""
from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

BITS = (2, 3, 4, 8, 16)
HEAD_DIMS = (64, 128, 256)
EVERYTHING = (("sliding_window", 4096), ("logit_softcap", 30.0), ("attention_sinks", True))

Array = Callable[[tuple[int, ...], Any], Any]  # makes an argument of a shape and a dtype
Result = tuple[str, float, str]  # name of a point and what there is to say of it, seconds, what went wrong or nothing


def fmt(k_bits: int, v_bits: int, **others) -> tuple[tuple[str, object], ...]:
    """Fields of a `KVFormat`, as a `Point` holds them: processes that only pass points around need no jax."""
    return tuple({"k_bits": k_bits, "v_bits": v_bits, **others}.items())


def weights(bits: int, k: int, n: int, group_size: int, scale_dtype: str = "float32", has_zero: bool = False):
    """Fields of a layout of packed weights, as a `MatmulPoint` holds them."""
    return tuple({"bits": bits, "k": k, "n": n, "group_size": group_size, "scale_dtype": scale_dtype,
                  "has_zero": has_zero}.items())


class Lowers(Protocol):
    """What is compiled."""

    @property
    def name(self) -> str: ...

    def lower(self, array: Array):
        """The call, lowered for the device of the arguments that `array` makes."""

    def check(self, compiled) -> str:
        """See `Compiled`."""
        ...


class Compiled:
    """Base of what is compiled."""

    def check(self, compiled) -> str:
        """Something to report of a compiled program. Raises ValueError for what is wrong with it."""
        return ""


@dataclasses.dataclass(frozen=True)
class Point(Compiled):
    """One advertised call of `paged_attention`; `layout`, `implementation` and `batch` are the backend's."""

    fmt: tuple[tuple[str, object], ...]
    head_dim: int = 128
    group: int = 8
    num_queries: int = 1
    options: tuple[tuple[str, object], ...] = ()
    kv_heads: int = 2
    q_dtype: str = "bfloat16"

    layout = "linear"
    implementation = "reference"
    batch = 3

    @property
    def name(self) -> str:
        return " ".join(["paged_attention", self.kv_format().name, f"H={self.head_dim} G={self.group} T={self.num_queries}",
                         *(f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(Point)[-2:]
                           if getattr(self, field.name) != field.default),
                         *(f"{k}={v}" for k, v in self.options)])

    def kv_format(self):
        from pallas_kernels import KVFormat

        return KVFormat(layout=self.layout, **dict(self.fmt))

    def lower(self, array: Array):
        """The call, lowered for the device of the arguments that `array` makes."""
        import jax
        import jax.numpy as jnp

        backend = importlib.import_module(f"pallas_kernels.paged_attention.{self.implementation}")
        batch, columns, kv_format = self.batch, 40, self.kv_format()
        heads = self.kv_heads * self.group
        tokens = array((batch, self.kv_heads, kv_format.open_tokens, self.head_dim), jnp.bfloat16)
        args = [
            array((batch, self.num_queries, heads, self.head_dim), jnp.dtype(self.q_dtype)),
            array((batch * columns, self.kv_heads, kv_format.page_layout(self.head_dim).words), jnp.uint32), tokens, tokens,
            array((batch, columns), jnp.int32), array((batch,), jnp.int32), array((batch,), jnp.int32)]
        arrays = {}
        if kv_format.sink_tokens:
            sinks = array((batch, self.kv_heads, kv_format.sink_tokens, self.head_dim), jnp.bfloat16)
            arrays = {"sink_k": sinks, "sink_v": sinks}
        options = {"sliding_window": None, "logit_softcap": None, "attention_sinks": None, "sink_k": None, "sink_v": None}
        options |= dict(self.options)
        if options["attention_sinks"]:
            arrays["attention_sinks"] = array((heads,), jnp.float32)

        def step(*args, **arrays):
            return backend.paged_attention(*args, **{**options, **arrays}, kv_format=kv_format, sm_scale=self.head_dim**-0.5)

        return jax.jit(step).lower(*args, **arrays)


class ClosePoint(Point):
    """One advertised call of `close_page`."""

    @property
    def name(self) -> str:
        return f"close_page {self.kv_format().name} H={self.head_dim}"

    def lower(self, array: Array):
        import jax
        import jax.numpy as jnp

        backend = importlib.import_module(f"pallas_kernels.close_page.{self.implementation}")
        tokens = array((3, self.kv_heads, 128, self.head_dim), jnp.bfloat16)
        return jax.jit(functools.partial(backend.close_page, kv_format=self.kv_format())).lower(
            tokens, tokens, num_sinks=array((3,), jnp.int32))


@dataclasses.dataclass(frozen=True)
class MatmulPoint(Compiled):
    """One advertised call of `grouped_matmul`: `weights` are fields of the layout of its packed weights."""

    weights: tuple[tuple[str, object], ...]
    rows: int = 128
    num_experts: int = 128
    glu: bool = False
    bias: bool = False
    out_dtype: str = "bfloat16"

    implementation = "reference"

    @property
    def name(self) -> str:
        fields = " ".join(f"{k}={v}" for k, v in self.weights)
        extra = [name for name in ("glu", "bias") if getattr(self, name)]
        return " ".join(["grouped_matmul", fields, f"M={self.rows} E={self.num_experts}", *extra, self.out_dtype])

    def packed(self, array: Array):
        """The packed weights."""
        raise NotImplementedError

    def lower(self, array: Array):
        import jax
        import jax.numpy as jnp

        backend = importlib.import_module(f"pallas_kernels.grouped_matmul.{self.implementation}")
        w = self.packed(array)
        biases = [array((self.num_experts, w.layout.n), jnp.float32)] if self.bias else []
        glu = (lambda gate, up: jax.nn.silu(gate) * up) if self.glu else None

        def step(x, w, sizes, *biases):
            return backend.grouped_matmul(
                x, w, sizes, bias=biases[0] if biases else None, glu=glu, preferred_element_type=jnp.dtype(self.out_dtype))

        return jax.jit(step).lower(
            array((self.rows, w.layout.k), jnp.bfloat16), w, array((self.num_experts,), jnp.int32), *biases)


@dataclasses.dataclass(frozen=True)
class RouterPoint(Compiled):
    """One advertised call of `fused_router`: `shape` is a name of its SPECS, for another number of tokens."""

    shape: str
    tokens: int = 16
    x_dtype: str = "bfloat16"
    biases: bool = False

    implementation = "reference"

    @property
    def name(self) -> str:
        return f"fused_router {self.shape} T={self.tokens} {self.x_dtype}{' biases' if self.biases else ''}"

    def lower(self, array: Array):
        import jax
        import jax.numpy as jnp

        from pallas_kernels.fused_router.specs import SPECS

        backend = importlib.import_module(f"pallas_kernels.fused_router.{self.implementation}")
        spec = SPECS[self.shape]
        arrays = {"valid": array((self.tokens,), jnp.bool_), "bias": None, "correction_bias": None}
        if self.biases:
            arrays |= dict.fromkeys(("bias", "correction_bias"), array((spec.num_experts,), jnp.float32))
        return jax.jit(functools.partial(backend.fused_router, rule=spec.rule)).lower(
            array((self.tokens, spec.hidden_size), jnp.dtype(self.x_dtype)),
            array((spec.hidden_size, spec.num_experts), jnp.float32), **arrays)


def compile_point(point: Lowers, **topology) -> Result:
    """Compiles for the first device of `jax.experimental.topologies.get_topology_desc(**topology)`."""
    start, error, said = time.perf_counter(), "", ""
    try:
        said = point.check(_compile(point, topology))
    except Exception as e:  # whatever it is, it is reported with the point's name
        error = f"{type(e).__name__}: {str(e).strip().splitlines()[0][:300]}"
    return f"{point.name}{said and ': '}{said}", time.perf_counter() - start, error


def _compile(point: Lowers, topology: dict[str, str]):
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(**topology).devices[:1]
    replicated = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec())
    return point.lower(lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)).compile()


def chosen[P: Lowers](points: list[P], names: list[str]) -> list[P]:
    """The points whose name contains one of `names`, all if there are none."""
    out = [p for p in points if not names or any(name in p.name for name in names)]
    if not out:
        print(f"no point's name contains one of {names}; names look like {points[0].name!r}", file=sys.stderr)
    return out


def report(results: Iterable[Result], target: str) -> int:
    """Prints results as they come. Returns an exit code."""
    count = failed = 0
    for name, seconds, error in results:
        count += 1
        failed += bool(error)
        print(f"{'FAILED ' + error if error else 'ok'}  {name}  {seconds:.1f} s", flush=True)
    print(f"{count - failed} of {count} points compile for {target}")
    return 1 if failed or not count else 0
