"""What drafts of different precision are compared on: rows of a text as a target hands them over, or stand-ins."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from eaglex.config import DraftConfig
    from eaglex.hosts.hf_target import HookedTarget
    from eaglex.weights import DraftWeights

PROMPT, SAID = 256, 128  # tokens: of the prompt's end, and of the target's own text behind it
LEAST = 16  # of its own text, however slow the target is
SECONDS = 5.0
STAND_INS = {"cpu": 128, "cuda": 512}  # rows: of 128 each is worth 0.8 % of agreement, and a GPU has time for more
_VERIFICATIONS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationText:
    """T rows of one text; the last `counted` of them are compared."""

    aux_hidden_states: Tensor  # [T, A·Ht]
    input_ids: Tensor  # [T]: for each row the token after it
    counted: int
    origin: str
    follows: Tensor | None = None  # [counted]: what the target says next, for each row the token after input_ids
    verify_seconds: float | None = None  # of the target, for one draft


@torch.inference_mode()
def target_text(
    target: HookedTarget,
    prompt: Sequence[int],
    *,
    nodes: int,
    context: int,
) -> CalibrationText:
    """The end of the prompt and up to 128 tokens of the target's own greedy text behind it: what it will draft for.

    At most 5 s, but 16 tokens, and one verification's time by forwards of `nodes` tokens.
    """
    count = min(SAID, max(2, (context - nodes) // 2))
    ids = list(prompt[-max(1, min(PROMPT, context - nodes - count)) :])
    cache, device = target.new_cache(), target.device
    logits, aux = target.extend(cache, torch.tensor(ids, device=device))
    pieces, said = [aux], [int(logits.argmax())]
    begun = time.perf_counter()
    while len(said) < count:
        logits, aux = target.extend(cache, torch.tensor(said[-1:], device=device))
        pieces.append(aux)
        said.append(int(logits.argmax()))
        if len(said) >= LEAST and time.perf_counter() - begun > SECONDS:
            break
    length = len(ids) + len(said) - 1
    seconds = []
    for _ in range(_VERIFICATIONS):
        begun = _now(device)
        target.extend(cache, torch.tensor((said * nodes)[:nodes], device=device))
        seconds.append(_now(device) - begun)
        target.keep(cache, length, [])
    tokens = torch.tensor([*ids, *said])
    return CalibrationText(
        aux_hidden_states=torch.cat(pieces)[:-1],
        input_ids=tokens[1:-1],
        counted=len(said) - 1,
        origin="the target's own text",
        follows=tokens[len(ids) + 1 :],
        verify_seconds=min(seconds),
    )


def stand_ins(config: DraftConfig, weights: DraftWeights) -> CalibrationText:
    """Where no target can be run yet: random tokens, and for hidden states embeddings of others, normed.

    No text and no target's states: good enough to rank precisions by how often the best token stays the same, which
    hardly depends on the rows, and for nothing else. Normal numbers where the target is wider than the draft.
    """
    generator = torch.Generator().manual_seed(0)
    device = weights.embed_tokens.device
    rows = STAND_INS.get(device.type, STAND_INS["cpu"])
    ids = torch.randint(config.vocab_size, (config.num_aux + 1, rows), generator=generator)
    if config.target_hidden_size == config.hidden_size:
        parts = [weights.embed_tokens[each.to(device)].float() for each in ids[1:]]
        norms = [part.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-12) for part in parts]
        aux = torch.cat([part / norm for part, norm in zip(parts, norms, strict=True)], -1)
    else:
        aux = torch.randn(rows, config.aux_width, generator=generator)
    return CalibrationText(
        aux_hidden_states=aux.to(weights.fc.dtype),
        input_ids=ids[0],
        counted=rows,
        origin="random tokens, with embeddings for hidden states as no target could be run",
    )


def agreed(best: Tensor, d2t: Tensor | None, follows: Tensor) -> float:
    """Share of rows whose best draft id [n] is the target's token [n]."""
    ids = best if d2t is None else best + d2t[best]
    return float((ids.cpu() == follows.cpu()).float().mean())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
