"""`experiments.kernels` and what it measures with: right and wrong implementations, bytes, names, bad input."""
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernels import kernels, parse_format, plan
from pallas_kernels import KVFormat, bench, bench_cases, dispatch
from pallas_kernels.close_page.reference import close_page as reference_close_page
from pallas_kernels.close_page.specs import ClosePageSpec
from pallas_kernels.grouped_matmul.reference import grouped_matmul as reference_matmul
from pallas_kernels.grouped_matmul.specs import SPECS as MATMUL_SPECS
from pallas_kernels.paged_attention.reference import paged_attention as reference_attention
from pallas_kernels.paged_attention.specs import SPECS, PagedAttentionSpec
from tests.experiments.conftest import assert_refused
from tests.pallas_kernels import oracle

SMALL = ("--repeats=2", "--min_ms=2", "--working_set_mib=0")
SPEC = PagedAttentionSpec(batch=3, q_len=1, num_heads=4, num_kv_heads=2, head_dim=32, kv_len=300, page_size=32, ragged=True)


@pytest.fixture(autouse=True)
def few_pages(monkeypatch):
    monkeypatch.setattr(bench_cases, "STOCK_PAGES", 32)


@pytest.fixture
def steady_clock(monkeypatch):
    """Calls run, but take 100 us each and a launch 1 ms, on a machine that others use too."""
    def seconds(run, calls):
        run(calls)
        return 1e-3 + 1e-4 * calls

    monkeypatch.setattr(bench, "_seconds", seconds)


@pytest.fixture
def plant(monkeypatch):
    """Registers an implementation for one test."""
    for op in ("paged_attention", "close_page", "grouped_matmul"):
        monkeypatch.setitem(dispatch._registry, op, dict(dispatch._registry[op]))
    return dispatch.register


def mean_of_values(q, pages, open_k, open_v, block_table, kv_lens, q_lens, **options):
    """Looks reasonable: the average of the newest values."""
    there = (jnp.arange(open_v.shape[2]) <= (kv_lens - 1)[:, None] % open_v.shape[2])[:, None, :, None]
    mean = jnp.sum(jnp.where(there, open_v, 0), axis=2) / jnp.sum(there, axis=2)
    out = jnp.repeat(mean, q.shape[2] // mean.shape[1], axis=1)[:, None].astype(q.dtype)
    return jnp.where((kv_lens > 0)[:, None, None, None], out, 0)


def test_a_wrong_kernel_is_reported_and_not_timed(run, plant, steady_clock, tmp_path):
    plant("paged_attention", "mean_of_values", mean_of_values)
    done = run(kernels, *SMALL, "--implementation=reference,mean_of_values,mosaic_gpu", "--spec=smollm2_135m_512", "--formats=k4v2",
               f"--output_dir={tmp_path}")
    assert done.code == 1 and done.result["wrong_or_failed"] == 1
    rows = {row["implementation"]: row for row in done.result["rows"]}
    wrong, right = rows["mean_of_values"], rows["reference"]
    assert wrong["status"].startswith("wrong: relative L2 error") and wrong["relative_l2_error"] > 0.1
    assert "us_p50" not in wrong and wrong["read_bandwidth_pct"] is None
    assert rows["mosaic_gpu"]["status"] == "refused: mosaic_gpu: runs on NVIDIA Hopper, not on cpu"
    assert right["status"] == "ok" and 0 < right["relative_l2_error"] < 0.01
    assert [right[f"us_p{q}"] for q in (10, 50, 90)] == pytest.approx([100] * 3)
    # 3 closed pages and 128 open tokens of 3 heads of 64; q and output of 9 heads.
    moved = 3 * (3 * (64 * 128 * 6 // 8 + 4 * (64 + 128)) + 128 * 256) + 2 * 9 * 64 * 2 + 3 * 4 + 4
    assert right["bytes_moved"] == moved and right["gb_per_s"] == pytest.approx(moved / 100 / 1e3)
    assert right["read_bandwidth_pct"] == pytest.approx(100 * right["gb_per_s"] / done.result["read_gb_per_s"])
    assert right["speedup_over_baseline"] is None and right["baseline_not_measured"].startswith("torch")
    assert "| k4v2" in done.out and "not measured: torch" in done.out
    assert json.loads((tmp_path / "results.jsonl").read_text())["rows"] == done.result["rows"]


@pytest.mark.parametrize("fault", ["one head", "one row", "not a number", "reads what is not owned", "long rows only"])
def test_faults_that_the_check_must_see(plant, fault):
    def faulty(q, pages, open_k, open_v, block_table, kv_lens, q_lens, **options):
        if fault == "reads what is not owned":
            block_table = jnp.where(block_table < 0, 0, block_table)
            kv_lens = jnp.where(kv_lens > 0, kv_lens + 1, 0)
        if fault == "long rows only":  # the last page of a row of more pages than the small check has
            kv_lens = jnp.where(kv_lens > 20 * options["kv_format"].page_size, kv_lens - 300, kv_lens)
        out = reference_attention(q, pages, open_k, open_v, block_table, kv_lens, q_lens, **options)
        if fault == "one head":
            out = out.at[:, :, 1].set(out[:, :, 0])
        if fault == "one row":
            out = out.at[-1].set(out[0])
        return out.at[0, 0, 0, 0].set(jnp.nan) if fault == "not a number" else out

    plant("paged_attention", fault, faulty)
    spec = PagedAttentionSpec(batch=2, q_len=1, num_heads=4, num_kv_heads=2, head_dim=32, kv_len=1000, page_size=32)
    case = bench_cases.case("paged_attention", spec, KVFormat(k_bits=4, v_bits=4, page_size=32))
    assert not case.check(fault) <= bench.TOLERANCE


@pytest.mark.parametrize("fmt", [
    KVFormat(k_bits=3, v_bits=2, page_size=32, sink_tokens=4, outlier_channels=16),
    KVFormat(k_bits=32, v_bits=32, page_size=32),
], ids=lambda f: f.name)
def test_the_check_agrees_with_the_independent_oracle(fmt):
    spec = PagedAttentionSpec(batch=1, q_len=5, num_heads=6, num_kv_heads=2, head_dim=32, kv_len=1, page_size=32)
    cache = bench_cases.attention_inputs(spec, fmt, np.array([70, 3, 1, 0, 64], np.int32), turns=1)
    pages, open_k, open_v, kv_lens, q_lens, *sinks = map(np.asarray, cache.operands)
    assert q_lens.tolist() == [5, 3, 1, 0, 5]
    assert np.isnan(open_k[0, :, 6:].astype(np.float32)).all() and (pages == 0xFFFFFFFF).all(axis=(1, 2)).sum() == 8
    expected = oracle.attention(
        cache.q, pages, open_k, open_v, cache.tables[0], kv_lens, q_lens, kv_format=fmt, sm_scale=32**-0.5,
        **dict(zip(("sink_k", "sink_v"), sinks)))
    for row in (0, 1, 2, 4):
        got = bench_cases.attention_row(cache, row, [0, 3, 5])
        np.testing.assert_allclose(got, expected[row, :q_lens[row], [0, 3, 5]], rtol=1e-6, atol=1e-6)


def test_pages_of_a_pool_are_all_different_memory():
    cache = bench_cases.attention_inputs(SPEC, KVFormat(k_bits=2, v_bits=2, page_size=32), SPEC.kv_lens(), turns=4)
    assert SPEC.kv_lens().tolist() == [300, 150, 1]
    table = np.asarray(cache.tables)
    assert (table >= 0).sum(axis=2).tolist() == [[9, 4, 0]] * 4
    used = table[table >= 0]
    assert len(set(used.tolist())) == 52 == len(cache.operands[0]) - 8
    assert not (np.diff(np.sort(used)) == np.diff(used)).all()
    words = np.asarray(cache.operands[0])[used]
    assert (words != 0).mean() > 0.9 and (words != 0xFFFFFFFF).all(axis=(1, 2)).any()


def test_bytes_by_hand():
    # Rows of 300, 150 and 1 tokens: 9 + 4 + 0 closed pages, 12 + 22 + 1 tokens in open pages.
    # A page of 32 tokens, 32 channels, 2 bits: 64 + 32 words of keys, 64 + 32 of values; a token in bfloat16: 2 * 32 * 2 bytes.
    plain = 2 * (13 * 192 * 4 + 35 * 128) + 2 * (3 * 4 * 32 * 2) + 13 * 4 + 3 * 4
    assert bench_cases.attention_bytes(SPEC, KVFormat(k_bits=2, v_bits=2, page_size=32)) == plain
    # Four sinks a row (one in the last): the open page of the last row is read there only.
    sinks = bench_cases.attention_bytes(SPEC, KVFormat(k_bits=2, v_bits=2, page_size=32, sink_tokens=4))
    assert sinks == plain + 2 * 8 * 128
    # 8 promoted channels at 8 bits: 8 * 32 * 6 bits more of codes, as many scales.
    promoted = KVFormat(k_bits=2, v_bits=2, page_size=32, outlier_channels=8)
    assert bench_cases.attention_bytes(SPEC, promoted) == plain + 2 * 13 * 8 * 32 * 6 // 8
    pages = ClosePageSpec(batch=5, num_kv_heads=2, head_dim=32, kv_format=KVFormat())
    assert bench_cases.close_page_bytes(pages, KVFormat(k_bits=2, v_bits=2, page_size=32)) == 10 * (2 * 32 * 32 * 2 + 192 * 4)


def test_close_page(plant, steady_clock):
    fmt = KVFormat(k_bits=2, v_bits=3, page_size=32, outlier_channels=8)
    case = bench_cases.case("close_page", ClosePageSpec(batch=4, num_kv_heads=2, head_dim=32, kv_format=fmt), fmt)
    plant("close_page", "last page forgotten", lambda k, v, **options: reference_close_page(k, v, **options).at[3].set(0))
    assert bench.measure(case, "last page forgotten", repeats=1, min_s=1e-4)["status"].startswith("wrong")
    timed = bench.measure(case, "reference", repeats=3, min_s=2e-3)
    assert timed["status"] == "ok" and timed["relative_l2_error"] == 0


def test_experts_beside_ragged_dot(run, plant, steady_clock):
    def neighbour(x, w, group_sizes, **options):  # each group times the matrix of the expert after it
        return reference_matmul(x, jax.tree.map(lambda leaf: jnp.roll(leaf, 1, axis=0), w), group_sizes, **options)

    plant("grouped_matmul", "neighbour", neighbour)
    done = run(kernels, *SMALL, "--op=grouped_matmul", "--implementation=reference,neighbour,mosaic_gpu", "--spec=tiny_int4")
    rows = {row["implementation"]: row for row in done.result["rows"]}
    right, dense = rows["reference"], rows["lax.ragged_dot"]
    assert done.code == 1 and rows["neighbour"]["status"].startswith("wrong")
    assert rows["mosaic_gpu"]["status"].startswith("refused: mosaic_gpu: runs on NVIDIA Hopper")
    # Experts with rows x 256 x 64 weights of 4 bits and a float32 scale in 64; rows of 256 in and 32 out, two bytes each.
    hit = np.count_nonzero(MATMUL_SPECS["tiny_int4"].group_sizes(0))
    assert right["effective_bits"] == 4.5 and right["format"] == "int4 in groups of 64"
    assert right["bytes_moved"] == hit * 256 * 64 * 4.5 / 8 + 4 * 2 * (256 + 32)
    assert dense["bytes_moved"] == hit * 256 * 64 * 2 + 4 * 2 * (256 + 32)
    assert right["us_p50"] == pytest.approx(100) and right["speedup_over_baseline"] == pytest.approx(1)


def test_a_call_is_the_difference_of_two_loops(monkeypatch):
    clock, made = [0.0], []

    def work(calls):
        made.append(calls)
        clock[0] += 5 + 0.25 * calls  # a launch costs 5 s, a call 0.25 s

    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    assert bench.sample(work, repeats=3, min_s=30).us == pytest.approx((250_000,) * 3)
    assert set(made) == {2, 2 + 10}  # 30 s at the 2.75 s a call that two calls seem to take
    assert bench.Samples((1.0, 2.0, 4.0)).summary(3000)["gb_per_s"] == 1.5
    assert bench.Samples((-1.0, -2.0, 4.0)).summary(3000)["us_p50"] is None


@pytest.mark.parametrize("text", ["k2v2", "k16v16", "k3v2+16ch@4", "k2v2+16ch@8+sink4+rot-kv+clip-k", "k4v4+rot-v", "k2v2+clip-kv"])
def test_format_names_are_read_back(text):
    assert parse_format(text).name == text


@pytest.mark.parametrize("text", [
    "", "2", "k2", "v2k2", "k2v2+", "k02v2", "k2v2+16ch", "k2v2+0ch@8", "k2v2+sink0", "k2v2+rot-", "K2V2", "k2v2+rot-vk", "k2v2 ",
    "k2v2+sink4+16ch@8", "k2v2+16ch@8+16ch@8", "k5v2", "k2v2+16ch@5", "k4v4+8ch@4"])
def test_no_other_format_name_is_read(text):
    with pytest.raises(ValueError, match="formats=|KVFormat"):
        parse_format(text)


def test_the_plan_by_default_covers_every_shape_of_the_benchmark():
    runs = plan(["paged_attention", "close_page"], ["reference"], ["all"], [], None)
    assert {run.spec_name for run in runs if run.op == "paged_attention"} == set(SPECS)
    assert len(runs) == len(set(runs)) and all(run.implementation == "reference" for run in runs)
    runs = plan(["close_page"], ["all"], ["batch_k4v2"], [], None)
    assert [run.implementation for run in runs] == ["mosaic_gpu", "mosaic_tpu", "reference"]
    assert {run.kv_format for run in runs} == {KVFormat(k_bits=4, v_bits=2)}  # what the shape names
    runs = plan(["paged_attention"], ["all"], ["qwen3_30b_32k"], ["k2v2+16ch@4"], "mma_sm90")
    assert {run.kv_format.layout for run in runs} == {"mma_sm90"}


@pytest.mark.parametrize("flags, words", [
    (["--op=attention"], ["op='attention'", "paged_attention, close_page"]),
    (["--implementation=cuda"], ["implementation='cuda'", "accepted are all", "reference"]),
    (["--spec=qwen3_30b_32k,"], ["spec=''", "qwen3_30b_32k_ragged"]),
    (["--spec=burst_k2v2"], ["spec='burst_k2v2'"]),
    (["--formats=k2v2,k5v5"], ["k_bits=5"]),
    (["--formats=k2v2,,k4v4"], ["formats=''", "k2v2+16ch@8"]),
    (["--formats=k2v2+64ch@8", "--spec=smollm2_135m_512"], ["outlier_channels=64", "head_dim=64"]),
    (["--layout=tiled"], ["layout='tiled'", "linear"]),
    (["--op=grouped_matmul", "--formats=k2v2"], ["formats=['k2v2']", "grouped_matmul"]),
    (["--layout=mma_sm90", "--formats=k2v2+8ch@8"], ["outlier_channels=8", "multiples of 16"]),
    (["--repeats=0"], ["repeats=0", "at least 1"]),
    (["--min_ms=0"], ["min_ms=0", "positive"]),
    (["--working_set_mib=-1"], ["working_set_mib=-1"]),
    (["--calls=3"], ["calls"]),
])
def test_bad_input(run, flags, words):
    assert_refused(run(kernels, *flags), *words)
