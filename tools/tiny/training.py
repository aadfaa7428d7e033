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

TARGET_LR, HEAD_LR, HEAD_GENERATED_LR = 4e-3, 3e-3, 1.5e-3
REPETITION_LR, REPETITION_WEIGHT = 6e-4, 2.0
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
    generated_tokens: int  # new tokens per sequence; the head's sequences are PROMPT_LENGTH longer in both phases
    head_batch: int
    head_tokens: int
    head_seconds: float
    head_generated_epochs: int
    head_generated_seconds: float
    compiled: bool

    @property
    def head_sequence(self) -> int:
        return PROMPT_LENGTH + self.generated_tokens


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


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz iterations (Jordan et al. 2024), for the inner matrices.

    Matrices of one shape are stacked, so that a step costs a few batched products instead of thousands of small
    kernels. The update is scaled to AdamW's usual size (Liu et al. 2025), so learning rate and decay are AdamW's.
    """

    def __init__(self, matrices: list[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for shape, same in by_shape.items():
                gradient = torch.stack([p.grad for p in same])
                momentum = self.state[same[0]].setdefault("momentum", torch.zeros_like(gradient))
                momentum.lerp_(gradient, 1 - group["momentum"])
                update = orthogonal(gradient.lerp(momentum, group["momentum"])) * (0.2 * max(shape) ** 0.5)
                torch._foreach_mul_(same, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(same, list((update * -group["lr"]).unbind()))


def orthogonal(x: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of a stack [n, rows, columns], roughly: five quintic iterations."""
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    if x.is_cuda:
        y = y.bfloat16()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = y @ y.mT
        y = 3.4445 * y + (-4.7750 * square + 2.0315 * square @ square) @ y
    return (y.mT if tall else y).to(x.dtype)


class Loop:
    """Steps until the budget of steps or seconds is used; sets the learning rate: warm-up, then linear to zero.

    Muon moves the matrices inside the layers, AdamW the embedding, the output layer and the norms.
    """

    def __init__(self, module: nn.Module, *, lr: float, steps: int, seconds: float, warmup: int, log: str) -> None:
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        inner = [p for n, p in named if p.dim() == 2 and "embed_tokens" not in n and "lm_head" not in n]
        tables = [p for n, p in named if p.dim() == 2 and ("embed_tokens" in n or "lm_head" in n)]
        norms = [p for _, p in named if p.dim() != 2]
        adamw = torch.optim.AdamW(
            [{"params": tables, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
            lr=lr,
            betas=(0.9, 0.95),
            fused=named[0][1].is_cuda,
        )
        self.optimizers = [Muon(inner, lr=lr, weight_decay=0.1), adamw]
        self.parameters = [p for _, p in named]
        self.lr, self.steps, self.seconds, self.warmup, self.log = lr, steps, seconds, warmup, log
        self.done = 0

    def __iter__(self) -> Iterator[int]:
        started = time.monotonic()
        elapsed = 0.0
        while self.done < self.steps and elapsed < self.seconds:
            used = max(self.done / self.steps, elapsed / self.seconds)
            for group in (g for o in self.optimizers for g in o.param_groups):
                group["lr"] = self.lr * min(1.0, (self.done + 1) / self.warmup) * (1 - used)
            yield self.done
            self.done += 1
            elapsed = time.monotonic() - started
        print(f"{self.log}: {self.done} steps in {elapsed:.1f} s", flush=True)

    def step(self, loss: Tensor) -> None:
        for p in self.parameters:
            p.grad = None
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()


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
    6-gram of the continuation, and adds the usual loss on corpus text. Ends when distinct-4 of three rounds in a
    row reaches the goal.
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
    reached = 0
    for round_number in loop:
        with autocast(device):
            tokens = target.generate(data.draw(budget.repetition_batch, PROMPT_LENGTH), new_tokens)
        made = tokens[:, PROMPT_LENGTH:]
        reached = reached + 1 if (score := distinct(made)) >= goal else 0
        again = repeats(made, 6)
        with autocast(device):
            hidden, _ = target(tokens[:, :-1])
            logits = target.lm_head(hidden[:, PROMPT_LENGTH - 1 :]).float()
            p = logits.softmax(-1).gather(-1, made.unsqueeze(-1)).squeeze(-1)
            penalty = ((1 - p).clamp_min(1e-4).log().neg() * again).mean()
            usual = target.loss(data.draw(budget.batch, budget.sequence + 1))
        loop.step(usual + REPETITION_WEIGHT * penalty)
        if round_number % 5 == 0 or reached == 3:
            print(
                f"repetition round {round_number}: distinct-4 {score:.3f}, penalty {penalty.item():.3f}, "
                f"loss {usual.item():.3f}",
                flush=True,
            )
        if reached == 3:
            break


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
    """The head's two phases over one frozen target, with one shape of batch, so that compiling pays."""

    def __init__(self, head: Head, target: Target, ids: Tensor, budget: Budget) -> None:
        self.head, self.target, self.ids, self.budget = head, target, ids, budget
        self.device = ids.device
        self.layers = target.compiled_layers() if budget.compiled else []
        self.unroll = torch.compile(head.unroll, dynamic=False) if budget.compiled else head.unroll

    def loss(self, tokens: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
        """Loss over the unrolled steps and, per step, how often the draft's argmax is the target's.

        tokens [B, T]; rows before first_row carry no loss. The label is the target's distribution restricted to
        the draft vocabulary, at rows whose most likely token is in it (as SpecForge trains).
        """
        ids = self.ids
        with torch.no_grad():
            hidden, aux = self.target(tokens, layers=self.layers)
            embedded = self.target.model.embed_tokens(tokens)
            wanted = self.target.lm_head(hidden)
            best = wanted.argmax(-1)
            inside = torch.isin(best, ids)
            label = wanted[..., ids].float().softmax(-1)
        total = torch.zeros((), device=self.device)
        hits = []
        for k, logits in enumerate(self.unroll(aux, embedded, UNROLLED_STEPS)):
            row = slice(1 + k + first_row, 1 + k + logits.shape[1])
            drafted = logits[:, first_row:].float()
            nats = -(label[:, row] * drafted.log_softmax(-1)).sum(-1)
            total = total + STEP_DECAY**k * (nats * inside[:, row]).sum() / inside[:, row].sum().clamp_min(1)
            hits.append((ids[drafted.detach().argmax(-1)] == best[:, row]).float().mean())
        return total, torch.stack(hits)

    def _run(self, loop: Loop, batches: Iterator[Tensor], first_row: int) -> None:
        for step in loop:
            with autocast(self.device):
                loss, hits = self.loss(next(batches), first_row)
            loop.step(loss)
            if step % 250 == 0:
                shown = [round(h, 3) for h in hits.tolist()]
                print(f"head step {step}: loss {loss.item():.3f}, agreement {shown}", flush=True)

    def on_corpus(self, data: Batches) -> None:
        """First phase: windows of the corpus."""
        budget = self.budget
        per_step = budget.head_batch * budget.head_sequence
        steps = max(1, budget.head_tokens // per_step)
        loop = Loop(self.head, lr=HEAD_LR, steps=steps, seconds=budget.head_seconds, warmup=100, log="head on corpus")

        def batches() -> Iterator[Tensor]:
            while True:
                yield data.draw(budget.head_batch, budget.head_sequence)

        self._run(loop, batches(), 0)

    def on_generated(self, made: Tensor, seed: int) -> None:
        """Second phase: the target's own greedy text made [n, T], whose next token is always the target's argmax."""
        budget = self.budget
        random = torch.Generator().manual_seed(seed)
        per_epoch = len(made) // budget.head_batch
        loop = Loop(
            self.head,
            lr=HEAD_GENERATED_LR,
            steps=per_epoch * budget.head_generated_epochs,
            seconds=budget.head_generated_seconds,
            warmup=50,
            log="head on generated text",
        )

        def batches() -> Iterator[Tensor]:
            while True:
                order = torch.randperm(len(made), generator=random).to(self.device)
                for rows in order[: per_epoch * budget.head_batch].split(budget.head_batch):
                    yield made[rows]

        self._run(loop, batches(), PROMPT_LENGTH - 2)


def generate_corpus(target: Target, data: Batches, budget: Budget) -> Tensor:
    """Greedy continuations of training prompts: tokens [n, PROMPT_LENGTH + generated_tokens]."""
    out = []
    started = time.monotonic()
    for _ in range(max(1, budget.generated_sequences // budget.generated_batch)):
        with autocast(data.device):
            out.append(target.generate(data.draw(budget.generated_batch, PROMPT_LENGTH), budget.generated_tokens))
    made = torch.cat(out)
    score = distinct(made[:64, PROMPT_LENGTH:])
    print(f"generated {len(made)} sequences in {time.monotonic() - started:.1f} s, distinct-4 {score:.3f}", flush=True)
    return made
