#!/usr/bin/env python3
"""Compare EAGLEX with SGLang's own EAGLE3 on a GPU: tokens, accept lengths, time to first token and to the result copy.

    socket_check.py install SITE               # entry points of eaglex and of the probe, into a folder on PYTHONPATH
    socket_check.py run PAIR PROMPTS OUT       # tokens and times under both algorithms; OUT/socket.json and logs
    socket_check.py table OUT/socket.json      # the tables of docs/sglang-socket.md

PAIR holds `target/` and `draft/`; PROMPTS is a .npy file of token ids to cut prompts from. SITE and the folder that
holds eaglex must be on PYTHONPATH. Three stages: engines on two GPUs start and serve one after the other, with no other
engine at work; then those on one GPU start and serve at once, since tokens do not depend on timing; then, with those
gone and the machine quiet, the two for the times (dummy weights of the Llama 8B sizes, 8 layers), in turn.

Environment: CASES, names separated by '; ' (default all that the GPUs allow); GPUS (default: all); REPEATS, engines per
case and algorithm (default 1; a second shows how far each agrees with itself); SECONDS, for all of it (default 600), of
which SECONDS_TO_TIME (default 120) are kept for the times and SECONDS_TO_SERVE (default 150) for the engines on one
GPU; NO_TIMES=1. Exit status 1: something differs or is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from socket_parts.cases import ALGORITHMS, CASES, compared, environment_of, gpus_of, repeated, shown
from socket_parts.engine import ROUNDS, case, time_one, write
from socket_parts.tables import cases_table, times_table

PAIR_SECONDS = 60  # at most, for the requests of one engine on two GPUs


def install(site: Path) -> None:
    """Entry points as pip would leave them: the plugin of eaglex, and the probe."""
    for name, target in {"eaglex": "eaglex.hosts.sglang:register", "socket_probe": "socket_probe:activate"}.items():
        info = site / f"{name}-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {target}\n")
        (info / "RECORD").write_text("")
    shutil.copy(Path(__file__).parent / "socket_parts" / "probe.py", site / "socket_probe.py")


COMPARISON = {"EAGLEX_OPTIONS": '{"drafter": "host"}'}  # SGLang's own draft, run early


@dataclass
class Process:
    """One engine's process. `result` names its files: .json what it served, .ready, .go0, .round0, .log."""

    arguments: list[str]
    result: Path
    devices: str
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self, tool: str = __file__) -> None:
        places = {"CUDA_VISIBLE_DEVICES": self.devices, "SOCKET_PORT": str(self.port)}
        with self.result.with_suffix(".log").open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, tool, *self.arguments], stdout=file, stderr=subprocess.STDOUT,
                env=os.environ | self.environment | places, start_new_session=True,
            )  # fmt: skip

    def has(self, suffix: str) -> bool:
        return self.result.with_suffix(suffix).is_file()

    def go(self, number: int = 0, what: Any = True) -> None:
        """Its turn `number`, and what to do in it."""
        write(self.result.with_suffix(f".go{number}"), what)

    @property
    def over(self) -> bool:
        """It has served, or there is no process any more that could."""
        return self.has(".json") or self.process is None or self.process.poll() is not None

    def signal(self, number: int) -> None:
        """To it and its children."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """With its children; an engine of the host can hang while it shuts down."""
        if self.process is None:
            return
        self.signal(signal.SIGKILL)
        self.process.wait()


def end_in_order() -> None:
    """Let a SIGTERM, as of `timeout`, pass through what kills the engines, which are in sessions of their own."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def until(done: Any, seconds: float) -> bool:
    """Poll; False when the time is over first."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if done():
            return True
        time.sleep(0.05)
    return False


def seconds(name: str, default: float) -> float:
    return float(os.environ.get(name, default))


def serve_all(processes: list[Process], limit: float) -> None:
    """Give these engines their turn at once; each is killed when it has served, which frees the GPU for the others."""
    waiting = [process for process in processes if process.process is not None]
    for process in waiting:
        process.go()

    def step() -> bool:
        for process in [process for process in waiting if process.over]:
            process.kill()
            waiting.remove(process)
        return not waiting

    if not until(step, limit):
        for process in waiting:
            process.kill()


@dataclass
class CaseRun:
    """Engines that serve cases: what they read, where they write, and since when."""

    pair: Path
    prompts: Path
    out: Path
    names: list[str]
    started: float = field(default_factory=time.monotonic, kw_only=True)

    def engine(
        self, name: str, algorithm: str, result: Path, *, devices: str, port: int, environment: dict[str, str]
    ) -> Process:
        """One that serves a case; its environment is the case's and what is given."""
        arguments = ["case", name, algorithm, str(self.pair), str(self.prompts), str(result)]
        return Process(arguments, result, devices, port, environment_of(name) | environment)

    def spent(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.started

    def say(self, what: str) -> None:
        print(f"{self.spent():6.1f} s  {what}", flush=True)


@dataclass
class Plan(CaseRun):
    """Every engine of a run, and the deadlines of its stages."""

    gpus: int

    def __post_init__(self) -> None:
        self.cases: dict[tuple[str, str, int], Process] = {}
        repeats = range(int(os.environ.get("REPEATS", "1")))
        for place, name in enumerate(self.names):
            devices = "0,1" if gpus_of(name) > 1 else str(place % self.gpus)
            for algorithm, repeat in itertools.product(ALGORITHMS, repeats):
                stem = f"{name.replace(', ', '-').replace(' ', '_')}-{algorithm}" + (f"-{repeat}" if repeat else "")
                result = self.out / f"{stem}.json"
                port = 21000 + 7 * len(self.cases)
                self.cases[name, algorithm, repeat] = self.engine(
                    name, algorithm, result, devices=devices, port=port, environment=COMPARISON
                )
        self.pairs = [process for key, process in self.cases.items() if gpus_of(key[0]) > 1]
        self.single = [process for key, process in self.cases.items() if gpus_of(key[0]) == 1]
        self.timed: dict[str, Process] = {}
        if not os.environ.get("NO_TIMES"):
            for number, algorithm in enumerate(ALGORITHMS):
                result = self.out / f"time-{algorithm}.json"
                probe = {"SOCKET_PROBE": str(self.out / f"probe-{algorithm}.txt")} | COMPARISON
                arguments = ["time_one", algorithm, str(result)]
                self.timed[algorithm] = Process(arguments, result, "0", 20000 + 7 * number, probe)

    def left(self, *kept: str) -> float:
        """Seconds until the stages named have to begin, or until the end."""
        reserved = {
            "TIME": seconds("SECONDS_TO_TIME", 120) * bool(self.timed),
            "SERVE": seconds("SECONDS_TO_SERVE", 150) * bool(self.single),
        }
        return max(1.0, seconds("SECONDS", 600) - self.spent() - sum(reserved[name] for name in kept))

    def served(self, name: str, algorithm: str) -> list[dict[str, Any]]:
        """What the engines of this case and algorithm have served, those that have."""
        found = [process for key, process in self.cases.items() if key[:2] == (name, algorithm)]
        return [json.loads(process.result.read_text()) for process in found if process.has(".json")]

    def report(self) -> list[dict[str, Any]]:
        rows = []
        for name in self.names:
            found = {a: self.served(name, a) for a in ALGORITHMS}
            missing = [a for a, runs in found.items() if not runs]
            if missing:
                rows.append({"case": name, "equal": False, "missing": missing})
                continue
            base = self.served(name.split(", ")[0], ALGORITHMS[0])
            row = compared(name, *(runs[0] for runs in found.values()), base=base[0] if base else None)
            rows.append(row | {"itself": {a: repeated(runs) for a, runs in found.items()}})
        return rows


def up(processes: list[Process]) -> bool:
    return all(process.has(".ready") or process.over for process in processes)


def serve_pairs(plan: Plan) -> None:
    """On two GPUs, one engine after the other and nothing else: a collective waits until both ranks have a time slice.

    One that hangs costs PAIR_SECONDS; apart from that each may take what is left, so that the first ones are whole.
    """
    for process in plan.pairs:
        process.start()
    until(lambda: up([*plan.pairs, *plan.timed.values()]), plan.left("TIME", "SERVE"))
    plan.say(f"{sum(process.has('.ready') for process in plan.pairs)} of {len(plan.pairs)} on two GPUs are up")
    for process in plan.pairs:
        serve_all([process], min(PAIR_SECONDS, plan.left("TIME", "SERVE")))
        plan.say(f"on two GPUs: {process.result.stem} {'served' if process.has('.json') else 'FAILED'}")


def serve_single(plan: Plan) -> None:
    """On one GPU, all at once."""
    for process in plan.single:
        process.start()
    until(lambda: up(plan.single), plan.left("TIME", "SERVE"))
    plan.say(f"{sum(process.has('.ready') for process in plan.single)} of {len(plan.single)} on one GPU are up")
    serve_all(plan.single, plan.left("TIME"))
    plan.say(f"{sum(process.has('.json') for process in plan.single)} of {len(plan.single)} have served")


def busy_cores(over: float = 0.5) -> float:
    """How many cores the whole machine keeps busy, over so many seconds; the load of a minute ago says nothing."""

    def idle() -> float:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()  # cpu, user, nice, system, idle, iowait, ...
        return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")

    begun, before = time.monotonic(), idle()
    time.sleep(over)
    return (os.cpu_count() or 1) - (idle() - before) / (time.monotonic() - begun)


def quiet() -> bool:
    """A quarter of the cores at most is busy."""
    return busy_cores() <= (os.cpu_count() or 1) / 4


def measure(plan: Plan) -> dict[str, list[Any]]:
    """Rounds of each algorithm, with how many cores were busy at its begin; what is not there in time is left out.

    They wait for the cores to be quiet while more time is left than SECONDS_TO_TIME.
    """
    taken: dict[str, list[Any]] = {algorithm: [] for algorithm in ALGORITHMS}
    if not until(lambda: all(process.has(".ready") for process in plan.timed.values()), plan.left()):
        return taken
    plan.say(f"times: {'quiet' if until(quiet, plan.left('TIME')) else 'NOT quiet'}, {busy_cores():.1f} cores busy")
    for number, (algorithm, process) in itertools.product(range(ROUNDS), plan.timed.items()):
        busy = round(busy_cores(), 1)
        process.go(number)
        done = f".round{number}"
        until(lambda process=process, done=done: process.has(done) or process.over, plan.left())
        if process.has(done):
            taken[algorithm].append({"busy_cores": busy} | json.loads(process.result.with_suffix(done).read_text()))
            plan.say(f"{algorithm} round {number}: {json.dumps(taken[algorithm][-1])}")
    return taken


def about(out: Path) -> dict[str, Any]:
    """GPU, driver and versions that a result is from."""
    import importlib.metadata

    import torch

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    versions = {name: importlib.metadata.version(name) for name in ("sglang", "triton")}
    return {
        "gpus": found, "torch": torch.__version__, **versions, "python": sys.version.split()[0],
        "commit": os.environ.get("EAGLEX_COMMIT", "unknown"), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def run(pair: Path, prompts: Path, out: Path) -> int:
    """Tokens first, with the engines for the times coming up beside; then the times, with no other engine left."""
    end_in_order()
    described = about(out)
    gpus = int(os.environ.get("GPUS") or len(described["gpus"]))
    names = os.environ["CASES"].split("; ") if os.environ.get("CASES") else list(CASES)
    plan = Plan(pair, prompts, out, [name for name in names if gpus_of(name) <= gpus], gpus)
    report: dict[str, Any] = {"about": described}
    try:
        for process in plan.timed.values():  # up by their turn; until then they only poll
            process.start()
        if plan.pairs:
            serve_pairs(plan)
        if plan.single:
            serve_single(plan)
        report["cases"] = plan.report()
        write(out / "socket.json", report)
        if plan.timed:
            report["times"] = measure(plan)
            write(out / "socket.json", report)
    finally:
        for process in (*plan.cases.values(), *plan.timed.values()):
            process.kill()
    for row in report["cases"]:
        print(shown(row), flush=True)
    timed = not plan.timed or all(len(rounds) == ROUNDS for rounds in report["times"].values())
    return 0 if timed and all(row["equal"] for row in report["cases"]) else 1


def main() -> int:
    command, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if command == "install":
        install(Path(rest[0]))
        return 0
    if command == "run":
        return run(*(Path(part) for part in rest))
    if command == "table":
        report = json.loads(Path(rest[0]).read_text())
        print("\n".join([*cases_table(report["cases"]), "", *times_table(report.get("times", {}))]))
        return 0
    if command == "case":
        case(rest[0], rest[1], *(Path(part) for part in rest[2:]))
        os._exit(0)  # the caller kills the engine's processes
    if command == "time_one":
        time_one(rest[0], Path(rest[1]))
        os._exit(0)
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main())
