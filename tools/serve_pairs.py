#!/usr/bin/env python3
"""Engines of serve_bench.py against each other where a few per cent count: batch by batch in turn, in either order.

    serve_pairs.py run OUT              # OUT/pairs.json and a log of every engine
    serve_pairs.py table OUT/pairs.json

By default `pausing`, eaglex with pausing on, against `none`. Nothing is simulated for it: a draft of random weights
accepts next to nothing, so this is what a server keeps of no speculation's speed where drafting never pays, trials
included. A turn is one batch of one engine, a request of NEW tokens less one of 2, while the others are stopped; the
order of the engines changes from turn to turn. The ratio of a round is that of two turns one right after the other.

Environment: that of serve_bench.py, NEW (600) tokens of each request (300 at batches above 16), ROUNDS (5) at most.
Exit status 1: an engine has no round.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import serve_bench
from serve_parts.engine import NEW, PROBE, Timed, batches, setting, speculation
from socket_check import Process, about, end_in_order
from socket_parts.engine import turn, write


def process_of(name: str, out: Path, number: int) -> Process:
    """As serve_bench's; `pausing` without simulated acceptance, all others without the probe, which takes times."""
    made = serve_bench.process_of(name, out, number)
    if name == "pausing":
        made.environment["SGLANG_SIMULATE_ACC_LEN"] = "0"
    else:
        made.environment.pop("SERVE_PROBE", None)
    return made


def serve(name: str, out: Path) -> None:
    """One engine: up, warm, then a batch for each turn that is given, and what it has counted at the end."""
    timed = Timed(name, out)
    timed.warm()
    write(out.with_suffix(".ready"), {"startup_s": round(timed.startup, 1)})
    number = 0
    while turn(out, number):
        asked = json.loads(out.with_suffix(f".go{number}").read_text())
        if asked == PROBE:
            found = timed.probed(Path(setting("SERVE_PROBE", "")))
            write(out.with_suffix(f".round{number}"), {"paused_cycles": found.get("paused_cycles", 0)})
            return
        done = timed.batch(asked, NEW if asked > 16 else int(setting("NEW", "600")))
        write(out.with_suffix(f".round{number}"), done)
        number += 1


class Run(serve_bench.Engines):
    """All engines of it, and what they have said: by engine and batch, one entry for each whole round."""

    def __init__(self, out: Path) -> None:
        names = [name.strip() for name in os.environ.get("ENGINES", "pausing; none").split(";")]
        super().__init__(out, names, process_of)
        self.taken: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self.paused_cycles: dict[str, int] = {}

    def rounds(self) -> None:
        """As many as fit, and the engines' own counts."""
        longest = 0.0
        for number in range(int(os.environ.get("ROUNDS", "5")) * len(batches())):
            begun, batch = time.monotonic(), batches()[number % len(batches())]
            order = self.names if (number + number // len(batches())) % 2 == 0 else self.names[::-1]
            found = {name: self.given(name, batch) for name in order}
            if any(turned is None for turned in found.values()):
                return
            for name, turned in found.items():
                self.taken.setdefault((name, batch), []).append(turned)  # type: ignore[arg-type]
            self.say(f"batch {batch}: {', '.join(f'{name} {found[name]}' for name in order)}")
            longest = max(longest, time.monotonic() - begun)
            if self.left() < longest + 5:
                break
        for name in self.names:
            self.paused_cycles[name] = (self.given(name, PROBE) or {}).get("paused_cycles", 0)

    def rows(self, commit: str) -> list[dict[str, Any]]:
        """A row for each engine and batch; `ratio` and its rounds are those against the last engine."""
        rows = []
        for (name, batch), taken in sorted(
            self.taken.items(), key=lambda one: (self.names.index(one[0][0]), one[0][1])
        ):
            tok_s, other = ([t["tok_s"] for t in found] for found in (taken, self.taken[self.names[-1], batch]))
            ratios = [round(mine / its, 4) for mine, its in zip(tok_s, other, strict=True)]
            steps = speculation()["speculative_num_steps"] if name != "none" else 0
            rows.append({
                "engine": name, "against": self.names[-1], "tp": int(setting("TP", "1")), "batch": batch,
                "num_steps": steps, "topk": speculation()["speculative_eagle_topk"] if steps else 0,
                "tok_s": round(statistics.median(tok_s), 1), "ratio": round(statistics.median(ratios), 4),
                "accept_length": round(statistics.median(t["accept_length"] for t in taken), 3),
                "paused_cycles": self.paused_cycles.get(name), "rounds": tok_s, "ratios": ratios,
                "startup_s": self.startup(name), "commit": commit,
            })  # fmt: skip
        return rows


def table(report: dict[str, Any]) -> list[str]:
    """A line for each row of an engine that is compared with another."""
    return [
        f"{row['engine']} / {row['against']}, batch {row['batch']}: {row['ratio']:.4f}, the median of {row['ratios']}; "
        f"{row['tok_s']:.0f} tokens per second, accept length {row['accept_length']}"
        for row in report["rows"]
        if row["engine"] != row["against"]
    ]


def run(out: Path) -> int:
    end_in_order()
    out.mkdir(parents=True, exist_ok=True)
    described, made = about(out), Run(out)
    with made.running(__file__) as all_up:
        if all_up:
            made.wait_for_gate()
            made.rounds()
    report = {"about": described, "layers": int(setting("LAYERS", "8")), "rows": made.rows(described["commit"])}
    write(out / "pairs.json", report)
    print("\n".join(table(report)), flush=True)
    return 0 if len(made.taken) == len(made.names) * len(batches()) else 1


if __name__ == "__main__":
    sys.exit(serve_bench.commanded(__doc__, run=run, table=table, serve=serve))
