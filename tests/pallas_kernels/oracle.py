"""Float64 NumPy oracles, written from the documented formats and sharing no code with the kernels."""
from __future__ import annotations

import ml_dtypes
import numpy as np

from pallas_kernels import KVFormat

SCALE_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float8_e4m3": ml_dtypes.float8_e4m3fn}
# Levels of a standard normal variable as tables give them, Max (1960).
GAUSSIAN = {2: [-1.5104, -0.4528, 0.4528, 1.5104],
            3: [-2.1520, -1.3439, -0.7560, -0.2451, 0.2451, 0.7560, 1.3439, 2.1520]}


def decode_codes(words: np.ndarray, bits: int, rows: int, columns: int) -> np.ndarray:
    """Codes [rows, columns] of one flat plane of words, each from the word and bit position that the format states."""
    row, column = np.indices((rows, columns))

    def field(first_word: int, width: int) -> np.ndarray:
        shift, word_row = np.divmod(row, rows * width // 32)
        word = words[first_word + word_row * columns + column].astype(np.uint64)
        return word >> (shift * width).astype(np.uint64) & np.uint64((1 << width) - 1)

    if bits == 3:
        return field(0, 2) + np.uint64(4) * field(rows * 2 // 32 * columns, 1)
    return field(0, bits)


def decode_page(words: np.ndarray, fmt: KVFormat, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values, float64 [Z, H], of one closed page of one KV head."""
    z, promoted = fmt.page_size, fmt.outlier_channels
    base = head_dim - promoted
    take = _Reader(words)
    if fmt.layout == "mma_sm90":
        return _decode_mma_sm90(take, fmt, head_dim)
    if fmt.layout == "tpu":
        return _decode_tpu(take, fmt, head_dim)
    k = _matrix(take, fmt, "k", fmt.k_bits, z, base, fmt.k_group)
    if promoted:
        group = fmt.k_group if fmt.k_axis == "channel" else 0
        k = np.concatenate([k, _matrix(take, fmt, "k", fmt.outlier_bits, z, promoted, group)], axis=1)
    order = np.arange(head_dim)
    if promoted and fmt.outlier_choice == "page":
        chosen = take(promoted // 4).view(np.uint8)
        order = np.concatenate([np.setdiff1d(order, chosen), chosen])
    _insert(k, take(fmt.k_sparse))
    v = _matrix(take, fmt, "v", fmt.v_bits, z, head_dim, fmt.v_group)
    _insert(v, take(fmt.v_sparse))
    unordered = np.empty_like(k)
    unordered[:, order] = k
    return unordered, v


def _matrix(take, fmt: KVFormat, part: str, bits: int, z: int, channels: int, group: int) -> np.ndarray:
    """The next codes and scales, as numbers."""
    axis, symmetric, kind = (getattr(fmt, f"{part}_{name}") for name in ("axis", "symmetric", "codes"))
    codes = decode_codes(take(z * channels * bits // 32), bits, z, channels)
    if bits == 32:
        return codes.astype(np.uint32).view(np.float32).astype(np.float64)
    if bits == 16:
        return codes.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    along = z if axis == "channel" else channels
    size = group or along
    shape = (z // size, channels) if axis == "channel" else (z, channels // size)
    dtype = np.dtype(SCALE_DTYPES[fmt.scale_dtype])
    count = shape[0] * shape[1] * (1 if symmetric else 2)
    raw = np.ascontiguousarray(take(-(-count * dtype.itemsize // 4))).view(np.uint8)[:count * dtype.itemsize]
    scalars = raw.view(dtype).astype(np.float64).reshape(*shape, -1)
    scale, offset = (np.repeat(s, size, axis=0 if axis == "channel" else 1) for s in (scalars[..., 0], scalars[..., -1]))
    if kind == "float8_e4m3":
        return scale * codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    if kind == "gaussian":
        unit = np.asarray(GAUSSIAN[bits])[codes.astype(int)]
        return scale * unit + (0 if symmetric else offset)
    return scale * (codes.astype(np.float64) - (2**bits - 1) / 2) if symmetric else scale * codes.astype(np.float64) + offset


def _insert(matrix: np.ndarray, entries: np.ndarray) -> None:
    """Sparse entries: position in the low half of each word, bfloat16 in the high half."""
    for word in entries:
        value = np.array([int(word) >> 16], np.uint16).view(ml_dtypes.bfloat16)[0]
        matrix[divmod(int(word) & 0xFFFF, matrix.shape[1])] = float(value)


class _Reader:
    def __init__(self, words):
        self.words, self.position = words, 0

    def __call__(self, count: int) -> np.ndarray:
        self.position += count
        return self.words[self.position - count:self.position]


def _decode_mma_sm90(take, fmt: KVFormat, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Every code from the word and bit that `mma_sm90` states, worked out element by element."""
    def plane(channels: int, bits: int, keys: bool) -> np.ndarray:
        token, channel = np.indices((128, channels))
        if keys:
            paired = channel < channels // 32 * 32
            tile = np.where(paired, channel // 32 * 2 + channel % 8 // 4, channel // 16)
            i, h, e = np.where(paired, channel % 32 // 8, channel % 16 // 4), channel % 4 // 2, channel % 2
            t, g, u = 8 * tile + token // 16, token % 8, token % 16 // 8
        else:
            t, g, u = channels // 16 * (token // 16) + channel // 16, channel % 8, channel % 16 // 8
            h, i, e = token % 16 // 8, token % 8 // 2, token % 2

        def read(words, quad, bit, width: int) -> np.ndarray:
            return words[(quad * 32 + 4 * g + i) * 4 + u + 2 * h] >> (16 * e + bit) & ((1 << width) - 1)

        if bits != 3:
            return read(take(channels * bits * 4), t * bits // 16, t * bits % 16, bits)
        octet, f = t // 8, t % 8
        if keys:  # of a pair of channel tiles, an octet has four token tiles
            octet = np.where(paired, tile // 2 * 2 + token // 64, octet)
            f = np.where(paired, 4 * (tile % 2) + token // 16 % 4, f)
        words = take(channels // 32 * 3 * 128 + channels % 32 // 16 * 256)
        x, y, byte = octet // 2 * 3 + octet % 2 * 2, octet // 2 * 3 + 1, octet % 2 * 8
        apart = read(words, x, 15, 1) | read(words, y, byte + 6, 2) << 1
        in_x = read(words, x, np.where(f == 6, 12, 3 * (f % 4)), 3)
        return np.select([f == 7, (f == 4) | (f == 5)], [apart, read(words, y, byte + 3 * (f % 4 % 2), 3)], in_x)

    def floats(halves: np.ndarray) -> np.ndarray:
        return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    def keys(channels: int, bits: int) -> np.ndarray:
        codes = plane(channels, bits, keys=True)
        if bits == 16:
            return floats(codes)
        scale, offset = (floats(take(channels // 2).view(np.uint16)) for _ in range(2))
        return scale * codes + offset

    k = keys(head_dim - fmt.outlier_channels, fmt.k_bits)
    if fmt.outlier_channels:
        k = np.concatenate([k, keys(fmt.outlier_channels, fmt.outlier_bits)], axis=1)
    take.position = fmt.page_layout(head_dim).key_words
    codes = plane(head_dim, fmt.v_bits, keys=False)
    if fmt.v_bits == 16:
        return k, floats(codes)
    scales = take(128)
    return k, floats(scales & 0xFFFF)[:, None] * codes + floats(scales >> 16)[:, None]


def _decode_tpu(take, fmt: KVFormat, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Every code from the word and bit that `tpu_tiles` states, worked out element by element."""
    def plane(channels: int, bits: int) -> np.ndarray:
        def read(width: int) -> np.ndarray:
            rows = -(-channels * width // 32)
            words = take(rows * 128)
            token, channel = np.indices((128, channels))
            field, rest = np.divmod(channel, 2 * rows)
            return words[rest // 2 * 128 + token] >> (16 * (rest % 2) + width * field).astype(np.uint32) & ((1 << width) - 1)

        return read(2) | read(1) << 2 if bits == 3 else read(bits)

    def floats(halves: np.ndarray) -> np.ndarray:
        return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    promoted = fmt.outlier_channels
    codes = [(plane(head_dim - promoted, fmt.k_bits), fmt.k_bits)]
    if promoted:
        codes.append((plane(promoted, fmt.outlier_bits), fmt.outlier_bits))
    parts = []
    for x, bits in codes:
        scales = take(x.shape[1] if bits < 16 else 0)
        parts.append(floats(x) if bits == 16 else floats(scales & 0xFFFF) * x + floats(scales >> 16))
    take.position = fmt.page_layout(head_dim).key_words
    v = plane(head_dim, fmt.v_bits)
    if fmt.v_bits == 16:
        return np.concatenate(parts, axis=1), floats(v)
    scales = take(128)[:, None]
    return np.concatenate(parts, axis=1), floats(scales & 0xFFFF) * v + floats(scales >> 16)


def attention(
    q, pages, open_k, open_v, block_table, kv_lens, q_lens, *, kv_format, sink_k=None, sink_v=None, attention_sinks=None,
    sm_scale, sliding_window=None, logit_softcap=None, decoded=None,
) -> np.ndarray:
    """`paged_attention`, one row, head and query at a time. `decoded` caches pages: (page id, head) -> (k, v)."""
    q, pages, open_k, open_v, block_table = (np.asarray(x) for x in (q, pages, open_k, open_v, block_table))
    batch, _, num_heads, head_dim = q.shape
    num_kv_heads, z, ring = open_k.shape[1], kv_format.page_size, kv_format.page_size * kv_format.open_pages
    decoded = {} if decoded is None else decoded
    out = np.zeros(q.shape, np.float64)
    for b in range(batch):
        length, valid = int(kv_lens[b]), int(q_lens[b]) if kv_lens[b] else 0
        for head in range(num_kv_heads):
            keys, values = [], []
            for s in range(length):
                page, offset = divmod(s, z)
                if s < kv_format.sink_tokens:
                    k, v = sink_k[b, head, s], sink_v[b, head, s]
                elif page > (length - 1) // z - kv_format.open_pages:
                    k, v = open_k[b, head, s % ring], open_v[b, head, s % ring]
                else:
                    where = (int(block_table[b, page]), head)
                    if where not in decoded:
                        decoded[where] = decode_page(pages[where], kv_format, head_dim)
                    k, v = (x[offset] for x in decoded[where])
                keys.append(np.asarray(k).astype(np.float64))
                values.append(np.asarray(v).astype(np.float64))
            for i in range(valid):
                t = length - valid + i
                first = 0 if sliding_window is None else max(0, t - sliding_window + 1)
                k, v = np.stack(keys[first:t + 1]), np.stack(values[first:t + 1])
                for n in range(head * num_heads // num_kv_heads, (head + 1) * num_heads // num_kv_heads):
                    logits = k @ q[b, i, n].astype(np.float64) * sm_scale
                    if logit_softcap is not None:
                        logits = logit_softcap * np.tanh(logits / logit_softcap)
                    top = logits.max() if attention_sinks is None else max(logits.max(), float(attention_sinks[n]))
                    weights = np.exp(logits - top)
                    total = weights.sum() + (0 if attention_sinks is None else np.exp(float(attention_sinks[n]) - top))
                    out[b, i, n] = weights @ v / total
    return out
