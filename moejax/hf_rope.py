"""The RoPE settings of a config.json, in the spelling before transformers 5 (`rope_theta`, `rope_scaling`) and after it
(`rope_parameters`)."""
from __future__ import annotations

from typing import Any

from moejax.config import ROPE_KINDS, RopeConfig, require_in

_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_READ_BY = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", *_YARN),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}


def read_rope(fields, max_position_embeddings: int, default_theta: float) -> RopeConfig:
    """RopeConfig out of the `Fields` of a config.json.

    Raises:
      ValueError: unknown kind, missing, contradictory or unread setting; the message names it.
    """
    settings = {key: value for key, value in _settings(fields).items() if value is not None}
    theta = settings.pop("rope_theta", None)
    kinds = [settings.pop(key) for key in ("rope_type", "type") if key in settings] or ["default"]
    for kind in kinds:
        require_in("config.json: rope_type", kind, ROPE_KINDS)
    if len(set(kinds)) > 1:
        raise ValueError(f"config.json: RoPE has two types, {', '.join(sorted(kinds))}")
    kind = kinds[0]
    outer_theta = fields.get("rope_theta", default=None)
    if theta is not None and outer_theta is not None and theta != outer_theta:
        raise ValueError(f"config.json: rope_theta={outer_theta} and rope_theta={theta} of the RoPE parameters disagree")
    partial = fields.get("partial_rotary_factor", default=None), settings.pop("partial_rotary_factor", None)
    if any(value not in (None, 1, 1.0) for value in partial):
        raise ValueError(f"config.json: partial_rotary_factor={partial[0] or partial[1]}: only 1.0 is supported")
    _take_original_length(fields, settings, kind, max_position_embeddings)
    if settings.get("factor") == 1 and kind == "default":
        del settings["factor"]
    unread = sorted(set(settings) - set(_READ_BY[kind]))
    if unread:
        raise ValueError(f"config.json: rope_type {kind} does not read " + ", ".join(f"{k}={settings[k]!r}" for k in unread))
    if kind == "yarn" and "factor" not in settings:
        settings["factor"] = max_position_embeddings / settings["original_max_position_embeddings"]
    missing = [key for key in _READ_BY[kind] if key not in settings and key not in _YARN]
    if missing:
        raise ValueError(f"config.json: rope_type {kind} needs {', '.join(missing)}")
    for key in ("beta_fast", "beta_slow"):
        if not settings.get(key, True):  # 0 means the default
            del settings[key]
    chosen = next(value for value in (theta, outer_theta, default_theta) if value is not None)
    return RopeConfig(kind=kind, theta=chosen, **settings)


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """The config.json entries of `rope`, in both spellings, so that every transformers release reads the same."""
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    for key in _READ_BY[rope.kind]:
        if getattr(rope, key) is not None:
            scaling[key] = getattr(rope, key)
    return {"rope_theta": rope.theta, "rope_scaling": None if rope.kind == "default" else scaling,
            "rope_parameters": {**scaling, "rope_theta": rope.theta}}


def _settings(fields) -> dict[str, Any]:
    old, new = fields.get("rope_scaling", default={}), fields.get("rope_parameters", default={})
    for name, value in (("rope_scaling", old), ("rope_parameters", new)):
        if not isinstance(value, dict):
            raise ValueError(f"config.json: {name}={value!r}: must be an object")
    differing = [key for key in old.keys() & new.keys() if old[key] != new[key]]
    if differing:
        raise ValueError(f"config.json: rope_scaling and rope_parameters disagree about {', '.join(sorted(differing))}")
    return {**new, **old}


def _take_original_length(fields, settings: dict[str, Any], kind: str, max_position_embeddings: int) -> None:
    """Puts the context length before scaling into `settings` where `kind` reads it, and refuses it where it would be lost."""
    name = "original_max_position_embeddings"
    outer = fields.get(name, default=None)
    if kind in ("yarn", "llama3"):
        # A value beside the RoPE parameters wins over one among them, as in transformers.
        settings[name] = outer if outer is not None else settings.get(name, max_position_embeddings)
        return
    for value in (outer, settings.pop(name, None)):
        if value not in (None, max_position_embeddings):
            raise ValueError(f"config.json: rope_type {kind} does not read {name}={value}")
