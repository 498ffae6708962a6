"""Fixtures of the tests that need an accelerator. Without `--device` they are skipped."""

import pytest

from tests.accelerators import CPU, chosen

collect_ignore = ["fake.py"]  # doctests would import it, and torch fails with a fake device beside a real one


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test with float64, and without it, as on MPS, where the device can refuse it."""
    if "accelerator" in metafunc.fixturenames:
        kinds = [True, False] if chosen.fake else [True]
        metafunc.parametrize("accelerator", kinds, ids=["float64", "no_float64"][: len(kinds)], indirect=True)


@pytest.fixture
def accelerator(request):
    """Return the device that `--device` names; the fake one twice, with float64 and without."""
    if chosen.device == CPU:
        pytest.skip("needs an accelerator: --device fake, cuda, mps or xpu")
    if chosen.fake:
        chosen.fake.allow_float64(request.param)
    yield chosen.device
    if chosen.fake:
        chosen.fake.allow_float64(True)


@pytest.fixture
def fake():
    """Return the module of the fake device, whose counters begin at 0."""
    if chosen.fake is None:
        pytest.skip("needs the fake device: --device fake")
    chosen.fake.reset()
    yield chosen.fake
    chosen.fake.allow_float64(True)
    chosen.fake.limit_memory(0)
