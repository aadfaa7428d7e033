#!/usr/bin/env python3
"""The worker with eaglex's engine beside SGLang's EAGLE3 and the comparison worker: tokens and accept lengths.

    socket_check.py install SITE                # once: entry points, into a folder on PYTHONPATH
    engine_check.py run PAIR PROMPTS OUT        # OUT/engine.json and a log of every engine
    engine_check.py table OUT/engine.json

PAIR holds `target/` and `draft/`; PROMPTS is a .npy file of token ids to cut prompts from. All engines start beside
each other on one GPU and serve at once, as tokens do not depend on timing. For speed: serve_bench.py.

Environment: CASES, names separated by '; ' (default: CASES below; those on two GPUs need two); SECONDS for all of it
(default 300); GPU of the engines on one (0), PAIR_GPUS of those on two (0,1); REQUESTS, the first so many of each
case's (all), and MOST_NEW tokens of each; PORT of the first (22000); WAIT_FOR, a file that is waited for before they
serve; NO_HOST=1 leaves the comparison worker out, NO_NONE=1 no speculation, HOST_CASES names the cases that it serves.
Exit status 1: something differs or is missing.

Equal means: the engine's tokens are EAGLE3's, and its accept length within 1 %; in the case "chain, acceptance" so is
what it accepts at each position, and a case that is about retraction has some. Its drafts are not EAGLE3's bit by bit,
as its sums round otherwise, so accept counts may differ; with a chain tokens may not. With a tree they may, where the
trees differ and the target's two best logits are a rounding apart: the target's attention sums over the nodes in their
order, so that a token's logits depend on which other nodes its window holds. EAGLE3's own chain and tree differ so too.
A request of a tree whose accept counts are EAGLE3's and whose tokens are not is a failure.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from socket_check import CaseRun, Process, about, end_in_order, seconds, serve_all, until
from socket_parts import cases as socket_cases
from socket_parts.cases import MOVED_BY_RETRACTION, PENALTIES, compared, gpus_of, has, repeated, updates_of
from socket_parts.engine import write

CASES = (
    "chain", "chain, no overlap", "chain, eager", "tree", "tree, page 64", "chain, page 16", "chain, page 64",
    "chain, features", "tree, features", "chain, weight updates", "chain, forced retraction", "chain, sampled",
    "chain, small pool", "chain, 3 slots, page 64", "chain, many prompts", "chain, features, no overlap",
    "chain, mixed sampling", "chain, adaptive", "chain, structured", "tree, structured", "chain, memory saver",
    "chain, acceptance", "chain, no radix cache", "tree, page 16",
)  # fmt: skip
GPU = os.environ.get("GPU", "0")  # of the engines on one
PORT = int(os.environ.get("PORT", "22000"))
STOCK, HOST, ENGINE = ALL_LANES = ("EAGLE3", "EAGLEX host", "EAGLEX engine")
NONE = "none"  # no speculation
# The engine with a draft of fewer bits, and the least part of EAGLE3's accept length that it keeps (docs/precision.md).
FEWER_BITS = {"EAGLEX fp8": 0.97, "EAGLEX int4": 0.93}
# The comparison worker's drafts are EAGLE3's bit by bit, so it tells apart what comes of other windows from the rest.
CONTROLLED = ("chain, features, no overlap", "chain, mixed sampling")
LANES = tuple(lane for lane in ALL_LANES if lane != HOST or not os.environ.get("NO_HOST"))
# EAGLE3 cannot read its target's files anew: its draft is given them too, and fails.
ALONE = ("weight updates", "memory saver")
CLOSE = 0.01  # accept lengths: by how much they may differ


def lanes_of(name: str) -> tuple[str, ...]:
    """Who serves a case."""
    if has(name, ALONE):
        return (ENGINE,)
    if "many prompts" in name:
        return (STOCK, ENGINE, *FEWER_BITS, *(() if os.environ.get("NO_NONE") else (NONE,)))
    if "adaptive" in name:
        return (STOCK, ENGINE, NONE)
    if name in CONTROLLED:
        return ALL_LANES
    chosen = os.environ.get("HOST_CASES")
    return tuple(lane for lane in LANES if lane != HOST or chosen is None or name in chosen.split("; "))


def lane_environment(lane: str) -> dict[str, str]:
    chosen = {"drafter": "engine" if lane == ENGINE or lane in FEWER_BITS else "host"}
    if lane in FEWER_BITS:
        chosen["draft_quant"] = lane.split()[1]
    return {"EAGLEX_OPTIONS": json.dumps(chosen)}


def algorithm_of(lane: str) -> str:
    return lane.split()[0]


def file_of(out: Path, name: str, lane: str) -> Path:
    return out / f"{name}-{lane}.json".replace(", ", "-").replace(" ", "_")


def judged(name: str, stock: dict[str, Any], ours: dict[str, Any], lane: str) -> dict[str, Any]:
    """One lane against EAGLE3: tokens, and accept lengths as near as the lane owes them."""
    row = compared(name, stock, ours)
    first, second = row["accept_length"].values()
    row["lane"], row["accept_ratio"] = lane, second / first
    row["itself"] = repeated([stock])["passes"]
    unlike = False
    if "acceptance" in name:
        unlike = not row["accept_difference"] or any(abs(found) > CLOSE for found, _ in row["accept_difference"])
    if has(name, MOVED_BY_RETRACTION):
        unlike = not row["retracted"]
    if lane in FEWER_BITS:  # of its own drafts: the tokens are EAGLE3's, and most of its accept length is there
        row["equal"] = bool(
            row["prompts"] and not row["different"] and not row["errors"] and row["accept_ratio"] >= FEWER_BITS[lane]
        )
    elif lane == ENGINE or name in CONTROLLED:
        row["excused"] = [place for place in row["different"] if is_excused(name, lane, place, stock, ours)]
        row["different"] = [place for place in row["different"] if place not in row["excused"]]
        row["rounded_otherwise"] = [place for place in row["different"] if may_round(name, place, stock, ours)]
        wrong = len(row["different"]) - len(row["rounded_otherwise"])
        row["equal"] = bool(
            row["prompts"] and not wrong and not row["errors"] and abs(row["accept_ratio"] - 1) <= CLOSE
        )
    row["equal"] = bool(row["equal"]) and not unlike
    return row


def may_round(name: str, place: list[int], stock: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether a request ([pass, request, …]) was verified in other trees than EAGLE3's."""
    return name.startswith("tree") and other_windows(place, stock, ours)


def other_windows(place: list[int], stock: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether a request was verified in other windows, as far as its counts tell."""
    a, b = (run["passes"][place[0]]["requests"][place[1]] for run in (stock, ours))
    return (a["verify"], a["correct"]) != (b["verify"], b["correct"])


def is_excused(name: str, lane: str, place: list[int], stock: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether a request's tokens may differ from EAGLE3's.

    A penalty is taken from tokens that the CPU has seen by then: with overlap that depends on timing. Without, it
    depends on where windows begin, and beside a sampled request equal logits are decided by a coin of the node: both
    differ where windows do, so for the engine alone. A sampled request's first token depends on what it is beside.
    """
    request = ours["passes"][place[0]]["requests"][place[1]]
    if request.get("sampled") and "mixed" in name:
        return True
    penalised = not PENALTIES.isdisjoint(request.get("feature", "").split(", "))
    if penalised and name not in CONTROLLED:
        return True
    by_windows = penalised or "mixed" in name
    return by_windows and lane == ENGINE and other_windows(place, stock, ours)


def against_none(name: str, none: dict[str, Any], runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each algorithm against no speculation: eaglex may part from it no more often than EAGLE3 does.

    With adaptive steps windows are of a size that depends on timing, so numbers of near ties scatter: twice as often.
    """
    rows = {lane: compared(name, none, run) for lane, run in runs.items()}
    most = len(rows[STOCK]["different"])
    most = 2 * most + 3 if "adaptive" in name else most
    for lane, row in rows.items():
        row |= {"case": f"{name}, against none", "lane": lane, "equal": len(row["different"]) <= most}
        row["equal"] = row["equal"] and bool(row["prompts"]) and not row["errors"]
    return list(rows.values())


def judged_alone(name: str, ours: dict[str, Any]) -> dict[str, Any]:
    """Weights that are read again, or gone and back, give the same tokens; drafts follow another embedding."""
    first, *later = (run["requests"] for run in ours["passes"])
    ways = updates_of(name) or ("memory saver",)
    accept = [
        1 + sum(r.get("correct", 0) for r in run) / sum(r.get("verify", 0) for r in run) for run in (first, *later)
    ]
    answered = [place for place, one in enumerate(first) if "ids" in one]
    moved = {
        way: [p for p in answered if first[p]["ids"] != run[p].get("ids")] for way, run in zip(ways, later, strict=True)
    }
    changed = len(moved.pop("tensor")) if "tensor" in moved else None
    different = [[1 + ways.index(way), p, -1, -1] for way, places in moved.items() for p in places]
    return {
        "case": name, "lane": ENGINE, "prompts": len(answered), "tokens": sum(len(first[p]["ids"]) for p in answered),
        "different": different, "accept_length": {"first": accept[0], "least": min(accept)}, "changed": changed,
        "equal": bool(answered and changed != 0 and not different and min(accept) > (1 - 10 * CLOSE) * accept[0]),
    }  # fmt: skip


def shown(row: dict[str, Any]) -> str:
    if row.get("missing"):
        return f"| {row['case']} | {row['lane']} | not served: {', '.join(row['missing'])} | | | |"
    accept = " / ".join(f"{value:.3f}" for value in row["accept_length"].values())
    verdict = "equal" if row["equal"] else f"DIFFERS {row['different'][:4]} {row.get('first_error', '')}"
    if "logprob_error" in row:
        verdict += f", log-probabilities within {row['logprob_error']:.2g}"
    if row["equal"] and row["different"]:
        alone = "against none" in row["case"]
        verdict = "no more often than EAGLE3" if alone else "equal but for rounding in other trees"
    if row.get("excused"):
        verdict += f", {len(row['excused'])} excused"
    positions = row.get("accept_by_position") or {}
    if all(positions.values()) and positions:
        verdict += "; by position " + " / ".join(" ".join(f"{x:.3f}" for x in found) for found in positions.values())
    if "acceptance" in row["case"] and row.get("accept_difference"):
        found = ", ".join(f"{100 * value:+.2f} ± {100 * error:.2f}" for value, error in row["accept_difference"])
        verdict += f"; differs by {found} %"
    if has(row["case"], MOVED_BY_RETRACTION):
        after = len(row.get("different_after_retraction", []))
        verdict += f"; {row['retracted']} retractions (EAGLE3 {row['retracted_by_stock']}), {after} differ after one"
    if row.get("itself"):
        verdict += f"; EAGLE3 differs from itself {len(row['itself'])} times"
    return (
        f"| {row['case']} | {row['lane']} | {row['prompts']} / {row['tokens']} | {len(row['different'])} | {accept} "
        f"| {verdict} |"
    )


def table(report: dict[str, Any]) -> list[str]:
    head = ["| case | lane | prompts / tokens | differ | accept length EAGLE3 / lane | |", "|---|---|---|---|---|---|"]
    up = [f"seconds until up: {json.dumps(report.get('up', {}))}"]
    return [*head, *map(shown, report["cases"]), "", *up]


@dataclass
class Plan(CaseRun):
    """Every engine of a run."""

    def __post_init__(self) -> None:
        self.served: dict[tuple[str, str], Process] = {}
        for number, (name, lane) in enumerate((case, lane) for case in self.names for lane in lanes_of(case)):
            result = file_of(self.out, name, lane)
            devices = os.environ.get("PAIR_GPUS", "0,1") if gpus_of(name) > 1 else GPU
            self.served[name, lane] = self.engine(
                name, algorithm_of(lane), result, devices=devices, port=PORT + 7 * number,
                environment=lane_environment(lane),
            )  # fmt: skip

    def left(self) -> float:
        return max(1.0, seconds("SECONDS", 300) - self.spent())


def serve(plan: Plan) -> dict[str, float]:
    """All engines come up beside each other. Those on two GPUs serve first, one after the other, since a collective
    waits until both ranks have the time slice of their GPU; then the others at once. Seconds until each was up.
    """
    processes = list(plan.served.values())
    pairs = [process for (name, _), process in plan.served.items() if gpus_of(name) > 1]
    for process in processes:
        process.start()
    up: dict[str, float] = {}

    def all_up() -> bool:
        for process in processes:
            if process.has(".ready"):
                up.setdefault(process.result.stem, round(plan.spent(), 1))
        return all(process.has(".ready") or process.over for process in processes)

    until(all_up, plan.left() / 2)
    plan.say(f"{sum(process.has('.ready') for process in processes)} of {len(processes)} are up")
    gate = os.environ.get("WAIT_FOR")  # other engines that are coming up
    if gate:
        until(lambda: Path(gate).exists(), plan.left() / 2)
    for process in pairs:
        serve_all([process], plan.left() / 2)
        plan.say(f"on two GPUs: {process.result.stem} {'served' if process.has('.json') else 'FAILED'}")
    serve_all([process for process in processes if process not in pairs], plan.left())
    plan.say(f"{sum(process.has('.json') for process in processes)} of {len(processes)} have served")
    return up


def rows_of(plan: Plan) -> list[dict[str, Any]]:
    rows = []
    for name in plan.names:
        found = {lane: plan.served[name, lane] for lane in lanes_of(name)}
        if len(found) == 1:
            process = found[ENGINE]
            here = process.has(".json")
            rows.append(
                judged_alone(name, json.loads(process.result.read_text()))
                if here
                else {"case": name, "lane": ENGINE, "equal": False, "missing": [ENGINE]}
            )
            continue
        for lane in [lane for lane in found if lane not in (STOCK, NONE)]:
            missing = [one for one in (STOCK, lane) if not found[one].has(".json")]
            if missing:
                rows.append({"case": name, "lane": lane, "equal": False, "missing": missing})
                continue
            stock, ours = (json.loads(found[one].result.read_text()) for one in (STOCK, lane))
            if "adaptive" not in name:
                rows.append(judged(name, stock, ours, lane))
            if NONE in found and found[NONE].has(".json"):
                none = json.loads(found[NONE].result.read_text())
                rows += against_none(name, none, {STOCK: stock, lane: ours})
            elif NONE in found:
                rows.append({"case": name, "lane": NONE, "equal": False, "missing": [NONE]})
    return rows


def run(pair: Path, prompts: Path, out: Path) -> int:
    end_in_order()
    out.mkdir(parents=True, exist_ok=True)
    names = os.environ["CASES"].split("; ") if os.environ.get("CASES") else list(CASES)
    unknown = [name for name in names if name not in socket_cases.CASES]
    if unknown:
        sys.exit(f"CASES: expected names of socket_parts.cases.CASES, got {unknown}")
    plan = Plan(pair, prompts, out, names)
    report: dict[str, Any] = {"about": about(out)}
    try:
        report["up"] = serve(plan)
        report["cases"] = rows_of(plan)
        write(out / "engine.json", report)
    finally:
        for process in plan.served.values():
            process.kill()
    print("\n".join(table(report)), flush=True)
    return 0 if all(row["equal"] for row in report["cases"]) else 1


def main() -> int:
    command, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if command == "run":
        return run(*(Path(part) for part in rest))
    if command == "table":
        print("\n".join(table(json.loads(Path(rest[0]).read_text()))))
        return 0
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main())
