"""Where the ranks of a test on GPUs are: on one device, in turns, or on two."""

from __future__ import annotations

import os

import pytest
import torch

ONE, TWO = "one_device", "two_devices"
WHERE = [ONE, TWO]


def needs(where: str, transport: str | None = None) -> None:
    """Skip what cannot be there."""
    if where == TWO and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if where == ONE and transport == "nccl":
        pytest.skip("NCCL refuses two ranks on one device")


def cycles_of(where: str) -> int:
    """Messages of the long tests: EAGLEX_BRIDGE_CYCLES, by default 10,000, and fewer where processes take turns."""
    return int(os.environ.get("EAGLEX_BRIDGE_CYCLES", 400 if where == ONE else 10_000))
