"""Appending, transforming and closing, each against plain indexing."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import kv_cache
from moejax.kv_cache import KeyTransform, LayerKV, Placement
from pallas_kernels.close_page import close_page
from pallas_kernels.kv_format import KVFormat
from pallas_kernels.pallas_utils import INVALID

B, K, Z, H, S, P = 3, 2, 32, 16, 3, 5
FORMAT = KVFormat(k_bits=3, v_bits=4, page_size=Z, sink_tokens=S)


def filled_cache(kv_format: KVFormat, seed: int = 0) -> LayerKV:
    """A cache with noise everywhere."""
    empty = kv_cache.init_layer(kv_format, num_kv_heads=K, head_dim=H, num_pages=P, max_batch=B)
    rng = np.random.default_rng(seed)

    def noise(a):
        if a.dtype == jnp.uint32:
            return jnp.asarray(rng.integers(0, 2**32, a.shape, np.uint32))
        return jnp.asarray(rng.normal(size=a.shape), a.dtype)

    return jax.tree.map(noise, empty)


def placement(block_table, kv_lens, q_lens) -> dict:
    return {"block_table": jnp.asarray(block_table, jnp.int32), "kv_lens": jnp.asarray(kv_lens, jnp.int32),
            "q_lens": jnp.asarray(q_lens, jnp.int32)}


@functools.partial(jax.jit, static_argnames="kv_format")
def append(cache, k, v, where, kv_format):
    return kv_cache.append(cache, k, v, Placement(**where), kv_format=kv_format)


@functools.partial(jax.jit, static_argnames="kv_format")
def close(caches, where, kv_format):
    return kv_cache.close_filled(caches, Placement(**where), formats=(kv_format,) * len(caches))


@pytest.mark.parametrize("T, kv_lens, q_lens", [
    (1, [0, 40, 31], [1, 1, 0]), (8, [1, 56, 64], [8, 5, 2]), (32, [0, 32, 0], [32, 1, 0])])
def test_append_writes_these_tokens_and_nothing_else(T, kv_lens, q_lens):
    cache, rng = filled_cache(FORMAT), np.random.default_rng(1)
    k, v = rng.normal(size=(2, B, T, K, H)).astype(np.float32)
    new = append(cache, k, v, placement(np.full((B, 4), INVALID), kv_lens, q_lens), FORMAT)
    for name, source in (("k", k), ("v", v)):
        opened, sinks = (np.array(getattr(cache, f"{kind}_{name}")) for kind in ("open", "sink"))
        for b in range(B):
            for i in range(q_lens[b]):
                opened[b, :, (kv_lens[b] + i) % Z] = source[b, i]
                if kv_lens[b] + i < S:
                    sinks[b, :, kv_lens[b] + i] = source[b, i]
        assert np.array_equal(opened, getattr(new, f"open_{name}")) and np.array_equal(sinks, getattr(new, f"sink_{name}"))
    assert np.array_equal(cache.pages, new.pages)


def test_close_filled_writes_the_pages_that_filled_and_no_other():
    caches = (filled_cache(FORMAT, 0), filled_cache(FORMAT, 1))
    # Row 0 fills its page 1 (id 3), row 1 its page 0 (id 1), row 2 sits out at a page's end.
    where = placement([[4, 3, 0, 0], [1, 2, 0, 0], [0, 0, 0, 0]], [2 * Z - 1, Z - 4, Z], [1, 4, 0])
    for old, new in zip(caches, close(caches, where, FORMAT)):
        expected = np.array(old.pages)
        expected[3] = close_page(old.open_k[0], old.open_v[0], kv_format=FORMAT, num_sinks=0)
        expected[1] = close_page(old.open_k[1], old.open_v[1], kv_format=FORMAT, num_sinks=S)
        assert np.array_equal(expected, new.pages)
        assert np.array_equal(old.open_k, new.open_k)
        assert not np.array_equal(expected[1], close_page(old.open_k[1], old.open_v[1], kv_format=FORMAT, num_sinks=0))


def test_a_page_without_an_id_overwrites_nothing():
    caches = (filled_cache(FORMAT),)
    new, = close(caches, placement(np.full((B, 4), INVALID), [Z - 1] * B, [1] * B), FORMAT)
    assert np.array_equal(caches[0].pages, new.pages)


def test_take_and_put_slot_are_inverse():
    cache, other = filled_cache(FORMAT, 0), filled_cache(FORMAT, 1)
    row = kv_cache.take_slot(other, jnp.int32(2))
    assert row.open_k.shape == (1, K, Z, H)
    new = kv_cache.put_slot(cache, row, jnp.int32(1))
    for name in ("open_k", "open_v", "sink_k", "sink_v"):
        expected = np.array(getattr(cache, name))
        expected[1] = getattr(other, name)[2]
        assert np.array_equal(expected, getattr(new, name))
    assert new.pages is row.pages


def test_hadamard_is_orthonormal_and_its_own_inverse():
    for size in (1, 2, 16, 128):
        matrix = kv_cache.hadamard(size)
        np.testing.assert_allclose(matrix @ matrix, np.eye(size), atol=1e-6)
        assert np.allclose(np.abs(matrix), size**-0.5)
    with pytest.raises(ValueError, match="size=24"):
        kv_cache.hadamard(24)


def test_transforms_keep_every_dot_product_of_a_query_with_its_keys():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(B, 4, 3 * K, H)).astype(np.float32), rng.normal(size=(B, 4, K, H)).astype(np.float32)
    perm = jnp.asarray(np.stack([rng.permutation(H) for _ in range(K)]), jnp.int32)
    q2, k2 = (kv_cache.permute_channels(kv_cache.rotate(x, "hadamard", 0), KeyTransform(perm)) for x in (q, k))

    def products(q, k):
        return np.einsum("btkgh,bskh->bkgts", np.asarray(q).reshape(B, 4, K, 3, H), np.asarray(k))

    np.testing.assert_allclose(products(q2, k2), products(q, k), atol=1e-5)
    assert not np.allclose(k2, k)


def test_permuted_channels_stand_where_the_permutation_says():
    k = np.arange(K * H, dtype=np.float32).reshape(1, 1, K, H)
    perm = np.stack([np.arange(H)[::-1], np.roll(np.arange(H), 1)]).astype(np.int32)
    out = np.asarray(kv_cache.permute_channels(k, KeyTransform(jnp.asarray(perm))))
    assert np.array_equal(out[0, 0, 0], k[0, 0, 0, ::-1]) and np.array_equal(out[0, 0, 1], np.roll(k[0, 0, 1], 1))


def test_layers_of_different_formats_close_into_their_own_pools():
    formats = (FORMAT, KVFormat(k_bits=2, v_bits=2, page_size=Z), FORMAT)
    caches = tuple(filled_cache(f, i) for i, f in enumerate(formats))
    where = Placement(**placement([[4, 3, 0, 0]] * B, [2 * Z - 1, 0, 0], [1, 0, 0]))
    for f, old, new in zip(formats, caches, kv_cache.close_filled(caches, where, formats=formats)):
        expected = np.array(old.pages)
        expected[3] = close_page(old.open_k[0], old.open_v[0], kv_format=f)
        assert np.array_equal(expected, new.pages)


def test_block_hadamard_works_on_blocks_and_is_its_own_inverse():
    x = np.random.default_rng(0).normal(size=(2, 24)).astype(np.float32)
    turned = np.asarray(kv_cache.rotate(x, "block_hadamard", 8))
    np.testing.assert_allclose(turned[:, 8:16], x[:, 8:16] @ kv_cache.hadamard(8), atol=1e-6)
    np.testing.assert_allclose(kv_cache.rotate(turned, "block_hadamard", 8), x, atol=1e-6)


def test_calibrated_rotation_keeps_products_and_needs_its_matrices():
    rng = np.random.default_rng(0)
    fmt = KVFormat(k_bits=2, page_size=Z, k_rotation="calibrated")
    matrix = rng.normal(size=(K, H, H)).astype(np.float32) + 4 * np.eye(H, dtype=np.float32)
    transform = KeyTransform(k_matrix=jnp.asarray(matrix), q_matrix=jnp.asarray(np.linalg.inv(matrix).swapaxes(1, 2)))
    q, k = (rng.normal(size=(B, 1, heads, H)).astype(np.float32) for heads in (3 * K, K))
    q2, k2 = kv_cache.stored_queries(q, fmt, transform), kv_cache.stored_keys(k, fmt, transform)
    for n in range(3 * K):
        np.testing.assert_allclose(np.einsum("bh,bh->b", q2[:, 0, n], k2[:, 0, n // 3]),
                                   np.einsum("bh,bh->b", q[:, 0, n], k[:, 0, n // 3]), atol=1e-4)
    with pytest.raises(ValueError, match="calibrated"):
        kv_cache.stored_keys(k, fmt, KeyTransform())


def test_points_that_no_cache_holds_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="key_rope"):
        kv_cache.init_layer(KVFormat(k_bits=2, page_size=Z, key_rope="pre"), num_kv_heads=K, head_dim=H, num_pages=1, max_batch=1)


@pytest.mark.parametrize("kv_len, closes", [(Z, None), (2 * Z, None), (3 * Z - 1, None), (3 * Z, 0), (4 * Z, 1), (6 * Z, 3)])
def test_with_three_open_pages_the_oldest_closes_when_the_newest_is_full(kv_len, closes):
    fmt = KVFormat(k_bits=3, v_bits=4, page_size=Z, sink_tokens=S, open_pages=3)
    cache = filled_cache(fmt)
    where = placement([[4, 3, 2, 1, 0, 0, 0]] * B, [kv_len - 1, 5, Z], [1, 1, 0])
    rng = np.random.default_rng(1)
    k, v = rng.normal(size=(2, B, 1, K, H)).astype(np.float32)
    new = append(cache, k, v, where, fmt)
    place = (kv_len - 1) % (3 * Z)
    expected = np.array(cache.open_k)
    expected[0, :, place], expected[1, :, 5] = k[0, 0], k[1, 0]
    assert np.array_equal(expected, new.open_k)
    closed, = close((new,), where, fmt)
    expected = np.array(cache.pages)
    if closes is not None:
        page = slice(closes % 3 * Z, closes % 3 * Z + Z)
        expected[[4, 3, 2, 1][closes]] = close_page(
            new.open_k[0, :, page], new.open_v[0, :, page], kv_format=fmt, num_sinks=S if closes == 0 else 0)
    assert np.array_equal(expected, closed.pages)


def test_layers_may_keep_different_numbers_of_open_pages():
    formats = tuple(KVFormat(k_bits=2, v_bits=2, page_size=Z, open_pages=n) for n in (1, 2, 4))
    caches = tuple(filled_cache(f, i) for i, f in enumerate(formats))
    where = Placement(**placement([[4, 3, 2, 1]] * B, [3 * Z - 1, 0, 0], [1, 0, 0]))
    for f, page, place, old, new in zip(formats, (2, 3, None), (0, 1, 0), caches,
                                        kv_cache.close_filled(caches, where, formats=formats)):
        expected = np.array(old.pages)
        if page is not None:
            tokens = slice(place * Z, place * Z + Z)
            expected[page] = close_page(old.open_k[0, :, tokens], old.open_v[0, :, tokens], kv_format=f)
        assert np.array_equal(expected, new.pages)
