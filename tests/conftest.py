"""What all tests share: one thread per worker, fixed seeds, `gpu` tests skipped where there is no GPU."""

import os

# Before torch is imported: xdist already uses every core, and threads of several workers would fight for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import doors
import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(doors.sizes(doors.sources()))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
