"""What the studies share: arguments, and a policy's comparison with its start."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from align.core.statistics import mean_interval
from align.data.readers import read_records
from align.data.records import Prompt
from align.eval.policy_comparison import PolicyComparison, compare_policies, judged_win_rates
from align.reward.checkpoint import load_reward_model
from align.sampling.generation import SamplingParams

ROOT = Path(__file__).resolve().parents[2]


def study_arguments(description: str | None, name: str, seeds: int = 0) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every study, which by default trains so many seeds, or nothing."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft", required=True, help="folder of the fine-tuned model")
    parser.add_argument("--judge", default="smollm2-135m-judge", help="a reward model that no stage was trained on")
    parser.add_argument("--samples", type=int, default=2, help="answers to each prompt")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "studies" / name, help="folder of the figures")
    if seeds:
        parser.add_argument("--seeds", type=int, nargs="+", default=list(range(seeds)))
        parser.add_argument("--runs", type=Path, default=Path("runs") / name, help="models and answers")
    return parser


def comparison_arguments(description: str | None, name: str, seeds: int = 0) -> argparse.ArgumentParser:
    """Return the same parser with the further arguments of `compare_with_start`."""
    parser = study_arguments(description, name, seeds)
    parser.add_argument("--reward", required=True, help="folder of the reward model")
    parser.add_argument("--prompts", default=str(ROOT / "data/prompts_heldout.jsonl"), help="prompts of the comparison")
    return parser


def compare_with_start(
    options: argparse.Namespace, policy: str, sampling: SamplingParams, seed: int, max_prompt_tokens: int | None = None
) -> tuple[PolicyComparison, dict[str, Any]]:
    """Compare a policy with the fine-tuned model on held-out prompts, with the judge's win rate among the figures."""
    prompts, reward = read_records(options.prompts, Prompt), load_reward_model(options.reward)
    comparison = compare_policies(
        options.sft, policy, reward, prompts, sampling, seed, options.samples, max_prompt_tokens=max_prompt_tokens
    )
    return comparison, figures_of(comparison, judged_win_rates(comparison, load_reward_model(options.judge), policy))


def figures_of(comparison: PolicyComparison, rates: np.ndarray) -> dict[str, Any]:
    """The figures of a policy, with the judge's win rate over the start for each prompt, and whether its run collapsed."""
    lengths = [float(np.mean([len(ids) for ids in side.ids])) for side in (comparison.before, comparison.after)]
    win_rate, (low, high) = float(rates.mean()), mean_interval(rates)
    return {
        "gain": comparison.gain,
        "gain interval": [comparison.gain_low, comparison.gain_high],
        "win rate": win_rate,
        "win rate interval": [low, high],
        "KL": comparison.kl,
        "tokens": lengths,
        "ended": [float(np.mean(side.ended)) for side in (comparison.before, comparison.after)],
        "collapsed": bool(comparison.gain_low <= 0 or win_rate < 0.5 or not 0.5 <= lengths[1] / lengths[0] <= 2),
    }
