"""What few bits cost a draft: agreement of logits on given rows, and accept length on a pair of models.

    python tools/precision.py shapes --shrink 1       random weights of real shapes, teacher-forced
    python tools/precision.py pair models/tiny        a pair's own: teacher-forced on its texts, and accept length
    python tools/precision.py auto --device cuda      what --draft-quant auto measures and chooses for random weights

Prints Markdown tables, part by part; `--output FILE` writes the figures as JSON as well. Logits are the reference's, in
float32 with bfloat16 weights, so that only the precision of the matrices differs. With `--device cuda` a pair's accept
lengths are those of the engine there, in bfloat16, on the texts of the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eaglex import checkpoint, reference
from eaglex.config import DraftConfig, RopeConfig, SpeculationConfig
from eaglex.hot_vocab import HotVocab, cut
from eaglex.packed import DraftQuant, Precision, part_of
from eaglex.quantize import quantize
from eaglex.weights import DraftWeights, LayerWeights, expected_shapes

PARTS = ("head", "mlp", "qkv", "o")
EVERY_FP8 = ",".join(f"{part}=fp8" for part in PARTS)  # `fp8` itself is INT4 in the head
QUANTS = ("fp8", "int4", EVERY_FP8, *(f"{part}={bits}" for part in PARTS for bits in ("fp8", "int4")))
MIXED = ("head=fp8,mlp=int4,qkv=int4,o=fp8", "head=int4,mlp=int4,qkv=int4,o=fp8", "head=int4,mlp=int4,qkv=fp8,o=fp8")
# hidden, intermediate, heads, kv heads, head_dim
SHAPES = {
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128),
    "gpt-oss-120b": (2880, 17280, 64, 8, 64),
    "Llama-3-70B": (8192, 28672, 64, 8, 128),
    "Kimi-K2": (7168, 18432, 64, 8, 128),
}
DRAFT_VOCAB, EMBEDDED = 32000, 1024  # rows of the embedding that no input names would only take memory
GAINS = {"lm_head": 2.0, "o_proj": 0.5, "down_proj": 0.5}  # logits of deviation 2, residual branches below the stream


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How a quantised draft's logits [T, Vd] compare with the unquantised ones on the same rows."""

    top1: float  # share of rows with the same best token
    cosine: float  # mean over rows
    kl: float  # mean KL divergence, nats

    @classmethod
    def of(cls, scored: tuple[Tensor, Tensor], plain: Tensor) -> Agreement:
        """Logits [T, Vd] and the ids [T, R] that may be drafted, against logits, in float32."""
        logits, ids = scored
        best = ids.gather(1, logits.gather(1, ids).argmax(-1, keepdim=True))[:, 0]
        same = (best == plain.argmax(-1)).float().mean()
        cosine = torch.nn.functional.cosine_similarity(logits, plain, dim=-1).mean()
        p, q = torch.log_softmax(plain, -1), torch.log_softmax(logits, -1)
        return cls(float(same), float(cosine), float((p.exp() * (p - q)).sum(-1).mean()))


def teacher_forced(config: DraftConfig, weights: DraftWeights, aux: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of one text, aux [T, A·Ht] and for each row the token after it, ids [T]: logits [T, Vd] and the draft ids [T, R]
    that a chain may draft.
    """
    with weights.fc.device:  # where the reference makes its tensors
        cache = reference.DraftCache.empty(config, weights.fc.dtype)
        rows = len(ids)
        visible = torch.ones(rows, rows, dtype=torch.bool).tril()
        hidden = reference.fuse(config, weights, aux)
        logits, hidden = reference.forward(config, weights, cache, hidden, ids, torch.arange(rows), visible)
        return reference.rescore(config, weights, logits, hidden, 1)


# -------------------------------------------------------------------------------------------------------- random shapes


def random_draft(
    name: str, shrink: int, freedom: float | None, *, seed: int = 0, device: str = "cpu"
) -> tuple[DraftConfig, DraftWeights]:
    """A draft of that shape with every size divided by `shrink`; normal weights, or Student's t of that freedom.

    Devices draw different numbers.
    """
    hidden, intermediate, heads, kv_heads, head_dim = SHAPES[name]
    config = DraftConfig(
        hidden_size=hidden // shrink,
        target_hidden_size=hidden // shrink,
        intermediate_size=intermediate // shrink,
        num_heads=heads // shrink,
        num_kv_heads=max(1, kv_heads // shrink),
        head_dim=head_dim,
        vocab_size=DRAFT_VOCAB // shrink,
        draft_vocab_size=DRAFT_VOCAB // shrink,
        max_positions=4096,
        rope=RopeConfig(theta=10000.0),
    )
    generator = torch.Generator(device).manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    sizes = expected_shapes(config) | {"embed_tokens": (EMBEDDED, config.hidden_size)}
    for tensor, size in sizes.items():
        if tensor == "d2t":
            continue
        noise = torch.randn(size, generator=generator, device=device)
        if freedom is not None and part_of(tensor) is not None:  # t = normal / sqrt(chi² / freedom), unit variance
            chi = torch.zeros(size, device=device)
            for _ in range(int(freedom)):
                chi += torch.randn(size, generator=generator, device=device).square_()
            noise *= (chi / freedom).rsqrt_() * ((freedom - 2) / freedom) ** 0.5
        if len(size) == 1:
            noise = 1 + 0.2 * noise
        elif tensor != "embed_tokens":
            noise *= GAINS.get(tensor.split(".")[-1], 1.0) / size[1] ** 0.5
        tensors[tensor] = noise.copy_(noise.bfloat16())
    names = [field.name for field in dataclasses.fields(LayerWeights)]
    layer: dict[str, Any] = {n: tensors.get(f"layers.0.{n}") for n in names}
    return config, DraftWeights(
        embed_tokens=tensors["embed_tokens"], fc=tensors["fc"], aux_norms=[], layers=[LayerWeights(**layer)],
        norm=tensors["norm"], lm_head=tensors["lm_head"],
    )  # fmt: skip


def shapes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Agreement of every precision on random drafts."""
    found: dict[str, Any] = {}
    for name in arguments.shape or SHAPES:
        for freedom in (None, 5.0):
            if arguments.weights not in (None, "normal" if freedom is None else "t5"):
                continue
            config, weights = random_draft(name, arguments.shrink, freedom, device=arguments.device)
            generator = torch.Generator().manual_seed(1)
            aux = torch.randn(arguments.rows, config.aux_width, generator=generator).to(arguments.device)
            ids = torch.randint(EMBEDDED, (arguments.rows,), generator=generator).to(arguments.device)
            plain, _ = teacher_forced(config, weights, aux, ids)
            size = name if arguments.shrink == 1 else f"{name} / {arguments.shrink}"
            label = f"{size}, {'normal' if freedom is None else f't({freedom:g})'} weights"
            print(f"\n{label}: {config.hidden_size}/{config.intermediate_size}, {arguments.rows} rows\n")
            print("| draft_quant | same best token | cosine of logits | KL, nats |\n|---|---|---|---|", flush=True)
            rows = found[label] = {}
            made = {bits: quantize(weights, DraftQuant.every(bits)) for bits in (Precision.FP8, Precision.INT4)}
            for quant in arguments.draft_quant or (*QUANTS, *MIXED):
                mixed = _without_rows(_mixed(weights, made, DraftQuant.parse(quant)), arguments)
                a = Agreement.of(teacher_forced(config, mixed, aux, ids), plain)
                rows[quant] = dataclasses.asdict(a)
                print(f"| {quant} | {a.top1:.1%} | {a.cosine:.5f} | {a.kl:.5f} |", flush=True)
    return found


def auto(arguments: argparse.Namespace) -> dict[str, Any]:
    """The lines of a choice, per shape, on stand-ins for a target's states: what a server's start would say."""
    from eaglex.hosts import auto_quant
    from eaglex.hosts.calibration import stand_ins
    from eaglex.hosts.draft_slots import to_device

    device, found = torch.device(arguments.device), dict[str, Any]()
    speculation = SpeculationConfig(num_steps=arguments.num_steps)
    for name in arguments.shape or SHAPES:
        config, weights = random_draft(name, arguments.shrink, None, device=arguments.device)
        named = {f.name: getattr(weights.layers[0], f.name) for f in dataclasses.fields(LayerWeights)}
        weights = to_device(
            DraftWeights(
                embed_tokens=weights.embed_tokens.bfloat16().repeat(-(-config.vocab_size // EMBEDDED), 1)[
                    : config.vocab_size
                ],
                fc=weights.fc.bfloat16(), aux_norms=[], norm=weights.norm.bfloat16(),
                layers=[LayerWeights(**{field: tensor.bfloat16() for field, tensor in named.items()})],
                lm_head=weights.lm_head.bfloat16(),
            ),
            device,
        )  # fmt: skip
        begun = time.perf_counter()
        choice = auto_quant.choose(config, weights, speculation, text=stand_ins(config, weights), device=device)
        found[name] = {"quant": str(choice.quant), "lines": choice.lines, "seconds": time.perf_counter() - begun}
        print(f"\n{name} / {arguments.shrink}, {found[name]['seconds']:.1f} s", *choice.lines, sep="\n", flush=True)
    return found


def _mixed(weights: DraftWeights, made: dict[Precision, DraftWeights], quant: DraftQuant) -> DraftWeights:
    """`quantize(weights, quant)` out of matrices that are packed already."""

    def of(name: str) -> DraftWeights:
        return made.get(quant.of(name) or Precision.NONE, weights)

    layer = {f.name: getattr(of(f.name).layers[0], f.name) for f in dataclasses.fields(LayerWeights)}
    head = of("lm_head")
    return dataclasses.replace(
        weights, layers=[LayerWeights(**layer)], lm_head=head.lm_head, lm_head_rows=head.lm_head_rows
    )


def _without_rows(weights: DraftWeights, arguments: argparse.Namespace) -> DraftWeights:
    """As a checkpoint that brings an INT4 head has it, where that is asked for."""
    return dataclasses.replace(weights, lm_head_rows=None) if arguments.without_rows else weights


# --------------------------------------------------------------------------------------------------------------- a pair


def pair(arguments: argparse.Namespace) -> dict[str, Any]:
    """Agreement on the target's own greedy texts, and the accept length there of a chain of `num_steps`.

    The texts are the same whatever the draft, so the target runs once; every precision then drafts from every row of
    them. What `eaglex generate` would accept is the walk over those drafts: a cycle begins behind the last one's bonus.
    """
    from eaglex.hosts import hf_target
    from eaglex.hosts.pair import Pair, PairSource
    from eaglex.hosts.transformers import GenerateOptions, HostLimits, TransformersHost

    folder, cpu, device = Path(arguments.folder), torch.device("cpu"), torch.device(arguments.device)
    models = Pair(PairSource(target=str(folder / "target"), draft=str(folder / "draft")))
    loaded = checkpoint.load(models.source.draft, target=models.source.target, dtype=torch.float32)
    model = hf_target.load_model(models.source.target, dtype=torch.float32, device=cpu)
    target = hf_target.HookedTarget(model, models.aux_layer_ids, "target")
    speculation = SpeculationConfig(num_steps=arguments.num_steps)
    host = TransformersHost(
        target, loaded.config, loaded.weights, aux_layer_ids=models.aux_layer_ids, speculation=speculation,
        limits=HostLimits(max_length=models.context),
    )  # fmt: skip
    texts = []
    for entry in json.loads((folder / "prompts.json").read_text())[: arguments.prompts]:
        prompt = models.encode(entry["prompt"])[-arguments.prompt_tokens :]
        said = host.generate([prompt], GenerateOptions(max_new_tokens=arguments.new_tokens)).tokens[0]
        if len(said) > arguments.num_steps:  # else no row has that many tokens behind it
            texts.append(Text(len(prompt), *_rows(target, [*prompt, *said])))
    found, plain, before = dict[str, Any](), torch.empty(0), torch.empty(0)
    print("| draft_quant | accept length | from every row | against none | same best token | cosine | KL, nats |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for label, config, weights in _variants(loaded, arguments):
        lengths = every_row(config, _served(weights, device), speculation, texts)
        means = torch.stack([each.mean() for each in lengths])
        each_text = [teacher_forced(config, weights, text.aux, text.ids) for text in texts]
        logits, ids = (torch.cat(parts) for parts in zip(*each_text, strict=True))
        if label == "none":
            plain, before = logits, means
        comparable = logits.shape == plain.shape
        a, walked = Agreement.of((logits, ids), plain) if comparable else None, walk(lengths)
        gain = (means - before) / before.mean()
        error = float(gain.std() / len(gain) ** 0.5) if len(gain) > 1 else 0.0
        found[label] = {
            "accept_length": walked, "from_every_row": float(means.mean()), "against_none": float(gain.mean()),
            "standard_error": error, **(dataclasses.asdict(a) if a else {}),
        }  # fmt: skip
        against = f"{float(gain.mean()):+.2%} ± {error:.2%}"
        agreement = f"{a.top1:.2%} | {a.cosine:.5f} | {a.kl:.5f}" if a else "| |"
        print(f"| {label} | {walked:.3f} | {float(means.mean()):.3f} | {against} | {agreement} |", flush=True)
    rows = sum(len(each) for each in lengths)
    counts = f"{len(texts)} texts, {rows} rows drafted from, {len(plain)} teacher-forced"
    print(f"\n{counts}, chain of {arguments.num_steps}")
    return found


def _variants(
    loaded: checkpoint.Checkpoint, arguments: argparse.Namespace
) -> Iterator[tuple[str, DraftConfig, DraftWeights]]:
    """The draft as it is, in every precision, and with every head asked for."""
    for quant in ("none", *(arguments.draft_quant or (*QUANTS, *MIXED))):
        yield quant, loaded.config, _without_rows(quantize(loaded.weights, DraftQuant.parse(quant)), arguments)
    for text in arguments.hot_vocab or ():
        hot = HotVocab.parse(text)
        made = cut(loaded.config, loaded.weights, hot.ranking(Path(arguments.folder) / "draft"), hot.size)
        print(made.note, file=sys.stderr)
        yield f"hot vocabulary {made.config.draft_vocab_size}", made.config, made.weights


@dataclasses.dataclass(frozen=True)
class Text:
    """A target's own text: its prompt's length, and for each row aux [L - 1, A·Ht] and the token after it [L - 1]."""

    prompt: int
    aux: Tensor
    ids: Tensor


def every_row(
    config: DraftConfig, weights: DraftWeights, speculation: SpeculationConfig, texts: list[Text]
) -> list[Tensor]:
    """Accept length, bonus counted, of a draft from each row behind a text's prompt that the text goes far beyond."""
    from eaglex.hosts.draft_slots import DraftRows, DraftSlots

    steps, longest = speculation.num_steps, max(len(text.ids) for text in texts)
    slots = DraftSlots(
        config, weights, speculation=speculation, max_batch=len(texts), max_length=longest + steps + 1,
        max_rows=max(longest, len(texts)), device=weights.fc.device,
    )  # fmt: skip
    lengths: list[list[float]] = [[] for _ in texts]
    for slot, text in enumerate(texts, start=1):
        if text.prompt > 1:
            count = text.prompt - 1
            slots.run([DraftRows(slot=slot, length=0, aux_hidden_states=text.aux[:count],
                                 next_tokens=text.ids[:count].tolist(), draft_from=False)])  # fmt: skip
    for offset in range(longest):
        rows = {
            slot: text.prompt - 1 + offset
            for slot, text in enumerate(texts, start=1)
            if text.prompt + offset + steps <= len(text.ids)
        }
        if not rows:
            break
        slots.run([
            DraftRows(slot=slot, length=row, aux_hidden_states=texts[slot - 1].aux[row : row + 1],
                      next_tokens=[int(texts[slot - 1].ids[row])])
            for slot, row in rows.items()
        ])  # fmt: skip
        drafted = slots.engine.results.draft_tokens[:, :steps].cpu()
        for slot, row in rows.items():
            hits = (drafted[slot] == texts[slot - 1].ids[row + 1 : row + 1 + steps]).long().cumprod(0)
            lengths[slot - 1].append(1.0 + float(hits.sum()))
    return [torch.tensor(each) for each in lengths]


def _served(weights: DraftWeights, device: torch.device) -> DraftWeights:
    """As an engine on `device` has them: on a GPU what is not packed is bfloat16, which the checkpoint was."""
    from eaglex.hosts.draft_slots import to_device

    if device.type == "cpu":
        return weights
    dtype = torch.bfloat16

    def narrow(weight: Any) -> Any:
        return weight.to(dtype) if isinstance(weight, Tensor) and weight.is_floating_point() else weight

    def fields_of(part: Any) -> dict[str, Any]:
        return {f.name: narrow(getattr(part, f.name)) for f in dataclasses.fields(part)}

    layers = [LayerWeights(**fields_of(layer)) for layer in weights.layers]
    rest = fields_of(weights) | {"layers": layers, "aux_norms": [narrow(gamma) for gamma in weights.aux_norms]}
    return to_device(DraftWeights(**rest), device)


def walk(lengths: list[Tensor]) -> float:
    """Accept length of the cycles that follow one another: each begins where the one before ended."""
    emitted = cycles = 0
    for each in lengths:
        row = 0
        while row < len(each):
            emitted, cycles, row = emitted + int(each[row]), cycles + 1, row + int(each[row])
    return emitted / cycles


@torch.inference_mode()
def _rows(target: Any, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """What the draft reads of a text: the target's auxiliary hidden states, and for each row the token after it."""
    ids = torch.tensor(tokens)
    aux = target.extend(target.new_cache(), ids)[1]
    return aux[:-1].clone(), ids[1:]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    kinds = parser.add_subparsers(required=True)
    one = kinds.add_parser("shapes", help="random weights of real shapes")
    one.add_argument("--shape", action="append", choices=SHAPES, help="default: all")
    one.add_argument("--shrink", type=int, default=4, help="divide every size by this (default 4)")
    one.add_argument("--rows", type=int, default=256, help="default 256")
    one.add_argument("--weights", choices=("normal", "t5"), help="their distribution; default: both, one after another")
    one.set_defaults(run=shapes)
    two = kinds.add_parser("pair", help="a folder with target/, draft/ and prompts.json")
    two.add_argument("folder")
    two.add_argument("--prompts", type=int, help="only the first so many")
    two.add_argument("--prompt-tokens", type=int, default=1024, help="cut prompts to their last so many (default 1024)")
    two.add_argument("--new-tokens", type=int, default=128, help="default 128")
    two.add_argument("--hot-vocab", action="append", metavar="N|FILE|N:FILE", help="a smaller head as well")
    two.add_argument("--num-steps", type=int, default=5, help="default 5")
    two.set_defaults(run=pair)
    three = kinds.add_parser("auto", help="the choice of --draft-quant auto")
    three.add_argument("--shape", action="append", choices=SHAPES, help="default: all")
    three.add_argument("--shrink", type=int, default=1, help="divide every size by this (default 1)")
    three.add_argument("--num-steps", type=int, default=5, help="default 5")
    three.set_defaults(run=auto)
    for sub, device in ((one, "cpu"), (two, "cpu"), (three, "cuda")):
        sub.add_argument("--device", default=device, help=f"default {device}")
        sub.add_argument("--draft-quant", action="append", metavar="P", help="only these, as eaglex takes them")
        sub.add_argument("--without-rows", action="store_true", help="INT4 heads are not rescored")
        sub.add_argument("--output", help="JSON file for the figures")
    options = parser.parse_args(arguments)
    found = options.run(options)
    if options.output:
        Path(options.output).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
