"""`eaglex generate`: EAGLE-3 speculation end to end on real text, with figures and a proof of losslessness."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import json
import logging
import os
import select
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import eaglex
from eaglex.config import TRANSPORTS, Sampling, SpeculationConfig
from eaglex.errors import ConfigError, EaglexError
from eaglex.packed import DraftQuant
from eaglex.text_stream import TextStream

if TYPE_CHECKING:
    from eaglex.bridge import LinkOptions
    from eaglex.hosts.pair import Pair
    from eaglex.hosts.team import Team
    from eaglex.hosts.transformers import GenerateOptions, Output, TransformersHost

PAIR = Path(__file__).resolve().parent.parent / "models" / "tiny"
PROMPT = '''"""Read and write configuration files.

A configuration file consists of sections, each led by a [section] header.
"""

import os
import re


class Parser:
'''
# A tree that is asked for by its width alone verifies this many nodes.
TREE_TOKENS = 16
WARM_UP_PROMPT, WARM_UP_TOKENS = 16, 8
STDIN_SECONDS = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One finished run. `lossless` is None where nothing was compared; `difference` says what differs."""

    prompt: str
    prompt_tokens: int
    text: str
    output: Output
    plain_tokens_per_second: float | None
    lossless: bool | None
    difference: str | None


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    from eaglex.cli import AUTO_HELP, QUANT_HELP, _ids, _quant_or_auto

    add = parser.add_argument
    add("--target", metavar="PATH", help="target model: folder or Hub id (default: the repository's models/tiny)")
    add("--draft", metavar="PATH", help="its EAGLE-3 draft: folder or Hub id")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        metavar="TEXT",
        help="text to continue (default: standard input if it is piped, else a built-in text)",
    )
    prompt.add_argument("--prompt-file", metavar="FILE", help="file with the text to continue; - is standard input")
    add("--num-steps", type=int, default=5, metavar="K", help="depth of a draft (default 5)")
    add("--topk", type=int, default=1, metavar="k", help="branches per step; 1 is a chain (default 1)")
    add(
        "--num-draft-tokens", type=int, metavar="N",
        help=f"nodes that the target verifies, root included (default K + 1; with branches up to {TREE_TOKENS})",
    )  # fmt: skip
    add(
        "--stop-below", type=float, default=0.0, metavar="P",
        help="end a draft once the draft model gives its best node less than this probability (default 0: never)",
    )  # fmt: skip
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default 0)")
    add(
        "--sampling", choices=("target-only", "rejection"), default="target-only",
        help="how sampled drafts are verified; rejection needs a chain (default target-only)",
    )  # fmt: skip
    add("--seed", type=int, default=0, help="of the random numbers (default 0)")
    add("--max-new-tokens", type=int, default=128, metavar="M", help="default 128")
    add("--aux-layer-ids", type=_ids, metavar="I,J,K", help="use these layers instead of those of the draft's config")
    add("--convention", choices=("output", "capture_before"), help="how layer ids are written")
    add("--draft-quant", metavar="P", type=_quant_or_auto, help=QUANT_HELP + AUTO_HELP)
    add(
        "--hot-vocab", metavar="N|FILE|N:FILE",
        help="keep the N most frequent tokens of the draft's head by a ranking of eaglex hot-vocab (default file: "
        "hot_vocab.json beside the draft; default N: all tokens that the ranking has seen)",
    )  # fmt: skip
    add("--device", metavar="D", help="cpu, cuda or cuda:N (default: a GPU if this build can use it)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default float32 on a CPU, bfloat16 on a GPU")
    add("--check", action="store_true", help="fail unless transformers' own greedy generate gives the same tokens")
    add("--no-baseline", action="store_true", help="do not time the target alone")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add(
        "--deadline", type=float, default=60.0, metavar="S",
        help="with torchrun: seconds after which a rank that does not come is lost (default 60)",
    )  # fmt: skip
    add(
        "--placement", choices=("rank0", "dedicated"), default="rank0",
        help="with torchrun: where the draft runs, on rank 0 or in a process of its own (default rank0)",
    )  # fmt: skip
    add(
        "--transport", choices=TRANSPORTS,
        help="with torchrun: how drafts travel between ranks (default: shm on CPUs; on GPUs p2p, mailbox or nccl, the "
        "first that a probe finds to work)",
    )  # fmt: skip
    add(
        "--drafter-device", metavar="D",
        help="where a dedicated drafter drafts: cpu or cuda:N (default: the first GPU that no rank has; cpu on CPUs)",
    )  # fmt: skip
    add(
        "--drafter-deadline", type=float, default=1.0, metavar="S",
        help="seconds that a dedicated drafter has for a draft; later ones are not waited for (default 1)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Generate and report; 1 where --check finds a difference. Raises EaglexError before a model is loaded.

    Under torchrun the target is split over its ranks; rank 0 drafts and reports.
    """
    # Read when torch loads. Two models take turns on the same cores, and threads that spin between their turns, the
    # default, are in the way: on 2 busy cores a verification took 1.4 s instead of 0.1 s.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from eaglex.bridge import BridgeOptions
    from eaglex.hosts import team as teams

    options = BridgeOptions(deadline=arguments.deadline, transport=arguments.transport)
    _check_placement(arguments)
    if teams.num_ranks() == 1 and arguments.placement == "rank0":
        return _run(arguments, None)
    with teams.Team(options) as team:
        said = {name: _plain(value) for name, value in vars(arguments).items() if name != "run"}
        team.members.agree("options", {"eaglex": eaglex.__version__, **said})
        try:
            return _run(arguments, team)
        except EaglexError:
            if team.device.type == "cuda":
                atexit.register(_leave_at_once)
            raise


def _check_placement(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a placement that this process cannot have, and for an option that its placement leaves."""
    if arguments.placement == "rank0":
        if arguments.drafter_device is not None:
            raise ConfigError(f"drafter_device: expected none with placement rank0, got {arguments.drafter_device}")
    elif "RANK" not in os.environ:
        raise ConfigError(
            f"placement: expected rank0 without torchrun, got {arguments.placement}; "
            "start it with: torchrun --nproc-per-node 1 -m eaglex generate ..."
        )


def _leave_at_once() -> None:
    """What torch has left of collectives that were aborted may wait at exit, or end the process by a signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _run(arguments: argparse.Namespace, team: Team | None) -> int:
    from eaglex.hosts.hf_target import check_split
    from eaglex.hosts.pair import DTYPES, choose_device

    with contextlib.nullcontext() if team is None else team.members.step("options"):
        speculation, chosen = _speculation(arguments), _chosen(arguments)
        dedicated = None if arguments.placement == "rank0" else _link(arguments)
        if dedicated is not None:
            _check_dedicated(arguments, speculation)
        device = choose_device(arguments.device)
        dtype = DTYPES[arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16")]
        text = _prompt(arguments) if team is None or team.drafts else ""
        pair = _pair(arguments)
        if team is not None:
            check_split(pair.source.target, team.num_ranks)
    if team is not None:  # standard input is rank 0's
        text = team.members.gather("prompt", text)[0]
    ids = pair.encode(text)
    length = min(pair.context, len(ids) + chosen.max_new_tokens)
    if team is not None:
        device = team.start(device)
    host = pair.load(
        speculation, max_length=length, device=device, dtype=dtype, prompt=ids, team=team, dedicated=dedicated
    )
    for note in pair.notes if team is None or team.drafts else ():
        print(f"eaglex: {note}", file=sys.stderr)
    with contextlib.closing(host), contextlib.nullcontext() if team is None else team.guarded():
        done = _generate(arguments, host, pair, text, ids, chosen)
    if team is None or team.drafts:
        _tell(arguments, done, host, pair.quant)
    return 1 if arguments.check and not done.lossless else 0


def _plain(value: object) -> object:
    """An option as JSON has it."""
    return value if value is None or isinstance(value, (bool, int, float, str, list)) else str(value)


def _link(arguments: argparse.Namespace) -> LinkOptions:
    from eaglex.bridge import LinkOptions

    return LinkOptions(deadline=arguments.drafter_deadline, device=arguments.drafter_device)


def _check_dedicated(arguments: argparse.Namespace, speculation: SpeculationConfig) -> None:
    """Raise ConfigError or DeviceError for what a dedicated drafter cannot do yet, or not where it is put."""
    from eaglex.hosts.pair import choose_device

    if arguments.drafter_device is not None:
        choose_device(arguments.drafter_device, field="drafter_device")
    if speculation.sampling is Sampling.REJECTION:
        raise ConfigError("placement: expected rank0 with rejection sampling, got dedicated")
    for name in ("draft_quant", "hot_vocab"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"placement: expected rank0 with {name}, got dedicated")


def _tell(arguments: argparse.Namespace, done: Run, host: TransformersHost, quant: DraftQuant) -> None:
    print(json.dumps(_as_json(arguments, done, host, quant)) if arguments.json else _report(done, host.speculation))
    for warning in done.output.warnings:
        print(f"eaglex: warning: {warning}", file=sys.stderr)
    if done.lossless is False:
        print(f"eaglex: {'error' if arguments.check else 'warning'}: {done.difference}", file=sys.stderr)


def _generate(
    arguments: argparse.Namespace,
    host: TransformersHost,
    pair: Pair,
    text: str,
    ids: list[int],
    chosen: GenerateOptions,
) -> Run:
    from eaglex.hosts import plain
    from eaglex.hosts.progress import bar

    _warm_up(host, ids, chosen)
    shown = host.team is None or host.team.drafts
    write: Callable[[str], object] = _write if shown and not arguments.json else (lambda piece: None)
    write(text)
    stream = TextStream(pair.tokenizer, ids, write)
    with _warnings_held(), bar(len(ids), "prompt", shown=shown) as prompt_bar:
        output = host.generate(
            [ids],
            chosen,
            on_tokens=lambda _, tokens: stream.put(tokens),
            on_prompt=lambda _, tokens: prompt_bar.update(len(tokens)),
        )
    stream.end()
    tokens = output.tokens[0]
    rate, lossless, difference = None, None, None
    if not arguments.no_baseline:
        with bar(len(tokens), "target alone", shown=shown) as plain_bar:
            alone = plain.decode(host.target, ids, count=len(tokens), options=chosen, on_token=plain_bar.update)
        rate = alone.tokens_per_second
        if chosen.temperature == 0:
            lossless, difference = _compare(host, ids, tokens, alone.tokens, "the target alone")
    if arguments.check and lossless is not False:
        count = min(chosen.max_new_tokens, host.context - len(ids))
        expected = plain.generate(host.target, ids, count=count, eos=host.target.eos_token_ids)
        lossless, difference = _compare(host, ids, tokens, expected, "transformers' generate")
    return Run(
        prompt=text, prompt_tokens=len(ids), text=stream.text, output=output, plain_tokens_per_second=rate,
        lossless=lossless, difference=difference,
    )  # fmt: skip


@contextlib.contextmanager
def _warnings_held() -> Iterator[None]:
    """The host logs its warnings at once, into the middle of the text; here they come at the end."""
    log = logging.getLogger("eaglex.hosts.transformers")

    def drop(_: logging.LogRecord) -> bool:
        return False

    log.addFilter(drop)
    try:
        yield
    finally:
        log.removeFilter(drop)


def _warm_up(host: TransformersHost, ids: list[int], chosen: GenerateOptions) -> None:
    """Threads, allocators and kernels start lazily; the figures are to show neither side's first calls."""
    from eaglex.hosts import plain

    few = dataclasses.replace(chosen, max_new_tokens=min(WARM_UP_TOKENS, chosen.max_new_tokens))
    host.generate([ids[:WARM_UP_PROMPT]], few)
    plain.decode(host.target, ids[:WARM_UP_PROMPT], count=few.max_new_tokens, options=few)


def _compare(
    host: TransformersHost, prompt: list[int], tokens: list[int], expected: list[int], whose: str
) -> tuple[bool, str | None]:
    from eaglex.hosts import plain

    if tokens == expected:
        return True, None
    pairs = enumerate(zip(tokens, expected, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(expected)))
    margin = plain.margin(host.target, prompt + expected[:first])
    hint = "" if _dtype(host) == "float32" else f"; {_dtype(host)} rounds near ties apart, compare in --dtype float32"
    return False, (
        f"not lossless: token {first}: expected {expected[first : first + 1]} as from {whose}, "
        f"got {tokens[first : first + 1]}; the target's two best logits are {margin:.2g} apart there{hint}"
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _speculation(arguments: argparse.Namespace) -> SpeculationConfig:
    rejection = arguments.sampling == "rejection"
    narrow = SpeculationConfig(
        num_steps=arguments.num_steps,
        topk=arguments.topk,
        num_draft_tokens=arguments.num_steps + 1,
        sampling=Sampling.REJECTION if rejection else Sampling.GREEDY,
        stop_below=arguments.stop_below,
    )
    count = arguments.num_draft_tokens
    if count is None:
        wide = max(TREE_TOKENS, narrow.num_draft_tokens)
        count = narrow.num_draft_tokens if narrow.topk == 1 else min(narrow.num_candidates + 1, wide)
    if count < 1:  # 0 is SpeculationConfig's word for the default
        raise ConfigError(f"num_draft_tokens: expected >= num_steps + 1 = {narrow.num_steps + 1}, got {count}")
    return dataclasses.replace(narrow, num_draft_tokens=count)


def _chosen(arguments: argparse.Namespace) -> GenerateOptions:
    from eaglex.hosts.transformers import GenerateOptions

    chosen = GenerateOptions(
        max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature, seed=arguments.seed
    )
    chosen.check(_speculation(arguments))
    if arguments.check and chosen.temperature > 0:
        raise ConfigError(
            f"check: expected temperature 0, since two samples of one distribution differ, got {chosen.temperature}"
        )
    return chosen


def _pair(arguments: argparse.Namespace) -> Pair:
    from eaglex.aux_layers import AuxConvention
    from eaglex.hosts.pair import Pair, PairSource
    from eaglex.hot_vocab import HotVocab

    target, draft = _paths(arguments)
    convention = AuxConvention(arguments.convention) if arguments.convention else None
    return Pair(
        PairSource(
            target=target, draft=draft, aux_layer_ids=arguments.aux_layer_ids, convention=convention,
            quant=arguments.draft_quant,
            hot_vocab=None if arguments.hot_vocab is None else HotVocab.parse(arguments.hot_vocab),
        )
    )  # fmt: skip


def _paths(arguments: argparse.Namespace) -> tuple[str, str]:
    target, draft = arguments.target, arguments.draft
    if (target is None) != (draft is None):
        raise ConfigError(f"--target and --draft: expected both or neither, got target={target}, draft={draft}")
    if target is not None:
        return target, draft
    if not all((PAIR / part / "config.json").exists() for part in ("target", "draft")):
        raise ConfigError(
            f"--target and --draft: expected both where the repository's pair is not at {PAIR}, got neither"
        )
    return str(PAIR / "target"), str(PAIR / "draft")


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt is not None:
        return str(arguments.prompt)
    if arguments.prompt_file is None:
        return _piped() or PROMPT
    try:
        return (
            sys.stdin.read()
            if arguments.prompt_file == "-"
            else Path(arguments.prompt_file).read_text(encoding="utf-8")
        )
    except (OSError, UnicodeDecodeError) as error:
        file = arguments.prompt_file
        raise ConfigError(f"--prompt-file: expected a readable file in UTF-8, got {file}: {error}") from error


def _piped() -> str:
    """What stands ready on standard input; a pipe that nobody writes to is not waited for."""
    try:
        if sys.stdin.isatty() or not select.select([sys.stdin], [], [], STDIN_SECONDS)[0]:
            return ""
        return sys.stdin.read()
    except (AttributeError, OSError, ValueError):  # closed, or not a file
        return ""


def _dtype(host: TransformersHost) -> str:
    return str(host.target.dtype).removeprefix("torch.")


def _as_json(arguments: argparse.Namespace, done: Run, host: TransformersHost, quant: DraftQuant) -> dict[str, Any]:
    output, statistics, speculation = done.output, done.output.statistics, host.speculation
    return {
        "text": done.text,
        "accept_length": statistics.accept_length,
        "acceptance_per_position": statistics.acceptance_per_position,
        "tokens_per_second": output.tokens_per_second,
        "tokens_per_second_without": done.plain_tokens_per_second,
        "phases_us": output.cycle_us,
        "prompt_us": output.prompt_us,
        "lossless": done.lossless,
        "tokens": output.tokens[0],
        "finish": output.finish[0].value,
        "cycles": statistics.cycles,
        "lanes": output.lanes,
        "warnings": output.warnings,
        "prompt": done.prompt,
        "prompt_tokens": done.prompt_tokens,
        "target": host.target.facts.name,
        "device": str(host.target.device),
        "dtype": _dtype(host),
        "num_steps": speculation.num_steps,
        "topk": speculation.topk,
        "num_draft_tokens": speculation.num_draft_tokens,
        "temperature": arguments.temperature,
        "sampling": arguments.sampling,
        "seed": arguments.seed,
        "num_ranks": 1 if host.team is None else host.team.num_ranks,
        "placement": arguments.placement,
        "bridge": host.slots.bridge_counters(),
        "transport": None if host.team is None or host.team.bridge is None else host.team.bridge.transport,
        "draft_quant": str(quant),
        "draft_vocab_size": host.draft_config.draft_vocab_size,
    }


def _report(done: Run, speculation: SpeculationConfig) -> str:
    output, statistics = done.output, done.output.statistics
    acceptance = " ".join(f"{share:.2f}" for share in statistics.acceptance_per_position) or "nothing drafted"
    rate, alone = output.tokens_per_second, done.plain_tokens_per_second
    without = f", {alone:.1f} without ({rate / alone:.2f} x)" if alone else ""
    cycle = ", ".join(f"{name} {us / 1e3:.2f}" for name, us in output.cycle_us.items())
    prompt = ", ".join(f"{name} {us / 1e3:.1f}" for name, us in output.prompt_us.items())
    verdict = {True: "yes: every token is the target's own choice", False: "NO", None: "not compared"}[done.lossless]
    shape = f"K={speculation.num_steps} topk={speculation.topk} N={speculation.num_draft_tokens}"
    lines = {
        "accept length": f"{statistics.accept_length:.2f} (bonus token counted; {shape}, {statistics.cycles} cycles)",
        "acceptance": f"{acceptance} (by position)",
        "tokens per second": f"{rate:.1f} with speculation{without}",
        "ms per cycle": f"{sum(output.cycle_us.values()) / 1e3:.2f}: {cycle}",
        "ms for the prompt": f"{sum(output.prompt_us.values()) / 1e3:.1f}: {prompt} ({done.prompt_tokens} tokens)",
        "lossless": f"{verdict} ({len(output.tokens[0])} tokens, ended by {output.finish[0].value})",
    }
    return "\n".join(["", *(f"{name:<18} {value}" for name, value in lines.items())])
