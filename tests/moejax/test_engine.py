"""A request gets the same tokens whatever happens around it; limits, stops, seeds and pages are kept."""
import dataclasses

import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx

from moejax import decode, page_table
from moejax.config import RopeConfig
from moejax.engine import Engine
from moejax.model import Transformer
from moejax.sampling import SamplingParams
from moejax.tokenizer import Tokenizer
from pallas_kernels.kv_format import KVFormat
from tests.moejax import tiny

LENGTHS = (70, 5, 33, 64, 31, 1, 65)
PROMPTS = [tiny.prompt(n, seed=n) for n in LENGTHS]
MIXED = [SamplingParams(max_tokens=20 + i, temperature=[1.2, 0.0][i % 2], top_p=0.95, seed=40 + i, ignore_eos=True)
         for i in range(len(PROMPTS))]


def new_engine(model=None, **kwargs) -> Engine:
    settings = dict(kv_format=tiny.EVERYTHING, max_batch=tiny.MAX_BATCH, max_len=tiny.MAX_LEN,  # noqa: C408
                    num_pages=tiny.NUM_PAGES, steps_per_segment=tiny.STEPS, calibration_tokens=tiny.prompt(100, 9))
    return Engine(model or tiny.model(), **{**settings, **kwargs})


@pytest.fixture(scope="module")
def engine() -> Engine:
    return new_engine()


@pytest.fixture(scope="module")
def alone(engine) -> list[tuple[int, ...]]:
    """The tokens of each request when it is the only one."""
    return [engine.generate([prompt], params)[0].token_ids for prompt, params in zip(PROMPTS, MIXED)]


def poison(engine: Engine) -> None:
    """NaN in every page, open page and sink; nothing runs, so all of it is unowned."""
    state = engine._state
    caches = tuple(dataclasses.replace(jax.tree.map(tiny.all_nan, c), transform=c.transform) for c in state.caches)
    engine._state = dataclasses.replace(state, caches=caches)


def test_alone_is_not_trivial(alone):
    assert [len(t) for t in alone] == [p.max_tokens for p in MIXED]
    assert all(len(set(t)) > 2 for t in alone) and len(set(alone[0])) > 8


@pytest.mark.parametrize("order", [range(7), range(6, -1, -1), [3, 0, 6, 2, 5, 1, 4]], ids=["forward", "backward", "mixed"])
def test_any_batch_and_slot_after_other_requests_with_nan_around(engine, alone, order):
    poison(engine)
    done = engine.generate([PROMPTS[i] for i in order], [MIXED[i] for i in order])
    assert [c.token_ids for c in done] == [alone[i] for i in order]
    assert [c.prompt_token_ids for c in done] == [tuple(PROMPTS[i]) for i in order]
    page_table.check(engine._table)
    assert engine._table.num_free == tiny.NUM_PAGES


def test_every_slot(engine, alone):
    """Longer requests hold the lower slots, so that the request comes to stand in each of them."""
    for slot in range(tiny.MAX_BATCH):
        poison(engine)
        others = [tiny.prompt(3, seed=s) for s in range(slot)]
        done = engine.generate([*others, PROMPTS[1]], [SamplingParams(max_tokens=25, ignore_eos=True)] * slot + [MIXED[1]])
        assert done[-1].token_ids == alone[1]


def test_seeds_decide_and_samples_share_pages(engine):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    engine.stats.forks = engine.stats.prefill_tokens = 0
    together = engine.generate([PROMPTS[0]], params, num_samples=3)
    assert engine.stats.forks == 2 and engine.stats.prefill_tokens == len(PROMPTS[0])
    assert [c.seed for c in together] == [5, 6, 7] and len({c.token_ids for c in together}) == 3
    for c in together:
        single, = engine.generate([PROMPTS[0]], dataclasses.replace(params, seed=c.seed))
        assert single.token_ids == c.token_ids
    many = engine.generate([PROMPTS[0]], params, num_samples=5)  # more than slots
    assert [c.token_ids for c in many[:3]] == [c.token_ids for c in together]
    assert engine._table.num_free == tiny.NUM_PAGES


def test_open_pages_take_no_page_of_the_pool_and_samples_have_their_own():
    engine = new_engine(kv_format=tiny.OPEN, num_pages=None)
    assert engine.num_pages == tiny.MAX_BATCH * (tiny.MAX_LEN // tiny.PAGE - 1)
    params = SamplingParams(max_tokens=50, temperature=1.0, seed=5, ignore_eos=True)
    alone = [engine.generate([PROMPTS[0]], dataclasses.replace(params, seed=5 + i))[0].token_ids for i in range(3)]
    poison(engine)
    assert [c.token_ids for c in engine.generate([PROMPTS[0]], params, num_samples=3)] == alone
    page_table.check(engine._table)
    assert engine.stats.forks == 2 and engine._table.num_free == engine.num_pages


def test_stop_ids_end_a_request_at_their_first_occurrence(engine, alone):
    stopping = dataclasses.replace(MIXED[0], stop_token_ids=(alone[0][7], 99))
    first = alone[0].index(alone[0][7])
    stopped, other = engine.generate([PROMPTS[0], PROMPTS[2]], [stopping, MIXED[2]])
    assert stopped.token_ids == alone[0][:first + 1] and stopped.finish_reason == "stop"
    assert other.token_ids == alone[2] and other.finish_reason == "length"


def test_a_first_token_can_be_the_last(engine, alone):
    for params in (dataclasses.replace(MIXED[0], max_tokens=1), dataclasses.replace(MIXED[0], stop_token_ids=(alone[0][0],))):
        done, = engine.generate([PROMPTS[0]], params)
        assert done.token_ids == alone[0][:1]
    assert not np.asarray(engine._state.active).any() and engine._table.num_free == tiny.NUM_PAGES


def test_admission_waits_for_pages(engine):
    """Six pages: two requests that may need three pages each run, the third waits though a slot is free."""
    engine.stats.peak_running = 0
    engine.generate([tiny.prompt(60, s) for s in range(4)], SamplingParams(max_tokens=38, ignore_eos=True))
    assert engine.stats.peak_running == 2
    engine.generate([tiny.prompt(9, s) for s in range(4)], SamplingParams(max_tokens=8, ignore_eos=True))
    assert engine.stats.peak_running == tiny.MAX_BATCH


def test_a_sequence_can_fill_the_cache_exactly(engine):
    done, = engine.generate([tiny.prompt(tiny.MAX_LEN - 10)], SamplingParams(max_tokens=11, ignore_eos=True))
    assert len(done.token_ids) == 11


@pytest.mark.parametrize("prompts, params, kwargs, words", [
    ([tiny.prompt(5), tiny.prompt(130)], SamplingParams(max_tokens=1), {}, "prompt 1: 130 tokens.*max_len=128"),
    ([tiny.prompt(120)], SamplingParams(max_tokens=10), {}, "prompt 0: 120 tokens and max_tokens=10 need 129"),
    ([tiny.prompt(5), []], SamplingParams(), {}, "prompt 1: is empty"),
    ([[3, tiny.VOCAB]], SamplingParams(), {}, "prompt 0: token id 101"),
    ([[-1]], SamplingParams(), {}, "prompt 0: token id -1"),
    (["text"], SamplingParams(), {}, "prompt 0: is text.*no tokenizer"),
    ("text", SamplingParams(), {}, "prompts='text'"),
    ([[3], [4]], [SamplingParams()], {}, "1 SamplingParams for 2 prompts"),
    ([[3]], SamplingParams(stop_token_ids=tuple(range(17))), {}, "17 stop ids.*at most 16"),
    ([[3]], SamplingParams(), {"num_samples": 0}, "num_samples=0"),
    ([[3]], SamplingParams(), {"num_samples": 10**9}, "num_samples=1000000000.*at most 65536"),
    ([[3]], SamplingParams(seed=2**31 - 2), {"num_samples": 3}, "prompt 0: seed=2147483646 and num_samples=3"),
    ([[3]], SamplingParams(stop_token_ids=(tiny.VOCAB,)), {}, "stop_token_ids: token id 101.*vocab_size=101"),
    ([[3], [5.7]], SamplingParams(), {}, "prompt 1: token id 5.7: must be an integer"),
    ([[True]], SamplingParams(), {}, "prompt 0: token id True"), ([b"ab"], SamplingParams(), {}, "prompt 0: b'ab'.*list"),
    ([[2**40]], SamplingParams(), {}, "prompt 0: token id 1099511627776"),
    ([3], SamplingParams(), {}, "prompt 0: 3: must be a list"),
    (None, SamplingParams(), {}, "prompts=None"), ([[3]], None, {}, "params=None.*SamplingParams"),
    ([[3]], [None], {}, "params=.None.*SamplingParams"),
])
def test_bad_requests_are_refused_before_any_work(engine, prompts, params, kwargs, words):
    engine.stats.prefill_tokens = 0
    with pytest.raises(ValueError, match=words):
        engine.generate(prompts, params, **kwargs)
    assert engine.stats.prefill_tokens == 0 and engine._table.num_free == tiny.NUM_PAGES


def test_a_request_larger_than_the_pool_is_refused():
    with pytest.raises(ValueError, match="need up to 2 pages, num_pages=1"):
        new_engine(num_pages=1).generate([tiny.prompt(60)], SamplingParams(max_tokens=10))


@pytest.mark.parametrize("kwargs, words", [
    ({"max_batch": 0}, "max_batch=0"), ({"max_len": 0}, "max_len=0"), ({"num_pages": -1}, "num_pages=-1"),
    ({"steps_per_segment": 0}, "steps_per_segment=0"), ({"calibration_tokens": None}, "8ch@8.*calibration_tokens"),
    ({"calibration_tokens": [3]}, r"len\(calibration_tokens\)=1"),
    ({"kv_format": KVFormat(k_bits=2, outlier_channels=16)}, "outlier_channels=16.*head_dim=16"),
    ({"calibration_tokens": [3, tiny.VOCAB]}, "calibration_tokens: token id 101.*vocab_size=101"),
    ({"kv_format": None}, "kv_format=None.*KVFormat"), ({"kv_format": "k4v4"}, "kv_format='k4v4'.*KVFormat"),
    ({"max_batch": 2**31}, "max_batch=2147483648"), ({"max_batch": 10**9}, "max_batch=1000000000,.*takes at least.*GiB"),
    ({"max_len": 2**31 - 1, "num_pages": None}, "max_len=2147483647,.*takes at least"),
    ({"num_pages": 2**31 - 1}, "num_pages=2147483647,.*takes at least"),
    ({"max_batch": 1000, "steps_per_segment": 2**31 - 1}, "steps_per_segment=2147483647: the cache with .* takes at least"),
])
def test_bad_engines_are_refused_by_name(kwargs, words):
    with pytest.raises(ValueError, match=words):
        new_engine(**kwargs)


def test_a_device_too_small_is_named_with_both_sizes(monkeypatch):
    monkeypatch.setattr(jax.Device, "memory_stats", lambda self: {"bytes_limit": 1 << 10}, raising=False)
    with pytest.raises(ValueError, match=r"max_batch=3, .*takes at least 0\.0 GiB, the device has 0\.0 GiB"):
        new_engine()


def test_sequences_longer_than_the_model_was_made_for_are_said(caplog):
    new_engine(max_len=512)
    assert not caplog.records
    new_engine(max_len=513)
    assert "max_len=513" in caplog.text and "max_position_embeddings=512" in caplog.text


def test_arrays_of_token_ids_are_prompts(engine, alone):
    done = engine.generate([np.asarray(PROMPTS[1]), jax.numpy.asarray(PROMPTS[2])], MIXED[1:3])
    assert [c.token_ids for c in done] == alone[1:3]


def test_positions_that_dynamic_rope_cannot_cache_are_refused():
    config = dataclasses.replace(tiny.config(), rope=RopeConfig(kind="dynamic", factor=2.0), max_position_embeddings=100)
    model = Transformer(config, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"max_len=128.*'dynamic'.*max_position_embeddings=100"):
        new_engine(model)


def test_ids_that_only_pad_the_vocabulary_are_never_sampled(engine):
    graphdef, params = nnx.split(tiny.model())
    model = nnx.merge(graphdef, jax.tree.map(lambda a: a, params))
    model.lm_head_VD[...] = model.lm_head_VD[...].at[tiny.DECODABLE:].mul(50)
    padded = new_engine(model)
    hot = SamplingParams(max_tokens=30, temperature=2.0, ignore_eos=True)
    for c in padded.generate(PROMPTS[1:3], [SamplingParams(max_tokens=30, ignore_eos=True), hot]):
        assert max(c.token_ids) < tiny.DECODABLE


def test_text_and_end_of_sequence_ids_come_from_the_tokenizer(engine, alone):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(tiny.DECODABLE - 5)}, unk_token="t0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    eos = alone[0][4]
    with_text = new_engine(tokenizer=Tokenizer(backend, eos_ids=[eos]))
    text = " ".join(f"t{i}" for i in PROMPTS[0])
    known = [i if i < tiny.DECODABLE - 5 else 0 for i in PROMPTS[0]]
    stopped, ignoring = with_text.generate([text, text], [dataclasses.replace(MIXED[0], ignore_eos=i) for i in (False, True)])
    assert stopped.prompt_token_ids == tuple(known)
    assert max(ignoring.token_ids) < tiny.DECODABLE - 5  # ids without text are not sampled
    if eos in ignoring.token_ids:
        end = ignoring.token_ids.index(eos)
        assert stopped.token_ids == ignoring.token_ids[:end + 1] and stopped.finish_reason == "stop"
        assert stopped.text == " ".join(f"t{i}" for i in ignoring.token_ids[:end])
    assert ignoring.text == " ".join(f"t{i}" for i in ignoring.token_ids)


def test_an_engine_survives_an_interrupted_call(engine, alone, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(decode, "generate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[:3], MIXED[:3])
    assert engine._table.num_free == tiny.NUM_PAGES
    assert engine.generate([PROMPTS[0]], MIXED[0])[0].token_ids == alone[0]


def test_compilations_are_few_and_counted(engine, alone):
    """All the lengths, batches and sampling parameters above: two prefill lengths, one of everything else."""
    before = decode.compilations.copy()
    engine.generate([tiny.prompt(n, n) for n in range(1, 60, 7)], SamplingParams(max_tokens=3, top_k=4, temperature=0.5))
    assert decode.compilations == before
    fresh = new_engine(kv_format=tiny.BF16, calibration_tokens=None)
    fresh.generate([tiny.prompt(n, n) for n in (1, 17, 40)], SamplingParams(max_tokens=3))
    assert fresh.num_compilations <= 4
    fresh.warm_up()
    assert fresh.num_compilations <= 4 and fresh.stats.generated_tokens == 0


def test_stats_add_up(engine):
    engine.stats = type(engine.stats)()
    done = engine.generate(PROMPTS[:2], SamplingParams(max_tokens=7, ignore_eos=True))
    assert engine.stats.generated_tokens == sum(len(c.token_ids) for c in done) == 14
    assert engine.stats.prefill_tokens == LENGTHS[0] + LENGTHS[1]
    assert len(engine.stats.step_ms) == 6 and all(ms > 0 for ms in engine.stats.step_ms)
    assert all(c.ttft_ms > 0 for c in done)
    assert engine.cache_bytes == sum(a.nbytes for a in jax.tree.leaves(engine._state.caches))
