"""GPU memory of one process beside others, by a driver that only pretends."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eaglex.hosts.sglang import process_memory
from eaglex.hosts.sglang.draft_memory import Ledger

DEVICE = torch.device("cuda:0")


class Driver:
    """NVML of a GPU on which `processes` (pid, bytes) are."""

    def __init__(self, processes: list[tuple[int, int]], *, fails: str = "") -> None:
        self.processes, self.fails, self.asked = processes, fails, b""

    def nvmlInit_v2(self) -> int:
        return int(self.fails == "init")

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        self.asked = uuid
        return 6 * (self.fails == "handle")

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, found: Any) -> int:
        assert count._obj.value >= len(self.processes)
        count._obj.value = len(self.processes)
        for place, (pid, used) in enumerate(self.processes):
            found[place].pid, found[place].used = pid, used
        return 7 * (self.fails == "processes")


def given(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    return driver


def test_the_structure_is_that_of_the_header() -> None:
    """nvml.h: unsigned pid, unsigned long long usedGpuMemory, two unsigned instance ids."""
    assert ctypes.sizeof(process_memory._Process) == 24
    assert process_memory._Process.used.offset == 8


def test_this_process_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = given(Driver([(1, 500), (os.getpid(), 700), (2, 900)]), monkeypatch)
    assert process_memory.used_here(DEVICE) == 700
    assert driver.asked == b"GPU-abc"


@pytest.mark.parametrize("processes", [[], [(1, 500)], [(os.getpid(), (1 << 64) - 1)]])
def test_what_the_driver_does_not_know_is_none(
    processes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given(Driver(processes), monkeypatch)
    assert process_memory.used_here(DEVICE) is None


@pytest.mark.parametrize("fails", ["init", "handle", "processes"])
def test_a_driver_that_fails_is_none(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given(Driver([(os.getpid(), 700)], fails=fails), monkeypatch)
    assert process_memory.used_here(DEVICE) is None


def test_no_driver_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("a driver is here")
    assert process_memory.used_here(DEVICE) is None


@pytest.mark.parametrize(("known", "used"), [(True, 200), (False, 1200)])
def test_the_ledger_counts_this_process_where_it_can(known: bool, used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server takes 1000 bytes of the GPU while the draft takes 200."""
    mine, others = [300], [400]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9000 - mine[0] - others[0], 9000))
    monkeypatch.setattr(process_memory, "used_here", lambda device: mine[0] if known else None)
    ledger = Ledger(DEVICE)
    with ledger.taking("weights"):
        mine[0] += 200
        others[0] += 1000
    assert ledger.used == {"weights": used}
