"""Training of the target and of its EAGLE-3 head. Every loop has a token budget and a time limit, whichever is first.

The learning rate follows the larger of the two fractions, so a loop cut by time still ends with its decay.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .corpus import BOS
from .model import Head, Shape, Target

TARGET_LR, HEAD_LR = 3e-3, 3e-3
REPETITION_LR, REPETITION_WEIGHT = 3e-4, 2.0
PROMPT_ROW_WEIGHT = 0.3  # of the head's loss on rows of corpus text, against 1 on the target's own text
UNROLLED_STEPS = 5
STEP_DECAY = 0.8  # weight of step k is 0.8^k, as in the EAGLE papers
PROMPT_LENGTH = 128  # of everything that the target continues


@dataclass(frozen=True)
class Budget:
    """Tokens, batch sizes and time limits (seconds) of one run."""

    sequence: int
    batch: int
    target_tokens: int
    target_seconds: float
    repetition_rounds: int
    repetition_batch: int
    repetition_seconds: float
    generated_sequences: int
    generated_batch: int
    generated_tokens: int  # new tokens per sequence; the head's sequences are PROMPT_LENGTH longer
    head_batch: int
    head_epochs: int
    head_seconds: float
    compiled: bool


class Batches:
    """Random windows of a token stream; the first token of each is BOS, as in a prompt cut from a document."""

    def __init__(self, stream: np.ndarray, seed: int, device: torch.device) -> None:
        self.stream = torch.from_numpy(stream.astype(np.int64)).to(device)
        self.random = torch.Generator().manual_seed(seed)
        self.device = device

    def draw(self, batch: int, length: int) -> Tensor:
        start = torch.randint(len(self.stream) - length, (batch, 1), generator=self.random)
        start = start.to(self.device, non_blocking=True)
        tokens = self.stream[start + torch.arange(length, device=self.device)]
        tokens[:, 0] = BOS
        return tokens


class Loop:
    """AdamW until the budget of steps or seconds is used. The learning rate: warm-up, then linear to zero."""

    def __init__(self, module: nn.Module, *, lr: float, steps: int, seconds: float, warmup: int, log: str) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        matrices = [p for p in self.parameters if p.dim() == 2]
        norms = [p for p in self.parameters if p.dim() != 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
            lr=lr,
            betas=(0.9, 0.95),
            fused=self.parameters[0].is_cuda,
        )
        self.lr, self.steps, self.seconds, self.warmup, self.log = lr, steps, seconds, warmup, log
        self.done = 0

    def __iter__(self) -> Iterator[int]:
        started = time.monotonic()
        elapsed = 0.0
        while self.done < self.steps and elapsed < self.seconds:
            used = max(self.done / self.steps, elapsed / self.seconds)
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * min(1.0, (self.done + 1) / self.warmup) * (1 - used)
            yield self.done
            self.done += 1
            elapsed = time.monotonic() - started
        print(f"{self.log}: {self.done} steps in {elapsed:.1f} s", flush=True)

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()


def autocast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


@torch.no_grad()
def held_out_loss(target: Target, stream: Tensor, length: int) -> float:
    """Mean loss in nats per token over all whole windows of the held-out stream, each after a BOS."""
    windows = stream[: len(stream) // length * length].view(-1, length).clone()
    windows[:, 0] = BOS
    losses = [target.loss(part).item() * len(part) for part in windows.split(16)]
    return sum(losses) / len(windows)


def train_target(target: Target, data: Batches, held_out: Tensor, budget: Budget) -> None:
    device = data.device
    per_step = budget.batch * budget.sequence
    loop = Loop(
        target,
        lr=TARGET_LR,
        steps=max(1, budget.target_tokens // per_step),
        seconds=budget.target_seconds,
        warmup=100,
        log="target",
    )
    layers = target.compiled_layers() if budget.compiled else []
    for step in loop:
        with autocast(device):
            loss = target.loss(data.draw(budget.batch, budget.sequence + 1), layers=layers)
        loop.step(loss)
        if step % 400 == 399:
            with autocast(device):
                held = held_out_loss(target, held_out, budget.sequence)
            print(f"target step {step + 1}: train {loss.item():.3f}, held out {held:.3f} nats per token", flush=True)


def repeats(tokens: Tensor, n: int) -> Tensor:
    """tokens [B, T] to bool [B, T]: this token completes an n-gram that its row has held before."""
    grams = tokens.unfold(1, n, 1)  # [B, T-n+1, n]
    same = (grams.unsqueeze(2) == grams.unsqueeze(1)).all(-1)
    seen = (same & torch.ones_like(same[0]).tril(-1)).any(-1)
    return F.pad(seen, (n - 1, 0))


def distinct(tokens: Tensor, n: int = 4) -> float:
    """Distinct n-grams over all n-grams, per row, averaged."""
    return 1 - repeats(tokens, n)[:, n - 1 :].float().mean().item()


def discourage_repetition(target: Target, data: Batches, budget: Budget, goal: float) -> None:
    """Sequence-level unlikelihood (Welleck et al. 2019): a small greedy model loops, and a loop fakes acceptance.

    Each round continues training prompts greedily, takes -log(1 - p) of the tokens that complete a repeated
    6-gram of the continuation, and adds the usual loss on corpus text. Ends as soon as distinct-4 reaches the goal:
    beyond it text only gets harder to predict.
    """
    device, new_tokens = data.device, 128
    loop = Loop(
        target,
        lr=REPETITION_LR,
        steps=budget.repetition_rounds,
        seconds=budget.repetition_seconds,
        warmup=5,
        log="repetition",
    )
    for round_number in loop:
        with autocast(device):
            tokens = target.generate(data.draw(budget.repetition_batch, PROMPT_LENGTH), new_tokens)
        made = tokens[:, PROMPT_LENGTH:]
        if (score := distinct(made)) >= goal:
            print(f"repetition round {round_number}: distinct-4 {score:.3f}, the goal", flush=True)
            break
        again = repeats(made, 6)
        with autocast(device):
            hidden, _ = target(tokens[:, :-1])
            logits = target.lm_head(hidden[:, PROMPT_LENGTH - 1 :]).float()
            p = logits.softmax(-1).gather(-1, made.unsqueeze(-1)).squeeze(-1)
            penalty = ((1 - p).clamp_min(1e-4).log().neg() * again).mean()
            usual = target.loss(data.draw(budget.batch, budget.sequence + 1))
        loop.step(usual + REPETITION_WEIGHT * penalty)
        if round_number % 5 == 0:
            print(
                f"repetition round {round_number}: distinct-4 {score:.3f}, penalty {penalty.item():.3f}, "
                f"loss {usual.item():.3f}",
                flush=True,
            )


def draft_vocabulary(stream: np.ndarray, shape: Shape) -> Tensor:
    """Target ids of the draft's vocabulary: the most frequent tokens of the training text, ascending."""
    counts = np.bincount(stream, minlength=shape.vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[: shape.draft_vocab_size])).long()


def start_head(head: Head, target: Target, ids: Tensor) -> None:
    """The head's own output layer starts as the target's rows of the draft vocabulary."""
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight[ids])
        head.norm.weight.copy_(target.model.norm.weight)


class HeadTrainer:
    """Trains the head over one frozen target; every batch has one shape, so that compiling pays."""

    def __init__(self, head: Head, target: Target, ids: Tensor, budget: Budget) -> None:
        self.head, self.target, self.ids, self.budget = head, target, ids, budget
        self.device = ids.device
        self.layers = target.compiled_layers() if budget.compiled else []
        self.unroll = torch.compile(head.unroll, dynamic=False) if budget.compiled else head.unroll

    def loss(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [B, T]: prompts of PROMPT_LENGTH with the target's own text behind them.

        Returns the loss over the unrolled steps, and hits [UNROLLED_STEPS, B, rows]: whether the draft's argmax is
        the target's, for the rows that draft text of the target. The label is the target's distribution restricted
        to the draft vocabulary, at rows whose most likely token is in it (as SpecForge trains).
        """
        ids = self.ids
        with torch.no_grad():
            hidden, aux = self.target(tokens, layers=self.layers)
            embedded = self.target.model.embed_tokens(tokens)
            wanted = self.target.lm_head(hidden)
            best = wanted.argmax(-1)
            label = wanted[..., ids].float().softmax(-1)
            weight = torch.isin(best, ids).float()
            weight[:, : PROMPT_LENGTH - 1] *= PROMPT_ROW_WEIGHT
        total = torch.zeros((), device=self.device)
        hits = []
        for k, logits in enumerate(self.unroll(aux, embedded, UNROLLED_STEPS)):
            row = slice(1 + k, 1 + k + logits.shape[1])
            nats = -(label[:, row] * logits.float().log_softmax(-1)).sum(-1)
            total = total + STEP_DECAY**k * (nats * weight[:, row]).sum() / weight[:, row].sum()
            hits.append((ids[logits.detach().argmax(-1)] == best[:, row])[:, PROMPT_LENGTH - 2 :])
        return total, torch.stack(hits)

    def train(self, made: Tensor, held_out: Tensor, seed: int) -> None:
        """made [n, T]: the target's greedy text, whose next token is always the target's argmax; held_out alike."""
        budget = self.budget
        random = torch.Generator().manual_seed(seed)
        per_epoch = len(made) // budget.head_batch
        steps = per_epoch * budget.head_epochs
        loop = Loop(self.head, lr=HEAD_LR, steps=steps, seconds=budget.head_seconds, warmup=100, log="head")
        order = torch.empty(0)
        for step in loop:
            if step % per_epoch == 0:
                order = torch.randperm(len(made), generator=random).to(self.device)
            at = step % per_epoch * budget.head_batch
            with autocast(self.device):
                loss, hits = self.loss(made[order[at : at + budget.head_batch]])
            loop.step(loss)
            if step % 500 == 0:
                shown = f"{chain_length(hits):.3f} in training, {self.evaluate(held_out):.3f} held out"
                print(f"head step {step}: loss {loss.item():.3f}, chain {shown}", flush=True)
        print(f"head: chain {self.evaluate(held_out):.3f} on held-out prompts", flush=True)

    @torch.no_grad()
    def evaluate(self, made: Tensor) -> float:
        """chain_length() over all whole batches of made [n, T]."""
        size = self.budget.head_batch
        with autocast(self.device):
            parts = [self.loss(made[at : at + size])[1] for at in range(0, len(made) - size + 1, size)]
        return chain_length(torch.cat(parts, dim=1))


def chain_length(hits: Tensor) -> float:
    """Accept length if a chain were drafted from every row, the bonus token counted; hits [steps, B, rows] bool.

    Greedy text is what verification would have accepted, so the unrolled steps see the tokens that a chain sees. An
    accept length over cycles starts chains more often where drafting is hard, and so comes out lower.
    """
    return 1 + hits.float().cumprod(0).mean((1, 2)).sum().item()


def generate_text(target: Target, data: Batches, budget: Budget, sequences: int) -> Tensor:
    """Greedy continuations of random prompts: tokens [n, PROMPT_LENGTH + generated_tokens]."""
    out = []
    started = time.monotonic()
    batch = min(budget.generated_batch, sequences)
    for _ in range(sequences // batch):
        with autocast(data.device):
            out.append(target.generate(data.draw(batch, PROMPT_LENGTH), budget.generated_tokens))
    made = torch.cat(out)
    score = distinct(made[:256, PROMPT_LENGTH:])
    print(f"generated {len(made)} sequences in {time.monotonic() - started:.1f} s, distinct-4 {score:.3f}", flush=True)
    return made
