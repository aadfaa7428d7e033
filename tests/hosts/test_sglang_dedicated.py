"""The worker with a dedicated drafter: a process of its own drafts, in the host's KV slots, and may end at any time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from fake_engine_host import Host, Request, made_host
from fake_engine_parts import Setting, TreeMaskMode

from eaglex import reference

OPTIONS = {"placement": "dedicated", "drafter_deadline": 20.0}
SETTINGS = {
    "chain": Setting(options=OPTIONS),
    "chain, no overlap": Setting(overlap=False, options=OPTIONS),
    "chain, prompts in pieces": Setting(max_rows=1, options=OPTIONS),
    "tree": Setting(topk=3, steps=3, nodes=9, mask=TreeMaskMode.QLEN_ONLY, options=OPTIONS),
}


@contextlib.contextmanager
def started(setting: Setting, seed: int) -> Iterator[Host]:
    """A host whose drafter ends with it."""
    with made_host(setting, seed) as host:
        try:
            yield host
        finally:
            host.worker._draft_worker.process.close()


def played(host: Host, turns: int = 20) -> None:
    for _ in range(turns):
        host.step()


@pytest.mark.parametrize("name", SETTINGS)
def test_every_verification_is_given_the_reference_draft(name: str) -> None:
    """Prefixes are shared, slots and KV slots used again; nothing of the draft is in this process."""
    with started(SETTINGS[name], len(name)) as host:
        draft = host.worker._draft_worker
        assert type(draft).__name__ == "DedicatedDraft"
        assert not hasattr(draft, "draft_k")
        played(host)
        assert host.started > host.setting.slots, "slots were not used again"
        assert host.drafted > host.verified / 2, "most requests were verified without a draft"
        assert set(draft.counters().values()) == {0}


def test_a_row_that_the_host_rewrites_is_sent_again() -> None:
    """Two requests with the same prompt; the radix cache gives the second the first one's KV slots, and its own to others."""
    with started(Setting(options=OPTIONS), 2) as host:
        state = host.random.get_state(), host.choose.getstate()
        first, second = (alone(host, state) for _ in range(2))
        assert first.prompt == second.prompt
        assert not set(first.kv) & set(second.kv)
        host.decode([])
        count = len(first.prompt)
        given_back, second.kv[:count] = second.kv[:count], first.kv[:count]
        host.pool.write((second.slot, slice(0, count)), torch.tensor(second.kv[:count], dtype=torch.int32))
        host.free_kv = given_back + host.free_kv[:50]
        third = alone(host, None)
        assert set(third.kv[: third.length]) & set(given_back)
        drafted = host.drafted
        for _ in range(3):
            host.decode([])
        assert host.drafted == drafted + 9


def alone(host: Host, state: tuple[torch.Tensor, object] | None) -> Request:
    """A prompt, whole and by itself, drawn from this state."""
    if state is not None:
        host.random.set_state(state[0])
        host.choose.setstate(state[1])
    before = list(host.running)
    host.prefill(1)
    (request,) = (one for one in host.running if one not in before)
    while request.unfinished:
        host.prefill(0)
    return request


def settled(host: Host, *, drafts: bool) -> None:
    """Verify what runs; without `drafts` each request is to be verified by its root alone."""
    if not drafts:
        for request in host.running:
            request.expected = reference.Draft.none()
    host.decode([])


def test_a_drafter_that_is_killed_costs_no_token_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    """Rows of requests that run are missed: they go without; those that begin when it is back are drafted for."""
    with started(Setting(options=OPTIONS), 4) as host:
        draft = host.worker._draft_worker
        alone(host, None)
        settled(host, drafts=True)
        settled(host, drafts=True)
        assert host.drafted == 2
        # what has been drafted already is still there for the next verification
        os.kill(draft.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, draft.process.pid, os.WEXITED | os.WNOWAIT)
        settled(host, drafts=True)
        host.worker._stream.join()
        for _ in range(3):
            settled(host, drafts=False)
        assert draft.counters()["gone"] == 1
        assert sum("fell out of use" in record.message for record in caplog.records) == 1
        until = time.monotonic() + 60
        while draft.client._bridge.generation() < 2 and time.monotonic() < until:
            draft.process.keep()
            time.sleep(0.02)
        settled(host, drafts=False)  # rank 0 hears of its successor, which rests
        time.sleep(1.1)
        settled(host, drafts=False)
        old, drafted = list(host.running), host.drafted
        alone(host, None)
        for _ in range(3):
            for request in old:
                request.expected = reference.Draft.none()
            host.decode([])
        assert host.drafted == drafted + 3
        assert draft.counters()["returns"] == 1


def test_a_schedule_goes_on_when_the_drafter_is_killed_again_and_again() -> None:
    """Whatever is drafted for is verified; what the target says does not depend on it."""
    with started(Setting(options=OPTIONS), 9) as host:
        draft = host.worker._draft_worker
        played(host, 4)
        plain = host.verify
        host.verify = lambda batch, **given: unchecked(host, plain, batch, given)  # type: ignore[method-assign]
        for turn in range(24):
            if turn in (3, 12):
                os.kill(draft.process.pid, signal.SIGKILL)
            host.step()
        assert draft.counters()["gone"] >= 1
        assert host.verified > 30


def unchecked(host: Host, verify: object, batch: object, given: dict[str, object]) -> object:
    """A verification of whatever tree it is given, the reference's or a root: nothing else may come."""
    nodes = host.setting.nodes
    made = batch.spec_info.draft_token.view(-1, nodes)  # type: ignore[attr-defined]
    for place, request in enumerate(batch.reqs):  # type: ignore[attr-defined]
        root = reference.tree(reference.Draft.none(), request.bonus, request.length, nodes)
        if made[place].tolist() == root.draft_tokens.tolist():
            request.expected = reference.Draft.none()
    return verify(batch, **given)  # type: ignore[operator]


def test_it_charges_nothing_and_refuses_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(Setting(options=OPTIONS), 1) as host:
        assert host.worker._draft_worker.kv_bytes_per_token == 0
    from eaglex.hosts.sglang import engine_arguments, options

    plain = {"device": "cpu", "speculative_adaptive": False}
    refuse = engine_arguments._refuse_dedicated
    refuse(SimpleNamespace(**plain), options.Options())
    wrong: list[tuple[str, dict[str, object], str]] = [
        ("device='cuda'", {"device": "cuda"}, "{}"),
        ("speculative_adaptive", {"speculative_adaptive": True}, "{}"),
        ("pausing", {}, '{"pausing": true}'),
        ("hot_vocab", {}, '{"hot_vocab": "9"}'),
        ("draft_quant 'auto'", {}, '{"draft_quant": "auto"}'),
    ]
    for named, changed, chosen in wrong:
        with pytest.raises(ValueError, match=named):
            refuse(SimpleNamespace(**(plain | changed)), options.read({options.VARIABLE: chosen}))
