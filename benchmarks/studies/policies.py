"""Policies beside their common start: the figures of the demo's table, for a policy of any method.

    python -m benchmarks.studies.policies --sft runs/demo/sft/model --reward runs/demo/reward/model dpo=runs/dpo/model

Prompts, answers to each, seed and judge are the demo's, so that its own table is the row of PPO.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from align.data.readers import read_records
from align.data.records import Prompt
from align.eval.reward.policy_comparison import compare_policies, judged_win_rates
from align.files import read_json, write_json
from align.launch import quiet_libraries
from align.reward.checkpoint import load_reward_model
from align.sampling.generation import Sampling
from benchmarks.studies.gold import ROOT
from benchmarks.studies.ppo_seeds import figures_of

FIRST = 40
"""Prompts for which the demo also takes the best of 16 answers."""


def main() -> None:
    """Compare every policy that is not compared yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="+", help="NAME=FOLDER of each policy")
    parser.add_argument("--sft", required=True, help="folder of the fine-tuned model")
    parser.add_argument("--reward", required=True, help="folder of the reward model")
    parser.add_argument("--judge", default="smollm2-135m-judge", help="a reward model that no stage learned from")
    parser.add_argument("--prompts", default=str(ROOT / "data/prompts_heldout.jsonl"), help="prompts of the comparison")
    parser.add_argument("--samples", type=int, default=4, help="answers of each policy to a prompt")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "studies" / "dpo" / "figures.json", help="figures")
    options = parser.parse_args()
    quiet_libraries()
    found = read_json(options.results) if options.results.exists() else {}
    for name, _, folder in (policy.partition("=") for policy in options.policies):
        if name not in found:
            found[name] = compare(options, folder)
            write_json(options.results, found)
        print(name, found[name], flush=True)


def compare(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """One policy's figures, with the rewards of its first prompts, which the demo compares with the best of 16 answers."""
    comparison = compare_policies(
        options.sft,
        folder,
        load_reward_model(options.reward),
        read_records(options.prompts, Prompt),
        Sampling(options.max_new_tokens, options.temperature),
        options.seed,
        options.samples,
    )
    rates = judged_win_rates(comparison, load_reward_model(options.judge), folder)
    figures = figures_of(comparison, rates)
    for name, side in (("reward before", comparison.before), ("reward after", comparison.after)):
        figures[name] = float(np.mean(side.rewards))
        figures[f"{name}, first {FIRST} prompts"] = float(np.mean(side.rewards[: FIRST * comparison.samples]))
    return figures


if __name__ == "__main__":
    main()
