"""Is a kernel right, and how fast is it: `python -m experiments.kernels --spec=qwen3_30b_32k --formats=k4v4,k2v2`.

Every op x implementation x named shape x cache format is compared with a float64 computation first, and timed when it is right
(`pallas_kernels.bench`). In the same run, in the same way, the device's read bandwidth is measured, and what there is without these
kernels (`kernel_baselines`): torch's attention over a bfloat16 cache, `lax.ragged_dot` over bfloat16 experts.
"""
from __future__ import annotations

import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch works on the same card; must precede the use of a device

import jax
from tqdm import tqdm

from experiments import cli, kernel_baselines, results
from pallas_kernels import bench, bench_cases, dispatch
from pallas_kernels.close_page.specs import SPECS as CLOSE_PAGE_SPECS
from pallas_kernels.grouped_matmul.specs import SPECS as MATMUL_SPECS
from pallas_kernels.grouped_matmul.specs import GroupedMatmulSpec
from pallas_kernels.kv_format import KVFormat
from pallas_kernels.paged_attention.specs import SPECS as ATTENTION_SPECS
from pallas_kernels.paged_attention.specs import PagedAttentionSpec

SPECS: dict[str, dict[str, Any]] = {
    "paged_attention": ATTENTION_SPECS, "close_page": CLOSE_PAGE_SPECS, "grouped_matmul": MATMUL_SPECS}
DEFAULT_SPECS = {
    "paged_attention": ("qwen3_30b_32k", "qwen3_30b_32k_ragged", "qwen3_30b_b64_32k", "qwen3_30b_b64_32k_ragged",
                        "qwen3_30b_b1_128k", "qwen3_30b_b1_128k_ragged"),
    "close_page": ("qwen3_30b_b16_k2v2", "burst_k2v2"),
    "grouped_matmul": tuple(f"qwen3_30b_b{batch}_{part}_int4" for batch in (1, 16, 64) for part in ("gate_up", "down")),
}
CPU_SPECS = {"paged_attention": ("smollm2_135m_512",), "close_page": ("one_slot_k2v2",), "grouped_matmul": ("tiny_int4",)}
DEFAULT_FORMATS = ("k2v2", "k3v3", "k4v4", "k16v16", "k2v2+16ch@4", "k2v2+16ch@8")
FORMAT = re.compile(r"k(\d+)v(\d+)(?:\+(\d+)ch@(\d+))?(?:\+sink(\d+))?(?:\+rot-(k?v?))?(?:\+clip-(k?v?))?")
READ_BYTES = {"gpu": 1 << 30, "tpu": 1 << 30, "cpu": 1 << 26}
MIB = 1 << 20
COLUMNS = {"op": "", "implementation": "", "spec": "", "format": "", "us_p50": ".1f", "us_p10": ".1f", "us_p90": ".1f",
           "gb_per_s": ",.1f", "read_bandwidth_pct": ".1f", "speedup_over_baseline": ".2f", "relative_l2_error": ".1e",
           "status": ""}


@cli.configurable
def kernels(
    op: list[str] = ["paged_attention"],  # noqa: B006 (never changed)
    implementation: list[str] = ["all"],  # noqa: B006
    spec: list[str] | None = None,
    formats: list[str] | None = None,
    layout: str | None = None,
    repeats: int = 11,
    min_ms: float = 20.0,
    working_set_mib: int = 256,
    baselines: bool = True,
) -> cli.Work:
    """Checks and times kernels: us a call (median, p10, p90), GB/s of what must move, % of read bandwidth, speed-up.

    Exit code 1 when an implementation gives wrong results, or does not compile or run. Lists may be separated by commas.

    Args:
      op: paged_attention, close_page, grouped_matmul.
      implementation: names, or all that are registered; one that cannot serve a call gets a row with its reason.
      spec: named shapes (pallas_kernels/OP/specs.py), or all. By default those of the benchmark; on CPU one that is tiny.
      formats: cache formats as tables name them, e.g. k2v2+16ch@8+sink4. By default six; for close_page what the shape names.
        Shapes of grouped_matmul say what their weights are.
      layout: of the pages; by default mma_sm90 on GPU and tpu on TPU, where the format can be stored so, else linear.
      repeats: samples a time is the median of.
      min_ms: a sample is the difference of two loops of calls; how much longer the long one takes.
      working_set_mib: calls take turns over pools, or over draws of experts, that together take at least this (an H200's L2 is
        60 MB).
      baselines: also time torch's scaled_dot_product_attention (flash, bfloat16), and lax.ragged_dot with bfloat16 experts.
    """
    for name, value, least in (("repeats", repeats, 1), ("working_set_mib", working_set_mib, 0)):
        if value < least:
            raise ValueError(f"{name}={value}: must be at least {least}")
    if not min_ms > 0:
        raise ValueError(f"{min_ms=}: must be positive")
    names = {"op": split(op), "implementation": split(implementation), "spec": split(spec), "formats": split(formats)}
    runs = plan(**names, layout=layout)
    timing = {"repeats": repeats, "min_s": min_ms / 1e3}
    return lambda: Bench(timing, working_set_mib * MIB, baselines).work(runs)


@dataclasses.dataclass(frozen=True)
class Run:
    """One row of the table."""

    op: str
    spec_name: str
    spec: Any
    kv_format: KVFormat | None  # None: the shape says what the weights are
    implementation: str

    @property
    def names(self) -> dict[str, Any]:
        """The format's columns."""
        if self.kv_format is None:
            return {"format": self.spec.format_name, "layout": "packed", "effective_bits": self.spec.effective_bits()}
        layout = self.kv_format.page_layout(self.spec.head_dim)
        return {"format": self.kv_format.name, "layout": self.kv_format.layout, "effective_bits": layout.effective_bits()}


def split(names: Sequence[str] | None) -> list[str]:
    """The names of a repeated flag whose values may be lists themselves."""
    return [part.strip() for item in names or () for part in item.split(",")]


def plan(op: list[str], implementation: list[str], spec: list[str], formats: list[str], layout: str | None) -> list[Run]:
    """Every row to be measured, in order: what shares inputs stands together.

    Raises:
      ValueError: a name that is unknown, or known to none of the chosen ops; a format that cannot be stored, or for no op with a
        cache.
    """
    choose("op", op, SPECS)
    if op == ["grouped_matmul"] and (formats or layout):
        raise ValueError(f"{formats=}, {layout=}: are of caches; op='grouped_matmul' has its format in the name of the shape")
    known = {name: dispatch.implementations(name) for name in op}
    choose("implementation", implementation, ["all", *dict.fromkeys(sum(known.values(), ()))])
    if spec:
        choose("spec", spec, ["all", *(s for name in op for s in SPECS[name])])
    parsed = [parse_format(text) for text in formats]
    defaults = CPU_SPECS if jax.default_backend() == "cpu" else DEFAULT_SPECS
    runs = []
    for name in op:
        for spec_name in SPECS[name] if "all" in spec else spec or defaults[name]:
            shape = SPECS[name].get(spec_name)
            if shape is None:  # another op's
                continue
            kv_formats = [None] if isinstance(shape, GroupedMatmulSpec) else formats_for(shape, parsed, layout)
            for f in kv_formats:
                runs += [Run(name, spec_name, shape, f, i) for i in known[name] if "all" in implementation or i in implementation]
    return list(dict.fromkeys(runs))


def choose(flag: str, names: list[str], accepted) -> None:
    """Raises ValueError for no name and for one that is not accepted."""
    for name in names or [""]:
        if name not in accepted:
            raise ValueError(f"{flag}={name!r}: accepted are {', '.join(accepted)}")


def parse_format(text: str) -> KVFormat:
    """The format that `KVFormat.name` calls so. Raises ValueError for any other text and for fields out of what is accepted."""
    match = FORMAT.fullmatch(text)
    if match is not None:
        k_bits, v_bits, channels, channel_bits, sinks = (int(x or 0) for x in match.groups()[:5])
        rotated, clipped = (x or "" for x in match.groups()[5:])
        f = KVFormat(
            k_bits=k_bits, v_bits=v_bits, sink_tokens=sinks, outlier_channels=channels,
            outlier_bits=channel_bits if channels else KVFormat.outlier_bits,
            k_rotation="hadamard" if "k" in rotated else "none", v_rotation="hadamard" if "v" in rotated else "none",
            k_range="clipped" if "k" in clipped else "minmax", v_range="clipped" if "v" in clipped else "minmax")
        if f.name == text:
            return f
    raise ValueError(f"formats={text!r}: must look like k2v2+16ch@8+sink4+rot-kv+clip-k, each part after the bits optional")


def formats_for(spec, parsed: list[KVFormat], layout: str | None) -> list[KVFormat]:
    """The formats to measure `spec` in. Raises ValueError for one that its heads cannot be stored in."""
    page_size = spec.page_size if isinstance(spec, PagedAttentionSpec) else spec.kv_format.page_size
    if not parsed:
        parsed = ([parse_format(text) for text in DEFAULT_FORMATS] if isinstance(spec, PagedAttentionSpec) else [spec.kv_format])
    return [dispatch.with_layout(dataclasses.replace(f, page_size=page_size), layout, spec.head_dim) for f in parsed]


class Bench:
    """Measures rows one after the other. `timing`: repeats and min_s, as of `bench.sample`."""

    def __init__(self, timing: dict[str, Any], working_set_bytes: int, baselines: bool):
        self.timing, self.working_set_bytes, self.baselines = timing, working_set_bytes, baselines

    def work(self, runs: list[Run]) -> dict:
        read = bench.read_bandwidth(READ_BYTES[jax.default_backend()], **self.timing)
        rows: list[dict] = []
        with tqdm(total=len(runs), unit="kernel", file=sys.stderr, dynamic_ncols=True) as bar:
            for _, same_spec in itertools.groupby(runs, lambda run: (run.op, run.spec_name)):
                group = list(same_spec)
                baseline = self.baseline(group[0])
                if "us_p50" in baseline:
                    rows.append(self.baseline_row(group[0], baseline, read))
                for kv_format, same_inputs in itertools.groupby(group, lambda run: run.kv_format):
                    case = bench_cases.case(group[0].op, group[0].spec, kv_format, working_set_bytes=self.working_set_bytes)
                    for run in same_inputs:
                        rows.append(self.row(run, case, baseline, read))
                        bar.write(" ".join(cell(rows[-1], key, form) for key, form in COLUMNS.items()), file=sys.stderr)
                        bar.update()
                    del case  # frees its memory
        return self.report(rows, read)

    def report(self, rows: list[dict], read: dict) -> dict:
        table = [{key: cell(row, key, form) for key, form in COLUMNS.items()} for row in rows]
        print(results.markdown_table(table, dict.fromkeys(COLUMNS, "")))
        bad = sum(row["status"].startswith(("wrong", "failed")) for row in rows)
        overhead = bench.loop_overhead(jax.numpy.ones((16, 1, 32, 128), "bfloat16"), **self.timing)
        return {
            "device": jax.devices()[0].device_kind, "platform": jax.default_backend(), "read_gb_per_s": read["gb_per_s"],
            "loop_overhead_us": overhead["us_p50"], "repeats": self.timing["repeats"],
            "working_set_bytes": self.working_set_bytes, "tolerance_relative_l2": bench.TOLERANCE, "rows": rows,
            "wrong_or_failed": bad, "exit_code": 1 if bad else 0,
        }

    def row(self, run: Run, case: bench.Case, baseline: dict, read: dict) -> dict:
        """One line of the table, and what is not shown there."""
        measured = bench.measure(case, run.implementation, **self.timing)
        row = {
            "op": run.op, "implementation": run.implementation, "spec": run.spec_name, **run.names,
            "bytes_moved": case.bytes_moved, **measured, "read_bandwidth_pct": percent(measured, read),
            "baseline_us_p50": baseline.get("us_p50"), "baseline_not_measured": baseline.get("reason"),
            "speedup_over_baseline": None}
        if measured.get("us_p50") and baseline.get("us_p50"):
            row["speedup_over_baseline"] = baseline["us_p50"] / measured["us_p50"]
        return row

    def baseline_row(self, run: Run, baseline: dict, read: dict) -> dict:
        return {"op": run.op, "spec": run.spec_name, "format": "bfloat16", "status": "ok", **baseline,
                "read_bandwidth_pct": percent(baseline, read)}

    def baseline(self, run: Run) -> dict:
        """`Samples.summary`, implementation and bytes_moved of what there is besides, or the reason why there is nothing."""
        if not self.baselines:
            return {"reason": "--nobaselines"}
        return kernel_baselines.measure(run.op, run.spec, self.working_set_bytes, self.timing)


def percent(measured: dict, read: dict) -> float | None:
    """The rate in percent of the read bandwidth."""
    rate, most = measured.get("gb_per_s"), read["gb_per_s"]
    return 100 * rate / most if rate and most else None


def cell(row: dict, key: str, form: str) -> str:
    """Text of one table cell."""
    value = row.get(key)
    if value is None:
        reason = row.get("baseline_not_measured")
        return f"not measured: {reason}" if key == "speedup_over_baseline" and reason else "-"
    return format(value, form)


if __name__ == "__main__":
    cli.main(kernels)
