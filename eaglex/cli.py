"""The `eaglex` command. A subcommand is one line of COMMANDS: its name, what it does, its options, its function."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence

import eaglex
from eaglex.errors import ConfigError, EaglexError
from eaglex.packed import Auto, DraftQuant

QUANT_HELP = (
    "precision of the draft's matrices: none, fp8 (head in int4, its best rescored), int4, or by part as in "
    "head=int4,mlp=fp8 (parts: head, mlp, qkv, o; default: as the checkpoint has them)"
)
AUTO_HELP = "; auto measures which pay, prints the figures, and takes those"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """One subcommand. `run` gets the parsed options and returns the exit code."""

    name: str
    help: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    from eaglex.aux_layers import AuxConvention

    parser.add_argument("path", metavar="PATH", help="draft checkpoint: folder or Hub id")
    parser.add_argument("--target", metavar="PATH", help="its target: folder or Hub id")
    parser.add_argument(
        "--bandwidth", metavar="TB/S", type=_positive, help="memory bandwidth for the step floor, e.g. 4.8 (H200), 1.8"
    )
    parser.add_argument("--aux-layer-ids", metavar="I,J,K", type=_ids, help="use these layers instead of the config's")
    parser.add_argument("--convention", choices=[c.value for c in AuxConvention], help="how the layer ids are written")
    parser.add_argument("--draft-quant", metavar="P", type=_quant, help=QUANT_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _inspect(options: argparse.Namespace) -> int:
    from eaglex import inspect
    from eaglex.aux_layers import AuxConvention
    from eaglex.checkpoint import examine

    convention = AuxConvention(options.convention) if options.convention else None
    facts = examine(options.path, target=options.target, aux_layer_ids=options.aux_layer_ids, convention=convention)
    if options.json:
        print(json.dumps(inspect.as_json(facts, options.bandwidth, options.draft_quant), indent=1))
    else:
        print(inspect.report(facts, options.bandwidth, options.draft_quant))
    return 0


def _hot_vocab_options(parser: argparse.ArgumentParser) -> None:
    from eaglex import hot_vocab_command

    hot_vocab_command.options(parser)


def _hot_vocab(options: argparse.Namespace) -> int:
    from eaglex import hot_vocab_command

    return hot_vocab_command.run(options)


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _doctor(options: argparse.Namespace) -> int:
    from eaglex import doctor

    findings = doctor.examine()
    print(doctor.as_json(findings) if options.json else doctor.report(findings))
    return doctor.failures(findings)


def _generate_options(parser: argparse.ArgumentParser) -> None:
    from eaglex import generate

    generate.options(parser)


def _generate(options: argparse.Namespace) -> int:
    from eaglex import generate

    return generate.run(options)


COMMANDS = (
    Command(
        name="generate",
        help="continue a text with a Hugging Face target and its EAGLE-3 draft",
        options=_generate_options,
        run=_generate,
    ),
    Command(
        name="inspect",
        help="what a draft checkpoint is and what a step of it costs",
        options=_inspect_options,
        run=_inspect,
    ),
    Command(
        name="hot-vocab",
        help="rank a target's tokens by how often texts hold them, for --hot-vocab",
        options=_hot_vocab_options,
        run=_hot_vocab,
    ),
    Command(
        name="doctor",
        help="what this machine lacks for eaglex; the exit code is the number of failures",
        options=_doctor_options,
        run=_doctor,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code. An error of the package is one line on stderr and code 1."""
    parser = argparse.ArgumentParser(prog="eaglex", description=(eaglex.__doc__ or "").strip())
    parser.add_argument("--version", action="version", version=f"eaglex {eaglex.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=command.help)
        command.options(sub)
        sub.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except EaglexError as error:
        print(f"eaglex: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `eaglex inspect ... | head`
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (value := float(text)) > 0 and math.isfinite(value):
            return value
    raise argparse.ArgumentTypeError(f"expected a number > 0, got {text!r}")


def _quant(text: str) -> DraftQuant:
    try:
        return DraftQuant.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _quant_or_auto(text: str) -> DraftQuant | Auto:
    return Auto.AUTO if text == Auto.AUTO.value else _quant(text)


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers separated by commas, got {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
