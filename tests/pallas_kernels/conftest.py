import pytest


@pytest.fixture(autouse=True)
def _strict(strict_promotion):
    """All kernel tests run with strict dtype promotion."""
