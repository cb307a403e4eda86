"""Breaks the code on purpose, one line at a time, and proves that the suite notices: `python -m tests.mutants [NAME ...]`.

Each mutant is one textual replacement in a copy of the tree, and the few tests that must then fail. A mutant whose tests stay
green, or whose text is no longer found exactly once, is a failure of this script.
"""
from __future__ import annotations

import dataclasses
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
COPIED = ("moejax", "pallas_kernels", "experiments", "configs", "tests", "pyproject.toml")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`old` occurs exactly once in `path` and becomes `new`; `tests` (pytest arguments) must then fail."""

    name: str
    path: str
    old: str
    new: str
    tests: str


ATTENTION = "pallas_kernels/paged_attention/reference.py"
PAGES = "pallas_kernels/close_page/reference.py"
HOPPER = "pallas_kernels/paged_attention/mosaic_gpu.py"
TPU = "pallas_kernels/paged_attention/mosaic_tpu.py"
TPU_TESTS = "tests/pallas_kernels/test_paged_attention_mosaic_tpu.py"
CLOSE = "pallas_kernels/close_page/mosaic_gpu.py"
CLOSED = "tests/pallas_kernels/test_close_page_mosaic_gpu.py"
OPENED = "tests/pallas_kernels/test_close_page_reference.py"
EXPERTS = "pallas_kernels/grouped_matmul/mosaic_gpu.py"
EXPERTS_TESTED = "tests/pallas_kernels/test_grouped_matmul_mosaic_gpu.py"
ORACLE = "tests/pallas_kernels/test_paged_attention_reference.py -k oracle_on_mixed_lengths"
WEIGHT_RULES = "tests/moejax/test_weight_rules.py"
SWEEP = "tests/experiments/test_sweep.py"

MUTANTS = (
    Mutant("value scales used for keys", PAGES, 'plane[f"{name}_scales"]', 'plane["v_scales"]', OPENED),
    Mutant("scale and offset swapped", PAGES, "g.scale_dtype) for s in scalars]",
           "g.scale_dtype) for s in scalars[::-1]]", OPENED),
    Mutant("sparse entries widen the range", PAGES, "kept.reshape(x.shape)", "ranged", f"{OPENED} -k sparse"),
    Mutant("promoted channels left where they were packed", PAGES,
           "back = jnp.argsort(_promoted_last(page.outlier_index, head_dim), axis=-1)",
           "back = _promoted_last(page.outlier_index, head_dim)", f"{OPENED} -k widest"),
    Mutant("queries turned like keys", "moejax/kv_cache.py", "transform, transform.q_matrix)",
           "transform, transform.k_matrix)", "tests/moejax/test_kv_cache.py -k calibrated"),
    Mutant("scoring sees the open page twice", "moejax/scoring.py", "s <= t, s < first)", "s <= t, s < first + Z)",
           "tests/moejax/test_scoring.py -k decoding_sees"),
    Mutant("statistics count the sinks", "moejax/calibration.py", "(positions >= sink_tokens)", "(positions >= 0)",
           "tests/moejax/test_calibration.py"),
    Mutant("low bit of a three-bit code one place low", "pallas_kernels/mma_sm90.py", "((octets[7] & 1) << 15)",
           "((octets[7] & 1) << 14)", "tests/pallas_kernels/test_mma_sm90.py"),
    Mutant("Hopper: a split's maximum ignored in the merge", "pallas_kernels/paged_attention/merge.py",
           "jnp.exp2(split_m - new_m)", "jnp.exp2(split_m - split_m)",
           "tests/pallas_kernels/test_paged_attention_mosaic_gpu.py -k merge_of"),
    Mutant("Hopper: a field's mask one bit high", "pallas_kernels/paged_attention/fragments.py", "((1 << bits) - 1) << bits * f)",
           "((1 << bits) - 1) << bits * f + 1)", "tests/pallas_kernels/test_fragments.py"),
    Mutant("Hopper: sums of a byte's first field with the others'", "pallas_kernels/paged_attention/fragments.py",
           "if bits in (2, 4) else 1", "if bits == 2 else 1", "tests/pallas_kernels/test_fragments.py"),
    Mutant("Hopper: the three-bit code of two words with its low bit two high", "pallas_kernels/paged_attention/fragments.py",
           "masked(low, 0x20)", "masked(low, 0x80)", "tests/pallas_kernels/test_fragments.py"),
    Mutant("Hopper: the next page", HOPPER, "jnp.clip(first_page + w, 0", "jnp.clip(first_page + w + 1, 0",
           "tests/pallas_kernels/test_paged_attention_mosaic_gpu.py -k against_float64"),
    Mutant("Hopper: unowned open values not cleared", HOPPER, "self._clear_values(end - first)", "pass",
           "tests/pallas_kernels/test_paged_attention_mosaic_gpu.py -k against_float64"),
    Mutant("Hopper: buffers of warpgroups overlap", HOPPER, "(groups, rows, head_dim), jnp.bfloat16",
           "(groups, OPEN_TOKENS, head_dim), jnp.bfloat16",
           "tests/pallas_kernels/test_paged_attention_mosaic_gpu.py -k disjoint"),
    Mutant("Hopper: value offsets not rescaled", HOPPER, "z=state.z * alpha", "z=state.z",
           "tests/pallas_kernels/test_paged_attention_mosaic_gpu.py -k against_float64"),
    Mutant("Hopper: sinks count for the ranges of later tiles", CLOSE, "num_sinks - TILE * m", "num_sinks", f"{CLOSED} -k sinks"),
    Mutant("Hopper: offsets of key channels one half row late", CLOSE, "zip((0, segment.tiles), words)",
           "zip((0, segment.tiles + 1), words)", f"{CLOSED} -k same_bits"),
    Mutant("Hopper: scale towards zero", CLOSE, "_round_outwards(step, step > 0)", "_round_outwards(step, step < 0)",
           f"{CLOSED} -k same_bits"),
    Mutant("Hopper: padding of a page left as it was", CLOSE, "range(end // _ROW_WORDS,", "range(first // _ROW_WORDS,",
           f"{CLOSED} -k same_bits"),
    Mutant("Hopper: copies from past the end of an expert", EXPERTS, "layout.chunks - 1)",
           "layout.chunks + WARPS)", f"{EXPERTS_TESTED} -k tails"),
    Mutant("Hopper: a warp without a chunk multiplies the last one", "pallas_kernels/grouped_matmul/fragments.py",
           "jnp.where(has_chunk, total + products, total)", "total + products", f"{EXPERTS_TESTED} -k tails"),
    Mutant("Hopper: rows of the next expert", EXPERTS, "place.item.expert * layout.blocks + block",
           "(place.item.expert + 1) * layout.blocks + block", f"{EXPERTS_TESTED} -k bias_and_glu"),
    Mutant("packed: scales of the next group", "pallas_kernels/packed_weights.py",
           "x.reshape(layout.chunks, layout.groups, layout.blocks, 2, 2, 8)",
           "jnp.roll(x, 1, axis=0).reshape(layout.chunks, layout.groups, layout.blocks, 2, 2, 8)",
           "tests/pallas_kernels/test_packed_weights.py -k bijection"),
    Mutant("packed experts: gate and up swapped", "moejax/experts.py", "self.w_gate_EDF[...], self.w_up_EDF[...])",
           "self.w_up_EDF[...], self.w_gate_EDF[...])", "tests/moejax/test_packed.py -k rounded"),
    Mutant("append_heads: keys normed like queries", "pallas_kernels/append_heads/reference.py", "rms_norm(k, scales[1], eps)",
           "rms_norm(k, scales[0], eps)", "tests/pallas_kernels/test_append_heads.py -k float32"),
    Mutant("append_heads: sinks written beyond their end", "pallas_kernels/append_heads/mosaic_gpu.py",
           "active & (kv_len < sink.shape[2])", "active", "tests/pallas_kernels/test_append_heads.py -k hopper"),
    Mutant("append_heads: rows that write nothing write", "pallas_kernels/append_heads/mosaic_gpu.py",
           "q_lens_ref[row] > 0", "q_lens_ref[row] >= 0", "tests/pallas_kernels/test_append_heads.py -k hopper"),
    Mutant("pairs of one expert in the other order", "moejax/experts.py", "(index < index[:, None])", "(index > index[:, None])",
           "tests/moejax/test_model.py -k combine"),
    Mutant("packed attention: keys and values swapped", "moejax/attention.py", "(self.w_q_NHD, self.w_k_KHD, self.w_v_KHD)]",
           "(self.w_q_NHD, self.w_v_KHD, self.w_k_KHD)]", "tests/moejax/test_packed.py -k dense"),
    Mutant("packed MLP: biases of gate and up swapped", "moejax/layers.py", "interleave(self.b_gate_F[...], self.b_up_F[...])",
           "interleave(self.b_up_F[...], self.b_gate_F[...])", "tests/moejax/test_packed.py -k dense"),
    Mutant("packed: columns 8 apart swapped", "pallas_kernels/packed_weights.py", "(6, 0, 1, 9, 2, 4, 8, 7, 3, 5)",
           "(6, 0, 1, 9, 2, 4, 7, 8, 3, 5)", "tests/pallas_kernels/test_packed_weights.py -k one_code"),
    Mutant("TPU: pages counted from the first row's", TPU, "+ n - self.starts[row]]", "+ n - self.starts[0]]",
           f"{TPU_TESTS} -k ring"),
    Mutant("TPU: value offsets not rescaled", TPU, "alpha * self.z[self.index, :, :1] + z", "self.z[self.index, :, :1] + z",
           f"{TPU_TESTS} -k every_kind"),
    Mutant("TPU: a window's first page left out", TPU, "call.sliding_window + 1, 0) // TOKENS",
           "call.sliding_window + 1, 0) // TOKENS + 1", f"{TPU_TESTS} -k every_kind"),
    Mutant("TPU: sinks count for the ranges of keys", "pallas_kernels/close_page/mosaic_tpu.py", ", 0) >= num_sinks",
           ", 0) >= 0", "tests/pallas_kernels/test_close_page_mosaic_tpu.py -k sinks"),
    Mutant("TPU: promoted channels' scales left out", "pallas_kernels/close_page/mosaic_tpu.py", "channel < base, scales,",
           "channel >= 0, scales,", "tests/pallas_kernels/test_close_page_mosaic_tpu.py -k huge"),
    Mutant("TPU: experts' zero points forgotten", "pallas_kernels/grouped_matmul/mosaic_tpu.py", "- sums[rows] * zero) * scale",
           ") * scale", "tests/pallas_kernels/test_grouped_matmul_mosaic_tpu.py -k formats"),
    Mutant("TPU: rows of the neighbouring expert", "pallas_kernels/grouped_matmul/mosaic_tpu.py", "first_tiles[owner] * tile + row",
           "first_tiles[owner] + row", "tests/pallas_kernels/test_grouped_matmul_mosaic_tpu.py -k group_sizes"),
    Mutant("TPU: third bit of a code one place low", "pallas_kernels/tpu_tiles.py", "1, channels) << 2)", "1, channels) << 1)",
           "tests/pallas_kernels/test_tpu_tiles.py"),
    Mutant("scale rounded down", "pallas_kernels/quantize.py", "np.float32(1 / steps), g.scale_dtype, up=True",
           "np.float32(1 / steps), g.scale_dtype, up=False",
           "tests/pallas_kernels/test_quantize.py"),
    Mutant("high bit of 3-bit codes one place low", "pallas_kernels/packing.py", ", 1) << 2)", ", 1) << 1)",
           "tests/pallas_kernels/test_packing.py"),
    Mutant("open page dropped but for the query", ATTENTION, "present = (positions < kv_lens[:, None]) &",
           "present = (positions == kv_lens[:, None] - 1) &", ORACLE),
    Mutant("wrong page", ATTENTION, "jnp.take(block_table, index, axis=1", "jnp.take(block_table, index + 1, axis=1", ORACLE),
    Mutant("page read as closed while it is open", ATTENTION, "closed = kv_format.closed_pages(kv_lens)",
           "closed = kv_format.closed_pages(kv_lens + 1)", ORACLE),
    Mutant("open pages in order of their age", ATTENTION,
           "positions = last - (last - jnp.arange(open_tokens, dtype=jnp.int32)) % open_tokens",
           "positions = last - open_tokens + 1 + jnp.arange(open_tokens, dtype=jnp.int32)", ORACLE),
    Mutant("Hopper: open pages in order of their age", "pallas_kernels/paged_attention/mosaic_gpu.py",
           "place = pl.ds(lax.rem(first, np.int32(self.call.fmt.open_tokens)), OPEN_TOKENS)",
           "place = pl.ds(first - base, OPEN_TOKENS)",
           "tests/pallas_kernels/test_paged_attention_mosaic_gpu.py -k several_open_pages"),
    Mutant("uniform attention", ATTENTION, "jnp.where(seen, jnp.exp(scores - m[..., None]), 0.0)", "jnp.where(seen, 1.0, 0.0)",
           ORACLE),
    Mutant("window one token wide of the mark", ATTENTION, "seen &= distance < sliding_window",
           "seen &= distance <= sliding_window", "tests/pallas_kernels/test_paged_attention_reference.py -k window"),
    Mutant("unowned values not masked", ATTENTION, "jnp.where(present[:, None, :, None], v.astype(jnp.float32), 0.0)",
           "v.astype(jnp.float32)", "tests/pallas_kernels/test_paged_attention_reference.py -k does_not_own"),
    Mutant("next token visible", ATTENTION, "(distance >= 0)", "(distance >= -1)",
           "tests/pallas_kernels/test_paged_attention_reference.py -k four_queries"),
    Mutant("sinks counted twice", ATTENTION,
           "(positions < (closed * page_size)[:, None]) & (positions >= kv_format.sink_tokens)",
           "(positions < (closed * page_size)[:, None]) & (positions >= 0)", ORACLE),
    Mutant("tiles overwrite the next expert", "pallas_kernels/grouped_matmul/reference.py", "jnp.where(inside, product,",
           "jnp.where(inside | True, product,", "tests/pallas_kernels/test_grouped_matmul_reference.py -k left_over"),
    Mutant("correction bias weighs", "pallas_kernels/fused_router/reference.py", "jnp.take_along_axis(scores_TE,",
           "jnp.take_along_axis(choice_TE,", "tests/pallas_kernels/test_fused_router_reference.py -k correction"),
    Mutant("page closed into the next place", "moejax/kv_cache.py", "oldest = ends // page_size - kv_format.open_pages",
           "oldest = ends // page_size - kv_format.open_pages + 1", "tests/moejax/test_kv_cache.py"),
    Mutant("quantised in every step", "moejax/kv_cache.py", "i, barred = jax.lax.optimization_barrier((i, opened))",
           "barred = opened", "tests/moejax/test_decode.py -k fills_no_page"),
    Mutant("newest page closed in place of the oldest", "moejax/kv_cache.py",
           "start = oldest[row] % kv_format.open_pages * page_size",
           "start = (oldest[row] - 1) % kv_format.open_pages * page_size", "tests/moejax/test_kv_cache.py"),
    Mutant("router weights always normalised", "pallas_kernels/fused_router/reference.py", "if rule.norm_topk_prob:", "if True:",
           "tests/pallas_kernels/test_fused_router_reference.py"),
    Mutant("padding ids sampled", "moejax/sampling.py", "logits = jnp.where(decodable[None], logits, -jnp.inf)", "logits = logits",
           "tests/moejax/test_sampling.py"),
    Mutant("balance loss without its factor", "moejax/train.py", "return routing.router_logits.shape[-1] * jnp.sum(",
           "return jnp.sum(", "tests/moejax/test_train.py -k by_hand"),
    Mutant("damaged checkpoint left in the way", "moejax/train_checkpoints.py", "self._set_aside(self.newest, steps[:i])", "pass",
           "tests/moejax/test_train.py -k set_aside"),
    Mutant("torn line left in place", "experiments/results.py", "os.ftruncate(fd, begin)", "pass",
           "tests/experiments/test_results.py"),
    Mutant("two trainings in one folder", "experiments/results.py", "fcntl.LOCK_EX | fcntl.LOCK_NB",
           "fcntl.LOCK_SH | fcntl.LOCK_NB", "tests/experiments/test_results.py -k lock"),
    Mutant("TPU: padding wakes experts", "pallas_kernels/fused_router/mosaic_tpu.py", "(taken & valid)", "taken",
           "tests/pallas_kernels/test_fused_router_mosaic_tpu.py -k tiles"),
    Mutant("TPU: of equal scores the higher expert", "pallas_kernels/fused_router/mosaic_tpu.py",
           "jnp.min(jnp.where((x == best) & ~taken, lane, float(x.shape[1]))",
           "jnp.max(jnp.where((x == best) & ~taken, lane, -1.0)",
           "tests/pallas_kernels/test_fused_router_mosaic_tpu.py -k ties"),
    Mutant("routing of random weights raised where it is chosen too often", "moejax/routing.py",
           "(quantile(frequencies_E) - quantile(chosen / FIT_TOKENS))", "(quantile(chosen / FIT_TOKENS) - quantile(frequencies_E))",
           "tests/moejax/test_routing.py -k asked_for"),
    Mutant("experts hit counted over all steps", "moejax/routing.py", "np.mean(np.sum(sizes > 0, axis=1))",
           "np.sum(sizes.sum(0) > 0)", "tests/moejax/test_routing.py -k each_step"),
    Mutant("bytes of experts as if routing were even", "experiments/random_decode.py", "(1 - hits / layer.mlp.num_experts)",
           "(1 - layer.mlp.rule.num_experts_per_tok / layer.mlp.num_experts) ** batch",
           "tests/experiments/test_decode.py -k skewed"),
    Mutant("random models made whatever there is", "experiments/random_decode.py",
           "    require_memory(packed_shapes(config, weights, param_dtype=jnp.bfloat16), formats, batch, max_len)\n", "",
           "tests/experiments/test_decode.py -k do_not_fit"),
    Mutant("packed experts counted as dense", "moejax/accounting.py", 'return "experts" if isinstance(config',
           'return "mlp" if isinstance(config',
           "tests/moejax/test_accounting.py -k held"),
    Mutant("the first rule of weights decides", "moejax/weight_rules.py", "if rule.matches(name)][-1:]",
           "if rule.matches(name)][:1]", f"{WEIGHT_RULES} -k last_rule"),
    Mutant("a rule that matches nothing is passed over", "moejax/weight_rules.py",
           'raise ValueError(f"{rule.said}: matches no matrix; there are {_listed(there)}")', "continue",
           f"{WEIGHT_RULES} -k refused"),
    Mutant("symmetric whatever the rule says", "moejax/packed.py",
           "group_size=group_size, symmetric=weight_format.symmetric)", "group_size=group_size)",
           f"{WEIGHT_RULES} -k holds"),
    Mutant("weights packed when all are read", "moejax/checkpoint.py", "            block.pack(of_block)\n", "            pass\n",
           f"{WEIGHT_RULES} -k before_the_next"),
    Mutant("what does not fit fails the sweep", "experiments/sweep.py", "    except accounting.DoesNotFitError as e:\n"
           "        record |= {\"status\": \"refused\", \"error\": cli.one_line(e)}\n", "", f"{SWEEP} -k do_not_fit"),
    Mutant("all points in one process", "experiments/sweep.py", "if sweep.alone else run_point(sweep",
           "if False else run_point(sweep", f"{SWEEP} -k process_for_every"),
    Mutant("kernels read float codes as integers", "pallas_kernels/grouped_matmul/served.py", "if w.layout.float_codes:",
           "if False:", "tests/pallas_kernels/test_grouped_matmul_mosaic_tpu.py -k float_codes"),
    Mutant("mxfp4 scales one power low", "pallas_kernels/qarray.py", "jnp.frexp(largest)[1] - 3", "jnp.frexp(largest)[1] - 4",
           "tests/pallas_kernels/test_qarray.py -k by_hand"),
    Mutant("compilation timed", "experiments/decode.py", "engine.generate(prompts, first, num_samples=num_samples)[0].ttft_ms",
           "0.0", "tests/experiments/test_decode.py -k one_repeat"),
)


def run_tests(tree: pathlib.Path, tests: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(tests)]
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax")}
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)


def copy_tree(folder: str) -> pathlib.Path:
    tree = pathlib.Path(folder)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(source, tree / name)
    return tree


def survives(tree: pathlib.Path, mutant: Mutant) -> str | None:
    """Why this mutant counts as a failure, or None when its tests caught it."""
    path = tree / mutant.path
    original = path.read_text()
    if original.count(mutant.old) != 1:
        return f"{mutant.old!r} occurs {original.count(mutant.old)} times in {mutant.path}, must be once"
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        done = run_tests(tree, mutant.tests)
    finally:
        path.write_text(original)
    if done.returncode == 1:  # pytest: tests were run and some failed
        return None
    return f"not caught (pytest exit code {done.returncode}): {done.stdout.strip().splitlines()[-1:]}"


def main(names: list[str]) -> int:
    chosen = [m for m in MUTANTS if not names or m.name in names]
    if unknown := set(names) - {m.name for m in MUTANTS}:
        print(f"error: unknown mutants {sorted(unknown)}; known are {[m.name for m in MUTANTS]}", file=sys.stderr)
        return 2
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(folder)
        for tests in dict.fromkeys(m.tests for m in chosen):
            if (baseline := run_tests(tree, tests)).returncode:
                print(f"{tests} fails without any mutant:\n{baseline.stdout[-2000:]}")
                return 1
        for mutant in chosen:
            why = survives(tree, mutant)
            print(f"{'caught' if why is None else 'SURVIVED'}  {mutant.name}{'' if why is None else ': ' + why}", flush=True)
            failures += why is not None
    print(f"{len(chosen) - failures} passed, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
