"""`eaglex generate` with a target that is split over two GPUs, or two ranks that share one: the same tokens as one
process, and lost ranks named.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import hf_pair
import pytest
import torch.distributed as dist
from support.bridge_places import ONE, WHERE, needs
from support.zygote import Zygote, serve

pytestmark = pytest.mark.gpu

DEADLINE = 5.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return hf_pair.save_pair_of_eight(tmp_path_factory.mktemp("pair"))


def _rank(arguments: list[str], folder: str, ends_by: int) -> int:
    """One rank, as torchrun would start it; `ends_by` is a signal that it sends itself at its 12th decision."""
    from eaglex.cli import main
    from eaglex.hosts.team import Team

    if ends_by:
        decide, calls = Team.decide, [0]

        def counted(self: Team, choose: Any) -> Any:
            calls[0] += 1
            if calls[0] == 12:
                Path(folder, "ended").write_text(str(time.monotonic()))
                os.kill(os.getpid(), ends_by)
            return decide(self, choose)

        Team.decide = counted  # type: ignore[method-assign]
    return main(arguments)


@pytest.fixture(scope="module")
def started():
    with Zygote(__file__) as zygote:
        yield zygote


@dataclasses.dataclass
class Job:
    """`eaglex` with these arguments in `count` processes, of which some end by a signal (`ends_at`, by rank)."""

    arguments: list[str]
    count: int = 2
    where: str = ONE
    ends_at: dict[int, int] = dataclasses.field(default_factory=dict)


class Ran:
    """A job that has ended, or not all of it within 60 s."""

    def __init__(self, zygote: Zygote, folder: Path, job: Job) -> None:
        self.folder = folder / uuid.uuid4().hex
        self.folder.mkdir()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        names = {"WORLD_SIZE": job.count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
        names |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        each = []
        for rank in range(job.count):
            own = names | {"RANK": rank, "LOCAL_RANK": 0 if job.where == ONE else rank}
            environment = {name: str(value) for name, value in own.items()}
            work = [job.arguments, str(self.folder), int(job.ends_at.get(rank, 0))]
            out, err = self.folder / f"{rank}.out", self.folder / f"{rank}.err"
            each.append(zygote.start(work, environment, out, err))
        until = time.monotonic() + 60
        waited_for = [process for rank, process in enumerate(each) if rank not in job.ends_at]
        while any(zygote.poll(process) is None for process in waited_for) and time.monotonic() < until:
            time.sleep(0.02)
        self.at = time.monotonic()
        self.codes = [zygote.poll(process) for process in each]
        for process, code in zip(each, self.codes, strict=True):
            if code is None:
                os.kill(process, signal.SIGKILL)

    def text(self, rank: int, stream: str = "err") -> str:
        return (self.folder / f"{rank}.{stream}").read_text()


def arguments_of(pair: Path, *options: str, where: str = ONE) -> list[str]:
    paths = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--prompt", "the a cat dog sees hears"]
    shape = ["--max-new-tokens", "24", "--topk", "3", "--num-steps", "3", "--dtype", "float32"]
    device = ["--device", "cuda:0" if where == ONE else "cuda"]
    return ["generate", *paths, *shape, *device, "--json", "--check", *options]


@pytest.fixture(scope="module")
def alone(pair, started, tmp_path_factory):
    ran = Ran(started, tmp_path_factory.mktemp("alone"), Job(arguments_of(pair), count=1))
    assert ran.codes == [0], ran.text(0)
    return json.loads(ran.text(0, "out"))


@pytest.mark.parametrize("transport", [None, "p2p", "mailbox", "nccl", "shm"])
@pytest.mark.parametrize("where", WHERE)
def test_ranks_say_what_one_process_says(where, transport, pair, alone, started, tmp_path):
    needs(where, transport)
    options = ["--transport", transport] if transport else []
    ran = Ran(started, tmp_path, Job(arguments_of(pair, *options, where=where), where=where))
    assert ran.codes == [0, 0], ran.text(0) + ran.text(1)
    found = json.loads(ran.text(0, "out"))
    assert found["tokens"] == alone["tokens"]
    assert found["accept_length"] == alone["accept_length"] > 1
    assert found["lossless"] is True
    assert found["transport"] == (transport or "p2p")
    assert found["bridge"]["drafts"] == found["bridge"]["pushed"] > 0
    assert found["warnings"] == []


@pytest.mark.parametrize("transport", [None, "shm"])
@pytest.mark.parametrize("where", WHERE)
def test_a_drafter_on_a_gpu(where, transport, pair, alone, started, tmp_path):
    """The ranks' own, or the second rank's: rows go there from device to device, or through the host."""
    needs(where)
    options = ["--placement", "dedicated", "--drafter-device", "cuda:0" if where == ONE else "cuda:1"]
    options += ["--drafter-deadline", "20", *(["--transport", transport] if transport else [])]
    ran = Ran(started, tmp_path, Job(arguments_of(pair, *options, where=where), where=where))
    assert ran.codes == [0, 0], ran.text(0) + ran.text(1)
    found = json.loads(ran.text(0, "out"))
    assert found["tokens"] == alone["tokens"]
    assert found["accept_length"] == alone["accept_length"]
    assert found["warnings"] == []


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("where", WHERE)
def test_a_killed_rank_is_named(where, victim, pair, started, tmp_path):
    needs(where)
    arguments = arguments_of(pair, "--deadline", str(DEADLINE), where=where)
    ran = Ran(started, tmp_path, Job(arguments, where=where, ends_at={victim: signal.SIGKILL}))
    assert ran.codes[1 - victim] == 1, ran.text(1 - victim)
    assert f"eaglex: error: rank {victim}: its process has ended" in ran.text(1 - victim)
    assert ran.at - float((ran.folder / "ended").read_text()) < DEADLINE + 4  # the others' exit included


@pytest.mark.parametrize("where", WHERE)
def test_a_stopped_rank_is_named(where, pair, started, tmp_path):
    needs(where)
    arguments = arguments_of(pair, "--deadline", str(DEADLINE), where=where)
    ran = Ran(started, tmp_path, Job(arguments, where=where, ends_at={1: signal.SIGSTOP}))
    assert ran.codes[0] == 1, ran.text(0)
    assert "eaglex: error: rank 1: " in ran.text(0)


if __name__ == "__main__":
    serve(lambda work: _rank(*work))
