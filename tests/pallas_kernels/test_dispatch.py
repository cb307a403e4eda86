import logging
import types

import jax
import pytest

from pallas_kernels import dispatch


@pytest.fixture
def op(monkeypatch):
    """An op of three: "picky" serves only x > 0, "broad" everything, "never" stands in no order."""
    monkeypatch.setattr(dispatch, "_registry", {})
    monkeypatch.setattr(dispatch, "_served", {})
    monkeypatch.setattr(dispatch, "PLATFORM_ORDER", {"cpu": ("absent", "picky", "broad")})

    def picky(x):
        if x == 0:
            raise ValueError("x=0: must not be zero")
        if x < 0:
            raise NotImplementedError(f"x={x} is negative")
        return "picky"

    dispatch.register("op", "picky", picky)
    dispatch.register("op", "broad", lambda x: "broad")
    dispatch.register("op", "never", picky)
    return "op"


def test_the_first_that_can_serve_runs_and_is_reported(op, caplog):
    assert dispatch.last_implementation(op) is None
    assert dispatch.call(op, None, 1) == "picky" == dispatch.last_implementation(op)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert dispatch.call(op, None, -1) == "broad" == dispatch.last_implementation(op)
    assert "picky refused: x=-1 is negative" in caplog.text


def test_a_named_implementation_never_falls_back(op):
    assert dispatch.call(op, "broad", 1) == "broad"
    with pytest.raises(NotImplementedError, match="op: no implementation can serve this call; picky refused: x=-1 is negative"):
        dispatch.call(op, "picky", -1)


def test_wrong_input_passes_through(op):
    with pytest.raises(ValueError, match="x=0"):
        dispatch.call(op, None, 0)


def test_unknown_names_are_listed(op):
    assert dispatch.implementations(op) == ("picky", "broad", "never")
    with pytest.raises(ValueError, match="implementation='fast': accepted are None, picky, broad, never"):
        dispatch.call(op, "fast", 1)
    with pytest.raises(ValueError, match="op='other'"):
        dispatch.call("other", None, 1)
    with pytest.raises(ValueError, match="'picky' is registered already"):
        dispatch.register(op, "picky", print)


@pytest.mark.parametrize("op", ["close_page", "grouped_matmul", "paged_attention"])
def test_kernels_name_the_device_that_they_do_not_run_on(op, monkeypatch):
    for name, chip in (("mosaic_gpu", "NVIDIA Hopper"), ("mosaic_tpu", "TPU")):
        with pytest.raises(NotImplementedError, match=f"{name}: runs on {chip}, not on cpu"):
            dispatch.call(op, name)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(compute_capability="8.0")])
    with pytest.raises(NotImplementedError, match="not on a GPU of capability='8.0'"):
        dispatch.call(op, "mosaic_gpu")
