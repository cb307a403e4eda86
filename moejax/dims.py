"""The one place where a dimension letter is defined.

Array names end in the letters of their axes (`x_BTD`, `w_gate_EDF`). For parameters the letters also decide how an array is
sharded: letter -> logical axis here, logical axis -> mesh axis in `moejax.sharding`.
"""
from __future__ import annotations

DIMS = {
    "B": "decode slots (batch)",
    "T": "query tokens",
    "S": "key/value positions",
    "D": "model width",
    "N": "query heads",
    "K": "KV heads",
    "H": "head dimension",
    "G": "query heads per KV head",
    "E": "experts",
    "X": "experts chosen per token",
    "F": "hidden width of an expert or a dense MLP",
    "V": "vocabulary",
    "L": "layers",
    "P": "physical pages in the pool",
    "J": "logical pages per sequence",
    "Z": "page size, tokens",
    "U": "quantisation groups along the quantised axis",
    "M": "rows of a grouped matmul: (token, chosen expert) pairs",
}

LOGICAL_AXES = {
    "B": "batch",
    "D": "embed",
    "N": "heads",
    "K": "kv_heads",
    "E": "expert",
    "F": "ffn",
    "V": "vocab",
}


def letters_of(name: str, ndim: int) -> str:
    """The axis letters of a parameter name: "w_gate_EDF" -> "EDF".

    Raises:
      ValueError: the name does not end in `ndim` letters of `DIMS`.
    """
    letters = name.rpartition("_")[2]
    if len(letters) != ndim or not set(letters) <= set(DIMS):
        raise ValueError(f"{name=}: must end in {ndim} dimension letters out of {''.join(DIMS)}")
    return letters
