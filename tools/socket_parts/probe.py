"""A plugin of SGLang that times the result copy: how long after a forward's end it starts, on the GPU and on the CPU.

It is copied into the folder of entry points under the name `socket_probe`, and does nothing unless SOCKET_PROBE names
the file to write: rows of [kind, microseconds on the GPU, microseconds on the CPU], every 50 of them.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any


def activate() -> None:
    """Wrap the ends of verification and of prefill, and the result copy."""
    path = os.environ.get("SOCKET_PROBE")
    if not path:
        return
    import torch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    pending: list[tuple[str, Any, Any, float]] = []
    rows: list[tuple[str, float, float]] = []

    def stamp() -> tuple[Any, float]:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event, time.perf_counter()

    def wrap(owner: Any, name: str, kind: str) -> None:
        original = getattr(owner, name)

        def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
            result = original(self, *arguments, **options)
            if kind == "verify" or options.get("capture_hidden_mode") is not None:
                result.probe_kind, result.probe = kind, stamp()
            return result

        setattr(owner, name, wrapped)

    wrap(EAGLEWorkerV2, "verify", "verify")
    wrap(TpModelWorker, "forward_batch_generation", "prefill")
    copy = GenerationBatchResult.copy_to_cpu

    def copy_to_cpu(self: Any, *arguments: Any, **options: Any) -> None:
        probe = getattr(self, "probe", None)
        if probe is not None:
            start, now = stamp()
            pending.append((self.probe_kind, probe[0], start, now - probe[1]))
        copy(self, *arguments, **options)
        while len(pending) > 8 and pending[0][2].query():
            kind, end, start, host = pending.pop(0)
            rows.append((kind, end.elapsed_time(start) * 1e3, host * 1e6))
            if len(rows) % 50 == 0:
                with open(path + ".part", "w") as file:
                    json.dump(rows, file)
                os.replace(path + ".part", path)

    GenerationBatchResult.copy_to_cpu = copy_to_cpu
