"""`eaglex generate` with a target that is split over two GPUs, or two ranks that share one: the same tokens as one
process, and lost ranks named.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import hf_pair
import pytest
import torch.distributed as dist
from support.bridge_places import ONE, WHERE, needs

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


class Ran:
    """`count` processes of their own, each a new interpreter: nothing is forked where CUDA or threads may be about."""

    def __init__(
        self, count: int, folder: Path, arguments: list[str], ends_at: dict[int, int] | None = None, where: str = ONE
    ) -> None:
        self.folder = folder / uuid.uuid4().hex
        self.folder.mkdir()
        ends_at = ends_at or {}
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        names = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
        names |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        each = []
        for rank in range(count):
            own = names | {"RANK": rank, "LOCAL_RANK": 0 if where == ONE else rank}
            with open(self.folder / f"{rank}.out", "w") as out, open(self.folder / f"{rank}.err", "w") as err:
                job = json.dumps([arguments, str(self.folder), int(ends_at.get(rank, 0))])
                environment = os.environ | {name: str(value) for name, value in own.items()}
                command = [sys.executable, __file__, job]
                each.append(subprocess.Popen(command, env=environment, stdout=out, stderr=err))
        until = time.monotonic() + 90
        for rank, process in enumerate(each):
            if rank not in ends_at:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, until - time.monotonic()))
        self.at = time.monotonic()
        self.codes = [process.poll() for process in each]
        for process in each:
            process.kill()
            process.wait(10)

    def text(self, rank: int, stream: str = "err") -> str:
        return (self.folder / f"{rank}.{stream}").read_text()


def arguments_of(pair: Path, *options: str, where: str = ONE) -> list[str]:
    paths = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--prompt", "the a cat dog sees hears"]
    shape = ["--max-new-tokens", "24", "--topk", "3", "--num-steps", "3", "--dtype", "float32"]
    device = ["--device", "cuda:0" if where == ONE else "cuda"]
    return ["generate", *paths, *shape, *device, "--json", "--check", *options]


@pytest.fixture(scope="module")
def alone(pair, tmp_path_factory):
    ran = Ran(1, tmp_path_factory.mktemp("alone"), arguments_of(pair))
    assert ran.codes == [0], ran.text(0)
    return json.loads(ran.text(0, "out"))


@pytest.mark.parametrize("transport", [None, "p2p", "mailbox", "nccl", "shm"])
@pytest.mark.parametrize("where", WHERE)
def test_ranks_say_what_one_process_says(where, transport, pair, alone, tmp_path):
    needs(where, transport)
    options = ["--transport", transport] if transport else []
    ran = Ran(2, tmp_path, arguments_of(pair, *options, where=where), where=where)
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
def test_a_drafter_on_a_gpu(where, transport, pair, alone, tmp_path):
    """The ranks' own, or the second rank's: rows go there from device to device, or through the host."""
    needs(where)
    options = ["--placement", "dedicated", "--drafter-device", "cuda:0" if where == ONE else "cuda:1"]
    options += ["--drafter-deadline", "20", *(["--transport", transport] if transport else [])]
    ran = Ran(2, tmp_path, arguments_of(pair, *options, where=where), where=where)
    assert ran.codes == [0, 0], ran.text(0) + ran.text(1)
    found = json.loads(ran.text(0, "out"))
    assert found["tokens"] == alone["tokens"]
    assert found["accept_length"] == alone["accept_length"]
    assert found["warnings"] == []


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("where", WHERE)
def test_a_killed_rank_is_named(where, victim, pair, tmp_path):
    needs(where)
    arguments = arguments_of(pair, "--deadline", str(DEADLINE), where=where)
    ran = Ran(2, tmp_path, arguments, {victim: signal.SIGKILL}, where)
    assert ran.codes[1 - victim] == 1, ran.text(1 - victim)
    assert f"eaglex: error: rank {victim}: its process has ended" in ran.text(1 - victim)
    assert ran.at - float((ran.folder / "ended").read_text()) < DEADLINE + 4  # the others' exit included


@pytest.mark.parametrize("where", WHERE)
def test_a_stopped_rank_is_named(where, pair, tmp_path):
    needs(where)
    ran = Ran(2, tmp_path, arguments_of(pair, "--deadline", str(DEADLINE), where=where), {1: signal.SIGSTOP}, where)
    assert ran.codes[0] == 1, ran.text(0)
    assert "eaglex: error: rank 1: " in ran.text(0)


if __name__ == "__main__":
    sys.exit(_rank(*json.loads(sys.argv[1])))
