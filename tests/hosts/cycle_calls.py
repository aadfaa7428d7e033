"""What the worker's own Python does in one decode cycle: frames, C calls, and the time they take with nothing behind.

    PYTHONPATH=. python tests/hosts/cycle_calls.py [BATCH ...]

The host's verification is an answer made beforehand, calls of CUDA are stand-ins, and the engine takes the tensors in
as ever and then runs nothing. So what is counted and timed is the worker alone: a forward without its verification, and
the draft that is enqueued at the end of the scheduler's turn. `cold`: the same after 64 MB have gone through the
caches before each part, as a scheduler's turn leaves them.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import fake_host
import pytest
import torch
from fake_engine_host import made_host
from fake_engine_parts import Batch, DraftInput, Setting, TreeMaskMode
from fake_host import Result

counted: Counter[str] = Counter()  # of CUDA, by name, while nothing is timed


class Event:
    """An event that has always happened."""

    def record(self, stream: Any = None) -> None:
        counted["record"] += 1

    def query(self) -> bool:
        counted["query"] += 1
        return True


class Stream:
    """A stream without work."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.cuda_stream = -priority

    def wait_event(self, event: Any) -> None:
        counted["wait_event"] += 1

    def wait_stream(self, other: Any) -> None:
        counted["wait_stream"] += 1

    def synchronize(self) -> None:
        """Nothing runs."""


class Cycle:
    """A worker that is up, and one batch that it is given again and again."""

    def __init__(self, host: Any, requests: int) -> None:
        self.worker, nodes = host.worker, host.setting.nodes
        width = self.worker._aux_width
        ids = torch.arange(1, requests + 1)
        lens = torch.full((requests,), 20)
        accepted = torch.full((requests,), 2, dtype=torch.int32)
        tokens = torch.ones(requests * nodes, dtype=torch.int32)
        hidden = torch.zeros((requests * nodes, width))
        places = torch.arange(1, requests * nodes + 1)
        self.bonus = torch.ones(requests, dtype=torch.int32)
        self.batch = Batch([None] * requests, ids, lens, spec_info=DraftInput(bonus_tokens=self.bonus))
        self.batch.out_cache_loc = places
        self.verifying = 0.0
        self.before: Callable[[], None] = lambda: None

        def verify(batch: Any, **given: Any) -> Result:
            begun = time.perf_counter()
            self.at = begun
            self.before()
            result = Result(
                logits_output=SimpleNamespace(hidden_states=hidden), next_token_ids=tokens, accept_lens=accepted,
                new_seq_lens=lens, next_draft_input=SimpleNamespace(bonus_tokens=self.bonus),
            )  # fmt: skip
            self.left = time.perf_counter()
            self.verifying = self.left - begun
            return result

        host.verify = verify
        self.worker._run_verify = verify

    def parts(self) -> tuple[float, float, float]:
        """Seconds before verification, behind it, and for enqueuing the draft."""
        self.batch.spec_info = DraftInput(bonus_tokens=self.bonus)
        self.before()
        start = time.perf_counter()
        result = self.worker.forward_batch_generation(self.batch, on_publish=len)
        end = time.perf_counter()
        result.copy_done = Event()  # as the host does
        self.before()
        late = time.perf_counter()
        self.worker._stream.launch()
        done = time.perf_counter()
        self.worker.on_verify_complete_cpu([1] * len(self.batch.reqs), batch_size=len(self.batch.reqs))
        return self.at - start, end - self.left, done - late


@contextmanager
def cycle(requests: int) -> Iterator[Cycle]:
    """A worker whose engine has been given this batch once and runs nothing from then on."""
    setting = Setting(slots=max(requests, 4), pool=4096, mask=TreeMaskMode.QLEN_ONLY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_host, "Stream", Stream)
        patch.setattr(fake_host, "Event", Event)
        Stream.current = Stream()  # type: ignore[attr-defined]
        with made_host(setting) as host:
            made = Cycle(host, requests)
            side = made.worker._draft_worker
            for _ in range(12):
                made.parts()
            quiet(side)
            for _ in range(12):
                made.parts()
            yield made


def quiet(side: Any) -> None:
    """Runs that repeat take their tensors in, as ever, and launch nothing."""

    def run(filled: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, stream: int) -> bool:
        counted["launch"] += 1
        return bool(filled.move(a, b, c, d, e, f))

    def tree(a: Any, b: Any, c: Any, stream: int) -> bool:
        counted["launch"] += 1
        return True

    repeated = next(iter(side._runs.values()))
    side._last[True] = functools.partial(run, repeated.filled)
    for pair in side._buffers._made.values():
        for buffers in pair:
            buffers.again = tree


def calls(made: Cycle) -> tuple[Counter[str], Counter[str]]:
    """Python frames and C functions of one cycle, by name, without those of this file and of torch; calls of CUDA."""
    found: Counter[str] = Counter()

    def see(frame: Any, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if file == __file__ or "fake_" in file or ("eaglex" not in file and file != "<string>"):
            return
        if event == "call":
            found["frame " + frame.f_code.co_name] += 1
        elif event == "c_call":
            found["C " + getattr(argument, "__name__", str(argument))] += 1

    counted.clear()
    sys.setprofile(see)
    try:
        made.parts()
    finally:
        sys.setprofile(None)
    return found, Counter(counted)


def main() -> None:
    import gc

    sweep = torch.zeros(8 << 20, dtype=torch.int64)

    def cold() -> None:
        sweep.add_(1)

    torch.set_num_threads(1)
    for requests in [int(text) for text in sys.argv[1:]] or [1, 64]:
        with cycle(requests) as made:
            found, cuda = calls(made)
            frames = sum(count for name, count in found.items() if name.startswith("frame"))
            print(f"batch {requests}: {frames} frames, {found.total() - frames} C calls, CUDA {dict(cuda)}")
            if "-v" in sys.argv:
                print(found)
            gc.disable()
            for name, before, rounds in (("hot", lambda: None, 3000), ("cold", cold, 300)):
                made.before = before
                rows = [made.parts() for _ in range(rounds)]
                shown = [statistics.median(column) * 1e6 for column in zip(*rows, strict=True)]
                text = " + ".join(f"{us:.1f}" for us in shown)
                print(f"  {name}: before, after, late {text} = {sum(shown):.1f} us")
            gc.enable()


if __name__ == "__main__":
    main()
