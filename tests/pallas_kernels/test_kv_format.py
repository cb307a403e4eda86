import itertools

import pytest

from pallas_kernels import KVFormat
from pallas_kernels.kv_format import ALL_BITS


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"k_bits": 5}, "k_bits=5"), ({"k_bits": 3.0}, "k_bits=3.0"), ({"k_axis": "head"}, "k_axis='head'"),
    ({"k_group": 48}, "k_group=48: must divide page_size=128"), ({"v_symmetric": 1}, "v_symmetric=1"),
    ({"k_bits": 8, "k_codes": "gaussian"}, "k_codes='gaussian'"), ({"v_bits": 8, "v_codes": "float8_e4m3"}, "v_symmetric=True"),
    ({"v_sparse": 5}, "v_sparse=5: needs v_bits"), ({"k_bits": 2, "k_sparse": 600}, "k_sparse=600"),
    ({"open_pages": 0}, "open_pages=0"),
    ({"k_rotation": "calibrated", "key_rope": "pre"}, "k_rotation='calibrated'"), ({"rotation_block": 24}, "rotation_block=24"),
    ({"layout": "mma_sm90", "k_axis": "token"}, "k_axis='token': layout 'mma_sm90' accepts channel"),
    ({"v_bits": True}, "v_bits=True"), ({"outlier_bits": 2}, "outlier_bits=2"),
    ({"page_size": 100}, "page_size=100"), ({"page_size": 32.0}, "page_size=32.0"),
    ({"outlier_channels": 4}, "outlier_channels=4"), ({"k_bits": 8, "outlier_channels": 8}, "outlier_bits=8: must exceed"),
    ({"sink_tokens": 128}, "sink_tokens=128"),
    ({"k_bits": 32}, "k_bits=32, v_bits=16"), ({"layout": "rows"}, "layout='rows'"), ({"k_range": "max"}, "k_range='max'"),
    ({"v_rotation": "random"}, "v_rotation='random'"), ({"scale_dtype": "float32"}, "scale_dtype='float32'"),
])
def test_bad_fields_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        KVFormat(**kwargs)


@pytest.mark.parametrize(("fmt", "head_dim", "message"), [
    (KVFormat(), 12, "head_dim=12"), (KVFormat(k_bits=4, outlier_channels=64), 64, "outlier_channels=64"),
    (KVFormat(v_rotation="hadamard"), 96, "power of two, got head_dim=96")])
def test_heads_that_do_not_fit_are_named(fmt, head_dim, message):
    with pytest.raises(ValueError, match=message):
        fmt.page_layout(head_dim)


def test_effective_bits_by_hand():
    """128 tokens, 64 channels: 4 + 2 bits a code, a 32-bit scale word per channel and per token."""
    layout = KVFormat(k_bits=4, v_bits=2).page_layout(64)
    assert layout.planes() == {"k_codes": (0, 1024), "k_scales": (1024, 64), "v_codes": (1088, 512), "v_scales": (1600, 128)}
    assert layout.words == 1728 and layout.page_bytes == 6912
    assert layout.effective_bits() == 1728 * 32 / (2 * 64 * 128) == 3.375


def test_promoted_channels_sinks_and_open_page_count():
    layout = KVFormat(k_bits=2, v_bits=2, outlier_channels=16, sink_tokens=4).page_layout(64)
    used = (48 * 128 * 2 + 64 * 128 * 2 + 16 * 128 * 8) // 32 + 48 + 128 + 16
    assert (layout.used_words, layout.words) == (used, -(-used // 32) * 32)
    assert layout.sequence_bytes(300) == 2 * layout.page_bytes + (128 + 4) * 2 * 64 * 2
    assert layout.effective_bits_at(300) == 8 * layout.sequence_bytes(300) / (2 * 64 * 300) > layout.effective_bits()
    with pytest.raises(ValueError, match="tokens=0"):
        layout.effective_bits_at(0)


def test_every_pair_of_bits_has_an_aligned_page_and_more_bits_take_more():
    bits = [b for b in ALL_BITS if b < 32]
    for head_dim in (8, 24, 64, 128):
        words = {(k, v): KVFormat(k_bits=k, v_bits=v).page_layout(head_dim).words for k, v in itertools.product(bits, repeat=2)}
        assert all(w % 32 == 0 for w in words.values())
        assert all(words[a, v] < words[b, v] for a, b in itertools.pairwise(bits[:4]) for v in bits)


def test_names_differ():
    formats = [
        KVFormat(), KVFormat(k_bits=2), KVFormat(k_bits=2, outlier_channels=8), KVFormat(k_bits=2, sink_tokens=4),
        KVFormat(k_bits=2, k_rotation="hadamard"), KVFormat(k_bits=2, v_rotation="hadamard"),
        KVFormat(k_bits=2, k_range="clipped")]
    assert len({f.name for f in formats}) == len(formats)
