"""The draft in fewer bits and with a smaller head, by eaglex's own options, on the rank that drafts."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from eaglex.hosts import auto_quant
from eaglex.hosts.calibration import stand_ins
from eaglex.hot_vocab import cut
from eaglex.packed import Auto, DraftQuant, Precision
from eaglex.quantize import quantize

if TYPE_CHECKING:
    import torch

    from eaglex.config import DraftConfig, SpeculationConfig
    from eaglex.hot_vocab import HotVocab
    from eaglex.weights import DraftWeights

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked for; None leaves the draft as its files have it."""

    quant: DraftQuant | Auto | None = None
    hot_vocab: HotVocab | None = None


class Shrink:
    """First fewer rows of the head, then fewer bits. Raises ConfigError for a ranking that is not there or not fit.

    `auto` measures at the first load, where the target cannot be run yet: on stand-ins (calibration.py). What it
    chooses then stays, also when the host loads weights anew.
    """

    def __init__(self, wanted: Wanted, draft: str, *, speculation: SpeculationConfig) -> None:
        self.speculation = speculation
        self._hot = wanted.hot_vocab
        self._ranking = None if self._hot is None else self._hot.ranking(draft)
        self._quant: DraftQuant | Auto = wanted.quant or DraftQuant()

    def shared(self, borrowed: tuple[str, ...]) -> tuple[str, ...]:
        """Of the made draft's tensors those that are the tensors borrowed from the target; known once it is loaded.

        An INT4 head is scored again by the rows it was made from: then these are the target's.
        """
        wanted = self._quant.head if isinstance(self._quant, DraftQuant) else None
        if self._hot is not None or wanted is Precision.FP8:
            return tuple(name for name in borrowed if name != "lm_head")
        head = "lm_head_rows" if wanted is Precision.INT4 else "lm_head"
        return tuple(head if name == "lm_head" else name for name in borrowed)

    def of(
        self, config: DraftConfig, weights: DraftWeights, device: torch.device
    ) -> tuple[DraftConfig, DraftWeights]:
        """This draft, as asked for; `weights` are on `device`."""
        if self._hot is not None and self._ranking is not None:
            made = cut(config, weights, self._ranking, self._hot.size)
            config, weights = made.config, made.weights
            logger.info("EAGLEX: %s", made.note)
            self.speculation.check(config)
        if isinstance(self._quant, Auto):
            text = stand_ins(config, weights)
            choice = auto_quant.choose(config, weights, self.speculation, text=text, device=device)
            self._quant = choice.quant
            for line in choice.lines:
                logger.info("EAGLEX: %s", line)
        elif self._quant != DraftQuant():
            logger.info("EAGLEX: the draft's matrices: %s.", self._quant)
        return config, quantize(weights, self._quant)
