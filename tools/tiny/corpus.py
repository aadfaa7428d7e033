"""The training text: what a Python installation holds, in a fixed order, and a byte-level BPE tokenizer over it.

A document is one source or text file of the standard library, or one topic of pydoc's help. A document whose
path hashes to a multiple of HELD_OUT_EVERY is held out of all training, the tokenizer's included.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 2048
PAD, BOS, EOS = 0, 1, 2
# Id 0 is the padding token, so a caller that passes pad_token_id=0 and no attention mask hides nothing of a prompt.
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|eos|>"]
HELD_OUT_EVERY = 40
MAX_DOCUMENT_BYTES = 500_000
# encodings: character tables. lib-dynload, config-*: binaries. site-packages and _bundled: other people's code.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "encodings", "lib-dynload", "_bundled"}
# Words with their leading space, digits up to three, punctuation with its line end, line ends with their indentation.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Document(NamedTuple):
    path: str
    text: str

    @property
    def path_hash(self) -> int:
        return int(hashlib.sha256(self.path.encode()).hexdigest()[:8], 16)

    @property
    def held_out(self) -> bool:
        return self.path_hash % HELD_OUT_EVERY == 0


def documents() -> Iterator[Document]:
    """All documents of the running Python's standard library, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = {p.relative_to(root).as_posix(): p for suffix in ("py", "txt") for p in root.rglob(f"*.{suffix}")}
    for name, path in sorted(paths.items()):
        if SKIPPED_FOLDERS & set(path.relative_to(root).parts) or name.startswith("config-"):
            continue
        if name == "pydoc_data/topics.py":
            yield from _topics(path)
            continue
        if not 64 <= path.stat().st_size <= MAX_DOCUMENT_BYTES:
            continue
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue  # test data in other encodings
        yield Document(name, text)


def _topics(path: Path) -> Iterator[Document]:
    """pydoc's help topics as plain text; the file assigns one literal dict."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for topic, text in sorted(ast.literal_eval(node.value).items()):
                yield Document(f"pydoc_data/topics.py#{topic}", text)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    return tokenizer


def pick_prompts(held_out: list[Document], count: int) -> list[dict[str, str]]:
    """One excerpt per held-out document: a prompt of about 400 characters and the text that follows it."""
    chosen = []
    for document in sorted(held_out, key=lambda d: d.path_hash):
        if len(document.text) < 2500:
            continue
        lines = document.text.splitlines(keepends=True)
        # A start in the first two thirds, fixed by the path's hash, at the beginning of a line.
        at = (document.path_hash // HELD_OUT_EVERY) % max(1, len(lines) * 2 // 3)
        text = "".join(lines[at:])[:1400]
        cut = text.find("\n", 400) + 1
        if cut == 0 or len(text) < 1000 or not text.isascii():
            continue
        chosen.append({"path": document.path, "prompt": text[:cut], "continuation": text[cut:]})
        if len(chosen) == count:
            break
    return chosen


def build(work: Path, *, prompt_count: int = 48) -> dict[str, object]:
    """Write tokenizer.json, train.npy, held_out.npy (uint16 streams, BOS text EOS ...), prompts.json, corpus.json."""
    work.mkdir(parents=True, exist_ok=True)
    everything = list(documents())
    train = [d for d in everything if not d.held_out]
    held_out = [d for d in everything if d.held_out]
    tokenizer = train_tokenizer([d.text for d in train])
    tokenizer.save(str(work / "tokenizer.json"))
    digest = hashlib.sha256()
    for document in everything:
        digest.update(document.path.encode() + b"\0" + document.text.encode() + b"\0")
    facts: dict[str, object] = {
        "python": sysconfig.get_python_version(),
        "documents": len(everything),
        "sha256": digest.hexdigest(),
    }
    for name, part in (("train", train), ("held_out", held_out)):
        encoded = tokenizer.encode_batch([d.text for d in part], add_special_tokens=False)
        stream = np.concatenate([np.array([BOS, *e.ids, EOS], dtype=np.uint16) for e in encoded])
        np.save(work / f"{name}.npy", stream)
        facts[f"{name}_tokens"] = len(stream)
        facts[f"{name}_bytes"] = sum(len(d.text.encode()) for d in part)
        facts[f"{name}_documents"] = len(part)
    prompts = pick_prompts(held_out, prompt_count)
    (work / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")
    (work / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts
