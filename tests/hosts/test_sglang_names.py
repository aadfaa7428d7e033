"""Every comparison of the algorithm's name in the host is listed in compat.py, with what is done about it."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import package_of
from host_source import Comparison, NameScan, name_comparisons, parse

from eaglex.hosts.sglang import compat
from eaglex.hosts.sglang.compat import Treatment

LISTED = {(site.path, site.function): site.treatment for site in compat.NAME_COMPARISONS}


def test_every_comparison_is_listed(host: Path) -> None:
    found = name_comparisons(host)
    assert len(found) > 20, "the scan found next to nothing: has the host renamed the field?"
    missing = {item for item in found if (item.path, item.function) not in LISTED}
    assert not missing


def test_a_comparison_with_eagle3_has_a_treatment_of_its_own(host: Path) -> None:
    for item in name_comparisons(host):
        if "EAGLE3" in item.names:
            assert LISTED[item.path, item.function] is not Treatment.SAME, item


def test_the_list_has_no_dead_entries() -> None:
    assert len(LISTED) == len(compat.NAME_COMPARISONS), "a function is listed twice"
    found = {version: name_comparisons(package_of(version)) for version in compat.READ_VERSIONS}
    everywhere = set().union(*found.values())
    assert set(LISTED) == {(item.path, item.function) for item in everywhere}
    treated = {(item.path, item.function) for item in everywhere if "EAGLE3" in item.names}
    assert {key for key, treatment in LISTED.items() if treatment is not Treatment.SAME} == treated
    newer = {key for key, treatment in LISTED.items() if treatment is Treatment.NEWER}
    for version in compat.RUN_VERSIONS:
        assert newer.isdisjoint({(item.path, item.function) for item in found[version] if "EAGLE3" in item.names})


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("return args.speculative_algorithm == 'EAGLE3'", {"EAGLE3"}),
        ("return args.speculative_algorithm.upper() not in ('EAGLE', 'EAGLE3')", {"EAGLE", "EAGLE3"}),
        ("algo = (args.speculative_algorithm or '').upper()\n    return algo == 'EAGLE3'", {"EAGLE3"}),
        ("return 'EAGLE3' == speculative_algorithm", {"EAGLE3"}),
        ("return algo is SpeculativeAlgorithm.EAGLE3", {"EAGLE3"}),
        ("return args.speculative_algorithm.startswith('EAGLE')", {"EAGLE"}),
        ("match args.speculative_algorithm:\n        case 'EAGLE3': return 1", {"EAGLE3"}),
    ],
)
def test_the_scan_sees_a_planted_comparison(tmp_path: Path, body: str, names: set[str]) -> None:
    file = tmp_path / "planted.py"
    file.write_text(f"def check(args, speculative_algorithm=None, algo=None):\n    {body}\n")
    scan = NameScan("planted.py", file.read_text().splitlines())
    scan.visit(parse(file))
    assert scan.found == {Comparison("planted.py", "check", frozenset(names))}


def test_the_scan_leaves_other_comparisons_alone(tmp_path: Path) -> None:
    file = tmp_path / "other.py"
    file.write_text("def check(args):\n    return args.speculative_algorithm is None or args.kind == 'EAGLE3'\n")
    scan = NameScan("other.py", file.read_text().splitlines())
    scan.visit(parse(file))
    assert not scan.found
