"""Every dialect that the loader accepts also starts in SGLang, and drafts there what the reference drafts from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine_host import made_host
from fake_engine_parts import Setting
from safetensors.torch import load_file, save_file

from eaglex.config import AuxNorm
from eaglex.dialects import Dialect
from eaglex.errors import EaglexError

FOLDER = Path(__file__).parent.parent / "cases"
CASES = json.loads((FOLDER / "expected.json").read_text())["cases"]
PLAIN = FOLDER / "C01_midlayer_d2t"


def served(draft: Path, target: Path) -> Any:
    """What the worker knows of the draft, after turns in which every verification was checked."""
    with made_host(Setting(draft=draft, target=target), seed=3) as host:
        for _ in range(12):
            host.step()
        assert host.drafted > host.verified / 2
        return host.worker._draft_worker.facts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_case_starts_and_drafts_or_says_why_not(case: dict[str, Any]) -> None:
    draft, target = FOLDER / case["id"], FOLDER / case["target"]
    if case["outcome"] == "load":
        served(draft, target)
        return
    with pytest.raises(EaglexError) as caught:
        served(draft, target)
    assert all(name in str(caught.value) for name in case["must_name"])


def written(folder: Path, prefix: str, outer: str, **changes: Any) -> Path:
    """The plain draft under other names: `prefix` of its layer's tensors, `outer` of all."""
    names = {
        f"{outer}{name.replace('midlayer.', prefix)}": t for name, t in load_file(PLAIN / "model.safetensors").items()
    }
    if outer:  # the head and its table stay outside
        names = {
            n.removeprefix(outer) if n.endswith(("lm_head.weight", "d2t", "t2d")) else n: t for n, t in names.items()
        }
    save_file(names, folder / "model.safetensors")
    config = json.loads((PLAIN / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


MODELOPT = {"use_last_layernorm": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
OTHER = {  # prefix of the layer's tensors and of all, changes of the config
    Dialect.SPECFORGE: ("midlayer.", "", {}),
    Dialect.SGLANG: ("layers.0.", "", {}),
    Dialect.MODELOPT: ("layers.0.", "", {"eagle_config": MODELOPT}),
    Dialect.AUTOMODEL: ("layers.0.", "model.", {"architectures": ["LlamaEagle3DraftModel"]}),
}


@pytest.mark.parametrize("dialect", OTHER, ids=lambda dialect: dialect.name)
def test_the_plain_draft_in_other_dialects(tmp_path: Path, dialect: Dialect) -> None:
    prefix, outer, changes = OTHER[dialect]
    assert served(written(tmp_path, prefix, outer, **changes), FOLDER / "_target").dialect is dialect


def test_speculators_and_eagle_3_1(tmp_path: Path) -> None:
    """Cases of the folder that are in those dialects."""
    facts = served(FOLDER / "C26_norm_before_residual", FOLDER / "_target")
    assert facts.dialect is Dialect.SPECULATORS
    facts = served(FOLDER / "C28_norm_before_fc_final_layer", FOLDER / "_target")
    assert facts.config.aux_norm is not AuxNorm.NONE
    assert set(OTHER) | {Dialect.SPECULATORS} == set(Dialect)
