"""What importing torch and the extension brings into a process; run by doctor as a process of its own.

Prints one JSON object per stage as it succeeds, so that a crash or a hang in one stage leaves those before it
readable. No import of eaglex itself at the top: the stage that fails must be the one that is named.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

LIBRARIES = ("libnccl.so", "libcudart.so")


def say(stage: str, **facts: Any) -> None:
    """Print one stage's facts at once."""
    print(json.dumps({"stage": stage, **facts}), flush=True)


def loaded(prefix: str) -> list[str]:
    """Real paths of the libraries of that name that are mapped into this process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted({str(Path(p).resolve()) for p in paths if Path(p).name.startswith(prefix)})


def version(path: str) -> int | None:
    """NCCL's or cudart's own version number, asked of a library that is loaded already."""
    name = "ncclGetVersion" if "nccl" in Path(path).name else "cudaRuntimeGetVersion"
    found = ctypes.c_int(0)
    try:
        failed = getattr(ctypes.CDLL(path), name)(ctypes.byref(found))
    except (OSError, AttributeError):
        return None
    return None if failed else found.value


def probe_torch() -> Any:
    """Import torch; its version and the CUDA that it was built for."""
    import torch

    say("torch", version=torch.__version__, cuda=torch.version.cuda)
    return torch


def probe_extension() -> None:
    """Import the compiled extension; what it says about its own build."""
    try:
        from eaglex import _C
    except Exception as error:
        say("extension", error=f"{type(error).__name__}: {error}")
        return
    say("extension", path=str(_C.__file__), info=_C.build_info())


def probe_gpus(torch: Any) -> None:
    """GPUs as torch sees them, and which pairs cannot reach each other's memory."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = []
    for i in range(count):
        properties = torch.cuda.get_device_properties(i)
        gpus.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory": properties.total_memory,
            }
        )
    apart = [
        [i, j] for i in range(count) for j in range(count) if i != j and not torch.cuda.can_device_access_peer(i, j)
    ]
    say("gpus", gpus=gpus, without_p2p=apart)


def main() -> None:
    """All stages in order."""
    try:
        torch = probe_torch()
    except Exception as error:
        say("torch", error=f"{type(error).__name__}: {error}")
        torch = None
    probe_extension()
    say("libraries", **{prefix: {path: version(path) for path in loaded(prefix)} for prefix in LIBRARIES})
    if torch is not None:
        probe_gpus(torch)


if __name__ == "__main__":
    main()
    sys.exit(0)
