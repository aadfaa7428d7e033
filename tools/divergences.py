#!/usr/bin/env python3
"""Where tokens of engine_check.py part from no speculation, and how near the target's two best logits lie there.

    divergences.py PAIR PROMPTS OUT CASE [RESULT.json]

OUT is the folder of an engine_check run that served CASE (such as "chain, many prompts"), the first pass of which is
looked at. Where no speculation has not served it, as for trees, the others are held against EAGLE3. At the first token
in which a request differs, the target is computed in float32 over the prompt and the tokens that are common: `margin`
is the logit of the first one's token less that of the lane's, `gap` the best logit less the second,
`spacing` the distance of bfloat16 numbers there. `near`: both tokens are the target's two best in float32.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from engine_check import NONE, STOCK, file_of, lanes_of
from socket_parts.cases import workload_of

Request = dict[str, Any]


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Place of the first token in which both have one and not the same."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


def spacing(value: float) -> float:
    """Distance of neighbouring bfloat16 numbers (8 bits of significand) at this one."""
    return math.ldexp(1.0, math.frexp(value)[1] - 8)


def rows_of(requests: list[Request], none: list[Request], lane: list[Request], logits_of: Any) -> list[dict[str, Any]]:
    """A row for each request that differs; `logits_of(ids)` are the target's, for the token behind them."""
    rows = []
    for number, (asked, plain, ours) in enumerate(zip(requests, none, lane, strict=True)):
        if "ids" not in plain or "ids" not in ours:
            continue
        place = first_difference(plain["ids"], ours["ids"])
        if place is None:
            continue
        tokens = plain["ids"][place], ours["ids"][place]
        logits = logits_of(asked["ids"] + plain["ids"][:place])
        best = sorted(range(len(logits)), key=logits.__getitem__)[-2:]
        rows.append({
            "request": number, "place": place, "tokens": list(tokens),
            "margin": round(logits[tokens[0]] - logits[tokens[1]], 5),
            "gap": round(logits[best[1]] - logits[best[0]], 5),
            "spacing": spacing(logits[best[1]]), "near": set(tokens) == set(best),
        })  # fmt: skip
    return rows


def target_of(pair: Path) -> Any:
    """Logits behind a list of ids, computed in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits_of(ids: list[int]) -> list[float]:
        found: list[float] = model(torch.tensor([ids])).logits[0, -1].tolist()
        return found

    return logits_of


def summary(lane: str, rows: list[dict[str, Any]], base: str) -> str:
    most = max((abs(row["margin"]) for row in rows), default=0.0)
    within = sum(abs(row["margin"]) <= row["spacing"] for row in rows)
    near = sum(row["near"] for row in rows)
    first = "no speculation" if base == NONE else base
    return (
        f"{lane}: {len(rows)} part from {first}; {near} between the target's two best logits, {within} within one step "
        f"of bfloat16, margin at most {most:.3f}"
    )


def main() -> int:
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    pair, prompts, out = (Path(part) for part in sys.argv[1:4])
    name = sys.argv[4]
    requests, logits_of = workload_of(name, prompts), target_of(pair)

    def served(lane: str) -> list[Request]:
        found: list[Request] = json.loads(file_of(out, name, lane).read_text())["passes"][0]["requests"]
        return found

    base = NONE if file_of(out, name, NONE).is_file() else STOCK
    first = served(base)
    lanes = [lane for lane in lanes_of(name) if lane != base and file_of(out, name, lane).is_file()]
    report = {lane: rows_of(requests, first, served(lane), logits_of) for lane in lanes}
    for lane, rows in report.items():
        print(summary(lane, rows, base))
    if len(sys.argv) > 5:
        found = {"case": name, "against": base, "lanes": report}
        Path(sys.argv[5]).write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(len(rows) <= len(report.get(STOCK, rows)) for rows in report.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
