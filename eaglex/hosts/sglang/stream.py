"""Where a draft runs: forked where verification ends, joined before the next forward."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eaglex.engine import current_stream


@dataclass(slots=True)
class Work:
    """One draft: what to run, given a cudaStream_t, and all that it reads.

    `ready` is recorded on the host's stream where the inputs are complete. `inputs` are kept alive until the draft has
    run: some were allocated on other streams of the host, whose allocator would hand their memory out again. torch's
    current stream is not the draft's while it runs: who needs that enters `DraftStream.entered`, for about 10 us.

    `beside`: on a stream of its own, for what the host enqueues next must not wait for it (its results, where it
    schedules without overlap). Else behind the forward on the host's own stream, where all else is enqueued by then:
    three calls of CUDA less in a cycle.
    """

    run: Callable[[int], None]
    ready: torch.cuda.Event
    inputs: Any
    beside: bool = True


@dataclass
class Fence:
    """What the host's scheduler waits for before it writes buffers that a forward reads (its WAR barrier).

    It takes the event and puts None in its place. The attribute's name changed with the host's version.
    """

    war_fastpath_read_done_event: torch.cuda.Event | None = None
    shared_read_done_event: torch.cuda.Event | None = None

    def publish(self, event: torch.cuda.Event) -> None:
        self.war_fastpath_read_done_event = event
        self.shared_read_done_event = event


class Current:
    """torch's current stream, without making an object for it each time: that takes 5 us, several times a cycle."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle: int | None = None
        self._stream: torch.cuda.Stream | None = None

    def stream(self) -> torch.cuda.Stream:
        """The same object as long as it is the same stream."""
        handle = current_stream(self._device)
        if self._stream is None or handle != self._handle:
            self._handle, self._stream = handle, torch.cuda.current_stream()
        return self._stream


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

    KEPT = 3  # drafts that are kept, with what they read, before one looks which of them have run

    def __init__(self, device: torch.device | str) -> None:
        self.current = Current(torch.device(device))
        self.stream = torch.cuda.Stream(device=device, priority=-1)  # type: ignore[no-untyped-call]
        self.pending: Work | None = None
        self.kept: deque[Work] = deque()
        self._forwards = self._on = self.stream  # where the last forward ran, and where a draft runs
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
        """Take a draft; `launch` runs it. At most one waits, because every forward begins with `join`."""
        if self.pending is not None:
            raise RuntimeError("a draft is waiting: join() comes before the next fork()")
        self.pending, self._forwards = work, self.current.stream()

    def launch(self) -> None:
        """Enqueue the draft that waits, if one does, behind `ready`."""
        work = self.pending
        if work is None:
            return
        self.pending = None
        if len(self.kept) >= self.KEPT:
            self._let_go()
        self.kept.append(work)
        if not work.beside:
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

    def _let_go(self) -> None:
        """Of drafts that have run: one has when the forward behind it is over, which waited for it."""
        kept = self.kept
        if kept[-1].ready.query():  # type: ignore[no-untyped-call]
            last = kept.pop()
            kept.clear()
            kept.append(last)
        while len(kept) > 1 and kept[1].ready.query():  # type: ignore[no-untyped-call]
            kept.popleft()

    def join(self) -> torch.cuda.Stream:
        """Make the current stream, which is returned, wait for the last draft; one that waits is enqueued first."""
        if self.pending is not None:
            self.launch()
        current = self.current.stream()
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
