#!/usr/bin/env python3
"""Results of serve_bench.py in the repository: put a run into bench/results, and its tables into a page.

    serve_results.py add RESULT.json WHAT SERVE.json ...   # the sets of a run, in this order; the last run is kept
    serve_results.py docs PAGE.md RESULT.json              # the page's tables of that file, between its two marks
    serve_results.py table RESULT.json

WHAT says in a sentence how the run was made. Sets of one run are of one commit, on the same GPUs: others are refused.
A page's tables stand between `<!-- NAME.json -->` and `<!-- end -->`; a test holds docs/sglang.md to its files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SAME = ("gpus", "torch", "sglang", "triton", "commit")
NAMES = {
    "eagle3": "EAGLE3", "eagle3-fp8": "EAGLE3 FP8", "none": "no speculation", "eaglex": "eaglex", "fp8": "eaglex FP8",
    "int4": "eaglex INT4", "dedicated": "eaglex, dedicated drafter", "socket": "comparison worker",
}  # fmt: skip
END = "<!-- end -->"


def added(before: dict[str, Any], what: str, sets: list[dict[str, Any]]) -> dict[str, Any]:
    """The file's new content: this run's rows, and the run before as the first of the earlier ones."""
    first = sets[0]["about"]
    for one in sets[1:]:
        differing = [key for key in SAME if one["about"].get(key) != first.get(key)]
        if differing:
            key = differing[0]
            raise ValueError(f"{key}: expected {first.get(key)!r} in every set, got {one['about'].get(key)!r}")
    earlier = list(before.get("earlier_runs", []))
    if before:
        earlier.insert(0, {key: value for key, value in before.items() if key != "earlier_runs"})
    rows = [row for one in sets for row in one["rows"]]
    about = first | {"attention_backend": "triton"}
    return {"about": about, "layers": sets[0]["layers"], "what": what, "rows": rows, "earlier_runs": earlier}


def sets_of(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by what was served, in their order; engines without speculation belong to the chain beside them."""
    found: dict[str, list[Row]] = {}
    title = ""
    for row in rows:
        if row["engine"] != "none":
            kind = "chain" if row["topk"] == 1 else f"tree, {row['topk']} branches,"
            title = f"TP {row['tp']}{'' if row['p2p'] else ' without P2P'}, {kind} K = {row['num_steps']}"
        found.setdefault(title, []).append(row)
    return found


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(title: str, rows: list[Row]) -> list[str]:
    """One set: speed and its ratio to EAGLE3's, GPU time of draft and extend, CPU time, and what is not by batch."""
    batches = sorted({row["batch"] for row in rows})
    stock = {row["batch"]: row for row in rows if row["engine"] == "eagle3"}
    engines: dict[str, dict[int, Row]] = {}
    for row in rows:
        engines.setdefault(row["engine"], {})[row["batch"]] = row
    first = f"| {title} | " + " | ".join(f"batch {batch}" if batch == batches[0] else str(batch) for batch in batches)
    lines = [first + " |", "|---" * (1 + len(batches)) + "|"]

    def line(label: str, cells: list[str]) -> None:
        lines.append(f"| {label} | " + " | ".join(cells) + " |")

    for name, found in engines.items():
        cells = []
        for batch in batches:
            other, row = stock.get(batch), found[batch]
            ratio = row.get("ratio") or (row["tok_s"] / other["tok_s"] if other else None)
            against = f" ({ratio:.3f})" if ratio and name != "eagle3" else ""
            cells.append(number(row["tok_s"]) + against)
        line(f"tokens per second, {NAMES.get(name, name)}", cells)
    drafting = [name for name in engines if name != "none"]
    named = " / ".join(NAMES.get(name, name) for name in drafting)
    for label, key in (("draft + extend, us (GPU)", "draft_us"), ("CPU time without verification, us", "host_us")):
        line(f"{label}: {named}", [" / ".join(number(engines[n][b][key]) for n in drafting) for b in batches])
    lines += ["", "| | first token, ms: 64 / 512 / 3000 tokens | start-up, s | GPU memory, GB |", "|---|---|---|---|"]
    for name, found in engines.items():
        row = found[batches[0]]
        tokens = " / ".join(number(value, 1) for value in row["first_token_ms"].values())
        memory = number(row["memory_gb"], 2)
        lines.append(f"| {NAMES.get(name, name)} | {tokens} | {number(row['startup_s'], 1)} | {memory} |")
    return lines


def tables(result: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for title, rows in sets_of(result["rows"]).items():
        lines += [*table(title, rows), ""]
    return lines[:-1]


def placed(page: str, name: str, lines: list[str]) -> str:
    """The page with these lines between its marks for that file. Raises ValueError where it has none."""
    mark = f"<!-- {name} -->"
    before, found, rest = page.partition(mark)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"page: expected {mark} and {END} behind it, got neither")
    return "\n".join([before + mark, *lines, END + after])


def main() -> int:
    command, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 2 else ("", [])
    if command == "add" and len(rest) > 2:
        path = Path(rest[0])
        before = json.loads(path.read_text()) if path.is_file() else {}
        made = added(before, rest[1], [json.loads(Path(one).read_text()) for one in rest[2:]])
        path.write_text(json.dumps(made, indent=1) + "\n")
    elif command == "docs" and len(rest) == 2:
        page, result = Path(rest[0]), Path(rest[1])
        page.write_text(placed(page.read_text(), result.name, tables(json.loads(result.read_text()))))
    elif command == "table":
        print("\n".join(tables(json.loads(Path(rest[0]).read_text()))))
    else:
        sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
