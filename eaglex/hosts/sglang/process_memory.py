"""GPU memory that this process has, as the driver tells it: what is free counts other processes too."""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch

MOST_PROCESSES = 512
_NOT_KNOWN = (1 << 64) - 1  # where the driver does not tell the memory of a process


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of nvml.h, as nvmlDeviceGetComputeRunningProcesses_v3 fills it."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def _library() -> ctypes.CDLL:
    """NVML, ready; OSError where there is none."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    if library.nvmlInit_v2():  # counts its calls, and is left open
        raise OSError("NVML does not start")
    return library


def used_here(device: torch.device) -> int | None:
    """Bytes of this GPU that this process has, or None where the driver does not tell: there is no NVML, or another
    process namespace (a container) than the driver's, so that it has no number of this process.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = _library()
        handle, count = ctypes.c_void_p(), ctypes.c_uint(MOST_PROCESSES)
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
            return None
        found = (_Process * MOST_PROCESSES)()
        if library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found):
            return None
        for process in found[: count.value]:
            if process.pid == os.getpid() and process.used != _NOT_KNOWN:
                return int(process.used)
    return None
