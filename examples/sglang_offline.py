#!/usr/bin/env python3
"""Offline generation with SGLang's Engine, drafted for by eaglex on one of the target's GPUs.

    python examples/sglang_offline.py --target meta-llama/Llama-3.1-8B-Instruct \\
        --draft yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
    python examples/sglang_offline.py --target PATH --draft PATH --tree 'What is a draft model?'

Needs sglang==0.5.17 and eaglex in one environment. The prompt is continued greedily; what is printed last is how many
tokens a verification gave, bonus token included.
"""

from __future__ import annotations

import argparse

CHAIN = {"speculative_num_steps": 5, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 6}
TREE = {"speculative_num_steps": 4, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the target model: a path or a repository's name")
    parser.add_argument("--draft", required=True, help="its EAGLE-3 head")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of the target; one of them drafts")
    parser.add_argument("--tree", action="store_true", help="draft a tree of 16 nodes instead of a chain of 5 tokens")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("prompts", nargs="*", default=["The three laws of thermodynamics are"])
    return parser.parse_args()


def main() -> None:
    chosen = options()
    import sglang  # eaglex's own options, if any, are in EAGLEX_OPTIONS before this

    engine = sglang.Engine(
        model_path=chosen.target,
        speculative_algorithm="EAGLEX",
        speculative_draft_model_path=chosen.draft,
        tp_size=chosen.tp,
        **(TREE if chosen.tree else CHAIN),
    )
    sampling = {"temperature": 0.0, "max_new_tokens": chosen.max_new_tokens}
    for prompt, answer in zip(chosen.prompts, engine.generate(chosen.prompts, sampling), strict=True):
        facts = answer["meta_info"]
        per_verification = facts["completion_tokens"] / max(1, facts["spec_verify_ct"])
        print(f"{prompt}{answer['text']}\n-- {facts['completion_tokens']} tokens, {per_verification:.2f} each time\n")
    engine.shutdown()


if __name__ == "__main__":  # the engine's processes import this file again
    main()
