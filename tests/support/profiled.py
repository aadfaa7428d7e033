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
def calls_of_the_runtime() -> Iterator[collections.Counter[str]]:
    """How often each function of CUDA's runtime is called in the range named CYCLES."""
    calls: collections.Counter[str] = collections.Counter()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        yield calls
    events = list(profiled.events())
    watched = next(e.time_range for e in events if e.name == CYCLES and e.device_type == torch.autograd.DeviceType.CPU)
    calls.update(e.name for e in events if e.name.startswith("cu")
                 and watched.start <= e.time_range.start <= watched.end)


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
