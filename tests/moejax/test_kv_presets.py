"""Each preset on a tiny page, against numbers worked by hand or by the method's own words in plain NumPy."""
import dataclasses
import math

import jax
import numpy as np
import pytest

from moejax import kv_presets as presets
from moejax.kv_cache import KeyTransform, hadamard, stored_keys
from pallas_kernels import KVFormat, fake_quantize
from tests.pallas_kernels.close_page_cases import FAST_COMPILE

Z, H = 128, 64
fake = jax.jit(fake_quantize, static_argnames="kv_format", compiler_options=FAST_COMPILE)


def fmt(name: str) -> KVFormat:
    formats = presets.get(name).formats(8, H)
    return formats[len(formats) // 2]


def page(seed=0):
    """[1, Z, H] each, in steps of 1/64 so that 16-bit floats hold them; channel 7 of the keys is an outlier with a bias."""
    rng = np.random.default_rng(seed)
    k, v = np.round(rng.normal(size=(2, 1, Z, H)) * 64) / 64
    k[..., 7] = k[..., 7] * 8 + 16
    return k.astype(np.float32), v.astype(np.float32)


def uniform(x, axis, bits):
    """Asymmetric min/max codes with exact scales."""
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    step = (high - low) / (2**bits - 1)
    return low + step * np.round((x - low) / step)


def groups(x, axis, size):
    shape = list(x.shape)
    shape[axis:axis + 1] = [shape[axis] // size, size]
    return x.reshape(shape)


def assert_quantised_as(ours, theirs, x, slack=0.02):
    """Equal up to the rounding of 16-bit scales: a step may be 0.8 % wider, which moves some codes by one."""
    ours, theirs = np.asarray(ours, np.float64).reshape(x.shape), np.asarray(theirs, np.float64).reshape(x.shape)
    lost = [np.linalg.norm(y - x) for y in (ours, theirs)]
    assert lost[0] == pytest.approx(lost[1], rel=slack)
    assert np.median(np.abs(ours - theirs)) < 2 * np.abs(theirs - x).mean()


@pytest.mark.parametrize(("name", "bits"), [("kivi-2", 2), ("kivi-4", 4)])
def test_kivi(name, bits):
    """Effective bits 3 and 5: a code of 2 or 4 bits and 32 bits of scale and minimum for 32 of them."""
    k, v = page()
    k_hat, v_hat = fake(k, v, kv_format=fmt(name))
    assert_quantised_as(k_hat, uniform(groups(k, 1, 32), 2, bits), k)
    assert_quantised_as(v_hat, uniform(groups(v, 2, 32), 3, bits), v)
    assert fmt(name).page_layout(H).effective_bits() == bits + 1


@pytest.mark.parametrize(("name", "bits"), [("naive-int2", 2), ("naive-int4", 4), ("qserve-kv4", 4), ("int8", 8)])
def test_per_token(name, bits):
    k, v = page()
    k_hat, v_hat = fake(k, v, kv_format=fmt(name))
    assert_quantised_as(k_hat, uniform(k, 2, bits), k)
    assert_quantised_as(v_hat, uniform(v, 2, bits), v)
    assert fmt(name).page_layout(H).effective_bits() == bits + 32 / H


def along(axis: int, pattern, times=1.0) -> np.ndarray:
    """[1, Z, H], `pattern` again and again along tokens (0) or channels (1); `times` broadcasts against [Z, H]."""
    line = np.tile(np.asarray(pattern, np.float32), (Z, H)[axis] // len(pattern))
    return (line[:, None] if axis == 0 else line[None]) * np.broadcast_to(np.float32(times), (Z, H))[None]


@pytest.mark.parametrize(("name", "largest"), [("kivi-2", 3), ("kivi-4", 15)])
def test_kivi_by_hand(name, largest):
    """0, 1.4, 2.6 and the largest code have step 1: 0, 1, 3, largest. Twice that in every second group of 32."""
    tokens, channels = (1 + np.arange(n) // 32 % 2 for n in (Z, H))
    for axis, times in ((0, tokens[:, None]), (1, channels)):
        hat = fake(*[along(axis, [0, 1.4, 2.6, largest], times)] * 2, kv_format=fmt(name))[axis]
        np.testing.assert_array_equal(hat, along(axis, [0, 1, 3, largest], times))


@pytest.mark.parametrize(("name", "largest"), [("naive-int2", 3), ("naive-int4", 15), ("qserve-kv4", 15), ("int8", 255)])
def test_per_token_by_hand(name, largest):
    """As for kivi, over all channels of a token. The tokens are equal: a range per channel would keep 1.4."""
    x = along(1, [0, 1.4, 2.6, largest])
    for hat in fake(x, x, kv_format=fmt(name)):
        np.testing.assert_array_equal(hat, along(1, [0, 1, 3, largest]))


def test_fp8_by_hand():
    """Largest 448: scale 1. 17 and 19 lie half way between 16, 18 and 20 and go to the even mantissa."""
    x = np.tile(np.array([448, 17, 19, -0.25], np.float32), (1, Z, H // 4))
    k_hat, _ = fake(x, x, kv_format=fmt("fp8-e4m3"))
    np.testing.assert_array_equal(np.asarray(k_hat)[0, 0, :4], [448, 16, 20, -0.25])
    assert fmt("fp8-e4m3").page_layout(H).effective_bits() == 8.25


@pytest.mark.parametrize(("name", "bits"), [("kvquant-2", 2), ("kvquant-3", 3), ("kvquant-4", 4)])
def test_kvquant(name, bits):
    """82 entries of 8,192 come back exactly, outliers first; the rest at the levels of a normal distribution; keys before RoPE."""
    f = fmt(name)
    assert f.key_rope == "pre" and f.sink_tokens == 1 and f.k_sparse == f.v_sparse == 82
    k, v = page()
    k[0, 9, 3] = 100
    k_hat, v_hat = (np.asarray(a) for a in fake(k, v, kv_format=f))
    assert k_hat[0, 9, 3] == 100
    assert (k_hat == k).sum() >= 75 and (v_hat == v).sum() >= 75  # a few have more digits than bfloat16
    assert len(np.unique(np.round(v_hat[0, 20], 3))) <= 2**bits + 5
    rest = np.ones(Z, bool)
    rest[9] = False  # channel 3 without its outlier: the deviation is that of the rest
    error = np.abs(k_hat - k)[0, rest, 3].mean()
    assert error < {2: 0.4, 3: 0.2, 4: 0.1}[bits]


# Max, 1960, table I: the levels that the units .447 and 1.342 of -1.5, -.5, .5, 1.5 (root mean square 1.118) go to.
MAX_LEVELS = {2: (0.4528, 1.510), 3: (0.2451, 1.344), 4: (0.3881, 1.256)}
QUARTERS = [-1.5, -0.5, 0.5, 1.5]


@pytest.mark.parametrize(("name", "bits"), [("kvquant-2", 2), ("kvquant-3", 3), ("kvquant-4", 4)])
def test_kvquant_by_hand(name, bits):
    """82 hundreds are the sparse entries and come back, the rest at Max's levels times 1.118, in bfloat16 1.125."""
    k, v = along(0, QUARTERS), along(1, QUARTERS)
    k[0, 40:42, :41] = v[0, :41, 40:42] = 100
    k_hat, v_hat = (np.asarray(a)[0] for a in fake(k, v, kv_format=fmt(name)))
    assert (k_hat[40:42, :41] == 100).all() and (v_hat[:41, 40:42] == 100).all()
    near, far = (1.125 * level for level in MAX_LEVELS[bits])
    np.testing.assert_allclose(k_hat[:, 50], along(0, [-far, -near, near, far])[0, :, 50], rtol=1e-3)
    np.testing.assert_allclose(v_hat[50], along(1, [-far, -near, near, far])[0, 50], rtol=1e-3)


@pytest.mark.parametrize(("name", "bits"), [("turboquant-2", 2), ("turboquant-3", 3), ("turboquant-4", 4)])
def test_turboquant_by_hand(name, bits):
    """Keys at Max's levels times 1.118 of their token; values too at 2 bits, and in equal steps above."""
    f = fmt(name)
    stored = np.asarray(stored_keys(np.eye(1, H, dtype=np.float32)[None, None] * 8, f, KeyTransform()))
    np.testing.assert_allclose(stored[0, 0, 0], 1, atol=1e-6)  # the first row of a Hadamard matrix of 64, times 1/8
    near, far = (1.118 * level for level in MAX_LEVELS[bits])
    k_hat, v_hat = fake(along(1, QUARTERS), along(1, QUARTERS if bits == 2 else [0, 1.4, 2.6, 2**bits - 1]), kv_format=f)
    coded = along(1, [-far, -near, near, far])
    np.testing.assert_allclose(k_hat, coded, rtol=1e-3)
    np.testing.assert_allclose(v_hat, coded if bits == 2 else along(1, [0, 1, 3, 2**bits - 1]), rtol=1e-3)


@pytest.mark.parametrize(("name", "bits"), [("turboquant-2", 2), ("turboquant-3", 3), ("turboquant-4", 4)])
def test_turboquant(name, bits):
    """One scalar a token, its root mean square; squared error of a Gaussian: 0.1175, 0.0345, 0.0095 of it (Max, 1960)."""
    f = fmt(name)
    k = np.random.default_rng(0).normal(size=(1, Z, H)).astype(np.float32) * np.linspace(1, 9, Z, dtype=np.float32)[:, None]
    k_hat = np.asarray(fake(k, k, kv_format=f)[0])
    share = np.mean((k_hat - k) ** 2, axis=2) / np.mean(k**2, axis=2)
    assert np.mean(share) == pytest.approx({2: 0.1175, 3: 0.0345, 4: 0.0095}[bits], rel=0.12)
    assert f.k_rotation == "hadamard" and f.keys.scale_words(Z, H) == Z // 2
    formats = presets.get(name).formats(8, H)
    assert [g.k_bits for g in formats] == ([bits] * 8 if bits == 2 else [16, 16, *[bits] * 4, 16, 16])


def test_saw_int4_rotates_keys_in_blocks_of_32():
    f = fmt("saw-int4")
    k = np.zeros((1, 1, 1, H), np.float32)
    k[..., 3] = 32**0.5
    stored = np.asarray(stored_keys(k, f, KeyTransform()))[0, 0, 0]
    np.testing.assert_allclose(stored, np.concatenate([hadamard(32)[3] * 32**0.5, np.zeros(32)]), atol=1e-5)
    assert f.v_rotation == "none" and f.k_axis == f.v_axis == "token" and f.page_layout(H).effective_bits() == 4.5


def test_saw_int4_by_hand():
    """Blocks of 32: 7.5 (e0 + e1) times sqrt(32) becomes 15, 0, 15, 0, ..., and 4.6 e32 becomes 4.6 in all of its block. One range
    a token, so the step is 1 (15 / 15, rounded outwards) and 4.6 becomes 5."""
    k = np.zeros((1, 1, Z, H), np.float32)
    k[..., :2], k[..., 32] = 7.5 * 32**0.5, 4.6 * 32**0.5
    stored = np.asarray(stored_keys(k, fmt("saw-int4"), KeyTransform()))[0]
    hat = np.asarray(fake(stored, stored, kv_format=fmt("saw-int4"))[0])
    np.testing.assert_allclose(hat[0, 9], [*[15, 0] * 16, *[5] * 32], rtol=0.008, atol=1e-5)


def test_oscar_by_hand():
    """Half ones, one 6, else zeros. Of 0 to 6 the step is 2 and 32 ones are lost whole; within .45 to 5.55 it is 1.7: zeros and
    ones become .45 and the 6 5.55, with 16.2 the least squared error of the fractions 1, .95, ... (23.8, 18.6, 16.2, 16.6, ...)."""
    x = np.zeros((1, Z, H), np.float32)
    x[..., ::2], x[..., 1] = 1, 6
    for hat in fake(x, x, kv_format=fmt("oscar-2")):
        np.testing.assert_allclose(hat, np.where(x == 6, 5.55, 0.45) + 0 * x, rtol=0.003)


def test_kitty_by_hand():
    """A quarter of the channels reaches 15: those, wherever they stand, get 15 steps of 1, the others 3."""
    k = along(0, [0, 1.4, 2.6, 3])
    k[0, 3::4, ::4] = 15
    k_hat, v_hat = fake(k, along(1, [0, 1.4, 2.6, 3]), kv_format=fmt("kitty-2"))
    expected = along(0, [0, 1, 3, 3])
    expected[0, 3::4, ::4] = 15
    np.testing.assert_array_equal(k_hat, expected)
    np.testing.assert_array_equal(v_hat, along(1, [0, 1, 3, 3]))


@pytest.mark.parametrize(("name", "promoted", "largest_k", "largest_promoted", "largest_v"), [
    ("moejax-2.5", 24, 3, 15, None), ("moejax-2.75", 24, 3, 15, None), ("moejax-2.5-fast", 8, 3, 15, 3),
    ("moejax-2.75-fast", 24, 3, 15, 3), ("moejax-3.25", 24, 3, 15, 7), ("moejax-4.25", 8, 15, 255, 7)])
def test_ours_by_hand(name, promoted, largest_k, largest_promoted, largest_v):
    """Steps of 1 up to the largest code, wider in the promoted channels, which are the last ones as stored. Symmetric values
    (None): levels -1.5, -.5, .5, 1.5 times a scale of 1. Ranges for 32 tokens (-2.75): twice that from token 32 on."""
    f = fmt(name)
    times = 1 + (np.arange(Z)[:, None] >= 32) if f.k_group else 1
    k, expected = (along(0, [*pattern, largest_k], times) for pattern in ([0, 1.4, 2.6], [0, 1, 3]))
    for x, pattern in ((k, [0, 1.4, 2.6]), (expected, [0, 1, 3])):
        x[..., -promoted:] = along(0, [*pattern, largest_promoted], times)[..., -promoted:]
    v, v_expected = [-1.5, -0.4, 0.6, 1.5], [-1.5, -0.5, 0.5, 1.5]
    if largest_v is not None:
        v, v_expected = [0, 1.4, 2.6, largest_v], [0, 1, 3, largest_v]
    k_hat, v_hat = fake(k, along(1, v), kv_format=f)
    np.testing.assert_array_equal(k_hat, expected)
    np.testing.assert_array_equal(v_hat, along(1, v_expected))


def test_oscar_keeps_sinks_and_three_pages_and_clips():
    f = fmt("oscar-2")
    assert (f.sink_tokens, f.open_pages, f.k_rotation, f.v_rotation) == (64, 3, "hadamard", "hadamard")
    x = np.zeros((1, Z, H), np.float32)
    x[..., ::2], x[..., 1] = 1, 6  # zeros and ones and one 6 a token: the best grid leaves the 6 out
    clipped = np.asarray(fake(x, x, kv_format=f)[1])[0, 0]
    plain = np.asarray(fake(x, x, kv_format=KVFormat(k_bits=2, v_bits=2))[1])[0, 0]
    assert np.square(clipped - x[0, 0]).sum() < 0.8 * np.square(plain - x[0, 0]).sum()


def test_kitty_promotes_a_quarter_page_by_page():
    f = fmt("kitty-2")
    k, v = page()
    k_hat = np.asarray(fake(k, v, kv_format=f)[0])[0]
    # 16 channels with 15 steps, 48 with 3: relative to its range each channel's worst error tells its width.
    worst = np.abs(k_hat - k[0]).max(0) / (k[0].max(0) - k[0].min(0))
    assert (np.sort(worst)[:16] < 0.036).all() and (np.sort(worst)[16:] > 0.1).all() and worst[7] < 0.036
    assert f.page_layout(H).used_words * 32 / (2 * H * Z) == pytest.approx(
        ((48 * 2 + 16 * 4) / H + 32 / Z + 16 * 8 / (H * Z) + 2 + 32 / H) / 2)


@pytest.mark.parametrize(("name", "bits"), [("moejax-2.5", 2.5), ("moejax-2.75", 2.6875), ("moejax-2.5-fast", 2.5),
    ("moejax-2.75-fast", 2.75), ("moejax-3.25", 3.25),
    ("moejax-4.25", 4.125)])
def test_ours_fit_their_budget(name, bits):
    assert fmt(name).page_layout(H).effective_bits() == bits <= float(name.split("-")[1])
    assert fmt(name).needs_calibration and (fmt(name).sink_tokens, fmt(name).open_pages) == (64, 2)


@pytest.mark.parametrize("name", ["moejax-2.5-fast", "moejax-2.75-fast", "moejax-3.25", "moejax-4.25"])
def test_ours_of_the_fast_layout_are_stored_in_it(name):
    f = presets.get(name).formats(1, 128)[0]
    assert dataclasses.replace(f, layout="mma_sm90").page_layout(128).words > 0


def test_all_say_what_they_share_and_unknown_names_are_refused():
    assert all(p.shares and p.differs for p in presets.PRESETS.values())
    assert math.isfinite(sum(f.page_layout(128).effective_bits() for p in presets.PRESETS.values() for f in p.formats(8, 128)))
    with pytest.raises(ValueError, match="preset 'kivi': accepted are kivi-2"):
        presets.get("kivi")
