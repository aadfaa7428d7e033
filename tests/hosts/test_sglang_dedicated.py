"""The worker with a dedicated drafter: a process of its own drafts, in the host's KV slots, and may end at any time."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, SupportsIndex

import pytest
import torch
from fake_engine_host import Host, Request, made_host
from fake_engine_parts import Setting, TreeMaskMode
from support import emulated

import eaglex.bridge_dedicated
from eaglex import reference
from eaglex.engine import DraftBatch
from eaglex.errors import DeviceError
from eaglex.hosts import dedicated

OPTIONS = {"placement": "dedicated", "drafter_deadline": 20.0}
SETTINGS = {
    "chain": Setting(options=OPTIONS),
    "chain, no overlap": Setting(overlap=False, options=OPTIONS),
    "chain, prompts in pieces": Setting(max_rows=1, options=OPTIONS),
    "tree": Setting(topk=3, steps=3, nodes=9, mask=TreeMaskMode.QLEN_ONLY, options=OPTIONS),
}


@contextlib.contextmanager
def started(setting: Setting, seed: int, rank: int = 0, size: int = 1) -> Iterator[Host]:
    """A host whose drafter ends with it."""
    with made_host(setting, seed, rank, size) as host:
        try:
            yield host
        finally:
            if rank == 0:
                host.worker._draft_worker.process.close()


@contextlib.contextmanager
def between_gpus(setting: Setting, seed: int, rank: int = 0, size: int = 1) -> Iterator[Host]:
    """`started` on the emulated device: rows and drafts go from one device's memory to the other's."""
    module = emulated.require()
    with emulated.Emulator(module).installed(), pytest.MonkeyPatch.context() as patch:
        script = str(Path(emulated.__file__).with_name("emulated_drafter.py"))
        folders = [str(emulated.ROOT), str(emulated.ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(folders))
        patch.setattr(dedicated, "COMMAND", (sys.executable, script, str(module)))
        chosen = setting.options | {"transport": "p2p"}
        with started(dataclasses.replace(setting, options=chosen), seed, rank, size) as host:
            draft = host.worker._draft_worker
            assert rank > 0 or type(draft.client).__name__ == "RelayClient"
            host.worker._stream.stream.cuda_stream = 0  # the stand-in's number is no stream of this device
            yield host


def played(host: Host, turns: int = 20) -> None:
    for _ in range(turns):
        host.step()


@pytest.mark.parametrize(
    "name", ["chain", *(pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS if name != "chain")]
)
def test_every_verification_is_given_the_reference_draft(name: str) -> None:
    """Prefixes are shared, slots and KV slots used again; nothing of the draft is in this process."""
    with started(SETTINGS[name], len(name)) as host:
        follows(host)


def follows(host: Host) -> None:
    draft = host.worker._draft_worker
    assert type(draft).__name__ == "DedicatedDraft"
    assert not hasattr(draft, "draft_k")
    played(host)
    assert host.started > host.setting.slots, "slots were not used again"
    assert host.drafted > host.verified / 2, "most requests were verified without a draft"
    assert set(draft.counters().values()) == {0}


@pytest.mark.timeout(400)  # the emulated device's waits take a core each from the engine that they wait for
@pytest.mark.parametrize(
    "name", ["chain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("chain, prompts in pieces", "tree"))]
)
def test_rows_and_drafts_go_from_device_to_device(name: str) -> None:
    with between_gpus(SETTINGS[name], len(name)) as host:
        follows(host)
        assert host.worker._draft_worker._repeated, "no verification was like one before"


def test_a_row_that_the_host_rewrites_is_sent_again() -> None:
    """Of two requests with one prompt the second gets the first one's KV slots, and a third those that it had."""
    with started(Setting(options=OPTIONS), 2) as host:
        state = host.random.get_state(), host.choose.getstate()
        first, second = (alone(host, state) for _ in range(2))
        assert first.prompt == second.prompt
        assert not set(first.kv) & set(second.kv)
        host.decode([])
        count = len(first.prompt)
        given_back, second.kv[:count] = second.kv[:count], first.kv[:count]
        host.pool.write((second.slot, slice(0, count)), torch.tensor(second.kv[:count], dtype=torch.int32))
        host.free_kv = Stack(host.free_kv + given_back)
        third = alone(host, None)
        assert set(third.kv[: third.length]) & set(given_back)
        drafted = host.drafted
        for _ in range(3):
            host.decode([])
        assert host.drafted == drafted + 9


class Stack(list[int]):
    """What was given back last is dealt next, whatever is asked for."""

    def pop(self, index: SupportsIndex = -1) -> int:
        return super().pop()


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


def comes_back(draft: Any, drafters: int) -> None:
    """Wait until so many processes have joined."""
    until = time.monotonic() + 60
    while draft.client._bridge.generation() < drafters:
        assert time.monotonic() < until
        draft.process.keep()
        time.sleep(0.02)


def settled(host: Host, *, drafts: bool) -> None:
    """Verify what runs; without `drafts` each request is to be verified by its root alone."""
    if not drafts:
        for request in host.running:
            request.expected = reference.Draft.none()
    host.decode([])


def drafts_for_who_comes(host: Host) -> None:
    """The drafter has returned once: it drafts for a request that begins now, not for those whose rows it missed."""
    old, drafted = list(host.running), host.drafted
    alone(host, None)
    for _ in range(3):
        for request in old:
            request.expected = reference.Draft.none()
        host.decode([])
    assert host.drafted == drafted + 3
    assert host.worker._draft_worker.counters()["returns"] == 1


@pytest.mark.slow
def test_a_drafter_that_is_killed_costs_no_token_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    """Rows of requests that run are missed: they go without; those that begin when it is back are drafted for."""
    with started(Setting(overlap=False, options=OPTIONS), 4) as host:  # drafts are there when a forward returns
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
        comes_back(draft, 2)
        settled(host, drafts=False)  # rank 0 hears of its successor, which rests
        time.sleep(1.1)
        settled(host, drafts=False)
        drafts_for_who_comes(host)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_fall_with_two_requests_out_takes_no_drafts_that_were_there(how: signal.Signals) -> None:
    """Emulated: the second request is called off on the device; other slots' drafts, which the followers have, stay."""
    emulated.require()
    options = {"placement": "dedicated", "drafter_deadline": 2.0}
    with between_gpus(Setting(overlap=False, options=options, slots=8), 4) as host:
        draft = host.worker._draft_worker
        results = draft.link.bridge.results

        def asked(*slots: int) -> bool:
            count = len(slots)
            batch = DraftBatch(
                aux_hidden_states=torch.ones(2 * count, draft.config.aux_width, dtype=draft.kv_dtype),
                input_ids=torch.arange(2 * count) + 3,
                row_start=torch.arange(count + 1, dtype=torch.int32) * 2,
                num_valid=torch.full((count,), 2, dtype=torch.int32),
                draft_from=torch.ones(count, dtype=torch.bool),
                req_pool_indices=torch.tensor(slots),
                seq_lens=torch.zeros(count, dtype=torch.int64),
                out_cache_loc=torch.arange(2 * count) + 1 + 10 * slots[0],
            )
            every = [True] * count
            return bool(draft.client.draft(batch, slots=list(slots), begins=every, rewritten=every, stream=0))

        assert asked(1, 2, 3, 4)
        until = time.monotonic() + 30
        while not bool((results.drafted_for[1:5] == 2).all()):
            assert time.monotonic() < until
            time.sleep(0.02)
        os.kill(draft.process.pid, how)
        with emulated.held(ctypes.CDLL(draft.client._bridge._binary.__file__)):  # both before the device sees one
            assert asked(5)
            assert asked(6, 7)
        time.sleep(3)  # the deadline
        if how is signal.SIGSTOP:
            os.kill(draft.process.pid, signal.SIGCONT)
        assert results.drafted_for[1:8].tolist() == [2, 2, 2, 2, -1, -1, -1]


@pytest.mark.slow
def test_a_schedule_goes_on_when_the_drafter_is_killed_again_and_again() -> None:
    """Whatever is drafted for is verified; what the target says does not depend on it."""
    with started(Setting(options=OPTIONS), 9) as host:
        draft = host.worker._draft_worker
        played(host, 4)
        tolerant = Tolerant(host)
        for drafters in (1, 2):
            comes_back(draft, drafters)
            host.step()
            time.sleep(1.1)  # it rests
            before = host.drafted
            for turn in range(16):
                if turn == 10:
                    tolerant.loose |= {request.number for request in host.running if request.unfinished}
                    os.kill(draft.process.pid, signal.SIGKILL)
                    os.waitid(os.P_PID, draft.process.pid, os.WEXITED | os.WNOWAIT)
                host.step()
            assert host.drafted > before
            assert draft.counters()["gone"] == drafters


def test_a_device_that_fails_and_a_process_that_does_not_start_cost_drafts_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> bool:
        raise DeviceError("the device is having a bad day")

    def does_not_start(*_: Any, **__: Any) -> None:
        raise OSError("Cannot allocate memory")

    with started(Setting(overlap=False, options=OPTIONS), 4) as host:
        draft = host.worker._draft_worker
        alone(host, None)
        settled(host, drafts=True)
        before = host.drafted
        draft.client.draft = fails
        settled(host, drafts=True)  # by the draft of before
        settled(host, drafts=False)
        alone(host, None)
        settled(host, drafts=False)
        assert host.drafted == before + 1
        os.kill(draft.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, draft.process.pid, os.WEXITED | os.WNOWAIT)
        with monkeypatch.context() as patch:
            patch.setattr("eaglex.hosts.dedicated.FIRST_RESTART", 0.0)
            patch.setattr("subprocess.Popen", does_not_start)
            patch.setattr(draft.process, "_pause", 0.0)
            for _ in range(3):
                settled(host, drafts=False)
        assert "was not started again: Cannot allocate memory" in caplog.text


@pytest.mark.timeout(400)
def test_a_trial_goes_ahead_of_requests_and_a_drafter_that_does_not_answer_it_stops_no_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started_ones: list[dedicated.DrafterProcess] = []
    start, try_out = dedicated.DrafterProcess.__init__, eaglex.bridge_dedicated.RelayClient.try_out

    def starts(self: dedicated.DrafterProcess, *arguments: Any) -> None:
        start(self, *arguments)
        started_ones.append(self)

    def in_vain(self: Any, dtype: torch.dtype, *, patience: float) -> bool:
        assert patience > 10
        os.kill(started_ones[0].pid, signal.SIGSTOP)
        return try_out(self, dtype, patience=0.5)

    monkeypatch.setattr(dedicated.DrafterProcess, "__init__", starts)
    monkeypatch.setattr(eaglex.bridge_dedicated.RelayClient, "try_out", in_vain)
    with between_gpus(Setting(overlap=False, options=OPTIONS), 4) as host:
        draft = host.worker._draft_worker
        assert draft.counters()["late"] == 1
        assert "did not answer a trial; the server starts without drafts" in caplog.text
        alone(host, None)
        settled(host, drafts=False)
        os.kill(draft.process.pid, signal.SIGCONT)
        time.sleep(1.5)  # it replies, and has rested
        for request in host.running:
            request.expected = reference.Draft.none()
        alone(host, None)
        settled(host, drafts=True)
        assert host.drafted == 1
        assert draft.counters()["returns"] == 1


def test_a_drafter_on_a_gpu_of_the_target_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from eaglex.hosts.sglang import engine_arguments

    args = SimpleNamespace(device="cuda", base_gpu_id=2, gpu_id_step=2, tp_size=2)
    ranks = [engine_arguments.rank_on(args, f"cuda:{index}") for index in range(6)]
    assert ranks == [None, None, 0, None, 1, None]
    with started(Setting(options=OPTIONS), 1):
        assert "shares" not in caplog.text
    monkeypatch.setattr(engine_arguments, "rank_on", lambda args, device: 1)
    with started(Setting(options=OPTIONS), 1) as host:
        slots = host.setting.pool + host.setting.page_size
        assert f"shares cpu with rank 1 of the target: its K and V of {slots} slots (" in caplog.text


class Tolerant:
    """In front of the host's check: a request may go without a draft, and one whose first tokens' rows the drafter may
    have missed, those of a prefix or of a prompt in pieces, may have another one than the reference's.
    """

    def __init__(self, host: Host) -> None:
        self.host, self.loose = host, set[int]()
        self._verify, self._join = host.verify, host.join
        host.verify, host.join = self.verify, self.join  # type: ignore[method-assign]

    def join(self) -> Request:
        request = self._join()
        if request.length:
            self.loose.add(request.number)
        return request

    def verify(self, batch: Any, **given: Any) -> Any:
        nodes = self.host.setting.nodes
        made = batch.spec_info.draft_token.view(-1, nodes)
        for place, request in enumerate(batch.reqs):
            root = reference.tree(reference.Draft.none(), request.bonus, request.length, nodes)
            if made[place].tolist() == root.draft_tokens.tolist():
                request.expected = reference.Draft.none()
            elif request.number in self.loose:
                chain = torch.arange(nodes - 1)
                request.expected = reference.Draft(made[place, 1:], chain, chain * 0.0)
        return self._verify(batch, **given)


def test_it_charges_nothing_and_refuses_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(Setting(options=OPTIONS), 1) as host:
        assert host.worker._draft_worker.kv_bytes_per_token == 0
    from eaglex.hosts.sglang import engine_arguments, options

    plain = {"device": "cpu", "speculative_adaptive": False, "dp_size": 1}
    refuse = engine_arguments._refuse_dedicated
    refuse(SimpleNamespace(**plain), options.Options())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    wrong: list[tuple[str, dict[str, object], str]] = [
        ("a further one", {"device": "cuda", "base_gpu_id": 0, "gpu_id_step": 1, "tp_size": 1}, "{}"),
        (r"dp_size=2 \(needs 1\)", {"dp_size": 2}, "{}"),
        ("speculative_adaptive", {"speculative_adaptive": True}, "{}"),
        ("pausing", {}, '{"pausing": true}'),
        ("hot_vocab", {}, '{"hot_vocab": "9"}'),
        ("draft_quant 'auto'", {}, '{"draft_quant": "auto"}'),
    ]
    for named, changed, chosen in wrong:
        with pytest.raises(ValueError, match=named):
            refuse(SimpleNamespace(**(plain | changed)), options.read({options.VARIABLE: chosen}))
