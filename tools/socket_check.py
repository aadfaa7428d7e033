#!/usr/bin/env python3
"""Compare EAGLEX with SGLang's own EAGLE3 on a GPU: tokens, accept lengths, time to first token and to the result copy.

    socket_check.py install SITE               # entry points of eaglex and of the probe, into a folder on PYTHONPATH
    socket_check.py run PAIR PROMPTS OUT       # tokens and times under both algorithms; OUT/socket.json and logs
    socket_check.py table OUT/socket.json      # the tables of docs/sglang-socket.md

PAIR holds `target/` and `draft/`; PROMPTS is a .npy file of token ids to cut prompts from. SITE and the folder that
holds eaglex must be on PYTHONPATH. All engines start beside each other and then take turns: first those on two GPUs,
one after the other; then all on one GPU at once, since tokens do not depend on timing; then the two for the times
(dummy weights of the Llama 8B sizes, 8 layers), in turn, when no other engine runs.

Environment: CASES, names separated by '; ' (default all that the GPUs allow); GPUS (default: all); HEAD_START, seconds
that engines on two GPUs and those for the times start before the rest (default 0); SECONDS, for all of it (default
600), of which SECONDS_TO_TIME (default 120) are kept for the times and SECONDS_TO_SERVE (default 150) for the engines
on one GPU; NO_TIMES=1. Exit status 1: something differs or is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from socket_parts.cases import ALGORITHMS, CASES, compared, environment_of, gpus_of, shown
from socket_parts.engine import ROUNDS, case, time_one, write
from socket_parts.tables import cases_table, times_table


def install(site: Path) -> None:
    """Entry points as pip would leave them: the plugin of eaglex, and the probe."""
    for name, target in {"eaglex": "eaglex.hosts.sglang:register", "socket_probe": "socket_probe:activate"}.items():
        info = site / f"{name}-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {target}\n")
        (info / "RECORD").write_text("")
    shutil.copy(Path(__file__).parent / "socket_parts" / "probe.py", site / "socket_probe.py")


@dataclass
class Process:
    """One engine's process. `result` names its files: .json what it served, .ready, .go0, .round0, .log."""

    arguments: list[str]
    result: Path
    devices: str
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        places = {"CUDA_VISIBLE_DEVICES": self.devices, "SOCKET_PORT": str(self.port)}
        with self.result.with_suffix(".log").open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, __file__, *self.arguments], stdout=file, stderr=subprocess.STDOUT,
                env=os.environ | self.environment | places, start_new_session=True,
            )  # fmt: skip

    def has(self, suffix: str) -> bool:
        return self.result.with_suffix(suffix).is_file()

    def go(self, number: int = 0) -> None:
        write(self.result.with_suffix(f".go{number}"), True)

    @property
    def over(self) -> bool:
        """It has served, or there is no process any more that could."""
        return self.has(".json") or self.process is None or self.process.poll() is not None

    def kill(self) -> None:
        """With its children; an engine of the host can hang while it shuts down."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()


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
class Plan:
    """Every engine of a run, and the deadlines of its stages."""

    pair: Path
    prompts: Path
    out: Path
    names: list[str]
    gpus: int
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.cases: dict[tuple[str, str], Process] = {}
        for number, (name, algorithm) in enumerate((name, a) for name in self.names for a in ALGORITHMS):
            result = self.out / f"{name.replace(', ', '-').replace(' ', '_')}-{algorithm}.json"
            devices = "0,1" if gpus_of(name) > 1 else str(number // 2 % self.gpus)
            arguments = ["case", name, algorithm, str(self.pair), str(self.prompts), str(result)]
            self.cases[name, algorithm] = Process(arguments, result, devices, 21000 + 7 * number, environment_of(name))
        self.timed: dict[str, Process] = {}
        if not os.environ.get("NO_TIMES"):
            for number, algorithm in enumerate(ALGORITHMS):
                result = self.out / f"time-{algorithm}.json"
                probe = {"SOCKET_PROBE": str(self.out / f"probe-{algorithm}.txt")}
                arguments = ["time_one", algorithm, str(result)]
                self.timed[algorithm] = Process(arguments, result, "0", 20000 + 7 * number, probe)

    def left(self, *kept: str) -> float:
        """Seconds until the stages named have to begin, or until the end."""
        reserved = {
            "TIME": seconds("SECONDS_TO_TIME", 120) * bool(self.timed),
            "SERVE": seconds("SECONDS_TO_SERVE", 150),
        }
        spent = time.monotonic() - self.started
        return max(1.0, seconds("SECONDS", 600) - spent - sum(reserved[name] for name in kept))

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self.started:6.1f} s  {what}", flush=True)

    def served(self, name: str, algorithm: str) -> dict[str, Any] | None:
        process = self.cases.get((name, algorithm))
        return json.loads(process.result.read_text()) if process is not None and process.has(".json") else None

    def report(self) -> list[dict[str, Any]]:
        rows = []
        for name in self.names:
            found = {a: self.served(name, a) for a in ALGORITHMS}
            missing = [a for a, served in found.items() if served is None]
            if missing:
                rows.append({"case": name, "equal": False, "missing": missing})
            else:
                base = self.served(name.split(", ")[0], ALGORITHMS[0])
                rows.append(compared(name, *found.values(), base=base))
        return rows


def serve_cases(plan: Plan) -> None:
    """Start all engines; those on two GPUs serve first, as a collective that waits for a shared GPU takes for ever."""
    pairs = [process for (name, _), process in plan.cases.items() if gpus_of(name) > 1]
    single = [process for (name, _), process in plan.cases.items() if gpus_of(name) == 1]
    for process in (*pairs, *plan.timed.values()):
        process.start()
    if pairs:
        time.sleep(seconds("HEAD_START", 0))
    for process in single:
        process.start()

    def up(processes: list[Process]) -> bool:
        return all(process.has(".ready") or process.over for process in processes)

    def serve_pairs(*kept: str) -> None:
        for number, process in enumerate(pairs):
            serve_all([process], plan.left(*kept) / (len(pairs) - number))
            plan.say(f"on two GPUs: {process.result.stem} {'served' if process.has('.json') else 'FAILED'}")

    early = bool(pairs) and until(lambda: up(pairs) or up(single), plan.left("TIME", "SERVE")) and up(pairs)
    plan.say(f"{sum(process.has('.ready') for process in pairs)} of {len(pairs)} engines on two GPUs are up")
    if early:
        serve_pairs("TIME", "SERVE")
    until(lambda: up(single), plan.left("TIME", "SERVE"))
    plan.say(f"{sum(process.has('.ready') for process in single)} of {len(single)} engines on one GPU are up")
    serve_all(single, plan.left("TIME"))
    plan.say(f"{sum(process.has('.json') for process in single)} of {len(single)} have served")
    if pairs and not early:
        until(lambda: up(pairs), plan.left("TIME"))
        serve_pairs("TIME")


def measure(plan: Plan) -> dict[str, list[Any]]:
    """Rounds of each algorithm; what is not there by the deadline is left out."""
    taken: dict[str, list[Any]] = {algorithm: [] for algorithm in ALGORITHMS}
    if until(lambda: all(process.has(".ready") for process in plan.timed.values()), plan.left()):
        for number in range(ROUNDS):
            for algorithm, process in plan.timed.items():
                process.go(number)
                done = f".round{number}"
                until(lambda process=process, done=done: process.has(done) or process.over, plan.left())
                if process.has(done):
                    taken[algorithm].append(json.loads(process.result.with_suffix(done).read_text()))
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
    """Tokens first, with the engines for the times coming up beside; then the times, alone on the GPU."""
    described = about(out)
    gpus = int(os.environ.get("GPUS") or len(described["gpus"]))
    names = os.environ["CASES"].split("; ") if os.environ.get("CASES") else list(CASES)
    plan = Plan(pair, prompts, out, [name for name in names if gpus_of(name) <= gpus], gpus)
    report: dict[str, Any] = {"about": described}
    try:
        serve_cases(plan)
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
    command, rest = sys.argv[1], sys.argv[2:]
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
