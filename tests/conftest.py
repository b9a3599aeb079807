"""Shared by all tests: the order (fast first), the --fast option, paths to evidence."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Tests that start kernels, browsers or builds come after the fast ones, in this order.
LAST = ("test_report", "test_setup", "e2e")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out the tests marked slow")


def _rank(item: pytest.Item) -> int:
    parts = item.path.with_suffix("").relative_to(ROOT / "tests").parts
    for rank, name in enumerate(LAST, start=1):
        if name in parts:
            return rank
    return 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_rank)  # stable: the order within a file stays
    if config.getoption("--fast"):
        skip = pytest.mark.skip(reason="slow, left out by --fast")
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def evidence() -> Path:
    """Folder with the measurements the model was fitted to; not part of the project.

    PERFMODEL_EVIDENCE names it; by default it is looked for beside the checkout.  Tests that
    compare with it are skipped, visibly, where it isn't there.
    """
    folder = Path(os.environ.get("PERFMODEL_EVIDENCE") or ROOT.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"no measurements: {folder} is not there (set PERFMODEL_EVIDENCE)")
    return folder
