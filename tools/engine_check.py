#!/usr/bin/env python3
"""The worker with eaglex's engine beside SGLang's EAGLE3 and the comparison worker: tokens, accept lengths, times.

    socket_check.py install SITE                # once: entry points, into a folder on PYTHONPATH
    engine_check.py run PAIR PROMPTS OUT        # OUT/engine.json and a log of every engine
    engine_check.py table OUT/engine.json

PAIR holds `target/` and `draft/`; PROMPTS is a .npy file of token ids to cut prompts from. All engines that serve
tokens start beside each other on one GPU and serve at once; then the three for the times (the Llama 8B sizes, 8 layers
of dummy weights, a random draft) take turns alone.

Environment: CASES, names separated by '; ' (default: CASES below); SECONDS for all of it (default 560), of which
SECONDS_TO_TIME (default 170) are kept for the times; NO_TIMES=1; NO_HOST=1 leaves the comparison worker out. Exit
status 1: something differs or is missing.

Equal means: the engine's tokens are EAGLE3's, and its accept length within 1 %. Its drafts are not EAGLE3's bit by bit,
as its sums round otherwise, so accept counts may differ; under deterministic inference tokens may not.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from socket_check import Process, about, serve_all, until
from socket_parts import cases as socket_cases
from socket_parts.cases import compared, environment_of
from socket_parts.engine import ROUNDS, write

CASES = ("chain", "chain, no overlap", "chain, eager", "tree", "tree, page 64")
STOCK, HOST, ENGINE = ALL_LANES = ("EAGLE3", "EAGLEX host", "EAGLEX engine")
LANES = tuple(lane for lane in ALL_LANES if lane != HOST or not os.environ.get("NO_HOST"))
CLOSE = 0.01  # accept lengths: by how much they may differ
TIMED_SHAPE = {"hidden": 4096, "vocab": 128256, "draft_vocab": 32000, "intermediate": 14336, "heads": 64, "kv_heads": 8}


def lane_environment(lane: str) -> dict[str, str]:
    return {"EAGLEX_OPTIONS": json.dumps({"drafter": "engine"})} if lane == ENGINE else {}


def algorithm_of(lane: str) -> str:
    return lane.split()[0]


def file_of(out: Path, name: str, lane: str) -> Path:
    return out / f"{name}-{lane}.json".replace(", ", "-").replace(" ", "_")


def judged(name: str, stock: dict[str, Any], ours: dict[str, Any], lane: str) -> dict[str, Any]:
    """One lane against EAGLE3: tokens, and accept lengths as near as the lane owes them."""
    row = compared(name, stock, ours)
    first, second = row["accept_length"].values()
    row["lane"], row["accept_ratio"] = lane, second / first
    if lane == ENGINE:
        row["equal"] = bool(
            row["prompts"] and not row["different"] and not row["errors"] and abs(row["accept_ratio"] - 1) <= CLOSE
        )
    return row


def shown(row: dict[str, Any]) -> str:
    if row.get("missing"):
        return f"| {row['case']} | {row['lane']} | not served: {', '.join(row['missing'])} | | | |"
    accept = " / ".join(f"{value:.3f}" for value in row["accept_length"].values())
    verdict = "equal" if row["equal"] else f"DIFFERS {row.get('first_error', '')}"
    return (
        f"| {row['case']} | {row['lane']} | {row['prompts']} / {row['tokens']} | {len(row['different'])} | {accept} "
        f"| {verdict} |"
    )


def times_lines(times: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Medians of each round, a column per lane."""
    lines = ["| median, of each round | " + " | ".join(times) + " |", "|---" * (len(times) + 1) + "|"]

    def add(what: str, pick: Any) -> None:
        lines.append(f"| {what} | " + " | ".join(", ".join(map(pick, rounds)) for rounds in times.values()) + " |")

    def medians(values: dict[str, Any]) -> str:
        return " / ".join(f"{one['median']:.1f}" for one in values.values())

    add("cycles per second, batch 1 / 8", lambda r: " / ".join(f"{v:.0f}" for v in r["cycles_per_second"].values()))
    add("first token, 64 / 512 / 3000 tokens, idle, ms", lambda r: medians(r["first_token_ms"]))
    add("the same beside 4 that decode, ms", lambda r: medians(r["first_token_beside_4_ms"]))
    return lines


def table(report: dict[str, Any]) -> list[str]:
    head = ["| case | lane | prompts / tokens | differ | accept length EAGLE3 / lane | |", "|---|---|---|---|---|---|"]
    up = [f"seconds until up: {json.dumps(report.get('up', {}))}"]
    return [*head, *map(shown, report["cases"]), "", *times_lines(report.get("times", {})), "", *up]


def write_timed_weights(target: Path, draft: Path, shape: dict[str, int] | None = None) -> None:
    """A random draft for the engine, and a target file whose header alone is read (its data is a hole in the file).

    The host makes dummy weights itself; eaglex reads a draft's files, and asks the target's for names and shapes.
    """
    import struct

    import torch
    from safetensors.torch import save_file

    sizes = shape or TIMED_SHAPE
    hidden, inter, draft_vocab = sizes["hidden"], sizes["intermediate"], sizes["draft_vocab"]
    head_dim = 64
    heads, kv = sizes["heads"] * head_dim, sizes["kv_heads"] * head_dim

    def random(*size: int) -> Any:
        return torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02)

    layer = {
        "self_attn.q_proj": random(heads, 2 * hidden), "self_attn.k_proj": random(kv, 2 * hidden),
        "self_attn.v_proj": random(kv, 2 * hidden), "self_attn.o_proj": random(hidden, heads),
        "mlp.gate_proj": random(inter, hidden), "mlp.up_proj": random(inter, hidden),
        "mlp.down_proj": random(hidden, inter), "hidden_norm": random(hidden) + 1,
        "input_layernorm": random(hidden) + 1, "post_attention_layernorm": random(hidden) + 1,
    }  # fmt: skip
    tensors = {f"midlayer.{name}.weight": tensor for name, tensor in layer.items()}
    tensors |= {"fc.weight": random(hidden, 3 * hidden), "norm.weight": random(hidden) + 1}
    tensors |= {"lm_head.weight": random(draft_vocab, hidden), "d2t": torch.zeros(draft_vocab, dtype=torch.int64)}
    for folder in (target, draft):
        folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, draft / "model.safetensors")
    header, at = {}, 0
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        end = at + 2 * sizes["vocab"] * hidden
        header[name] = {"dtype": "BF16", "shape": [sizes["vocab"], hidden], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (target / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


@dataclass
class Plan:
    """Every engine of a run."""

    pair: Path
    prompts: Path
    out: Path
    names: list[str]
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.served: dict[tuple[str, str], Process] = {}
        for number, (name, lane) in enumerate((name, lane) for name in self.names for lane in LANES):
            result = file_of(self.out, name, lane)
            arguments = ["case", name, algorithm_of(lane), str(self.pair), str(self.prompts), str(result)]
            environment = environment_of(name) | lane_environment(lane)
            self.served[name, lane] = Process(arguments, result, "0", 22000 + 7 * number, environment)
        self.timed: dict[str, Process] = {}
        for number, lane in enumerate(() if os.environ.get("NO_TIMES") else LANES):
            result = file_of(self.out, "time", lane)
            if lane == ENGINE:
                write_timed_weights(self.out / f"{result.stem}-target", self.out / f"{result.stem}-draft")
            environment = lane_environment(lane) | {"SOCKET_PROBE": str(self.out / f"{result.stem}.probe")}
            arguments = ["time_one", algorithm_of(lane), str(result)]
            self.timed[lane] = Process(arguments, result, "0", 20500 + 7 * number, environment)

    def left(self, kept: float = 0.0) -> float:
        return max(1.0, float(os.environ.get("SECONDS", 560)) - (time.monotonic() - self.started) - kept)

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self.started:6.1f} s  {what}", flush=True)


def serve(plan: Plan) -> dict[str, float]:
    """Tokens; the engines for the times start with the others. Seconds until each lane's were up."""
    kept = float(os.environ.get("SECONDS_TO_TIME", 170)) * bool(plan.timed)
    everyone = [*plan.served.values(), *plan.timed.values()]
    for process in everyone:
        process.start()
    up: dict[str, float] = {}

    def all_up() -> bool:
        for process in everyone:
            if process.has(".ready"):
                up.setdefault(process.result.stem, round(time.monotonic() - plan.started, 1))
        return all(process.has(".ready") or process.over for process in plan.served.values())

    until(all_up, plan.left(kept + 60))
    plan.say(f"{sum(process.has('.ready') for process in plan.served.values())} of {len(plan.served)} are up")
    serve_all(list(plan.served.values()), plan.left(kept))
    plan.say(f"{sum(process.has('.json') for process in plan.served.values())} of {len(plan.served)} have served")
    return up


def measure(plan: Plan) -> dict[str, list[Any]]:
    taken: dict[str, list[Any]] = {lane: [] for lane in plan.timed}
    until(lambda: all(process.has(".ready") or process.over for process in plan.timed.values()), plan.left())
    for number in range(ROUNDS):
        for lane, process in plan.timed.items():
            process.go(number)
            done = f".round{number}"
            until(lambda process=process, done=done: process.has(done) or process.over, plan.left())
            if process.has(done):
                taken[lane].append(json.loads(process.result.with_suffix(done).read_text()))
                plan.say(f"{lane} round {number}: {json.dumps(taken[lane][-1]['cycles_per_second'])}")
    return taken


def rows_of(plan: Plan) -> list[dict[str, Any]]:
    rows = []
    for name in plan.names:
        found = {lane: plan.served[name, lane] for lane in LANES}
        for lane in LANES[1:]:
            missing = [one for one in (STOCK, lane) if not found[one].has(".json")]
            if missing:
                rows.append({"case": name, "lane": lane, "equal": False, "missing": missing})
                continue
            stock, ours = (json.loads(found[one].result.read_text()) for one in (STOCK, lane))
            rows.append(judged(name, stock, ours, lane))
    return rows


def run(pair: Path, prompts: Path, out: Path) -> int:
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
        report["times"] = measure(plan) if plan.timed else {}
        write(out / "engine.json", report)
    finally:
        for process in (*plan.served.values(), *plan.timed.values()):
            process.kill()
    print("\n".join(table(report)), flush=True)
    timed = all(len(rounds) == ROUNDS for rounds in report["times"].values())
    return 0 if timed and all(row["equal"] for row in report["cases"]) else 1


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
