"""Measures any op x implementation x case: correct first, then the time of one call, with its spread.

`bench_cases` makes the cases out of the named shapes; `experiments.kernels` is the command line. Needs jax and numpy only.

How a call is timed: n calls stand in one jitted loop, each call's input made from the previous call's output in a way that the
compiler cannot see through. A long loop minus a short one, divided by the difference in calls, is one sample; so what one launch
from Python costs falls out. What is left beside the op is one small elementwise operation a call (`loop_overhead`).
"""
from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Weights of the softmax and queries times key scales pass through bfloat16 in the fast kernels: 2**-9 each, on terms a few times
# larger than their sum. Wrong pages, heads, scales or weights give errors of the order of 1.
TOLERANCE = 2e-2
SHORT_CALLS = 2
MAX_CALLS = 1000
# Added to an input times an output: far below half a unit in the last place of the input, which the compiler cannot know.
TINY = 1e-30


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an op, ready to be checked and timed.

    Attributes:
      op: its name.
      call: call(implementation, i, x, *operands) -> one array; i is the number of the call in its loop.
      x: the operand through which one call of a loop depends on the one before.
      operands: the other arrays.
      feed: feed(x, out) -> the next call's x: equal to x, but not in the eyes of the compiler.
      bytes_moved: bytes that one call must at least read and write in device memory.
      check: check(implementation) -> worst relative L2 error against the exact result; inf for a violated property.
    """

    op: str
    call: Callable[..., jax.Array]
    x: jax.Array
    operands: tuple[Any, ...]
    feed: Callable[[jax.Array, jax.Array], jax.Array]
    bytes_moved: int
    check: Callable[[str], float]


@dataclasses.dataclass(frozen=True)
class Samples:
    """Times of one call in microseconds, one a repetition."""

    us: tuple[float, ...]

    def summary(self, bytes_moved: int) -> dict[str, float | None]:
        """Median and spread, and the rate in GB/s (1e9 bytes a second) at which a call of the median time moves its bytes.

        All None when the median is not positive: the noise was larger than the time.
        """
        p50, p10, p90 = (float(np.percentile(self.us, q)) for q in (50, 10, 90))
        if not p50 > 0:
            return {"us_p50": None, "us_p10": None, "us_p90": None, "gb_per_s": None}
        return {"us_p50": p50, "us_p10": p10, "us_p90": p90, "gb_per_s": bytes_moved / p50 / 1e3}


def sample(run: Callable[[int], Any], *, repeats: int, min_s: float) -> Samples:
    """Times one call.

    Args:
      run: run(n) makes n calls, each after the one before, and returns when the last is done. Free to compile for each n.
      repeats: samples.
      min_s: seconds that the long loop should take longer than the short one; at most MAX_CALLS calls are made for it.
    """
    run(SHORT_CALLS)  # compiles
    call_s = min(_seconds(run, SHORT_CALLS) for _ in range(2)) / SHORT_CALLS
    more = int(np.clip(min_s / call_s, 1, MAX_CALLS))
    run(SHORT_CALLS + more)
    pairs = [(_seconds(run, SHORT_CALLS + more), _seconds(run, SHORT_CALLS)) for _ in range(repeats)]
    return Samples(tuple(1e6 * (long - short) / more for long, short in pairs))


def _seconds(run: Callable[[int], Any], calls: int) -> float:
    start = time.perf_counter()
    run(calls)
    return time.perf_counter() - start


def loop(call: Callable[..., jax.Array], x: jax.Array, operands: tuple, feed) -> Callable[[int], Any]:
    """run(n) for `sample`: n times out = call(i, x, *operands), x = feed(x, out), in one compiled program for each n."""
    # n is static: a loop whose trip count the device decides asks the host before each turn.
    @functools.partial(jax.jit, static_argnames="n")
    def repeated(x, operands, n):
        out = jax.eval_shape(functools.partial(call, 0), x, *operands)

        def body(i, carry):
            # All that a call does depends on the turn: nothing can be moved out of the loop, be it only a conversion.
            x, inputs = lax.optimization_barrier((carry[0], operands))
            out = call(i, x, *inputs)
            return feed(x, out), out  # carried whole, so computed whole

        return lax.fori_loop(0, n, body, (x, jnp.zeros(out.shape, out.dtype)))

    return lambda n: jax.block_until_ready(repeated(x, operands, n))


def add_tiny(x: jax.Array, out: jax.Array) -> jax.Array:
    """`Case.feed` of ops whose output looks like their input; x as it was, unless `out` is not finite."""
    return x + out * jnp.asarray(TINY, out.dtype)


def measure(case: Case, implementation: str, *, repeats: int, min_s: float) -> dict[str, Any]:
    """Checks one implementation, then times it if it is right.

    Returns:
      status: "ok", "refused: ...", "wrong: ...", "failed: ..." (did not compile or run) or "too noisy: ..."; relative_l2_error,
      None if it was not computed; and `Samples.summary` if it is right.
    """
    error = None
    try:
        error = case.check(implementation)
        if not error <= TOLERANCE:  # NaN is wrong too
            return {"status": f"wrong: relative L2 error {error:.2g}, must be at most {TOLERANCE}", "relative_l2_error": error}
        run = loop(functools.partial(case.call, implementation), case.x, case.operands, case.feed)
        summary = sample(run, repeats=repeats, min_s=min_s).summary(case.bytes_moved)
    except NotImplementedError as refusal:
        reason = str(refusal).partition(f"{implementation} refused: ")[2] or str(refusal)
        return {"status": f"refused: {reason}", "relative_l2_error": error}
    except jax.errors.JaxRuntimeError as failure:
        return {"status": f"failed: {str(failure).splitlines()[0]}", "relative_l2_error": error}
    status = "ok" if summary["us_p50"] else "too noisy: no time stood out of the noise, raise min_ms"
    return {"status": status, "relative_l2_error": error, **summary}


def read_bandwidth(num_bytes: int, *, repeats: int, min_s: float) -> dict[str, Any]:
    """`Samples.summary` of reading `num_bytes` (a power of two) of device memory: a reduction, timed as ops are."""
    rows = 1 << (num_bytes // 4).bit_length() // 2
    words = jax.jit(lambda: lax.broadcasted_iota(jnp.uint32, (rows, num_bytes // 4 // rows), 1))()

    def total(i, x, words):
        return jnp.sum(jnp.sum(words ^ x, axis=1))  # the exclusive or keeps x inside of the sum

    run = loop(total, jnp.uint32(1), (words,), lambda x, out: x ^ out)
    return sample(run, repeats=repeats, min_s=min_s).summary(words.nbytes)


def loop_overhead(x: jax.Array, *, repeats: int, min_s: float) -> dict[str, Any]:
    """`Samples.summary` of the same loop around nothing, over an input like `x`: it is part of every time."""
    return sample(loop(lambda i, x: x, x, (), add_tiny), repeats=repeats, min_s=min_s).summary(0)
