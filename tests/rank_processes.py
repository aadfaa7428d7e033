"""Ranks as torchrun starts them, forked from the test so that they need not import everything again."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from support.zygote import redirect

# Machines that run tests beside other work are slow; a hang is found by the deadlines that are tested, not by this.
PATIENCE = 100
PORT_BYTES = 8


@dataclasses.dataclass
class Ended:
    """One rank that has ended: exit code or minus the signal, output, and seconds since all were started."""

    code: int
    out: str
    err: str
    seconds: float


class Ranks:
    """`count` processes that run body(rank), the exit code. Killed on exit, in whatever state they are."""

    def __init__(self, count: int, body: Callable[[int], int], folder: Path) -> None:
        gc.collect()  # else a rank may collect what is garbage here, and wait for threads that it does not have
        self.folder, self.begun = folder, time.monotonic()
        # All are forked before the store has a thread and any rank calls it: whoever is forked while that thread holds
        # a lock finds it held for ever. They wait for the port on a pipe.
        ports, told = os.pipe()
        self.processes = [self._start(rank, count, (ports, told), body) for rank in range(count)]
        # As torchrun's agent does: the store outlives every rank.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(told, f"{self._store.port:{PORT_BYTES}}".encode() * count)
        os.close(ports)
        os.close(told)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            try:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            except (ProcessLookupError, ChildProcessError):
                pass

    def wait(self, *ranks: int) -> list[Ended]:
        """These ranks, by default all, once they have ended."""
        return [self._wait(rank) for rank in ranks or range(len(self.processes))]

    def text(self, rank: int, stream: str = "err") -> str:
        return (self.folder / f"{rank}.{stream}").read_text()

    def _wait(self, rank: int) -> Ended:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            process, status = os.waitpid(self.processes[rank], os.WNOHANG)
            if process:
                seconds = time.monotonic() - self.begun
                return Ended(os.waitstatus_to_exitcode(status), self.text(rank, "out"), self.text(rank), seconds)
            time.sleep(0.02)
        raise AssertionError(f"rank {rank} hangs; its stderr: {self.text(rank)}")

    def _start(self, rank: int, count: int, pipe: tuple[int, int], body: Callable[[int], int]) -> int:
        process = os.fork()
        if process:
            return process
        code = 70
        try:
            # torch's first call of this kind after a fork replaces its thread pool. Here there is one thread; left to
            # the threads that load weights, one of them can meet no pool at all ("Invalid thread pool!").
            torch.set_num_threads(1)
            os.close(pipe[1])
            port = os.read(pipe[0], PORT_BYTES).decode().strip()  # empty when the test has ended
            os.close(pipe[0])
            redirect(self.folder / f"{rank}.out", self.folder / f"{rank}.err")
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            code = body(rank)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
