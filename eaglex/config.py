"""What an EAGLE-3 draft model is, how far it drafts, and how large the engine around it may grow.

Frozen dataclasses without torch; every field is checked at construction and an error names field, expected and actual.
The C++ structs of the same names (csrc/core/config.h) carry the same fields.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import operator
from typing import Any, ClassVar, NoReturn

from eaglex.errors import ConfigError

TRANSPORTS = ("shm", "p2p", "mailbox", "nccl")  # of a bridge's messages: between hosts, then between GPUs, best first


class AuxNorm(enum.Enum):
    """RMSNorm in front of `fc`: none, one over the whole concatenation (norm_before_fc), one per layer (fc_norm)."""

    NONE = "none"
    WHOLE = "whole"
    EACH = "each"


class Residual(enum.Enum):
    """What the first layer adds its attention to: the hidden state, or its hidden_norm (norm_before_residual)."""

    PRE_NORM = "pre_norm"
    NORMED = "normed"


class NextHidden(enum.Enum):
    """What the next step is fed with: the last residual sum, or the output of the final norm (norm_output)."""

    PRE_NORM = "pre_norm"
    NORMED = "normed"


class EmbeddingNorm(enum.Enum):
    """Whether the first layer norms the token embedding (input_layernorm) before the concatenation."""

    NORMED = "normed"
    NONE = "none"


class Sampling(enum.Enum):
    """How draft tokens are chosen: the top-k, or a chain drawn at the request's temperature with its draft_probs."""

    GREEDY = "greedy"
    REJECTION = "rejection"


class MaskMode(enum.Enum):
    """SGLang's tree masks: [N, seq_len + N] per request in one flat tensor, [B, N, N], or bits of [B, N, bytes]."""

    FULL = "full"
    QLEN_ONLY = "qlen_only"
    QLEN_ONLY_BITPACK = "qlen_only_bitpack"


class RopeScaling(enum.Enum):
    """How the rotary frequencies are stretched beyond the trained context."""

    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, in the words of Hugging Face's `rope_parameters`.

    `attention_factor` multiplies cosine and sine (yarn); None takes yarn's own 0.1 ln(factor) + 1, or 1 elsewhere.
    """

    theta: float = 10000.0
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                _fail(f"rope.{field.name}", "finite", value)
        if not self.theta > 1:
            _fail("rope.theta", "> 1", self.theta)
        if not self.factor >= 1:
            _fail("rope.factor", ">= 1", self.factor)
        if self.scaling in (RopeScaling.LLAMA3, RopeScaling.YARN) and self.original_max_position_embeddings < 1:
            _fail("rope.original_max_position_embeddings", ">= 1", self.original_max_position_embeddings)
        if self.scaling is RopeScaling.LLAMA3 and not self.high_freq_factor > self.low_freq_factor > 0:
            _fail("rope.high_freq_factor", f"> low_freq_factor={self.low_freq_factor} > 0", self.high_freq_factor)
        if self.scaling is RopeScaling.YARN and not self.beta_fast >= self.beta_slow > 0:
            _fail("rope.beta_fast", f">= beta_slow={self.beta_slow} > 0", self.beta_fast)
        if self.mscale < 0 or self.mscale_all_dim < 0:
            _fail("rope.mscale, rope.mscale_all_dim", ">= 0", (self.mscale, self.mscale_all_dim))
        if self.attention_factor is not None and not self.attention_factor > 0:
            _fail("rope.attention_factor", "> 0", self.attention_factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Shapes and numeric switches of one EAGLE-3 draft model.

    `max_positions` is the target's context, not the draft's `max_position_embeddings` (often 2048, and often wrong).
    `rotary_dim` is the part of head_dim that RoPE turns (partial rotary); 0 means all of it.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    max_positions: int
    num_layers: int = 1
    num_aux: int = 3
    rotary_dim: int = 0
    rms_norm_eps: float = 1e-5
    aux_norm: AuxNorm = AuxNorm.NONE
    residual: Residual = Residual.PRE_NORM
    next_hidden: NextHidden = NextHidden.PRE_NORM
    embedding_norm: EmbeddingNorm = EmbeddingNorm.NORMED
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "target_hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "vocab_size",
            "draft_vocab_size",
            "max_positions",
            "num_layers",
            "num_aux",
        ):
            _at_least(self, name, 1)
        for name in ("head_dim", "rotary_dim"):
            _integer(self, name)
        if self.rotary_dim == 0:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        if self.head_dim < 2 or self.head_dim % 2:
            _fail("head_dim", "even and >= 2", self.head_dim)
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            _fail("rotary_dim", f"even and in 2..head_dim={self.head_dim}", self.rotary_dim)
        if self.num_heads % self.num_kv_heads:
            _fail("num_heads", f"a multiple of num_kv_heads={self.num_kv_heads}", self.num_heads)
        if self.draft_vocab_size > self.vocab_size:
            _fail("draft_vocab_size", f"<= vocab_size={self.vocab_size}", self.draft_vocab_size)
        if not 0 < self.rms_norm_eps < 1:
            _fail("rms_norm_eps", "in (0, 1)", self.rms_norm_eps)

    @property
    def aux_width(self) -> int:
        """Width of one row of aux_hidden_states: num_aux · target_hidden_size."""
        return self.num_aux * self.target_hidden_size

    @property
    def q_size(self) -> int:
        """Width of all query heads: num_heads · head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads: num_kv_heads · head_dim."""
        return self.num_kv_heads * self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """How far and how wide one cycle drafts; SGLang's --speculative-num-steps, -eagle-topk and -num-draft-tokens.

    `num_steps` K is the depth of the tree, `topk` k the branches taken per step, `num_draft_tokens` N the nodes that
    the target verifies, root (the bonus token) included. A chain is topk 1 with N = K + 1. K = 0 is plain decoding: the
    draft's K and V are kept up to date, nothing is drafted, N is 1.

    `stop_below` ends a request's draft early: after the first step whose best node has a cumulative probability below
    it (as the draft model sees it), the rest of the K steps is not drafted; what was drafted is kept, so there are
    fewer nodes. 0 never stops. A request's draft does not depend on the others in its batch; time is saved once all of
    them have stopped.
    """

    num_steps: int
    topk: int = 1
    num_draft_tokens: int = 0
    sampling: Sampling = Sampling.GREEDY
    stop_below: float = 0.0

    MAX_STEPS: ClassVar[int] = 16
    MAX_TOPK: ClassVar[int] = 16
    MAX_DRAFT_TOKENS: ClassVar[int] = 64

    def __post_init__(self) -> None:
        for name in ("num_steps", "topk", "num_draft_tokens"):
            _integer(self, name)
        if self.num_draft_tokens == 0:
            object.__setattr__(self, "num_draft_tokens", self.num_steps + 1)
        if not 0 <= self.num_steps <= self.MAX_STEPS:
            _fail("num_steps", f"in 0..{self.MAX_STEPS}", self.num_steps)
        if not 1 <= self.topk <= self.MAX_TOPK:
            _fail("topk", f"in 1..{self.MAX_TOPK}", self.topk)
        low, high = self.num_steps + 1, min(self.num_candidates + 1, self.MAX_DRAFT_TOKENS)
        if not low <= self.num_draft_tokens <= high:
            _fail(
                "num_draft_tokens",
                f"in {low}..{high} for num_steps={self.num_steps}, topk={self.topk}",
                self.num_draft_tokens,
            )
        if self.sampling is Sampling.REJECTION and self.topk != 1:
            _fail("topk", "1 with rejection sampling", self.topk)
        if not 0 <= self.stop_below < 1:
            _fail("stop_below", "in [0, 1)", self.stop_below)

    @property
    def num_candidates(self) -> int:
        """Scored nodes of one cycle before re-ranking: k for the first step, k² for each later one."""
        return self.topk + (self.num_steps - 1) * self.topk**2 if self.num_steps else 0

    @property
    def stop_score(self) -> float:
        """`stop_below` as a log-probability."""
        return math.log(self.stop_below) if self.stop_below > 0 else -math.inf

    def check(self, config: DraftConfig) -> None:
        """Raise ConfigError where these steps cannot run on that draft model."""
        if self.topk > config.draft_vocab_size:
            _fail("topk", f"<= draft_vocab_size={config.draft_vocab_size}", self.topk)
        if self.num_steps >= config.max_positions:
            _fail("num_steps", f"< max_positions={config.max_positions}", self.num_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """How much one cycle may bring, for which memory is planned at construction.

    `max_batch` requests (padded lanes included), `max_rows` rows of aux_hidden_states, `num_slots` request slots, of
    which slot 0 is reserved for padded lanes.

    `token_table_bytes`: the most GPU memory for what the first layer's q, k and v make of each token that can be
    drafted, draft_vocab_size · (num_heads + 2 num_kv_heads) · head_dim numbers of 2 bytes (393 MB for 32,000 tokens at
    hidden size 4096). With it a step reads half of those matrices; a table that would be larger is not made. 0: none.
    """

    max_batch: int
    max_rows: int
    num_slots: int
    token_table_bytes: int = 2**30

    def __post_init__(self) -> None:
        _in_range(self, "max_batch", 1)
        _in_range(self, "max_rows", self.max_batch)
        _in_range(self, "num_slots", 2)
        _in_range(self, "token_table_bytes", 0, 2**40)


def _integer(owner: Any, name: str) -> int:
    """The field's value, which may be any type that Python takes for an index."""
    value = getattr(owner, name)
    try:
        return operator.index(value)
    except TypeError:
        _fail(name, "an integer", repr(value))


def _at_least(owner: Any, name: str, low: int) -> None:
    value = _integer(owner, name)
    if not value >= low:
        _fail(name, f">= {low}", value)


def _in_range(owner: Any, name: str, low: int, high: int = 2**30) -> None:
    value = _integer(owner, name)
    if not low <= value <= high:
        _fail(name, f"in {low}..{high}", value)


def _fail(field: str, expected: str, actual: object) -> NoReturn:
    raise ConfigError(f"{field}: expected {expected}, got {actual}")
