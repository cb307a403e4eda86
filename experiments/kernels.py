"""How fast is attention over the low-bit cache? `python -m experiments.kernels --spec=qwen3_30b_32k --kv_formats=k2v2`"""
from __future__ import annotations

import os
import re
import sys

# torch needs memory of its own on the same GPU. Must precede the first use of a device.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")

import jax
from tqdm import tqdm

from experiments import cli
from experiments.results import markdown_table
from pallas_kernels import bench, dispatch
from pallas_kernels.kv_format import KVFormat
from pallas_kernels.paged_attention.specs import SPECS

OP = "paged_attention"
FORMAT = re.compile(r"k(\d+)v(\d+)(?:\+(\d+)ch@(\d+))?(?:\+sink(\d+))?")
COLUMNS = {
    "spec": "", "kv_format": "", "effective_bits": ".2f", "implementation": "", "us": ".1f", "us_p10": ".1f", "us_p90": ".1f",
    "gb_per_s": ".0f", "bandwidth_pct": ".0f", "speedup_vs_torch": ".2f", "worst_error": ".4f", "status": ""}


@cli.configurable
def kernels(
    spec: list[str] = ["smollm2_135m_512"],  # noqa: B006 (never changed)
    kv_formats: list[str] = ["k16v16", "k4v4", "k3v3", "k2v2"],  # noqa: B006
    implementation: list[str] = ["all"],  # noqa: B006
    layout: str = "auto", calls: int = 100, repeats: int = 7, bandwidth_mib: int = 1024, seed: int = 0,
) -> cli.Work:
    """Checks, then times `paged_attention` over every given shape, cache format and implementation.

    Each kernel is compared with the float32 reference first, on short rows full of NaN where nothing is owned; a wrong one gets
    no time and exit code 1. Times are of calls inside one jitted loop, with scales, block table, open page and merge. Beside
    them, in the same run: the read bandwidth, and torch's bfloat16 flash attention of the same shape where torch has a GPU.

    Args:
      spec: named shapes of pallas_kernels/paged_attention/specs.py.
      kv_formats: cache formats: k2v2, k4v2+sink4, k2v2+16ch@8 (16 key channels at 8 bits), ...
      implementation: registered names, or all.
      layout: order of codes in a page; auto takes mma_sm90 on a GPU and linear elsewhere.
      calls: calls in the timed loop.
      repeats: times the loop is run.
      bandwidth_mib: MiB that the bandwidth measurement reads.
      seed: of all random numbers.
    """
    known = dispatch.implementations(OP)
    for flag, values, accepted in (("spec", spec, tuple(SPECS)), ("implementation", implementation, ("all", *known))):
        for value in values:
            if value not in accepted:
                raise ValueError(f"{flag}={value!r}: accepted are {', '.join(accepted)}")
    for flag, number in (("calls", calls), ("repeats", repeats), ("bandwidth_mib", bandwidth_mib)):
        if number < 1:
            raise ValueError(f"{flag}={number}: must be at least 1")
    if layout == "auto":
        layout = "mma_sm90" if jax.default_backend() == "gpu" else "linear"
    formats = [parse_format(text, layout) for text in kv_formats]
    for name in spec:
        for fmt in formats:
            fmt.page_layout(SPECS[name].head_dim)
    chosen = known if "all" in implementation else implementation

    def work() -> dict:
        bandwidth = bench.read_bandwidth(bandwidth_mib << 20)
        torch_us = {name: _torch_us(name, repeats) for name in spec}
        rows = []
        points = [(s, f, i) for s in spec for f in formats for i in chosen]
        for name, fmt, which in tqdm(points, unit="point", file=sys.stderr, dynamic_ncols=True):
            rows.append(_measure(name, fmt, which, bandwidth, torch_us[name], calls, repeats, seed))
            tqdm.write(str({key: value for key, value in rows[-1].items() if value is not None}), file=sys.stderr)
        print(markdown_table(rows, COLUMNS))
        wrong = any(row["status"] == "wrong" for row in rows)
        return {"device": jax.devices()[0].device_kind, "read_gb_per_s": bandwidth / 1e9, "torch_sdpa_us": torch_us,
                "layout": layout, "rows": rows, "exit_code": int(wrong)}

    return work


def parse_format(text: str, layout: str) -> KVFormat:
    """The format that e.g. "k2v2+16ch@8+sink4" names. Raises ValueError for other texts, and as `KVFormat` does."""
    match = FORMAT.fullmatch(text)
    if match is None:
        raise ValueError(f"kv_formats={text!r}: must look like k2v2, k4v2+sink4 or k2v2+16ch@8")
    k_bits, v_bits, channels, bits, sinks = (int(x or 0) for x in match.groups())
    return KVFormat(
        k_bits=k_bits, v_bits=v_bits, outlier_channels=channels, outlier_bits=bits or 8, sink_tokens=sinks, layout=layout)


def _torch_us(name: str, repeats: int) -> float | str:
    try:
        return bench.torch_seconds(SPECS[name], repeats) * 1e6
    except NotImplementedError as e:
        return f"not measured: {e}"


def _measure(
    name: str, fmt: KVFormat, implementation: str, bandwidth: float, torch_us: float | str, calls: int, repeats: int, seed: int,
) -> dict:
    spec, layout = SPECS[name], fmt.page_layout(SPECS[name].head_dim)
    row = {"spec": name, "kv_format": fmt.name, "implementation": implementation, "effective_bits": layout.effective_bits()}
    try:
        row["worst_error"] = float(bench.row_errors(spec, fmt, implementation, seed).max())
    except NotImplementedError as e:
        return {**row, "status": f"refused: {e}"}
    if not row["worst_error"] <= bench.MAX_ERROR:  # NaN is wrong too
        return {**row, "status": "wrong"}
    inputs = bench.make_inputs(spec, fmt, seed)
    timing = bench.seconds_per_call(
        bench.attention(spec, fmt, implementation), *inputs.arrays, calls=calls, repeats=repeats, **inputs.sinks)
    moved = bench.moved_bytes(spec, fmt)
    row |= {"us": timing.median * 1e6, "us_p10": timing.p10 * 1e6, "us_p90": timing.p90 * 1e6,
            "gb_per_s": moved / timing.median / 1e9, "bandwidth_pct": 100 * moved / timing.median / bandwidth}
    if isinstance(torch_us, float):
        row["speedup_vs_torch"] = torch_us / row["us"]
    return {**row, "status": "ok"}


if __name__ == "__main__":
    cli.main(kernels)
