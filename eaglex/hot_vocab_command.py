"""`eaglex hot-vocab`: counts the tokens of text files or of a server's outputs, streaming, and writes the ranking."""

from __future__ import annotations

import argparse
import codecs
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeGuard

from eaglex.errors import ConfigError
from eaglex.fields import shown

_BLOCK = 2**18  # bytes of text that are tokenised at once
_LINE = 2**26  # a record may not be longer
_SIZES = (1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000)
_RECORDS = (".jsonl", ".ndjson")


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add = parser.add_argument
    add(
        "files", nargs="+", metavar="FILE",
        help="text in UTF-8 (- is standard input), or *.jsonl with one record a line: `tokens` (ids) or `text`, as "
        "eaglex generate --json writes them",
    )  # fmt: skip
    add("--tokenizer", required=True, metavar="PATH", help="the target: folder or Hub id")
    add("--field", metavar="NAME", help="a record's field of text or ids, dotted: choices.0.text (default: text)")
    add("--output", default="hot_vocab.json", metavar="FILE", help="default hot_vocab.json")


def run(arguments: argparse.Namespace) -> int:
    """Count, write, and report what the first N tokens would cover."""
    from eaglex.hosts import hf_target
    from eaglex.hosts.progress import bar
    from eaglex.hot_vocab import Counting

    sizes = [_size(file) for file in arguments.files]
    tokenizer = hf_target.load_tokenizer(arguments.tokenizer)
    vocab = hf_target.read_facts(arguments.tokenizer).vocab_size
    counting = Counting(vocab)
    total = None if None in sizes else sum(size for size in sizes if size is not None)
    with bar(total, "hot-vocab", unit="B") as progress:
        for file in arguments.files:
            for tokens in _tokens(file, tokenizer, arguments.field, progress.update):
                counting.add(tokens, file)
    names = [Path(file).name for file in arguments.files]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    ranking = counting.ranking(", ".join(names[:3]) + more)
    ranking.write(arguments.output)
    ranked, held = int(ranking.counts.sum()), int(ranking.held_out.sum())
    seen = int((ranking.counts > 0).sum())
    print(f"{ranked:,} tokens ranked, {held:,} held out; {seen:,} of {vocab:,} occur; written to {arguments.output}")
    order = ranking.counts.argsort(descending=True, stable=True)
    for size in [*(s for s in _SIZES if s < seen), seen]:
        what = "held-out" if held else "the same"
        print(f"--hot-vocab {size}:{arguments.output} covers {ranking.coverage(order[:size]):.2%} of {what} tokens")
    return 0


def _size(file: str) -> int | None:
    if file == "-":
        return None
    try:
        return Path(file).stat().st_size
    except OSError as error:
        raise ConfigError(f"{file}: expected a readable file, got {error.strerror}") from error


def _tokens(file: str, tokenizer: Any, field: str | None, took: Callable[[int], Any]) -> Iterator[list[int]]:
    """Token ids of one file, block by block; the end of a text counts as the end-of-text token, if there is one."""
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]

    def encoded(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    try:
        with sys.stdin.buffer if file == "-" else open(file, "rb") as opened:
            if file.endswith(_RECORDS):
                for number, line in enumerate(_lines(opened, file), start=1):
                    took(len(line))
                    if line.strip():
                        found = _record(line, field, f"{file}:{number}")
                        yield found if isinstance(found, list) else encoded(found) + end
            else:
                empty = True
                for text in _blocks(opened, took):
                    empty = False
                    yield encoded(text)
                yield [] if empty else end
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: expected a readable file in UTF-8, got {error}") from error


def _blocks(opened: IO[bytes], took: Callable[[int], Any]) -> Iterator[str]:
    """Text in blocks that end at a line's end where one is near, so that few words are cut in two."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    while data := opened.read(_BLOCK):
        took(len(data))
        text = rest + decoder.decode(data)
        at = text.rfind("\n") + 1 or text.rfind(" ") or len(text)
        at = len(text) if at < 0 else at
        rest = text[at:]
        if at:
            yield text[:at]
    if rest := rest + decoder.decode(b"", final=True):
        yield rest


def _lines(opened: IO[bytes], file: str) -> Iterator[bytes]:
    while line := opened.readline(_LINE):
        if len(line) == _LINE:
            raise ConfigError(f"{file}: expected records of at most {_LINE} bytes, got a longer one")
        yield line


def _record(line: bytes, field: str | None, where: str) -> list[int] | str:
    """A record's token ids, or its text."""
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: expected a JSON object, got {str(error)[:80]}") from None
    tokens = value.get("tokens") if isinstance(value, dict) and field is None else None
    if _ids(tokens):
        return tokens
    if tokens is not None and not isinstance(value.get("text"), str):
        raise ConfigError(f"{where}: tokens: expected a list of token ids, got {shown(tokens)}")
    for name in (field or "text").split("."):
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            value = value.get(name) if isinstance(value, dict) else None
    if field is not None and _ids(value):
        return value
    if isinstance(value, str):
        return value
    raise ConfigError(f"{where}: expected `tokens`, or a text in `{field or 'text'}`, got {type(value).__name__}")


def _ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
