#!/usr/bin/env python3
"""Download the SGLang wheels that the contract tests read, and unpack their Python sources.

    fetch_wheels.py            # the versions in eaglex/hosts/sglang/compat.py, about 60 MB once

They go into $EAGLEX_SGLANG_WHEELS, by default a folder of the user's cache. No dependency is downloaded and nothing is
installed. The tests are skipped where the sources are missing, unless EAGLEX_REQUIRE_SGLANG=1.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = {  # version -> SHA-256 of the CPython 3.12 wheel for x86-64 Linux; the sources are the same in every wheel
    "0.5.17": "fb4cba478a5dca5ee146550b39f33add1c4e475d21ee11810b86ed1c58068093",
    "0.5.23": "8d257a319395b322bb1be327d05e5528859358153c8563b04c0a4a3c8af164b6",
}
LEFT_OUT = ("sglang/multimodal_gen/", "sglang/test/")


def cache() -> Path:
    """Where the unpacked sources are kept, one folder per version."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eaglex" / "sglang"
    return Path(os.environ.get("EAGLEX_SGLANG_WHEELS") or default)


def download(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--python-version", "3.12", "--implementation", "cp", "--abi", "cp312"]
    command += ["--platform", "manylinux_2_34_x86_64"]
    subprocess.run([*command, f"sglang=={version}"], check=True)
    (wheel,) = folder.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEELS[version]:
        sys.exit(f"fetch_wheels: {wheel.name} has SHA-256 {digest}, expected {WHEELS[version]}")
    return wheel


def fetch(version: str) -> Path:
    """The folder that holds `sglang/` of this version; downloaded if it is not there yet."""
    place = cache() / version
    if place.is_dir():
        return place
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache()) as folder:
        unpacked = Path(folder) / "unpacked"
        with zipfile.ZipFile(download(version, Path(folder))) as wheel:
            for member in wheel.namelist():
                wanted = member.endswith(".py") or ".dist-info/" in member
                if wanted and not member.startswith(LEFT_OUT):
                    wheel.extract(member, unpacked)
        unpacked.rename(place)  # last, so that a folder that exists is whole
    return place


if __name__ == "__main__":
    for wanted_version in WHEELS:
        print(fetch(wanted_version))
