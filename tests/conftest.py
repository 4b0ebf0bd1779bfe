"""What every test shares: tolerances, one thread, a fixed seed, untouched tables, no GPU tests without a GPU."""

import random
import signal
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from hyperball import angular, radial

# Relative and absolute error of a short chain of operations whose result is of order one.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}

settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it


def tolerance(dtype: torch.dtype, factor: float = 1.0) -> dict[str, float]:
    """`rtol` and `atol` for `torch.testing.assert_close`; a longer chain (a gradient) passes a `factor`."""
    return {"rtol": factor * TOLERANCES[dtype], "atol": factor * TOLERANCES[dtype]}


@pytest.fixture(scope="session", name="tolerance")
def tolerance_fixture() -> Callable[..., dict[str, float]]:
    return tolerance


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (scikit-learn and foolbox draw from the global generator)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_compiled_code_from_other_tests() -> None:
    # Recompilations are counted per function over the whole process, and the limit is 8.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # two workers share the machine, and sums keep one order


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def tables_as_they_were() -> Iterator[None]:
    """Rows that a test registers are gone when it ends, so that no test depends on which ran before it."""
    tables = (radial.TABLE.rows, angular.TABLE.rows)
    before = [dict(rows) for rows in tables]
    yield
    for rows, known in zip(tables, before, strict=True):
        rows.clear()
        rows.update(known)
