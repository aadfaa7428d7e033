"""Hub ids: the cache alone in offline mode, and a clear error for what it does not hold. No network is reached."""

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from eaglex.checkpoint import load
from eaglex.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An offline Hub with an empty cache of its own."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put(cache, repo, folder, names, *, revision="main"):
    snapshot = cache / f"models--{repo.replace('/', '--')}" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / revision).write_text(COMMIT)
    for name in names:
        (snapshot / name).write_bytes((folder / name).read_bytes())


def test_offline_cache(toy, target, cache):
    del toy.tensors["embed_tokens.weight"]
    put(cache, "someone/draft", toy.write(), ["config.json", "model.safetensors"])
    put(cache, "someone/target", target, ["config.json", "model.safetensors"])
    loaded = load("someone/draft", target="someone/target")
    assert torch.equal(loaded.weights.fc, toy.tensors["fc.weight"])
    assert loaded.facts.label == "someone/draft"


def test_the_targets_revision_is_its_own(toy, target, cache):
    del toy.tensors["embed_tokens.weight"]
    put(cache, "someone/draft", toy.write(), ["config.json", "model.safetensors"])
    put(cache, "someone/target", target, ["config.json", "model.safetensors"], revision="v2")
    with pytest.raises(CheckpointError, match="someone/target: expected a folder or a reachable Hub id"):
        load("someone/draft", target="someone/target")
    assert load("someone/draft", target="someone/target", target_revision="v2").weights.embed_tokens.numel()


def test_offline_and_not_cached(cache):
    with pytest.raises(CheckpointError, match="nobody/nothing: expected a folder or a reachable Hub id"):
        load("nobody/nothing")


def test_offline_with_config_alone(toy, cache):
    put(cache, "someone/half", toy.write(), ["config.json"])
    with pytest.raises(CheckpointError, match=r"someone/half: expected model\.safetensors, got config\.json"):
        load("someone/half")


def test_files_are_fetched_one_by_one(toy, tmp_path, monkeypatch):
    """Online: the list of files, then only those that are needed."""
    folder, asked = toy.write(), []

    class Api:
        def model_info(self, repo, *, revision, timeout):
            asked.append((repo, revision))
            names = ["config.json", "model.safetensors", "README.md", "pytorch_model.bin"]
            return type("Info", (), {"siblings": [type("Sibling", (), {"rfilename": n}) for n in names]})

    def download(repo, name, revision):
        asked.append(name)
        return str(folder / name)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    load("someone/draft", revision="v1")
    assert asked[0] == ("someone/draft", "v1")
    assert set(asked[1:]) == {"config.json", "model.safetensors"}
