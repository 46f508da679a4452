"""The same PPO on many seeds: how many of them collapse.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.ppo_seeds --sft runs/demo/sft/model --reward runs/demo/reward/model \
        [--seeds 0 1 2 3 4 5 6 7]

The demo's settings for PPO, from one fine-tuned model and one reward model; only the seed differs. Afterwards the kept
policy and its start answer the held-out prompts. A run has collapsed if the policy's reward there is not above the start's
(95 % interval), if the shipped judge, which no stage learned from, prefers the start's answers, or if answers are less than
half as long or twice as long. Every step that is finished is not done again. Figures go to docs/studies/ppo-seeds/.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from align.commands.stages import run_unless_finished
from align.data.readers import read_records
from align.data.records import Prompt
from align.eval.reward.policy_comparison import PolicyComparison, compare_policies, judged_win_rates
from align.files import read_json, write_json
from align.launch import quiet_libraries
from align.ppo import PPOConfig, run_ppo
from align.reward.checkpoint import load_reward_model
from align.sampling.generation import Sampling
from align.settings_parser import parse
from align.statistics import mean_interval
from benchmarks.studies.gold import ROOT

STUDY = ROOT / "docs" / "studies" / "ppo-seeds"


def main() -> None:
    """Do the runs that are not done yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft", required=True, help="folder of the fine-tuned model")
    parser.add_argument("--reward", required=True, help="folder of the reward model")
    parser.add_argument("--judge", default="smollm2-135m-judge", help="a reward model that no stage learned from")
    parser.add_argument("--config", default=str(ROOT / "configs/demo/smollm2-135m/ppo.yaml"), help="settings of PPO")
    parser.add_argument("--prompts", default=str(ROOT / "data/prompts_heldout.jsonl"), help="prompts of the comparison")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    parser.add_argument("--samples", type=int, default=2, help="answers of each policy to a prompt")
    parser.add_argument("--runs", type=Path, default=Path("runs/ppo-seeds"), help="policies")
    parser.add_argument("--results", type=Path, default=STUDY, help="figures")
    options = parser.parse_args()
    quiet_libraries()
    for seed in options.seeds:
        began = time.monotonic()
        target = options.runs / f"seed-{seed}.json"
        if not target.exists():
            write_json(target, run_seed(options, seed))
        print(f"seed {seed}: finished, {time.monotonic() - began:.0f} s", flush=True)
        write_figures(options.runs, options.results)


def run_seed(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One run and its comparison with the start."""
    words = ["--config", options.config, "--model", options.sft, "--reward_model", options.reward, "--seed", str(seed)]
    config = parse(PPOConfig, [*words, "--output_dir", str(options.runs / f"seed-{seed}")])
    policy = str(run_unless_finished(run_ppo, config))
    comparison = compare_policies(
        options.sft,
        policy,
        load_reward_model(options.reward),
        read_records(options.prompts, Prompt),
        Sampling(config.max_new_tokens, config.temperature),
        seed,
        options.samples,
        max_prompt_tokens=config.max_prompt_tokens,
    )
    return figures_of(comparison, judged_win_rates(comparison, load_reward_model(options.judge), policy))


def figures_of(comparison: PolicyComparison, rates: np.ndarray) -> dict[str, Any]:
    """What is reported of a seed, and whether it collapsed."""
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


def write_figures(runs: Path, results: Path) -> None:
    """figures.json: all seeds that are finished, and how many collapsed."""
    found = {path.stem: read_json(path) for path in sorted(runs.glob("seed-*.json"))}
    collapsed = sum(row["collapsed"] for row in found.values())
    write_json(results / "figures.json", {"seeds": found, "collapsed": collapsed, "of": len(found)})


if __name__ == "__main__":
    main()
