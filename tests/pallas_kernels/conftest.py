import pytest


@pytest.fixture(autouse=True)
def _strict(strict_promotion):
    """All kernel tests run with strict dtype promotion."""


@pytest.fixture
def no_races(capfd):
    """The interpreter of Hopper kernels prints the races that it finds, and goes on."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out
