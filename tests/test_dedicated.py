"""A dedicated drafter under `eaglex generate`: whatever becomes of it, all ranks emit the target's own tokens."""

import argparse
import json
import os
import signal
import time

import hf_pair
import pytest
import torch
from rank_processes import Ranks

from eaglex import generate
from eaglex.bridge import Bridge, Invitation, LinkOptions
from eaglex.cli import main
from eaglex.config import EngineLimits, SpeculationConfig
from eaglex.drafter import Job
from eaglex.errors import ConfigError, EaglexError
from eaglex.hosts import dedicated
from eaglex.hosts.dedicated import DedicatedSlots
from eaglex.hosts.pair import Pair, PairSource

SHAPE = ["--topk", "3", "--num-steps", "3"]
ANSWER = 2.0  # seconds that the drafter has


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return hf_pair.save_pair(
        tmp_path_factory.mktemp("pair"),
        model=hf_pair.target_model(seed=1, vocab_size=16),
        config=hf_pair.draft_config(vocab_size=16, draft_vocab_size=12),
    )


def arguments(pair, *options):
    paths = ["--target", str(pair / "target"), "--draft", str(pair / "draft")]
    prompt = ["--prompt", "the a cat dog sees hears", "--max-new-tokens", "24"]
    return ["generate", *paths, *prompt, *SHAPE, "--json", "--check", *options]


def run_dedicated(pair, folder, prepare):
    """Two ranks and a drafter; `prepare` changes rank 0."""

    def body(rank):
        if rank == 0:
            prepare()
        return main(arguments(pair, "--placement", "dedicated", "--drafter-deadline", str(ANSWER)))

    with Ranks(2, body, folder) as ranks:
        return ranks.wait()


@pytest.fixture(scope="module")
def expected(pair):
    """What one process says."""
    known = []

    def run(capsys):
        if not known:
            assert main(arguments(pair)) == 0
            known.append(json.loads(capsys.readouterr().out))
        return known[0]

    return run


def faults(found):
    return {name: found["bridge"][name] for name in ("late", "gone", "refused", "bad_reply", "own_failure")}


NONE = {"late": 0, "gone": 0, "refused": 0, "bad_reply": 0, "own_failure": 0}


@pytest.mark.slow
def test_it_drafts_like_rank_0_does(pair, expected, capsys, tmp_path):
    ended = run_dedicated(pair, tmp_path, lambda: None)
    assert [(rank.code, rank.err) for rank in ended] == [(0, "")] * 2
    found = json.loads(ended[0].out)
    assert found["tokens"] == expected(capsys)["tokens"]
    assert found["accept_length"] == expected(capsys)["accept_length"] > 1
    assert (found["placement"], found["num_ranks"], found["warnings"]) == ("dedicated", 2, [])
    assert faults(found) == NONE
    assert found["bridge"]["drafts"] == found["bridge"]["pushed"]


def at_call(limit, act):
    """Do that at the limit-th cycle of rank 0's drafting."""
    run, calls = DedicatedSlots.run, 0

    def counted(self, rows):
        nonlocal calls
        calls += 1
        if calls == limit:
            act(self)
        begun = time.monotonic()
        run(self, rows)
        assert time.monotonic() - begun < ANSWER + 1

    DedicatedSlots.run = counted


LOSSES = {
    "killed": (signal.SIGKILL, "gone", "its process has ended"),
    "stopped": (signal.SIGSTOP, "late", "no reply within 2000 ms"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "fault", "why"), LOSSES.values(), ids=LOSSES.keys())
def test_a_lost_drafter_costs_no_token(pair, expected, capsys, tmp_path, number, fault, why):
    def prepare():
        # The warm-up takes a few of them.
        at_call(14, lambda slots: os.kill(slots.process.pid, number))

    ended = run_dedicated(pair, tmp_path, prepare)
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    found = json.loads(ended[0].out)
    assert found["tokens"] == expected(capsys)["tokens"]
    assert found["lossless"] is True
    assert faults(found) == {**NONE, fault: 1}
    assert len(found["warnings"]) == 1
    assert why in found["warnings"][0]
    assert ended[0].err == f"eaglex: warning: {found['warnings'][0]}\n"
    assert ended[1].err == ""
    assert 0 < found["bridge"]["drafts"] < found["bridge"]["pushed"]


@pytest.mark.slow
def test_it_is_started_again_and_drafts_for_the_next_request(pair, expected, capsys, tmp_path):
    """Killed in the warm-up's request; the next request begins when its successor has joined."""

    def prepare():
        at_call(2, kill_and_wait)

    def kill_and_wait(slots):
        os.kill(slots.process.pid, signal.SIGKILL)
        begin, started = DedicatedSlots.run, []

        def patient(self, rows):
            if rows[0].length == 0 and not started:
                started.append(True)
                while self._bridge.generation() < 2:
                    self.process.keep()
                    time.sleep(0.05)
                self.client.draft(dedicated.batch_of(rows, device=self.device))  # rank 0 hears of it, and it rests
                time.sleep(1.1)
            begin(self, rows)

        DedicatedSlots.run = patient

    ended = run_dedicated(pair, tmp_path, prepare)
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    found = json.loads(ended[0].out)
    assert found["tokens"] == expected(capsys)["tokens"]
    assert found["accept_length"] == expected(capsys)["accept_length"]
    assert faults(found) == {**NONE, "gone": 1}
    assert found["bridge"]["returns"] == 1


@pytest.mark.slow
def test_one_that_cannot_start_ends_all(pair, tmp_path):
    """Made for another shape: a fault of the setup, told before the first token."""

    def prepare():
        invitation = Bridge.invitation

        def other(self):
            found = invitation(self)
            return type(found)(address=found.address, identity=[1, 2], terms=found.terms)

        Bridge.invitation = other

    ended = run_dedicated(pair, tmp_path, prepare)
    assert [rank.code for rank in ended] == [1, 1]
    assert "eaglex drafter: error: group: expected" in ended[0].err
    assert "eaglex: error: dedicated drafter: expected it to join, got exit code 1" in ended[0].err
    assert "drafter: expected success on all ranks, got on rank 0: dedicated drafter" in ended[1].err


def test_the_drafter_is_told_all_of_the_drafts_shape(pair):
    speculation = SpeculationConfig(num_steps=4, topk=2, num_draft_tokens=9, stop_below=0.25)
    both = Pair(PairSource(target=str(pair / "target"), draft=str(pair / "draft")))
    plan = both._plan(speculation, LinkOptions(device="cpu"), torch.float32, None)
    invitation = Invitation(address="here", identity=[1, 2], terms={})
    job = Job.from_json(plan.job(invitation, EngineLimits(max_batch=3, max_rows=40, num_slots=4), 50))
    assert job.speculation == speculation
    assert (job.max_batch, job.max_rows, job.max_length) == (3, 40, 50)


@pytest.mark.parametrize("field", ["quant", "hot_vocab", "convention"])
def test_a_word_in_the_place_of_a_value_is_refused(field):
    with pytest.raises(ConfigError, match=f"^{field}: expected .* or None, got 'fp8'$"):
        PairSource(target="a", draft="b", **{field: "fp8"})


def test_what_it_cannot_do(pair, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(arguments(pair, "--placement", "dedicated")) == 1
    assert "placement: expected rank0 without torchrun, got dedicated" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    for device in ("banana", "cuda:64"):
        with pytest.raises(EaglexError, match=rf"^drafter_device: expected .*, got {device}$"):
            generate._check_dedicated(argparse.Namespace(drafter_device=device), SpeculationConfig(num_steps=1))
    assert main(arguments(pair, "--placement", "dedicated")) == 1
    assert "torchrun: expected to reach its store" in capsys.readouterr().err
