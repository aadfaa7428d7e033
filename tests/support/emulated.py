"""The CUDA backend without a GPU: loads the module that tests/emulator builds, and puts it behind eaglex.engine."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# Where `make build` leaves it; EAGLEX_EMULATED names the folder of another build.
FOLDER = Path(os.environ.get("EAGLEX_EMULATED") or ROOT / "build" / str(sys.implementation.cache_tag) / "emulated")


def find() -> Path | None:
    """The module's file, None where it was not built."""
    names = (FOLDER / f"_C{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in names if path.exists()), None)


def require() -> Path:
    """The module's file; without it the test is skipped, and fails in CI."""
    path = find()
    if path is None:
        leave = pytest.fail if os.environ.get("CI") else pytest.skip
        leave(f"no module in {FOLDER}; EAGLEX_EMULATOR=ON builds it")
    return path


def load(path: Path) -> ModuleType:
    """Under a name of its own, so that eaglex._C may be loaded beside it."""
    spec = importlib.util.spec_from_file_location("emulated._C", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_fake_nccl(path: Path) -> None:
    """Into this process, as the libnccl that the bridge finds; `path` is the module's, which is loaded."""
    fake, device = ctypes.CDLL(str(path.parent / "nccl" / "libnccl.so.2")), ctypes.CDLL(str(path))
    ends = (device.eaglex_emulator_enter, device.eaglex_emulator_leave)
    fake.fake_nccl_driver(*(ctypes.cast(end, ctypes.c_void_p) for end in ends))


@contextlib.contextmanager
def held(library: ctypes.CDLL) -> Iterator[None]:
    """What is launched until the end waits for it."""
    library.eaglex_emulator_hold()
    try:
        yield
    finally:
        library.eaglex_emulator_release()


class Emulator:
    """Engines that are built while `installed` run the CUDA backend on tensors of the CPU."""

    def __init__(self, path: Path) -> None:
        self.module = load(path)
        self._library = ctypes.CDLL(str(path))
        self._library.eaglex_emulator_pending.restype = ctypes.c_size_t

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Engines and bridges that are made meanwhile are of this module."""
        with pytest.MonkeyPatch.context() as patch:
            for part in ("engine", "bridge", "bridge_dedicated"):
                patch.setattr(f"eaglex.{part}._extension", lambda: self.module)
            yield

    @contextlib.contextmanager
    def lagging(self) -> Iterator[None]:
        """Until the end the device works only when waited for, and does one launch when asked how far it is."""
        with held(self._library):
            yield

    @property
    def pending(self) -> int:
        """Launches that the lagging device has not begun."""
        return int(self._library.eaglex_emulator_pending())
