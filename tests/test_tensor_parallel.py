"""`eaglex generate` under torchrun: the target split over ranks, rank 0 drafts, every rank has the same tokens."""

import json
import os
import signal
import subprocess
import sys
import time

import hf_pair
import pytest
import transformers
from rank_processes import Ranks

from eaglex import bridge, generate
from eaglex.cli import main
from eaglex.errors import ConfigError
from eaglex.hosts import hf_target, team
from eaglex.hosts.acceptance import Acceptor
from eaglex.hosts.shared_slots import SendingSlots
from eaglex.hosts.transformers import TransformersHost

TEXT = "the a cat dog sees hears"
COUNT = 24
TREE = ["--topk", "3", "--num-steps", "3"]
DEADLINE = 6.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return hf_pair.save_pair_of_eight(tmp_path_factory.mktemp("pair"))


def arguments(pair, *options):
    paths = ["--target", str(pair / "target"), "--draft", str(pair / "draft")]
    return ["generate", *paths, "--prompt", TEXT, "--max-new-tokens", str(COUNT), *options]


@pytest.fixture(scope="module")
def alone(pair):
    """What one process says, by options."""
    known = {}

    def run(capsys, *options):
        if options not in known:
            assert main(arguments(pair, "--json", "--check", *options)) == 0
            known[options] = json.loads(capsys.readouterr().out)
        return known[options]

    return run


def check_same(found, expected, ranks):
    assert found["tokens"] == expected["tokens"]
    assert found["text"] == expected["text"]
    assert found["accept_length"] == expected["accept_length"] > 1
    assert found["lanes"] == expected["lanes"]
    assert found["lossless"] is True
    assert (found["num_ranks"], found["transport"]) == (ranks, "shm")
    assert found["warnings"] == []


def test_torchrun(pair, alone, capsys):
    """The command itself; rank 0 alone reports."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "eaglex"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, *arguments(pair, "--json", "--check", *TREE)],
        capture_output=True, text=True, timeout=110, check=False, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1
    check_same(json.loads(result.stdout), alone(capsys, *TREE), 2)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("options", [[], TREE], ids=["chain", "tree"])
def test_every_number_of_ranks(pair, alone, capsys, tmp_path, count, options):
    expected = alone(capsys, *options)
    with Ranks(count, lambda rank: main(arguments(pair, "--json", "--check", *options)), tmp_path) as ranks:
        ended = ranks.wait()
    assert [(rank.code, rank.err) for rank in ended] == [(0, "")] * count
    check_same(json.loads(ended[0].out), expected, count)
    assert [rank.out for rank in ended[1:]] == [""] * (count - 1)


@pytest.mark.slow
@pytest.mark.skipif(not (generate.PAIR / "draft" / "config.json").exists(), reason="models/tiny is not there")
def test_the_repositorys_pair_on_eight_ranks(capsys, tmp_path):
    options = ["generate", "--json", "--check", "--no-baseline", "--prompt", "import os\nimport re\n"]
    options += ["--max-new-tokens", "24"]
    assert main(options) == 0
    expected = json.loads(capsys.readouterr().out)
    with Ranks(8, lambda rank: main(options), tmp_path) as ranks:
        ended = ranks.wait()
    assert [(rank.code, rank.err) for rank in ended] == [(0, "")] * 8
    check_same(json.loads(ended[0].out), expected, 8)


@pytest.mark.parametrize("how", [TREE, ["--sampling", "rejection"]], ids=["tree", "rejection"])
def test_sampling(pair, capsys, tmp_path, how):
    """Rank 0 draws for all."""
    options = arguments(pair, "--json", "--temperature", "1.0", "--seed", "3", "--no-baseline", *how)
    assert main(options) == 0
    expected = json.loads(capsys.readouterr().out)
    with Ranks(2, lambda rank: main(options), tmp_path) as ranks:
        ended = ranks.wait()
    assert [(rank.code, rank.err) for rank in ended] == [(0, "")] * 2
    assert json.loads(ended[0].out)["tokens"] == expected["tokens"]


def test_only_rank_0_chooses(pair, alone, capsys, tmp_path, monkeypatch):
    """Logits of other ranks may differ in the last bit; what they would choose is not even asked."""
    generate = TransformersHost.generate
    monkeypatch.setattr("eaglex.generate._warm_up", lambda *_: None)  # there each rank chooses in the plain loop

    def told(self, *given, **options):
        output = generate(self, *given, **options)
        print(output.tokens[0], file=sys.stderr)
        return output

    def body(rank):
        TransformersHost.generate = told
        if rank == 1:
            Acceptor.first = Acceptor.accept = None
        return main(arguments(pair, "--json", "--no-baseline", *TREE))

    with Ranks(2, body, tmp_path) as ranks:
        ended = ranks.wait()
    assert [rank.code for rank in ended] == [0, 0]
    assert [json.loads(rank.err) for rank in ended] == [alone(capsys, *TREE)["tokens"]] * 2


def test_ranks_with_other_options(pair, tmp_path):
    def body(rank):
        return main(arguments(pair, "--json", "--num-steps", "4" if rank == 1 else "5"))

    with Ranks(2, body, tmp_path) as ranks:
        ended = ranks.wait()
    assert [rank.code for rank in ended] == [1, 1]
    expected = "eaglex: error: num_steps: expected 5 as on rank 0, got 4 on rank 1\n"
    assert [rank.err for rank in ended] == [expected] * 2


def test_a_rank_that_cannot_begin_ends_all(pair, tmp_path):
    """Its files are broken; the others need not wait for the deadline."""

    def body(rank):
        if rank == 1:
            hf_target.read_facts = broken
        return main(arguments(pair, "--json"))

    def broken(path):
        raise ConfigError("target: expected a model folder or Hub id that transformers loads, got a broken disk")

    with Ranks(2, body, tmp_path) as ranks:
        ended = ranks.wait()
    assert [rank.code for rank in ended] == [1, 1]
    assert ended[1].err.startswith("eaglex: error: target: expected a model folder")
    assert "options: expected success on all ranks, got on rank 1: target: expected a model folder" in ended[0].err


def test_targets_that_cannot_be_split(pair, tmp_path):
    with pytest.raises(ConfigError, match="target num_attention_heads: expected a multiple of the 3 ranks, got 8"):
        hf_target.check_split(pair / "target", 3)
    config = transformers.LlamaConfig(**{**hf_pair.SIZES, "num_key_value_heads": 2})
    config.save_pretrained(tmp_path / "few")
    with pytest.raises(ConfigError, match="target num_key_value_heads: expected a multiple of the 4 ranks, got 2"):
        hf_target.check_split(tmp_path / "few", 4)
    transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=40).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match="expected a model that transformers has a tensor-parallel plan for"):
        hf_target.check_split(tmp_path / "gpt2", 2)


def test_an_environment_that_is_not_torchruns(pair, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert main(arguments(pair)) == 1
    assert "WORLD_SIZE: expected a number as torchrun sets it, got 'two'" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(arguments(pair, "--deadline", "0")) == 1
    assert "deadline: expected > 0 and finite, got 0.0" in capsys.readouterr().err


def lose(number, place, note):
    """Send this process that signal at the tenth forward of the target, or at the sixth message of the bridge."""
    calls = 0  # and write down when

    def counted(function, limit):
        def call(*given, **options):
            nonlocal calls
            calls += 1
            if calls == limit:
                note.write_text(str(time.monotonic()))
                os.kill(os.getpid(), number)
            return function(*given, **options)

        return call

    if place == "forward":
        team.Team.collective = counted(team.Team.collective, 10)
    else:
        SendingSlots.run = counted(SendingSlots.run, 6)  # which ends with a push
        bridge.Bridge.receive = counted(bridge.Bridge.receive, 6)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("place", ["forward", "bridge"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_ends_all_by_name(pair, tmp_path, number, place, victim):
    def body(rank):
        if rank == victim:
            lose(number, place, tmp_path / "lost")
        return main(arguments(pair, "--no-baseline", "--deadline", str(DEADLINE), *TREE))

    others = [rank for rank in range(4) if rank != victim]
    with Ranks(4, body, tmp_path) as ranks:
        ended = ranks.wait(*others)
    assert [rank.code for rank in ended] == [1] * 3
    for rank in ended:
        assert f"eaglex: error: rank {victim}: " in rank.err, rank.err
        assert rank.err.count("\n") == 1, rank.err
    lost = float((tmp_path / "lost").read_text()) - ranks.begun
    allowed = 1 if number == signal.SIGKILL else DEADLINE + 1
    leaving = 4  # the interpreter's own end
    assert max(rank.seconds for rank in ended) - lost < allowed + leaving


def test_a_rank_whose_target_fails_ends_all_by_name(pair, tmp_path):
    """An error of the model itself is not taken for a lost connection."""

    def body(rank):
        if rank == 1:
            hf_target.HookedTarget.verify = broken
        return main(arguments(pair, "--no-baseline", "--deadline", str(DEADLINE), *TREE))

    def broken(self, *_):
        with self.around():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with Ranks(2, body, tmp_path) as ranks:
        ended = ranks.wait()
    assert [rank.code for rank in ended] == [1, 1]
    for rank in ended:
        assert "eaglex: error: rank 1: its target failed: CUDA error: an illegal memory access" in rank.err


def test_a_draft_that_fails_costs_no_token(pair, alone, capsys, tmp_path):
    """Rank 0 says "no draft" from then on, all ranks go on, and there is one warning."""
    from eaglex.engine import DraftEngine
    from eaglex.errors import DeviceError

    expected, run, calls = alone(capsys, *TREE), DraftEngine.run, 0

    def failing(self, *given):
        nonlocal calls
        calls += 1
        if calls > 8:
            raise DeviceError("the device is gone")
        return run(self, *given)

    def body(rank):
        DraftEngine.run = failing
        return main(arguments(pair, "--json", "--check", *TREE))

    with Ranks(2, body, tmp_path) as ranks:
        ended = ranks.wait()
    assert [rank.code for rank in ended] == [0, 0]
    found = json.loads(ended[0].out)
    assert found["tokens"] == expected["tokens"]
    assert found["lossless"] is True
    assert found["cycles"] > expected["cycles"]
    assert len(found["warnings"]) == 1
    assert "the drafter failed, going on without speculation: the device is gone" in found["warnings"][0]
    assert ended[1].err == ""
