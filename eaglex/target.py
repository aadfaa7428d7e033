"""What a draft needs of its target's files: sizes, context, and the embedding and head where they are shared."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eaglex.errors import CheckpointError
from eaglex.fields import Fields, read_json
from eaglex.source import CONFIG, Source, TensorInfo, open_source

# A multimodal target keeps the language model's sizes in a nested object and its tensors under a longer prefix.
_NESTED = ("text_config", "llm_config", "language_config")
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.", "model.text_model.", "")
_EMBED = tuple(f"{p}embed_tokens.weight" for p in _PREFIXES)
_HEAD = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The facts of one target model; tensors are looked up only when asked for."""

    source: Source
    file: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_positions: int
    tied: bool | None  # None: left to the default of its model class
    quantization: str | None

    def embed_tokens(self) -> TensorInfo:
        """The header entry of the token embedding [vocab, hidden]."""
        return self._find(_EMBED, "embed_tokens.weight")

    def lm_head(self) -> TensorInfo:
        """The header entry of the head [vocab, hidden]; the embedding where there is none and nothing says untied."""
        found = self.source.tensor(_HEAD)
        if found is not None:
            return found
        return self._find(_HEAD, "lm_head.weight") if self.tied is False else self.embed_tokens()

    def _find(self, names: tuple[str, ...], what: str) -> TensorInfo:
        found = self.source.tensor(names)
        if found is None:
            raise CheckpointError(
                f"{self.source.label}: expected {what} of the target under one of {', '.join(names)}, got none"
            )
        return found


def read_target(path_or_hub_id: str | Path, revision: str | None = None) -> Target:
    """Read a target's config. CheckpointError or ConfigError names what is missing or wrong."""
    source = open_source(path_or_hub_id, revision)
    if CONFIG not in source.names:
        raise CheckpointError(f"{source.label}: expected {CONFIG} of the target, got none")
    config = read_json(source.path(CONFIG))
    text = next((child for name in _NESTED if (child := config.child(name)) is not None), config)
    tied = text.flag("tie_word_embeddings")
    tied = config.flag("tie_word_embeddings") if tied is None else tied
    quantization = config.child("quantization_config") or text.child("quantization_config")
    return Target(
        source=source,
        file=config.file,
        hidden_size=_required(text, "hidden_size"),
        num_layers=_required(text, "num_hidden_layers"),
        vocab_size=_required(text, "vocab_size"),
        max_positions=_required(text, "max_position_embeddings"),
        tied=tied,
        quantization=None if quantization is None else quantization.text("quant_method") or "quantised",
    )


def _required(fields: Fields, name: str) -> int:
    value = fields.integer(name)
    if value is None:
        fields.fail(name, "an integer >= 1 in the target's config")
    return value
