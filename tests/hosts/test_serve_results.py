"""tools/serve_results.py: runs in bench/results, and the page whose tables are made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import serve_results

ROOT = Path(__file__).parents[2]


def a_row(engine: str, batch: int, tok_s: float, **more: Any) -> dict[str, Any]:
    return {
        "engine": engine, "tp": 1, "p2p": True, "batch": batch, "num_steps": 5, "topk": 1, "tok_s": tok_s,
        "draft_us": None if engine == "none" else 1000.4, "host_us": None if engine == "none" else 99.6,
        "first_token_ms": {"64": 10.04, "512": 11.0, "3000": 24.0}, "startup_s": 30.0, "memory_gb": None,
    } | more  # fmt: skip


def a_set(rows: list[dict[str, Any]], **about: Any) -> dict[str, Any]:
    told = {"gpus": ["H200"], "torch": "2", "sglang": "0", "triton": "3", "commit": "abc"} | about
    return {"about": told, "layers": 8, "rows": rows}


def test_a_run_takes_the_place_of_the_one_before() -> None:
    old = serve_results.added({}, "first", [a_set([a_row("eagle3", 1, 500)])])
    new = serve_results.added(old, "second", [a_set([a_row("eaglex", 1, 600)]), a_set([a_row("none", 1, 400)])])
    assert [row["engine"] for row in new["rows"]] == ["eaglex", "none"]
    assert [run["what"] for run in new["earlier_runs"]] == ["first"]
    assert "earlier_runs" not in new["earlier_runs"][0]
    third = serve_results.added(new, "third", [a_set([])])
    assert [run["what"] for run in third["earlier_runs"]] == ["second", "first"]


def test_sets_of_two_commits_are_not_one_run() -> None:
    with pytest.raises(ValueError, match=r"commit: expected 'abc' in every set, got 'xyz'"):
        serve_results.added({}, "", [a_set([]), a_set([], commit="xyz")])


def test_a_table_has_ratios_to_eagle3_of_the_same_set() -> None:
    tree = [a_row("eaglex", 4, 900, topk=4, num_steps=4), a_row("eagle3", 4, 600, topk=4, num_steps=4)]
    chain = [a_row("eaglex", 1, 750), a_row("eagle3", 1, 500), a_row("none", 1, 250, topk=0, num_steps=0)]
    lines = serve_results.tables({"rows": chain + tree})
    assert "| tokens per second, eaglex | 750 (1.500) |" in lines
    assert "| tokens per second, no speculation | 250 (0.500) |" in lines
    assert "| TP 1, tree, 4 branches, K = 4 | batch 4 |" in lines
    assert "| tokens per second, eaglex | 900 (1.500) |" in lines
    assert "| CPU time without verification, us: eaglex / EAGLE3 | 100 / 100 |" in lines
    assert "| no speculation | 10.0 / 11.0 / 24.0 | 30.0 | - |" in lines


def test_tables_stand_between_their_marks() -> None:
    page = "a\n<!-- x.json -->\nold\n<!-- end -->\nb\n"
    assert serve_results.placed(page, "x.json", ["new"]) == "a\n<!-- x.json -->\nnew\n<!-- end -->\nb\n"
    with pytest.raises(ValueError, match=r"expected <!-- y.json -->"):
        serve_results.placed(page, "y.json", [])


@pytest.mark.parametrize("name", ["serve-h200x2.json", "serve-h200.json"])
def test_the_pages_tables_are_the_files(name: str) -> None:
    page = (ROOT / "docs" / "sglang.md").read_text()
    result = json.loads((ROOT / "bench" / "results" / name).read_text())
    assert serve_results.placed(page, name, serve_results.tables(result)) == page
