"""Processes that begin with everything imported: one interpreter imports it and forks. It never touches a GPU and has
no threads, so that its children may. transformers alone takes 10 to 20 s to import on a fresh machine.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOADED = (
    "torch", "torch._dynamo", "torch.distributed.tensor.parallel", "accelerate", "transformers.generation.utils",
    "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "eaglex.cli",
    "eaglex.bridge_dedicated", "eaglex.hosts.transformers", "eaglex.hosts.dedicated", "eaglex.hosts.team",
)  # fmt: skip


class Zygote:
    """`script` calls `serve` where it is started as a program. A context manager."""

    def __init__(self, script: str) -> None:
        self._process = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)

    def start(self, job: Any, environment: dict[str, str], out: Path, err: Path) -> int:
        """The process that runs this job."""
        return int(self._ask({"job": job, "environment": environment, "out": str(out), "err": str(err)}))

    def poll(self, process: int) -> int | None:
        """Its exit code, or minus the signal; None while it runs."""
        code = self._ask({"poll": process})
        return None if code is None else int(code)

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def redirect(out: str | Path, err: str | Path) -> None:
    """This process, which a fork has made, writes what it says into these files."""
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115


def serve(run: Callable[[Any], int]) -> None:
    """Fork a child that runs run(job), its exit code, for each request on stdin, until that ends."""
    for name in PRELOADED:
        importlib.import_module(name)
    assert threading.active_count() == 1
    ended: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            answer = _poll(request["poll"], ended)
        else:
            answer = os.fork()
            if answer == 0:
                _child(run, request)
        print(json.dumps(answer), flush=True)


def _poll(process: int, ended: dict[int, int]) -> int | None:
    if process not in ended:
        found, status = os.waitpid(process, os.WNOHANG)
        if not found:
            return None
        ended[process] = os.waitstatus_to_exitcode(status)
    return ended[process]


def _child(run: Callable[[Any], int], request: dict[str, Any]) -> None:
    code = 70
    try:
        redirect(request["out"], request["err"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ |= request["environment"]
        code = run(request["job"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
