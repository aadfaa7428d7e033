"""The tables of docs/sglang-socket.md, from what a run has measured."""

from __future__ import annotations

from typing import Any


def cases_table(rows: list[dict[str, Any]]) -> list[str]:
    """Tokens and accept lengths, a line per case."""
    columns = "case, prompts / tokens, requests that differ, accept length EAGLE3 / EAGLEX, verifications, retracted"
    lines = ["| " + " | ".join(columns.split(", ")) + " |", "|---|---|---|---|---|---|"]
    for row in rows:
        if row.get("missing"):
            lines.append(f"| {row['case']} | not served: {', '.join(row['missing'])} | | | | |")
            continue
        differ = str(len(row["different"]))
        if row.get("different_after_retraction"):
            differ += f", and after a retraction {len(row['different_after_retraction'])}"
        accept = " / ".join(f"{value:.3f}" for value in row["accept_length"].values())
        verifies = " / ".join(str(value) for value in row["verifies"].values())
        lines.append(
            f"| {row['case']} | {row['prompts']} / {row['tokens']} | {differ} | {accept} | {verifies} "
            f"| {row['retracted'] or ''} |"
        )
    return lines


def times_table(times: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Medians of every round, a line per measure."""
    lines = ["| median, of each round | " + " | ".join(times) + " |", "|---" * (len(times) + 1) + "|"]

    def add(what: str, pick: Any) -> None:
        cells = [", ".join(pick(one) for one in rounds) for rounds in times.values()]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")

    for kind, name in (("verify", "verification's"), ("prefill", "prefill's")):
        for key, where in (("gpu_us", "GPU"), ("host_us", "CPU")):
            place = f"{kind}_end_to_copy_{key}"
            add(f"{name} end to the result copy, {where}, us", lambda one, place=place: f"{one[place]['median']:.0f}")
    for key, where in (("first_token_ms", "idle server"), ("first_token_beside_4_ms", "beside 4 that decode")):
        add(
            f"first token, 64 / 512 / 3000 tokens, {where}, ms",
            lambda one, key=key: " / ".join(f"{value['median']:.1f}" for value in one[key].values()),
        )
    add(
        "cycles per second, batch 1 / 8",
        lambda one: " / ".join(f"{value:.0f}" for value in one["cycles_per_second"].values()),
    )
    return lines
