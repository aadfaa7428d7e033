"""Where a draft runs: forked where verification ends, joined before the next forward."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from eaglex.engine import current_stream_of


class Work(NamedTuple):
    """One draft: what to run, given a cudaStream_t, and all that it reads.

    `inputs` are kept alive until the draft has run: some were allocated on other streams of the host, whose allocator
    would hand their memory out again. torch's current stream is not the draft's while it runs: who needs that enters
    `DraftStream.entered`, for about 10 us.

    With `ready`, recorded on the host's stream where the inputs are complete, it runs on a stream of its own, beside
    what the host enqueues next, which must not wait for it (its results, where it schedules without overlap). Without,
    behind the forward on the host's own stream, where all else is enqueued by then: no event, no wait. `result` is then
    the forward's, for its `copy_done`.
    """

    run: Callable[[int], None]
    inputs: Any
    ready: torch.cuda.Event | None = None
    result: Any = None


class Fence:
    """What the host's scheduler waits for before it writes buffers that a forward reads (its WAR barrier).

    It takes the event right after the forward and puts None in its place; None is a wait for all that is enqueued. With
    overlap an event of ours would be one too many in each cycle: by then the host has recorded `copy_done` of the
    result behind its copies, which come right behind verification. The attribute's name depends on the host's version.
    """

    def __init__(self) -> None:
        self.result: Any = None  # the last forward's: its copy_done
        self._event: torch.cuda.Event | None = None

    def publish(self, event: torch.cuda.Event) -> None:
        """Wait for this one."""
        self.result, self._event = None, event

    @property
    def war_fastpath_read_done_event(self) -> torch.cuda.Event | None:
        """The event, None where there is none."""
        result = self.result
        if result is None:
            return self._event
        return result.copy_done if _is_recorded(result) else None

    @war_fastpath_read_done_event.setter
    def war_fastpath_read_done_event(self, event: torch.cuda.Event | None) -> None:
        self.result, self._event = None, event

    shared_read_done_event = war_fastpath_read_done_event


class Events:
    """Events that are recorded again and again, in turn: to make one costs as much as to record it.

    A wait that was enqueued is for the record before it, so an event is free for its next turn once its waits are
    enqueued: the host does so right after the forward that published it, the draft's stream within a forward.
    """

    TURNS = 8

    def __init__(self) -> None:
        self._events: deque[torch.cuda.Event] = deque()

    def recorded(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event of this stream's work so far."""
        if len(self._events) < self.TURNS:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            event = self._events.popleft()
        event.record(stream)
        self._events.append(event)
        return event


class DraftStream:
    """Runs one draft at a time, behind the host's forwards or beside its streams.

    The priority of its own stream is high for two reasons: the draft is what the next cycle waits for, and the host
    takes its streams from the pool of priority 0, which hands the same 32 streams out in turn, so a stream of that pool
    could be the host's copy stream as well, and its result copy would wait for the draft.
    """

    KEPT = 6  # drafts that are kept, with what they read, before one looks which of them have run: that asks CUDA

    def __init__(self, device: torch.device | str) -> None:
        self._handle_now = current_stream_of(torch.device(device))
        self._handle: int | None = None
        self.stream = torch.cuda.Stream(device=device, priority=-1)  # type: ignore[no-untyped-call]
        self.pending: Work | None = None
        self.kept: deque[tuple[Any, Any]] = deque()  # inputs of each, and an event of the forward in front of it
        self._forwards = self._on = self.stream  # where the last forward ran or runs, and where a draft runs
        self._done: torch.cuda.Event | None = None  # of a draft beside the host's stream that it has not waited for

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """The stream on which a draft runs, or ran last, as torch's current one."""
        return torch.cuda.stream(self._on)

    def within(self, run: Callable[[], None]) -> Callable[[int], None]:
        """`run` for a Work, with its stream as torch's current one."""

        def entered(_: int) -> None:
            with self.entered():
                run()

        return entered

    def fork(self, work: Work) -> None:
        """Take a draft of the forward that `join` has begun; `launch` runs it. At most one waits, because every forward
        begins with `join`.
        """
        if self.pending is not None:
            raise RuntimeError("a draft is waiting: join() comes before the next fork()")
        self.pending = work

    def launch(self) -> None:
        """Enqueue the draft that waits, if one does, behind `ready`."""
        work = self.pending
        if work is None:
            return
        self.pending = None
        if len(self.kept) >= self.KEPT:
            self.let_go()
        result = work.result  # not kept: its logits are large
        self.kept.append((work.inputs, work.ready if result is None else result.copy_done))
        if work.ready is None:
            self._on = self._forwards
            work.run(self._on.cuda_stream)
            return
        self._on = self.stream
        self.stream.wait_event(work.ready)
        try:
            work.run(self.stream.cuda_stream)
        finally:  # also behind half a draft
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(self.stream)

    def let_go(self) -> None:
        """Of drafts that have run: one has when the forward behind it is over, which waited for it."""
        kept = self.kept
        if kept and _over(kept[-1][1], 0):
            last = kept.pop()
            kept.clear()
            kept.append(last)
        while len(kept) > 1 and _over(kept[1][1], len(kept) - 1):
            kept.popleft()

    def join(self) -> torch.cuda.Stream:
        """Make the current stream, which is returned, wait for the last draft; one that waits is enqueued first."""
        if self.pending is not None:
            self.launch()
        current, handle = self._forwards, self._handle_now()
        if handle != self._handle:  # torch makes an object each time it is asked for it: 5 us
            self._handle, current = handle, torch.cuda.current_stream()
            self._forwards = current
        if self._done is not None:
            current.wait_event(self._done)
            self._done = None
        elif self._on is not current and self._on is not self.stream:  # the host goes on elsewhere
            current.wait_stream(self._on)
        return current

    def drain(self) -> None:
        """Wait on the CPU until no draft runs: for a flush, a weight update, and before memory is given back."""
        self.join()
        self._on.synchronize()
        self.kept.clear()


def _over(event: Any, behind: int) -> bool:
    """Whether the forward is over whose event this is, with so many behind it. Where the host makes none that can be
    asked, its own limit counts: it forwards no more than two batches ahead of the results that it has seen.
    """
    if isinstance(event, torch.cuda.Event):
        return bool(event.query())  # type: ignore[no-untyped-call]
    return behind > 2


def _is_recorded(result: Any) -> bool:
    """Whether the host has recorded `copy_done`: not of a result that it samples, or has another thread copy, later."""
    return result.delay_sample_func is None and isinstance(result.copy_done, torch.cuda.Event)
