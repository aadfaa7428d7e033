"""A target and its draft from two folders or Hub ids, checked by their configs before any weight is read."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from eaglex import checkpoint, quantize
from eaglex.aux_layers import AuxConvention
from eaglex.bridge import Invitation, LinkOptions
from eaglex.config import DraftConfig, EngineLimits, SpeculationConfig
from eaglex.drafter import Job
from eaglex.engine import _extension
from eaglex.errors import ConfigError, DeviceError
from eaglex.hosts import auto_quant, hf_target
from eaglex.hosts.calibration import CalibrationText, stand_ins, target_text
from eaglex.hosts.dedicated import DedicatedPlan
from eaglex.hosts.hf_target import HookedTarget, TargetFacts
from eaglex.hosts.team import Team
from eaglex.hosts.transformers import HostLimits, TransformersHost, check_prompt
from eaglex.hot_vocab import HotVocab, cut
from eaglex.packed import Auto, DraftQuant
from eaglex.weights import DraftWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairSource:
    """Where a pair is and how its auxiliary layers are read; None takes what the draft's config says.

    `quant` and `hot_vocab` make the draft smaller at load; None leaves it as it is, and Auto.AUTO measures which
    precisions pay.
    """

    target: str
    draft: str
    aux_layer_ids: Sequence[int] | None = None
    convention: AuxConvention | None = None
    quant: DraftQuant | Auto | None = None
    hot_vocab: HotVocab | None = None

    def __post_init__(self) -> None:
        # A word in the place of a value would be passed over.
        for name, kinds in (
            ("convention", (AuxConvention,)),
            ("quant", (DraftQuant, Auto)),
            ("hot_vocab", (HotVocab,)),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise ConfigError(f"{name}: expected {' or '.join(k.__name__ for k in kinds)} or None, got {value!r}")


class Pair:
    """A pair whose configs fit. `load` reads the weights. Raises ConfigError and CheckpointError."""

    def __init__(self, source: PairSource) -> None:
        self.source = source
        self.target: TargetFacts = hf_target.read_facts(source.target)
        self.draft = self._examine()
        self.tokenizer: Any = hf_target.load_tokenizer(source.target)
        self.ranking = None if source.hot_vocab is None else source.hot_vocab.ranking(source.draft)
        self.notes: list[str] = []  # what `load` changed of the draft
        # The precisions of the draft's parts; with Auto.AUTO known behind `load`, on the rank that drafts.
        self.quant = source.quant if isinstance(source.quant, DraftQuant) else DraftQuant()

    @property
    def context(self) -> int:
        """Positions that both models have."""
        return min(self.draft.config.max_positions, self.target.max_positions or self.draft.config.max_positions)

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Output ids of the target's auxiliary layers."""
        assert self.draft.aux.output_ids is not None
        return self.draft.aux.output_ids

    def encode(self, text: str) -> list[int]:
        """The prompt's token ids, special tokens included. Raises ConfigError for an empty or too long one."""
        if not text:
            raise ConfigError("prompt: expected a text, got an empty one")
        ids: list[int] = self.tokenizer(text)["input_ids"]
        check_prompt(ids, context=self.context, vocab_size=self.target.vocab_size)
        return ids

    def load(
        self,
        speculation: SpeculationConfig,
        *,
        max_length: int,
        device: torch.device,
        dtype: torch.dtype,
        prompt: Sequence[int] = (),
        team: Team | None = None,
        dedicated: LinkOptions | None = None,
    ) -> TransformersHost:
        """Both models on `device` in `dtype`, bound to a host for one request of up to `max_length` tokens.

        With a team: this rank's part of the target, and the draft on rank 0 alone, or in a `dedicated` process.
        Auto.AUTO needs the `prompt` (token ids), behind which the target writes what precisions are measured on; with a
        team it does not, and stand-ins take the place of its text.
        """
        with contextlib.nullcontext() if team is None else team.members.step("weights"):
            speculation.check(self.draft.config)
            model = hf_target.load_model(
                self.source.target, dtype=dtype, device=device, num_ranks=1 if team is None else team.num_ranks
            )
            target = HookedTarget(model, self.aux_layer_ids, self.source.target)
            here = team is None or (team.drafts and dedicated is None)
            config, weights = self._load_draft(dtype, device) if here else (self.draft.config, None)
            speculation.check(config)
            if self.source.quant is Auto.AUTO and weights is not None:
                # Ranks are watched, so that none waits for ever, from the host's making on: until then none writes.
                alone = team is None
                text = self._text(target, prompt, speculation) if alone else stand_ins(config, weights)
                choice = auto_quant.choose(config, weights, speculation, text=text, device=device)
                self.quant, weights = choice.quant, quantize.quantize(weights, choice.quant, device=device)
                self.notes += choice.lines
        return TransformersHost(
            target,
            config,
            weights,
            aux_layer_ids=self.aux_layer_ids,
            speculation=speculation,
            limits=HostLimits(max_length=max_length),
            team=team,
            dedicated=None if dedicated is None else self._plan(speculation, dedicated, dtype, team),
        )

    def _plan(
        self, speculation: SpeculationConfig, options: LinkOptions, dtype: torch.dtype, team: Team | None
    ) -> DedicatedPlan:
        source, drafter_device = self.source, options.device or _free_device(team)

        def job(invitation: Invitation, limits: EngineLimits, max_length: int) -> str:
            return Job(
                invitation=invitation,
                target=source.target,
                draft=source.draft,
                aux_layer_ids=None if source.aux_layer_ids is None else list(source.aux_layer_ids),
                convention=None if source.convention is None else source.convention.value,
                dtype=str(dtype).removeprefix("torch."),
                device=drafter_device,
                max_length=max_length,
                **Job.shape(speculation, limits),
            ).to_json()

        return DedicatedPlan(job=job, options=options, device=drafter_device)

    def _load_draft(self, dtype: torch.dtype, device: torch.device) -> tuple[DraftConfig, DraftWeights]:
        source = self.source
        loaded = checkpoint.load(
            source.draft,
            target=source.target,
            aux_layer_ids=source.aux_layer_ids,
            convention=source.convention,
            dtype=dtype,
        )
        return self._shrink(loaded.config, loaded.weights, device)

    def _shrink(
        self, config: DraftConfig, weights: DraftWeights, device: torch.device
    ) -> tuple[DraftConfig, DraftWeights]:
        """The draft as asked for: first fewer rows of the head, then fewer bits."""
        self.notes = []
        if self.ranking is not None and self.source.hot_vocab is not None:
            made = cut(config, weights, self.ranking, self.source.hot_vocab.size)
            config, weights = made.config, made.weights
            self.notes.append(made.note)
        if isinstance(self.source.quant, DraftQuant):
            weights = quantize.quantize(weights, self.source.quant, device=device)
            self.notes.append(f"draft_quant: {self.source.quant}")
        return config, weights

    def _text(self, target: HookedTarget, prompt: Sequence[int], speculation: SpeculationConfig) -> CalibrationText:
        check_prompt(prompt, context=self.context, vocab_size=self.target.vocab_size)
        return target_text(target, prompt, nodes=speculation.num_draft_tokens, context=self.context)

    def _examine(self) -> checkpoint.Facts:
        source = self.source
        facts = checkpoint.examine(
            source.draft, target=source.target, aux_layer_ids=source.aux_layer_ids, convention=source.convention
        )
        assert facts.aux.output_ids is not None
        self.target.check_draft(facts.config, facts.aux.output_ids)
        return facts


def _free_device(team: Team | None) -> str:
    """Where a dedicated drafter goes: a GPU that no rank has, or the CPU beside a target on CPUs."""
    if team is None or team.device.type == "cpu":
        return "cpu"
    if torch.cuda.device_count() <= team.num_ranks:
        raise ConfigError(
            f"drafter device: expected a GPU beside the {team.num_ranks} of the target, got "
            f"{torch.cuda.device_count()} in all; --drafter-device names one, or cpu"
        )
    return f"cuda:{team.num_ranks}"


def choose_device(name: str | None, *, field: str = "device") -> torch.device:
    """The device that `field` names, by default a GPU if this build can use one. Raises ConfigError, DeviceError."""
    built = bool(_extension().build_info()["cuda"])
    if name is None:
        return torch.device("cuda" if built and torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{field}: expected cpu, cuda or cuda:N, got {name}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{field}: expected cpu, cuda or cuda:N, got {name}")
    if device.type == "cuda" and not built:
        raise DeviceError(f"{field}: expected cpu, since this build of eaglex has no CUDA backend, got {name}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"{field}: expected one of {torch.cuda.device_count()} GPUs, got {name}")
    return device
