"""`append_heads`: the plain one against NumPy, the Hopper kernel against the plain one (interpreted without a GPU)."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.append_heads import OpenPages, append_heads, mosaic_gpu, reference

ON_GPU = jax.default_backend() == "gpu"
KV_LENS = [3, 0, 130, 77, 127, 128, 5]
Q_LENS = [1, 1, 1, 0, 1, 1, 0]
EPS = 1e-6


def inputs(*, num_heads=8, num_kv_heads=4, head_dim=128, sinks=0, norms=True, open_tokens=128, dtype="bfloat16") -> tuple:
    """(heads, cos, sin, pages, kv_lens, q_lens, scales); places that hold no token are NaN."""
    rng, B = np.random.default_rng(0), len(KV_LENS)

    def numbers(*shape) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    buffers = [numbers(B, num_kv_heads, tokens, head_dim) for tokens in (open_tokens, open_tokens, sinks, sinks) if tokens]
    pages = tuple(page.at[:, :, -1:].set(np.nan) for page in buffers)
    angles = rng.normal(size=(B, head_dim // 2)).astype(np.float32) * 9
    scales = (numbers(head_dim), numbers(head_dim)) if norms else ()
    return (numbers(B, num_heads + 2 * num_kv_heads, head_dim), jnp.cos(angles), jnp.sin(angles), pages,
            jnp.asarray(KV_LENS, jnp.int32), jnp.asarray(Q_LENS, jnp.int32), scales)


def by_hand(heads, cos, sin, pages, kv_lens, q_lens, scales, num_heads) -> tuple[np.ndarray, list[np.ndarray]]:
    heads, cos, sin, *scales = (np.asarray(x, np.float64) for x in (heads, cos, sin, *scales))
    pages, (_, K, Z, H) = [np.asarray(page, np.float64) for page in pages], pages[0].shape
    q = np.empty((len(heads), num_heads, H))
    for b, row in enumerate(heads):
        for n, head in enumerate(row):
            if n < num_heads + K:
                if scales:
                    head = head / np.sqrt(np.mean(head**2) + EPS) * scales[n >= num_heads]
                turned = (head[:H // 2] + 1j * head[H // 2:]) * (cos[b] + 1j * sin[b])
                head = np.concatenate([turned.real, turned.imag])
            if n < num_heads:
                q[b, n] = head
                continue
            which, at = divmod(n - num_heads, K)
            if q_lens[b]:
                pages[which][b, at, kv_lens[b] % Z] = head
                if len(pages) > 2 and kv_lens[b] < pages[2].shape[2]:
                    pages[2 + which][b, at, kv_lens[b]] = head
    return q, pages


@pytest.mark.parametrize(("sinks", "norms"), [(0, True), (4, True), (6, False)])
def test_float32_equals_what_is_worked_out_head_by_head(sinks, norms):
    heads, cos, sin, pages, kv_lens, q_lens, scales = case = inputs(sinks=sinks, norms=norms, dtype="float32", head_dim=32)
    q, new = append_heads(heads, cos, sin, OpenPages(*pages), kv_lens, q_lens, num_heads=8, eps=EPS,
                          **dict(zip(("q_scale", "k_scale"), scales)))
    want_q, want = by_hand(*case, num_heads=8)
    np.testing.assert_allclose(q, want_q, rtol=0, atol=2e-5)
    for got, page in zip([page for page in new if page is not None], want, strict=True):
        np.testing.assert_allclose(got, page, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("options"), [
    {}, {"head_dim": 64, "sinks": 4}, {"head_dim": 256, "norms": False, "num_heads": 4}, {"sinks": 70, "open_tokens": 256},
    pytest.param({"num_heads": 32, "sinks": 4}, marks=pytest.mark.gpu)])
def test_hopper_equals_the_reference(options):
    case, num_heads = inputs(**options), options.get("num_heads", 8)
    run = functools.partial(mosaic_gpu.append_heads, num_heads=num_heads, eps=EPS)
    q, pages = jax.jit(run)(*case) if ON_GPU else run(*case, interpret=plgpu.InterpretGPUParams())
    want_q, want = reference.append_heads(*case, num_heads=num_heads, eps=EPS)
    for got, expected in zip((q, *pages), (want_q, *want), strict=True):
        # Norms are rounded to bfloat16 before RoPE: a last bit may differ there, and is one of the result's then.
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, expected)), rtol=2**-7, atol=2**-7)


def test_what_is_not_served_is_named():
    def refused(match: str, **options):
        with pytest.raises(NotImplementedError, match=match):
            mosaic_gpu.append_heads(*inputs(**options), num_heads=options.get("num_heads", 8), eps=EPS)

    refused("head_dim=32", head_dim=32)
    refused("6 query heads, 2 KV heads", num_heads=6, num_kv_heads=2)
    refused("float32", dtype="float32")
    heads, cos, sin, pages, kv_lens, q_lens, _ = inputs()
    with pytest.raises(ValueError, match="N=7"):
        append_heads(heads, cos, sin, OpenPages(*pages), kv_lens, q_lens, num_heads=7, eps=EPS)
    with pytest.raises(ValueError, match="cos.shape"):
        append_heads(heads, cos[:, 1:], sin, OpenPages(*pages), kv_lens, q_lens, num_heads=8, eps=EPS)
