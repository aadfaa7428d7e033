#!/usr/bin/env python3
"""Speed of SGLang with eaglex's engine, with EAGLE3 and without speculation: rows of bench/results/serve-h200.json.

    serve_bench.py install SITE         # entry points of eaglex and of the probe, into a folder on PYTHONPATH
    serve_bench.py run OUT              # OUT/serve.json and a log of every engine
    serve_bench.py table OUT/serve.json

Dummy weights of the Llama-3.1-8B shape with LAYERS (8) layers of target; every verification accepts 3 tokens
(SGLANG_SIMULATE_ACC_LEN), whatever was drafted. All engines are up at once, one at work at a time. The others are
stopped meanwhile: an idle scheduler of SGLang spins, and ten of them made the one at work up to 1.6 times slower on 16
cores. A turn is one batch of one engine, a second or less, and the engines' turns follow each other, in either order:
at small batches the CPU decides, and what a host does to it lasts some seconds. A figure is the median over the turns;
`ratio` is the median of each turn's tokens per second over those of EAGLE3's turn beside it.

More engines can be asked for: `pausing`, eaglex with pausing on where nothing is ever accepted (to be compared with
`none`); `fp8` and `int4`, eaglex with a draft of fewer bits; `dedicated`, eaglex with its draft on a further GPU;
`eagle3-fp8`, SGLang's own draft quantised by SGLang;
`socket`, SGLang's own draft run by eaglex's first worker; `before`, the eaglex of another checkout, whose folder is the
variable BEFORE, to compare two commits in one run.

Environment: PORT of the first engine (23000 + 200 x TP; two runs beside each other need two), ENGINES (default
"eaglex; eagle3; none"), K (5), TOPK (1), NODES (16, of a tree), BATCHES (1,4,16,64), TP (1), GPU (0), the first of
them, or DEVICES, all of them, NCCL_ONLY=1 (without SGLang's own all-reduce), POOL (72000) tokens, FRACTION (0.7) of
the memory that an engine finds free for its weights and pool, ROUNDS (3) at most, TURNS (1) of each batch in a round
(as many as BATCHES with commas, or one for all), NEW (300) tokens of each request, FIRST_TOKENS (9) turns of a first
token of each length in a round, SECONDS for all of it (300), EAGLEX_OPTIONS beside the drafter. The report is written
after each round, so whole rounds are there however a run ends. Exit status 1: an engine is missing.

draft_us is the GPU time of draft and extend together, host_us the CPU time of a forward without verification: before
it, after it, and later, where a draft is enqueued outside of the forward.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import socket_check
from serve_parts.engine import FIRST, PROBE, PROMPT, batches, one, speculation
from socket_check import Process, about, end_in_order, until
from socket_parts.engine import write

OWN: dict[str, dict[str, Any]] = {  # engines under EAGLEX, and their options
    "eaglex": {"drafter": "engine"},
    "pausing": {"drafter": "engine", "pausing": True},
    "fp8": {"drafter": "engine", "draft_quant": "fp8"},
    "int4": {"drafter": "engine", "draft_quant": "int4"},
    "dedicated": {"drafter": "engine", "placement": "dedicated"},
    "socket": {"drafter": "host"},
    "before": {"drafter": "engine"},
}
ENGINES = ("eagle3", "eagle3-fp8", "none", *OWN)
ACCEPTED = {"pausing": "1"}  # "3" elsewhere


def install(site: Path) -> None:
    """Entry points as pip would leave them: the plugin of eaglex, and the probe."""
    socket_check.install(site)
    info = site / "serve_probe-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: serve_probe\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nserve_probe = serve_probe:activate\n")
    (info / "RECORD").write_text("")
    shutil.copy(Path(__file__).parent / "serve_parts" / "probe.py", site / "serve_probe.py")


def process_of(name: str, out: Path, number: int) -> Process:
    result = out / f"serve-{name}.json"
    environment = {"SGLANG_SIMULATE_ACC_LEN": ACCEPTED.get(name, "3"), "SERVE_PROBE_ENGINE": name}
    if name != "none":
        environment["SERVE_PROBE"] = str(out / f"serve-{name}.probe")
    if name in OWN:
        chosen = json.loads(os.environ.get("EAGLEX_OPTIONS") or "{}")
        environment["EAGLEX_OPTIONS"] = json.dumps(chosen | OWN[name])
    if name == "before":
        environment["PYTHONPATH"] = f"{os.environ.get('BEFORE', '')}:{os.environ.get('PYTHONPATH', '')}"
        environment["SERVE_PROBE_ENGINE"] = "eaglex"
    first = int(os.environ.get("GPU", "0"))
    devices = ",".join(map(str, range(first, first + int(os.environ.get("TP", "1")) + (name == "dedicated"))))
    devices = os.environ.get("DEVICES") or devices
    port = int(os.environ.get("PORT") or 23000 + 200 * int(os.environ.get("TP", "1"))) + 11 * number
    if "," in devices:  # the host refuses to start where other engines hold unequal parts of the two
        environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    return Process(["serve", name, str(result)], result, devices, port, environment)


def rows_of(name: str, rounds: list[dict[str, Any]], startup: float, commit: str) -> list[dict[str, Any]]:
    """One row for each batch: medians over the rounds."""

    def median(values: list[Any]) -> float | None:
        found = [value for value in values if value is not None]
        return round(statistics.median(found), 2) if found else None

    def stage(one_round: dict[str, Any], kind: str, batch: int) -> float | None:
        found = one_round["probe"].get("stages", {}).get(kind, {}).get(str(batch))
        return found["median"] if found else None

    def lengths(kind: str) -> dict[str, float | None]:
        taken = [turn[kind] for one_round in rounds for turn in one_round["first"]]
        return {length: median([one[length] for one in taken]) for length in (taken[0] if taken else {})}

    chosen = json.loads(os.environ.get("EAGLEX_OPTIONS") or "{}")
    rows = []
    for batch in batches():
        measured = [taken for one_round in rounds for taken in one_round["batches"][str(batch)]]
        gpu = [(stage(r, "draft", batch), stage(r, "extend", batch)) for r in rounds]
        host = [(stage(r, "host", batch), stage(r, "late", batch) or 0.0) for r in rounds]
        used = [r["probe"].get("gpu_bytes") for r in rounds]
        rows.append({
            "engine": name,
            "tp": int(os.environ.get("TP", "1")),
            "placement": OWN[name].get("placement") or chosen.get("placement", "rank0") if name in OWN else None,
            "precision": "fp8" if name == "eagle3-fp8"
            else OWN.get(name, {}).get("draft_quant") or chosen.get("draft_quant", "bf16"),
            "p2p": os.environ.get("NCCL_P2P_DISABLE") != "1",
            "batch": batch,
            "num_steps": speculation()["speculative_num_steps"] if name != "none" else 0,
            "topk": speculation()["speculative_eagle_topk"] if name != "none" else 0,
            "tok_s": median([m["tok_s"] for m in measured]),
            "cycle_us": median([m["cycle_us"] for m in measured]),
            "draft_us": median([d + e if d is not None and e is not None else None for d, e in gpu]),
            "tree_or_draft_us": median([d for d, _ in gpu]),
            "extend_us": median([e for _, e in gpu]),
            "verify_us": median([stage(r, "verify", batch) for r in rounds]),
            "verify_cpu_us": median([stage(r, "verify_cpu", batch) for r in rounds]),
            "host_us": median([h + late if h is not None else None for h, late in host]),
            "host_parts_us": {
                part: median([stage(r, part, batch) for r in rounds]) for part in ("before", "after", "late")
            },
            "ttft_ms": lengths("first_token_ms").get(str(PROMPT)),
            "first_token_ms": lengths("first_token_ms"),
            "one_token_ms": lengths("one_token_ms"),
            "accept_length": median([m["accept_length"] for m in measured]),
            "paused_cycles": max(r["probe"].get("paused_cycles", 0) for r in rounds),
            "startup_s": startup,
            "memory_gb": median([u / 1e9 if u else None for u in used]),
            "commit": commit,
            "rounds": [m["tok_s"] for m in measured],
        })  # fmt: skip
    return rows


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with `ratios` to EAGLE3's turns beside theirs, and their median."""
    stock = {row["batch"]: row["rounds"] for row in rows if row["engine"] == "eagle3"}
    for row in rows:
        pairs = zip(row["rounds"], stock.get(row["batch"], ()), strict=False)
        row["ratios"] = [round(mine / its, 4) for mine, its in pairs]
        row["ratio"] = round(statistics.median(row["ratios"]), 4) if row["ratios"] else None
    return rows


def table(report: dict[str, Any]) -> list[str]:
    """A line for each row, and each engine's speed against EAGLE3's."""
    shown = ["batch", "tok_s", "cycle_us", "draft_us", "verify_us", "verify_cpu_us", "host_us", "ttft_ms"]
    shown += ["accept_length", "paused_cycles", "startup_s", "memory_gb"]
    lines = ["| engine | " + " | ".join(shown) + " | x EAGLE3 |", "|---" * (len(shown) + 2) + "|"]
    for row in report["rows"]:
        against = f"{row['ratio']:.3f}" if row.get("ratio") else ""
        lines.append(f"| {row['engine']} | " + " | ".join(str(row.get(key)) for key in shown) + f" | {against} |")
    return lines


def turns_of(batch: int) -> int:
    """How often a batch is taken in one round."""
    asked = [int(part) for part in os.environ.get("TURNS", "1").split(",")]
    if len(asked) not in (1, len(batches())):
        sys.exit(f"TURNS: expected one number, or {len(batches())} as BATCHES has, got {asked}")
    return asked[batches().index(batch) if len(asked) > 1 else 0]


class Engines:
    """The engines of a run, one at work at a time."""

    def __init__(self, out: Path, names: list[str], make: Callable[[str, Path, int], Process]) -> None:
        self.out, self.names = out, names
        self.begun, self.limit = time.monotonic(), float(os.environ.get("SECONDS", 300))
        self.processes = {name: make(name, out, number) for number, name in enumerate(names)}
        self.turns = dict.fromkeys(names, 0)

    def left(self) -> float:
        return max(0.5, self.limit - (time.monotonic() - self.begun))

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self.begun:6.1f} s  {what}", flush=True)

    def up(self) -> bool:
        """Wait for all of them; whether all are there. They are stopped then."""
        until(lambda: all(p.has(".ready") or p.over for p in self.processes.values()), self.left())
        found = [name for name, process in self.processes.items() if process.has(".ready")]
        self.say(f"up: {found}")
        for process in self.processes.values():
            process.signal(signal.SIGSTOP)
        return found == self.names

    @contextlib.contextmanager
    def running(self, tool: str) -> Iterator[bool]:
        """All of them, served by `tool`, and whether all came up; however it ends, they are killed."""
        try:
            for process in self.processes.values():
                process.start(tool)
            yield self.up()
        finally:
            for process in self.processes.values():
                process.kill()

    def wait_for_gate(self) -> None:
        gate = os.environ.get("WAIT_FOR")  # another job on the same GPU, which the times must not share it with
        if gate:
            until(lambda: Path(gate).exists(), self.left())

    def given(self, name: str, what: Any) -> dict[str, Any] | None:
        """What the engine says of its next turn; None where it is not there, or does not in time."""
        process, number = self.processes[name], self.turns[name]
        if not process.has(".ready") or process.over:
            return None
        self.turns[name] += 1
        done = f".round{number}"
        process.signal(signal.SIGCONT)
        process.go(number, what)
        until(lambda: process.has(done) or process.over, self.left())
        process.signal(signal.SIGSTOP)
        found = process.result.with_suffix(done)
        return json.loads(found.read_text()) if found.is_file() else None

    def startup(self, name: str) -> float:
        return float(json.loads(self.processes[name].result.with_suffix(".ready").read_text())["startup_s"])


class Run(Engines):
    """All rounds, and the report of those that are whole."""

    def __init__(self, out: Path, names: list[str]) -> None:
        super().__init__(out, names, process_of)
        self.rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

    def round(self, number: int) -> None:
        """Each batch of each engine so often, then first tokens; kept where the engine has said all of it."""
        turns: list[Any] = [batch for batch in batches() for _ in range(turns_of(batch))]
        turns += [FIRST] * int(os.environ.get("FIRST_TOKENS", "9"))
        made: dict[str, dict[str, Any]] = {
            name: {"batches": {str(batch): [] for batch in batches()}, "first": []} for name in self.names
        }
        missing = set()
        for count, asked in enumerate(turns, number):
            if self.left() < 1:
                return
            for name in self.names if count % 2 == 0 else self.names[::-1]:
                taken = self.given(name, asked)
                if taken is None:
                    missing.add(name)
                else:
                    (made[name]["first"] if asked == FIRST else made[name]["batches"][str(asked)]).append(taken)
        for name in self.names:
            probe = self.given(name, PROBE)
            if probe is not None and name not in missing:
                self.rounds[name].append(made[name] | {"probe": probe})
                self.say(f"{name} round {number}: {json.dumps(self.rounds[name][-1])}")

    def report(self, described: dict[str, Any]) -> dict[str, Any]:
        rows = []
        for name, taken in self.rounds.items():
            if taken:
                rows += rows_of(name, taken, self.startup(name), described["commit"])
        found = {"about": described, "layers": int(os.environ.get("LAYERS", "8")), "rows": compared(rows)}
        write(self.out / "serve.json", found)
        return found


def run(out: Path) -> int:
    end_in_order()
    out.mkdir(parents=True, exist_ok=True)
    names = [name.strip() for name in os.environ.get("ENGINES", "eaglex; eagle3; none").split(";")]
    unknown = [name for name in names if name not in ENGINES]
    if unknown:
        sys.exit(f"ENGINES: expected some of {list(ENGINES)}, got {unknown}")
    described, made = about(out), Run(out, names)
    with made.running(__file__):
        made.wait_for_gate()
        longest = 0.0
        for number in range(int(os.environ.get("ROUNDS", "3"))):
            if number and made.left() < longest + 2:
                break
            started = time.monotonic()
            made.round(number)
            report = made.report(described)
            longest = max(longest, time.monotonic() - started)
        print("\n".join(table(report)), flush=True)
    return 0 if all(made.rounds.values()) else 1


def commanded(
    usage: str | None,
    *,
    run: Callable[[Path], int],
    table: Callable[[dict[str, Any]], list[str]],
    serve: Callable[[str, Path], None],
) -> int:
    """What the command line says: `run FOLDER`, `table REPORT`, or `serve ENGINE FILE`, which does not return."""
    command, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if command == "run":
        return run(Path(rest[0]))
    if command == "table":
        print("\n".join(table(json.loads(Path(rest[0]).read_text()))))
        return 0
    if command == "serve":
        serve(rest[0], Path(rest[1]))
        os._exit(0)  # the caller kills the engine's processes
    sys.exit(usage)


def main() -> int:
    if sys.argv[1:2] == ["install"]:
        install(Path(sys.argv[2]))
        return 0
    return commanded(__doc__, run=run, table=table, serve=one)


if __name__ == "__main__":
    sys.exit(main())
