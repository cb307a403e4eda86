"""Decoding through the paged cache against the forward pass without one, and what the compiled programs do with memory."""
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moejax
from moejax import decode, kv_schedule, page_table, sampling
from moejax.sampling import SamplingParams
from pallas_kernels.kv_format import KVFormat
from tests.moejax import tiny
from tests.tolerances import TOLERANCES, assert_close

PAGE, SLOT = tiny.PAGE, 1
PROMPT = tiny.prompt(70)
DECODABLE = np.arange(tiny.VOCAB) < tiny.DECODABLE
NO_STOP = jnp.full(decode.MAX_STOP_IDS, decode.NO_TOKEN, jnp.int32)
WIDTHS = [KVFormat(k_bits=b, v_bits=b, page_size=PAGE) for b in (8, 4, 3, 2)]


def label(kv_format) -> str:
    return kv_schedule.name(kv_schedule.per_layer(kv_format, 2))


@functools.cache
def split(kv_format):
    """On the model of two layers, but for WIDTHS on the one of one layer: that compiles in half the time."""
    return decode.split(tiny.model(1 if kv_format in WIDTHS else 2), kv_format)


def fresh(kv_format, num_pages=tiny.NUM_PAGES, garbage=False):
    """A state with pages for a whole sequence in slot 1, in shuffled order; `garbage`: NaN wherever nothing is."""
    spec, _ = split(kv_format)
    state = decode.init_state(spec, max_batch=tiny.MAX_BATCH, num_pages=num_pages, max_len=tiny.MAX_LEN)
    if garbage:
        state = dataclasses.replace(state, caches=jax.tree.map(tiny.all_nan, state.caches))
    table = page_table.allocate(page_table.create(
        max_batch=tiny.MAX_BATCH, num_pages=num_pages, max_len=tiny.MAX_LEN, page_size=PAGE), SLOT, tiny.MAX_LEN)
    order = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    return decode.with_table(state, dataclasses.replace(
        table, block_table=np.where(table.block_table >= 0, order[table.block_table], -1).astype(np.int32)))


def prefill(kv_format, state, tokens, chunk=10**6, start=0):
    """(state, {tokens so far: logits after them}), `tokens` given in chunks of `chunk`."""
    spec, params = split(kv_format)
    seen = {}
    for first in range(0, len(tokens), chunk):
        part = tokens[first:first + chunk]
        for piece, q_len in decode.pieces(part, start + first, PAGE):
            state, logits = decode.prefill_piece(spec, params, state, np.int32(SLOT), piece, np.int32(q_len))
        seen[first + len(part)] = np.asarray(logits)
    return state, seen


def generate(kv_format, state, logits, max_tokens):
    """Greedy tokens of slot 1, in segments."""
    spec, params = split(kv_format)
    request = decode.Request(sampling.row_of(SamplingParams()), jnp.int32(max_tokens), NO_STOP)
    state, first = decode.insert(state, np.int32(SLOT), logits, request, DECODABLE)
    tokens = [int(first[0])]
    while len(tokens) < max_tokens:
        state, packed = decode.generate(spec, params, state, DECODABLE, num_steps=tiny.STEPS)
        assert packed[0].tolist() == [decode.NO_TOKEN] * tiny.STEPS + [0]  # that slot is empty
        tokens += [t for t in packed[SLOT, :-1].tolist() if t != decode.NO_TOKEN]
    return state, tokens


@pytest.mark.parametrize("kv_format, round_kv, name", [(tiny.EXACT, False, "decode_f32"), (tiny.BF16, True, "decode_bf16_kv")])
def test_equals_the_full_forward(kv_format, round_kv, name):
    full = tiny.full_logits(PROMPT, round_kv)
    state, seen = prefill(kv_format, fresh(kv_format, garbage=True), PROMPT, chunk=1)
    assert_close(np.stack([seen[i + 1] for i in range(len(PROMPT))]), full, name)
    state, tokens = generate(kv_format, state, seen[len(PROMPT)], 40)
    assert tokens == tiny.full_greedy(PROMPT, 40, round_kv)
    assert state.kv_lens.tolist() == [0, len(PROMPT) + 39, 0] and not state.active.any()


def test_the_16_bit_tokens_are_those_of_the_unrounded_model():
    state, seen = prefill(tiny.BF16, fresh(tiny.BF16), PROMPT)
    _, tokens = generate(tiny.BF16, state, seen[len(PROMPT)], 30)
    assert tokens == tiny.full_greedy(PROMPT, 30)


def test_rounding_is_seen_by_the_tolerance():
    """The bfloat16 comparison would notice a cache that does not round (or rounds something else)."""
    error = np.abs(tiny.full_logits(PROMPT, True) - tiny.full_logits(PROMPT, False))
    t = TOLERANCES["decode_bf16_kv"]
    assert (error > t.atol + t.rtol * np.abs(tiny.full_logits(PROMPT, True))).any()


@pytest.mark.parametrize("kv_format", [tiny.EXACT, tiny.BF16, *WIDTHS, tiny.EVERYTHING, tiny.OPEN], ids=label)
def test_prefill_in_chunks_gives_the_same_logits(kv_format):
    _, whole = prefill(kv_format, fresh(kv_format), PROMPT, chunk=1)
    for chunk in (7, PAGE - 1, PAGE, PAGE + 1, len(PROMPT)):
        _, seen = prefill(kv_format, fresh(kv_format, garbage=True), PROMPT, chunk=chunk)
        for tokens, logits in seen.items():
            assert_close(logits, whole[tokens], "decode_f32")


@pytest.mark.parametrize("kv_format", [WIDTHS[-1], tiny.EVERYTHING, tiny.OPEN], ids=label)
def test_decode_steps_give_what_prefill_gives(kv_format):
    """Greedy tokens one step at a time, then the same sequence as a prompt."""
    state, seen = prefill(kv_format, fresh(kv_format), PROMPT)
    _, tokens = generate(kv_format, state, seen[len(PROMPT)], 40)
    _, seen = prefill(kv_format, fresh(kv_format), PROMPT + tokens, chunk=1)
    again = [int(np.argmax(np.where(DECODABLE, seen[len(PROMPT) + i], -np.inf))) for i in range(40)]
    assert again == tokens


def test_fewer_bits_cost_more():
    full = tiny.full_logits(PROMPT, num_layers=1)[-1]
    errors = [np.abs(prefill(f, fresh(f), PROMPT)[1][len(PROMPT)] - full).mean() for f in WIDTHS]
    assert 0 < errors[0] < errors[1] < errors[2] < errors[3]


def test_score_piece_is_the_log_softmax_of_prefill():
    spec, params = split(tiny.BF16)
    _, seen = prefill(tiny.BF16, fresh(tiny.BF16), PROMPT, chunk=1)
    state, start = fresh(tiny.BF16), 0
    for piece, q_len in decode.pieces(PROMPT, 0, PAGE):
        targets = np.zeros(len(piece), np.int32)
        targets[:q_len] = [*PROMPT, 5][start + 1:start + 1 + q_len]
        state, log_probs, top = decode.score_piece(spec, params, state, np.int32(SLOT), piece, np.int32(q_len), targets)
        for i in range(q_len):
            logits = seen[start + i + 1].astype(np.float64)
            expected = logits[targets[i]] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            assert_close(log_probs[i], expected, "decode_f32")
            assert top[i] == np.argmax(logits)
        start += q_len


@pytest.mark.parametrize("max_batch", [1, 3])
def test_a_step_that_fills_no_page_quantises_nothing(max_batch):
    """XLA moves what does not depend on the row out of the loop over rows that filled: into every step, if it may."""
    spec, params = split(WIDTHS[2])
    state = decode.init_state(spec, max_batch=max_batch, num_pages=tiny.NUM_PAGES, max_len=tiny.MAX_LEN)
    text = decode.decode_step.lower(spec, params, state, DECODABLE).compile().as_text()
    step = re.search(r"\nENTRY [^\n]*\n(.*?)\n\}", text, re.DOTALL)
    assert step and "reduce_min" in text
    outside = [line for line in step[1].splitlines() if "/while/body/" in line]
    assert not [line for line in outside if re.search(r"= \(?(f32|bf16)\[", line)]


def test_decode_step_is_one_step_of_generate():
    spec, params = split(tiny.BF16)
    state, seen = prefill(tiny.BF16, fresh(tiny.BF16), PROMPT)
    _, tokens = generate(tiny.BF16, state, seen[len(PROMPT)], 5)
    state, _ = prefill(tiny.BF16, fresh(tiny.BF16), PROMPT)
    request = decode.Request(sampling.row_of(SamplingParams()), jnp.int32(4), NO_STOP)
    state, _ = decode.insert(state, np.int32(SLOT), seen[len(PROMPT)], request, DECODABLE)
    steps = []
    for _ in range(4):
        state, step = decode.decode_step(spec, params, state, DECODABLE)
        steps.append(step.tolist())
    assert steps == [[decode.NO_TOKEN, tokens[i], decode.NO_TOKEN] for i in (1, 2, 3)] + [[decode.NO_TOKEN] * 3]


def test_the_state_is_donated_and_the_pool_is_not_copied():
    kv_format = WIDTHS[0]
    spec, params = split(kv_format)
    state = fresh(kv_format, num_pages=2000)
    state_bytes = sum(a.nbytes for a in jax.tree.leaves(state))
    pool_bytes = sum(c.pages.nbytes for c in state.caches)
    piece = np.zeros(PAGE, np.int32)
    for lowered in (decode.generate.lower(spec, params, state, DECODABLE, num_steps=tiny.STEPS),
                    decode.prefill_piece.lower(spec, params, state, np.int32(0), piece, np.int32(3))):
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes == state_bytes
        assert memory.temp_size_in_bytes < pool_bytes / 4
    before = [c.pages.unsafe_buffer_pointer() for c in state.caches]
    new, _ = decode.prefill_piece(spec, params, state, np.int32(SLOT), piece, np.int32(PAGE))
    assert all(a.is_deleted() for a in jax.tree.leaves(state.caches))
    assert [c.pages.unsafe_buffer_pointer() for c in new.caches] == before


def test_pieces_never_cross_a_page_and_have_few_lengths():
    for start in range(0, 2 * PAGE, 5):
        for length in range(0, 3 * PAGE, 7):
            tokens, position, out = list(range(100, 100 + length)), start, []
            for piece, q_len in decode.pieces(tokens, start, PAGE):
                assert len(piece) in decode.piece_lengths(PAGE) and 1 <= q_len <= len(piece)
                assert position // PAGE == (position + q_len - 1) // PAGE
                position += q_len
                out += piece[:q_len].tolist()
            assert out == tokens


def test_a_limit_runs_the_first_steps_of_the_same_program():
    spec, params = split(tiny.BF16)
    state, seen = prefill(tiny.BF16, fresh(tiny.BF16), PROMPT, chunk=PAGE)
    request = decode.Request(sampling.row_of(SamplingParams()), jnp.int32(50), NO_STOP)
    state, _ = decode.insert(state, np.int32(SLOT), jnp.asarray(seen[len(PROMPT)]), request, DECODABLE)
    copy = jax.tree.map(jnp.copy, state)
    _, every = decode.generate(spec, params, state, DECODABLE, num_steps=tiny.STEPS)
    copy, first = decode.generate(spec, params, copy, DECODABLE, num_steps=tiny.STEPS, limit=2)
    before = decode.compilations.total()
    _, rest = decode.generate(spec, params, copy, DECODABLE, num_steps=tiny.STEPS, limit=tiny.STEPS - 2)
    assert decode.compilations.total() == before
    assert first[SLOT, 2:-1].tolist() == [decode.NO_TOKEN] * (tiny.STEPS - 2)
    assert [*first[SLOT, :2].tolist(), *rest[SLOT, :tiny.STEPS - 2].tolist()] == every[SLOT, :-1].tolist()


@pytest.mark.parametrize(("platform", "layout"), [("cpu", "linear"), ("gpu", "mma_sm90"), ("tpu", "tpu")])
def test_pages_lie_as_the_kernels_of_the_platform_read_them(platform, layout, monkeypatch):
    model, _ = moejax.load("tests/golden/qwen3_moe")  # heads of 32 channels
    fmt = KVFormat(k_bits=3, v_bits=2)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert {f.layout for f in decode.split(model, fmt)[0].formats} == {layout}
    assert {f.layout for f in decode.split(model, fmt, implementation="reference")[0].formats} == {"linear"}


def test_heads_that_the_format_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="outlier_channels=16"):
        decode.split(tiny.model(), KVFormat(k_bits=2, page_size=PAGE, outlier_channels=16))
