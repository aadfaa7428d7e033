"""The SGLang sources that the contract tests read, and the helpers beside this file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers; spawned processes inherit the path

import fetch_wheels

from eaglex.hosts.sglang import compat


def package_of(version: str) -> Path:
    """The folder `sglang/` of a version's unpacked wheel."""
    package = fetch_wheels.cache() / version / "sglang"
    if not package.is_dir():
        reason = f"the sources of SGLang {version} are not in {fetch_wheels.cache()}: run tests/hosts/fetch_wheels.py"
        if os.environ.get("EAGLEX_REQUIRE_SGLANG") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return package


@pytest.fixture(scope="session", params=compat.READ_VERSIONS)
def host(request: pytest.FixtureRequest) -> Path:
    """Each version whose contract is read."""
    return package_of(request.param)


@pytest.fixture(scope="session", params=compat.RUN_VERSIONS)
def running_host(request: pytest.FixtureRequest) -> Path:
    """Each version that the worker runs on."""
    return package_of(request.param)
