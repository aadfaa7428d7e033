"""Tokens as text while they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class TextStream:
    """Writes tokens as text while they come; a character whose bytes are not all there yet waits."""

    # Tokenizers drop a space in front of a text's first token; behind some tokens of the prompt it is not the first.
    CONTEXT = 4

    def __init__(self, tokenizer: Any, prompt: list[int], write: Callable[[str], object]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._tokens = prompt[-self.CONTEXT :]
        self._before = len(self._decoded())
        self._written = 0

    @property
    def text(self) -> str:
        """All that came, special tokens left out."""
        return self._decoded()[self._before :]

    def put(self, tokens: list[int]) -> None:
        """Take these tokens in and write what is complete."""
        self._tokens = self._tokens + tokens
        self._advance(self.text.rstrip("\ufffd"))

    def end(self) -> None:
        """Write the rest."""
        self._advance(self.text)
        self._write("\n")

    def _advance(self, text: str) -> None:
        self._write(text[self._written :])
        self._written = max(self._written, len(text))

    def _decoded(self) -> str:
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return text
