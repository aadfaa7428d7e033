"""A plugin of SGLang that times drafting: GPU time by events on the streams, and the CPU time around verification.

It is copied into the folder of entry points under the name `serve_probe`, and does nothing unless SERVE_PROBE names a
file. Rows are [stage, batch, microseconds]; they are written, and forgotten, at the first prefill after a file
SERVE_PROBE.want has appeared, so that no cycle that is timed pays for it.

Of an engine that pauses, paused cycles are counted and nothing is timed.

Stages: `draft` and `extend`, GPU time (the engine drafts in `extend`; its `draft` is the tree kernel); `verify`, GPU
time, and `verify_cpu`, the CPU's; `host`, CPU time of a forward without verification and the host's own callback, and
of it the parts `before` and `after` verification; `late`, that of enqueuing the draft outside of it. Every fourth cycle
has events, and its CPU time is left out.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

EVERY = 4
cycle: dict[str, Any] = {"number": 0, "batch": 0, "verify": 0.0, "inside": False, "paused": 0}
pending: list[tuple[str, int, Any, Any]] = []
rows: list[tuple[str, int, float]] = []


def sampled() -> bool:
    return cycle["number"] % EVERY == 0


def event(stream: int | None = None) -> Any:
    """Recorded on the current stream, or on this one (a cudaStream_t)."""
    import torch

    made = torch.cuda.Event(enable_timing=True)
    made.record(None if stream is None else torch.cuda.ExternalStream(stream))
    return made


def timed(owner: Any, name: str, stage: str, *, takes_stream: bool = False) -> None:
    """GPU time of a method, on the stream that is current around it, or that it takes as its last argument."""
    original = getattr(owner, name)

    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        batch = cycle["batch"]
        if not sampled() or not batch:
            return original(self, *arguments, **options)
        stream = arguments[-1] if takes_stream else None
        start = event(stream)
        result = original(self, *arguments, **options)
        pending.append((stage, batch, start, event(stream)))
        return result

    setattr(owner, name, wrapped)


def verification(owner: Any) -> None:
    """CPU time of `verify`, which the forward's own is reduced by."""
    original = owner.verify

    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        start = cycle["verify_from"] = time.perf_counter()
        result = original(self, *arguments, **options)
        cycle["verify"] = time.perf_counter() - start
        return result

    owner.verify = wrapped


def published(original: Any) -> Any:
    """The host's own callback with the lengths, which is not the worker's time either."""

    def wrapped(*arguments: Any) -> None:
        start = time.perf_counter()
        original(*arguments)
        cycle["published"] = time.perf_counter() - start

    return wrapped


def forward(owner: Any, path: str) -> None:
    original = owner.forward_batch_generation

    def wrapped(self: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
        extends = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        if extends:
            cycle["batch"] = 0
            if self.ps.tp_rank == 0 and os.path.exists(path + ".want"):
                write(path)
            return original(self, batch, *arguments, **options)
        cycle["number"] += 1
        cycle["batch"] = len(batch.reqs)
        if options.get("on_publish") is not None:
            options["on_publish"] = published(options["on_publish"])
        cycle["published"] = 0.0
        start = time.perf_counter()
        cycle["inside"] = True
        result = original(self, batch, *arguments, **options)
        cycle["inside"] = False
        if hasattr(self, "_plan"):
            cycle["paused"] = self._plan.paused_cycles
        if not sampled():
            own = time.perf_counter() - start - cycle["verify"] - cycle["published"]
            before = cycle["verify_from"] - start
            parts = {"host": own, "before": before, "after": own - before, "verify_cpu": cycle["verify"]}
            for stage, seconds in parts.items():
                rows.append((stage, cycle["batch"], seconds * 1e6))
        return result

    owner.forward_batch_generation = wrapped


def paused(owner: Any, path: str) -> None:
    """The paused cycles alone: what is compared with no speculation has no clock in it that the other has not."""
    original = owner.forward_batch_generation

    def wrapped(self: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
        if batch.forward_mode.is_extend() and self.ps.tp_rank == 0 and os.path.exists(path + ".want"):
            cycle["paused"] = self._plan.paused_cycles
            write(path)
        return original(self, batch, *arguments, **options)

    owner.forward_batch_generation = wrapped


def launch(owner: Any) -> None:
    """CPU time of a draft that is enqueued outside of a forward."""
    original = owner.launch

    def wrapped(self: Any) -> None:
        if cycle["inside"] or self.pending is None or sampled() or not cycle["batch"]:
            original(self)
            return
        start = time.perf_counter()
        original(self)
        rows.append(("late", cycle["batch"], (time.perf_counter() - start) * 1e6))

    owner.launch = wrapped


def write(path: str) -> None:
    import torch

    torch.cuda.synchronize()
    rows.extend((stage, batch, start.elapsed_time(stop) * 1e3) for stage, batch, start, stop in pending)
    found = {"pid": os.getpid(), "rows": rows, "reserved_bytes": torch.cuda.memory_reserved()}
    found["paused_cycles"] = cycle["paused"]
    with open(path + ".part", "w") as file:
        json.dump(found, file)
    pending.clear()
    rows.clear()
    os.remove(path + ".want")
    os.replace(path + ".part", path)


def activate() -> None:
    """Wrap the worker that this process will make: eaglex's engine, or SGLang's EAGLE3."""
    path, engine = os.environ.get("SERVE_PROBE"), os.environ.get("SERVE_PROBE_ENGINE")
    if not path or engine == "none":
        return
    if engine == "pausing":
        from eaglex.hosts.sglang.engine_worker import EaglexEngineWorker

        paused(EaglexEngineWorker, path)
        return
    if engine in ("eaglex", "fp8", "int4", "dedicated"):
        from eaglex.hosts.sglang.dedicated_draft import DedicatedDraft
        from eaglex.hosts.sglang.draft_side import DraftSide
        from eaglex.hosts.sglang.engine_draft import EngineDraft
        from eaglex.hosts.sglang.engine_worker import EaglexEngineWorker as Worker
        from eaglex.hosts.sglang.stream import DraftStream

        launch(DraftStream)
        timed(DraftSide, "draft", "draft")
        for side in (EngineDraft, DedicatedDraft):
            timed(side, "draft_verified", "extend", takes_stream=True)
    elif engine == "socket":
        from eaglex.hosts.sglang.stream import DraftStream
        from eaglex.hosts.sglang.worker import EaglexWorker as Worker

        launch(DraftStream)
    else:
        from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
        from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2 as Worker

        timed(EagleDraftWorker, "draft", "draft")
        timed(EagleDraftWorker, "_draft_extend_for_decode", "extend")
    timed(Worker, "verify", "verify")
    verification(Worker)
    forward(Worker, path)
