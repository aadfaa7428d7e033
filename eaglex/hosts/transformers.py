"""Speculation with a Hugging Face target and without a server: eaglex drafts, one forward of the target verifies.

The cycle is a server's: `tree` fills the verifier's tensors, the target verifies them, the accepted path is compacted
in its KV cache, and one launch takes the accepted rows into the draft and drafts again. Drafting is batched over
requests; the target runs them one by one, each with a cache of its own, since this host is for correctness and for one
user, not for throughput.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eaglex.config import DraftConfig, EngineLimits, Sampling, SpeculationConfig
from eaglex.errors import ConfigError, DeviceError
from eaglex.hosts.acceptance import Acceptor
from eaglex.hosts.dedicated import DedicatedPlan, DedicatedSlots
from eaglex.hosts.draft_slots import DraftRows, DraftSlots, tree_of
from eaglex.hosts.hf_target import HookedTarget
from eaglex.hosts.shared_slots import Link, ReceivingSlots, SendingSlots
from eaglex.hosts.statistics import Phases, Statistics
from eaglex.hosts.team import Team
from eaglex.reference import Accepted, VerifyTree
from eaglex.weights import DraftWeights

_log = logging.getLogger(__name__)


class Finish(enum.Enum):
    """Why a text ended: an end-of-text token, max_new_tokens, or the context."""

    EOS = "eos"
    MAX_NEW_TOKENS = "max_new_tokens"
    CONTEXT = "context"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostLimits:
    """Memory of a host: `max_batch` requests of at most `max_length` tokens, prompt included (0: the target's context).

    Prompts enter in chunks of `prompt_chunk` tokens.
    """

    max_batch: int = 1
    max_length: int = 0
    prompt_chunk: int = 512

    def __post_init__(self) -> None:
        for name, low in (("max_batch", 1), ("max_length", 0), ("prompt_chunk", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name}: expected >= {low}, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """One call of `generate`. Request i draws from seed + i; `eos_token_ids` None takes the target's own."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    eos_token_ids: frozenset[int] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens: expected >= 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature: expected >= 0 and finite, got {self.temperature}")
        if not 0 <= self.seed < 2**63:  # so that seed + i is one that torch takes
            raise ConfigError(f"seed: expected in 0..{2**63 - 1}, got {self.seed}")

    def check(self, speculation: SpeculationConfig) -> None:
        """Raise ConfigError where these options contradict the way of drafting."""
        if speculation.sampling is Sampling.REJECTION and self.temperature == 0:
            raise ConfigError("temperature: expected > 0 with rejection sampling, got 0")


@dataclasses.dataclass(kw_only=True)
class Output:
    """The texts of one call and what the speculation did. Seconds are wall time behind the first token of each text."""

    tokens: list[list[int]]  # per request, without its prompt; an end-of-text token is its last
    finish: list[Finish]
    statistics: Statistics
    prompt_us: dict[str, float]  # in all: prefill by the target, extend by the draft
    cycle_us: dict[str, float]  # per cycle: tree, verify, accept, compact, host, draft (one launch: extend and K steps)
    decode_seconds: float
    lanes: dict[str, int]  # requests per outcome of a draft launch, this call's alone
    warnings: list[str] = dataclasses.field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Tokens behind each text's first one, over the time since then; 0 where there are none."""
        count = sum(len(t) - 1 for t in self.tokens)
        return count / self.decode_seconds if count and self.decode_seconds > 0 else 0.0


Slots = DraftSlots | SendingSlots | DedicatedSlots | ReceivingSlots
OnTokens = Callable[[int, list[int]], None]


@dataclasses.dataclass
class _Request:
    index: int
    prompt: list[int]
    acceptor: Acceptor
    cache: Any
    budget: int
    out_of: Finish  # what an exhausted budget means
    tokens: list[int] = dataclasses.field(default_factory=list)
    finish: Finish | None = None

    @property
    def slot(self) -> int:
        return self.index + 1

    @property
    def length(self) -> int:
        """Rows in the cache: all tokens but the last one."""
        return len(self.prompt) + len(self.tokens) - 1

    def emit(self, tokens: list[int], eos: frozenset[int]) -> list[int]:
        """Take these tokens in as far as end of text and budget allow; returns those that were."""
        ended = next((i for i, token in enumerate(tokens) if token in eos), None)
        room = self.budget - len(self.tokens)
        if ended is not None and ended < room:
            taken, self.finish = tokens[: ended + 1], Finish.EOS
        else:
            taken = tokens[:room]
            self.finish = self.out_of if len(taken) == room else None
        self.tokens += taken
        return taken


class TransformersHost:
    """Generates with `target`, drafted for by an EAGLE-3 head; emits what the target alone would have.

    With a `team` the target runs on all its ranks, each with a host of its own that makes the same calls; `weights` are
    rank 0's alone, which drafts and decides; or nobody's, with a `dedicated` drafter. Raises ConfigError where draft
    and target do not fit, before anything is allocated, and BridgeError where the ranks do not.
    """

    def __init__(
        self,
        target: HookedTarget,
        config: DraftConfig,
        weights: DraftWeights | None,
        *,
        aux_layer_ids: Sequence[int],
        speculation: SpeculationConfig,
        limits: HostLimits | None = None,
        team: Team | None = None,
        dedicated: DedicatedPlan | None = None,
    ) -> None:
        limits = limits or HostLimits()
        target.facts.check_draft(config, aux_layer_ids)
        context = min(config.max_positions, target.facts.max_positions or config.max_positions)
        self.target, self.speculation, self.limits = target, speculation, limits
        self.context = context if limits.max_length == 0 else min(limits.max_length, context)
        self.team, self.draft_config = team, config
        if team is not None:
            target.around = team.collective
        self.slots: Slots = self._make_slots(config, weights, dedicated)

    def close(self) -> None:
        """End what runs beside this process: a dedicated drafter."""
        self.slots.close()

    def _make_slots(
        self, config: DraftConfig, weights: DraftWeights | None, dedicated: DedicatedPlan | None
    ) -> Slots:
        team, speculation, device, max_batch = self.team, self.speculation, self.target.device, self.limits.max_batch
        chunk = min(self.limits.prompt_chunk, self.context)
        limits = EngineLimits(
            max_batch=max_batch,
            max_rows=max(max_batch * speculation.num_draft_tokens, chunk),
            num_slots=max_batch + 1,
        )
        if team is not None:
            link = Link(
                team=team,
                speculation=speculation,
                limits=limits,
                vocab_size=config.vocab_size,
                aux_width=0 if dedicated is None else config.num_aux * config.target_hidden_size,
                relay=dedicated is not None and dedicated.relays(device, team.options.transport),
            )
            if not team.drafts:
                return ReceivingSlots(link, device)
            if dedicated is not None:
                return DedicatedSlots(config, link, plan=dedicated, max_length=self.context, device=device)
        assert weights is not None
        drafting = DraftSlots(
            config,
            weights,
            speculation=speculation,
            max_batch=max_batch,
            max_length=self.context,
            device=device,
            max_rows=limits.max_rows,
        )
        if team is not None:
            return SendingSlots(drafting, link)
        drafting.warm_up()
        return drafting

    def decide(self, choose: Callable[[], Accepted]) -> Accepted:
        """What `choose` says; with a team, what rank 0's says, on all ranks."""
        return choose() if self.team is None else self.team.decide(choose)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        options: GenerateOptions,
        on_tokens: OnTokens | None = None,
        on_prompt: OnTokens | None = None,
    ) -> Output:
        """Continue up to max_batch prompts (token ids, special tokens included).

        `on_tokens(request, tokens)` is called as tokens are emitted, `on_prompt` as prompt tokens are taken in. Raises
        ConfigError for a bad prompt or option before anything runs.
        """
        options.check(self.speculation)
        call = _Call(self, options, self._requests(prompts, options), on_tokens or _ignore, on_prompt or _ignore)
        return call.finish()

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raise ConfigError for a prompt that cannot be continued here."""
        check_prompt(prompt, context=self.context, vocab_size=self.target.facts.vocab_size)

    def _requests(self, prompts: Sequence[Sequence[int]], options: GenerateOptions) -> list[_Request]:
        if not 1 <= len(prompts) <= self.limits.max_batch:
            raise ConfigError(f"prompts: expected 1..max_batch={self.limits.max_batch}, got {len(prompts)}")
        for prompt in prompts:
            self.check_prompt(prompt)
        requests = []
        for i, prompt in enumerate(prompts):
            room = self.context - len(prompt)
            requests.append(
                _Request(
                    index=i,
                    prompt=list(prompt),
                    cache=self.target.new_cache(),
                    budget=min(options.max_new_tokens, room),
                    out_of=Finish.MAX_NEW_TOKENS if options.max_new_tokens <= room else Finish.CONTEXT,
                    acceptor=Acceptor(options.temperature, options.seed + i, self.speculation.sampling, self.slots.d2t),
                )
            )
        return requests


class _Call:
    """One call of `generate`: its requests, its figures, and whether the drafter still works."""

    def __init__(
        self, host: TransformersHost, options: GenerateOptions, requests: list[_Request], emit: OnTokens, took: OnTokens
    ) -> None:
        self.target, self.slots, self.decide, self.requests = host.target, host.slots, host.decide, requests
        self.speculation, self.chunk = host.speculation, host.limits.prompt_chunk
        self.eos = self.target.eos_token_ids if options.eos_token_ids is None else options.eos_token_ids
        self.emit, self.took = emit, took
        self.prompt_phases, self.phases = Phases(self.target.device), Phases(self.target.device)
        self.statistics, self.warnings = Statistics(self.speculation.num_steps), list[str]()
        self.drafter_works = True

    def finish(self) -> Output:
        """Run all requests to their end."""
        lanes, seconds = self.slots.counters(), 0.0
        for request in self.requests:
            seconds += self.begin(request)
        begun = time.perf_counter()
        while active := [r for r in self.requests if r.finish is None]:
            self.cycle(active)
            if not self.warnings and (complaint := self.statistics.complaint()):
                self.warn(complaint)
        seconds += time.perf_counter() - begun
        cycles = max(1, self.statistics.cycles)
        return Output(
            tokens=[r.tokens for r in self.requests],
            finish=[r.finish for r in self.requests if r.finish is not None],
            statistics=self.statistics,
            prompt_us=self.prompt_phases.microseconds(),
            cycle_us={name: us / cycles for name, us in self.phases.microseconds().items()},
            decode_seconds=seconds,
            warnings=self.warnings,
            lanes={name: count - lanes[name] for name, count in self.slots.counters().items()},
        )

    def begin(self, request: _Request) -> float:
        """The prompt through target and draft, and the first token; returns the seconds behind that token.

        The last row of the prompt enters the draft with the first token, that of an earlier chunk with a prompt token.
        """
        prompt, chunk, phases = request.prompt, self.chunk, self.prompt_phases
        for first in range(0, len(prompt), chunk):
            tokens = prompt[first : first + chunk]
            phases.start()
            logits, aux = self.target.extend(request.cache, torch.tensor(tokens, device=self.target.device))
            phases.mark("prefill")
            rows = self.rows(request, first, aux, prompt[first + 1 : first + chunk + 1])
            if first + chunk < len(prompt):
                rows.draft_from = False
                self.draft([rows])
                phases.mark("extend")
            self.took(request.index, tokens)
        chosen = self.decide(lambda: Accepted([0], [request.acceptor.first(logits)]))
        self.emit(request.index, request.emit(chosen.tokens, self.eos))
        begun = time.perf_counter()
        if request.finish is None:
            rows.next_tokens.append(request.tokens[0])
            phases.start()
            self.draft([rows])
            phases.mark("extend")
        return time.perf_counter() - begun

    def cycle(self, active: list[_Request]) -> None:
        """Verify what was drafted for these requests, emit what the target accepts, and draft again."""
        phases, slots = self.phases, self.slots
        phases.start()
        trees = slots.trees([r.slot for r in active], [r.length for r in active], [r.tokens[-1] for r in active])
        phases.mark("tree")
        batch = []
        for i, request in enumerate(active):
            length = request.length
            logits, aux = self.target.verify(request.cache, trees.draft_tokens[i], trees.positions[i], trees.mask[i])
            phases.mark("verify")
            tree = tree_of(trees, i)
            accepted = self.decide(functools.partial(self.accept, request, tree, logits))
            taken = request.emit(accepted.tokens, self.eos)
            counted = len(taken) if request.finish is Finish.EOS else accepted.accept_length
            self.statistics.record(counted, had_draft=int(tree.retrieve_next_token[0]) >= 0)
            phases.mark("accept")
            if request.finish is None:
                self.target.keep(request.cache, length, accepted.nodes)
                # Always N rows, as with a server: the accepted path in front, the rest does not count.
                nodes = [*accepted.nodes, *[0] * (len(logits) - len(accepted.nodes))]
                batch.append(self.rows(request, length, aux[nodes], accepted.tokens))
                phases.mark("compact")
            self.emit(request.index, taken)
            phases.mark("host")
        if batch:
            self.draft(batch)
            phases.mark("draft")

    def accept(self, request: _Request, tree: VerifyTree, logits: Tensor) -> Accepted:
        """What the target's logits [N, V] accept of this tree."""
        chain = None
        if self.speculation.sampling is Sampling.REJECTION:
            assert isinstance(self.slots, (DraftSlots, SendingSlots))
            chain = self.slots.chain(request.slot, request.length)
        return request.acceptor.accept(tree, logits, chain)

    def rows(self, request: _Request, length: int, aux: Tensor, next_tokens: list[int]) -> DraftRows:
        """What the request brings to the draft at this length."""
        sampled = self.speculation.sampling is Sampling.REJECTION
        return DraftRows(
            slot=request.slot,
            length=length,
            aux_hidden_states=aux,
            next_tokens=list(next_tokens),
            temperature=request.acceptor.temperature,
            uniforms=request.acceptor.uniforms(self.speculation.num_steps) if sampled else None,
        )

    def draft(self, batch: list[DraftRows]) -> None:
        """One launch of the draft. When it fails, the call goes on without: old drafts are for other lengths."""
        if not self.drafter_works:
            self.slots.skip(batch)
            return
        try:
            self.slots.run(batch)
            for warning in self.slots.take_warnings():
                self.warn(warning)
        except DeviceError as error:
            self.drafter_works = False
            self.warn(f"the drafter failed, going on without speculation: {error}")

    def warn(self, message: str) -> None:
        """Log it and keep it for the output."""
        self.warnings.append(message)
        _log.warning("%s", message)


def check_prompt(prompt: Sequence[int], *, context: int, vocab_size: int) -> None:
    """Raise ConfigError for a prompt that is empty, leaves no room in the context, or holds an id out of range."""
    if len(prompt) == 0:
        raise ConfigError("prompt: expected at least one token, got none")
    if len(prompt) >= context:
        raise ConfigError(
            f"prompt: expected at most {context - 1} tokens, so that one fits behind it in a context of {context}, "
            f"got {len(prompt)}"
        )
    if other := [token for token in prompt if isinstance(token, (str, float))]:
        raise ConfigError(f"prompt: expected token ids, got {other[0]!r}: tokenise texts first")
    if bad := [token for token in prompt if not 0 <= token < vocab_size]:
        raise ConfigError(f"prompt: expected token ids in 0..{vocab_size - 1}, got {bad[0]}")


def _ignore(_request: int, _tokens: list[int]) -> None:
    pass
