"""What a decode cycle costs the scheduler's CPU: Python frames, and calls of CUDA beside the two launches."""

from __future__ import annotations

import cycle_calls


def test_a_cycle_is_two_launches_and_few_frames() -> None:
    with cycle_calls.cycle(4) as made:
        frames, cuda = [], []
        for _ in range(12):
            found, calls = cycle_calls.calls(made)
            frames.append(sum(count for name, count in found.items() if name.startswith("frame")))
            cuda.append(calls)
    assert max(frames) <= 22  # some us each where caches are cold (cycle_calls.py); 16, and 20 where CUDA is asked
    assert [calls["launch"] for calls in cuda] == [2] * 12, "the tree and the draft"
    for name in ("record", "wait_event", "wait_stream"):
        assert not any(calls[name] for calls in cuda), name
    assert 0 < sum(calls["query"] for calls in cuda) <= 6, "which drafts have run is asked now and then"
