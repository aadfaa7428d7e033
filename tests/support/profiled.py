"""What torch's profiler sees: calls of CUDA's runtime, and kernels, whichever library they come from.

Once per process, with support.own_process: a second session may see nothing.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile

CYCLES = "cycles under observation"


@contextlib.contextmanager
def calls_of_the_runtime(*, window: bool) -> Iterator[collections.Counter[str]]:
    """How often each function of CUDA's runtime is called; with `window` only in the range named CYCLES.

    That leaves out the profiler's own calls (it synchronises at its end), but range and calls are dated by two clocks:
    in sessions of a few milliseconds no call was found within the range, so a window is for those of a second.
    """
    calls: collections.Counter[str] = collections.Counter()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        yield calls
    events = list(profiled.events())
    mine = [e for e in events if e.name.startswith("cu")]
    if window:
        cpu = torch.autograd.DeviceType.CPU
        watched = next(e.time_range for e in events if e.name == CYCLES and e.device_type == cpu)
        mine = [e for e in mine if watched.start <= e.time_range.start <= watched.end]
    calls.update(e.name for e in mine)


@contextlib.contextmanager
def kernels() -> Iterator[set[str]]:
    """Names of the kernels that run within."""
    names: set[str] = set()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        yield names
        torch.cuda.synchronize()
    names.update(event.key for event in profiled.key_averages())
    assert names, "the profiler saw no kernel at all"
