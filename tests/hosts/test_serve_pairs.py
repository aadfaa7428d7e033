"""tools/serve_pairs.py without a GPU: turns of engines that only pretend, and the rows that come of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import serve_pairs

ENGINE = """
import json, pathlib, sys, time
name, out = sys.argv[2], pathlib.Path(sys.argv[3])
out.with_suffix(".ready").write_text(json.dumps({"startup_s": 1.5}))
for number in range(int(sys.argv[2] == "broken") or 99):
    while not out.with_suffix(f".go{number}").is_file():
        time.sleep(0.01)
    asked = json.loads(out.with_suffix(f".go{number}").read_text())
    found = {"tok_s": (100 if name == "none" else 98) * (1 if asked == 1 else 2), "accept_length": 1.0}
    if asked == "probe":
        found = {"paused_cycles": 7}
    part = out.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(out.with_suffix(f".round{number}"))
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> serve_pairs.Run:
    for name, value in {"BATCHES": "1,4", "ROUNDS": "3", "SECONDS": "40"}.items():
        monkeypatch.setenv(name, value)
    return serve_pairs.Run(tmp_path)


def played(made: serve_pairs.Run, tmp_path: Path) -> None:
    """All rounds that the engines live to see."""
    tool = tmp_path / "engine.py"
    tool.write_text(ENGINE)
    with made.running(str(tool)) as all_up:
        assert all_up
        made.rounds()


def test_rounds_are_taken_in_turn_and_compared_one_by_one(
    made: serve_pairs.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(made, tmp_path)
    rows = {(row["engine"], row["batch"]): row for row in made.rows("abc")}
    assert set(rows) == {("pausing", 1), ("pausing", 4), ("none", 1), ("none", 4)}
    assert rows["pausing", 4]["rounds"] == [196, 196, 196]
    assert rows["pausing", 4]["ratios"] == [0.98] * 3
    assert (rows["pausing", 1]["paused_cycles"], rows["pausing", 1]["startup_s"]) == (7, 1.5)
    assert rows["none", 1]["num_steps"] == 0
    (one, four) = serve_pairs.table({"rows": list(rows.values())})
    assert one.startswith("pausing / none, batch 1: 0.9800")
    assert four.startswith("pausing / none, batch 4: 0.9800")
    turns = [line.split(": ")[1].split()[0] for line in capsys.readouterr().out.splitlines() if "  batch " in line]
    assert turns == ["pausing", "none", "none", "pausing", "pausing", "none"]  # each batch in either order


def test_an_engine_that_ends_leaves_the_rounds_that_are_whole(
    made: serve_pairs.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINES", "broken; none")
    monkeypatch.setattr(serve_pairs.serve_bench, "OWN", {"broken": {}})
    made = serve_pairs.Run(tmp_path)
    played(made, tmp_path)
    assert {key: len(taken) for key, taken in made.taken.items()} == {("broken", 1): 1, ("none", 1): 1}


def test_nothing_is_simulated_for_the_engine_that_pauses(tmp_path: Path) -> None:
    pausing, none = (serve_pairs.process_of(name, tmp_path, 0).environment for name in ("pausing", "none"))
    assert pausing["SGLANG_SIMULATE_ACC_LEN"] == "0"
    assert json.loads(pausing["EAGLEX_OPTIONS"]) == {"drafter": "engine", "pausing": True}
    assert "SERVE_PROBE" in pausing
    assert "SERVE_PROBE" not in none
