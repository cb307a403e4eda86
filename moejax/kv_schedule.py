"""Cache formats layer by layer, and the JSON file that holds them.

    {"base": {"k_bits": 3, "v_bits": 2}, "layers": {"0": {"k_bits": 8}, "29": {"k_bits": 4, "v_bits": 4}}}

`base` holds fields of `KVFormat`, `layers` the fields in which a layer differs from it.
"""
from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from pallas_kernels.kv_format import KVFormat


def per_layer(kv_format: KVFormat | Sequence[KVFormat], num_layers: int) -> tuple[KVFormat, ...]:
    """One format a layer. Raises ValueError for anything else, a wrong number of formats, or more than one page size."""
    if isinstance(kv_format, KVFormat):
        return (kv_format,) * num_layers
    if not isinstance(kv_format, (list, tuple)) or not all(isinstance(f, KVFormat) for f in kv_format):
        raise ValueError(f"kv_format={kv_format!r}: must be a KVFormat, or a list of one for each of the {num_layers} layers")
    formats = tuple(kv_format)
    if len(formats) != num_layers:
        raise ValueError(f"{len(formats)} KV formats: the model has {num_layers} layers")
    if len(sizes := {f.page_size for f in formats}) > 1:
        raise ValueError(f"page_size={sorted(sizes)}: layers share the block table and must have one page size")
    return formats


def skip_layers(kv_format: KVFormat, num_layers: int, *, first: int = 0, last: int = 0) -> tuple[KVFormat, ...]:
    """`kv_format` for all but the `first` and `last` layers, whose cache stays at 16 bits.

    Raises:
      ValueError: negative numbers, or more than there are layers.
    """
    if first < 0 or last < 0 or first + last > num_layers:
        raise ValueError(f"skip_first_layers={first}, skip_last_layers={last}: must be at least 0 and together at most the "
                         f"model's {num_layers} layers")
    plain = KVFormat(page_size=kv_format.page_size)
    return tuple(plain if i < first or i >= num_layers - last else kv_format for i in range(num_layers))


def load(path: str | pathlib.Path, num_layers: int) -> tuple[KVFormat, ...]:
    """Reads a schedule file.

    Raises:
      ValueError: no JSON, unknown keys or fields, layers that the model does not have, values that `KVFormat` refuses.
      OSError: it cannot be read.
    """
    try:
        data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{path}: not a JSON file: {e}") from None
    if not isinstance(data, dict) or not set(data) <= {"base", "layers", "about"}:
        raise ValueError(f"{path}: must be an object with the keys base, layers and (free text) about")
    base = _format(path, "base", KVFormat(), data.get("base", {}))
    formats = [base] * num_layers
    layers = data.get("layers", {})
    if not isinstance(layers, dict):
        raise ValueError(f"{path}: layers={layers!r}: must be an object of layer numbers")
    for key, fields in layers.items():
        if not key.isdecimal() or int(key) >= num_layers:
            raise ValueError(f"{path}: layer {key!r}: the model has layers 0 … {num_layers - 1}")
        formats[int(key)] = _format(path, f"layer {key}", base, fields)
    return per_layer(formats, num_layers)


def dump(formats: Sequence[KVFormat], about: str = "") -> str:
    """The JSON text that `load` reads as these formats; `base` is the most frequent one."""
    base = max(dict.fromkeys(formats), key=list(formats).count)
    layers = {str(i): _difference(f, base) for i, f in enumerate(formats) if f != base}
    return json.dumps({"about": about, "base": _difference(base, KVFormat()), "layers": layers}, indent=1) + "\n"


def effective_bits(formats: Sequence[KVFormat], head_dim: int) -> float:
    """Mean over the layers of the bits a stored element takes in closed pages, all overheads included."""
    return sum(f.page_layout(head_dim).effective_bits() for f in formats) / len(formats)


def effective_bits_at(formats: Sequence[KVFormat], head_dim: int, tokens: int) -> float:
    """The same at a sequence length of `tokens`, open pages and sinks included."""
    return sum(f.page_layout(head_dim).effective_bits_at(tokens) for f in formats) / len(formats)


def name(formats: Sequence[KVFormat]) -> str:
    """Short label: the format's name, or "mixed(name x layers, ...)"."""
    counts = {f: list(formats).count(f) for f in dict.fromkeys(formats)}
    if len(counts) == 1:
        return formats[0].name
    return "mixed(" + ", ".join(f"{f.name} x{n}" for f, n in counts.items()) + ")"


def _format(path, where: str, base: KVFormat, fields) -> KVFormat:
    known = {f.name for f in dataclasses.fields(KVFormat)}
    if not isinstance(fields, dict) or not set(fields) <= known:
        raise ValueError(f"{path}: {where}: {fields!r}: must be an object of fields of KVFormat: {', '.join(sorted(known))}")
    try:
        return dataclasses.replace(base, **fields)
    except ValueError as e:
        raise ValueError(f"{path}: {where}: {e}") from None


def _difference(kv_format: KVFormat, base: KVFormat) -> dict:
    a, b = dataclasses.asdict(kv_format), dataclasses.asdict(base)
    return {key: value for key, value in a.items() if value != b[key]}
