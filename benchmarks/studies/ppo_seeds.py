"""The same PPO on many seeds: how many of them collapse.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.ppo_seeds --sft runs/demo/sft/model --reward runs/demo/reward/model \
        [--seeds 0 1 2 3 4 5 6 7] [--config configs/demo/smollm2-135m/ppo.yaml]

All runs start from one fine-tuned model and one reward model; only the seed differs. Afterwards the kept policy and its
start answer the held-out prompts. A run has collapsed if the policy's reward there is not above the start's (95 %
interval), if the shipped judge, which no stage was trained on, prefers the start's answers, or if answers are less than half
as long or more than twice as long. A variant of PPO is another `--config` with other `--runs` and `--results`.
"""

import argparse
from typing import Any

from align.core.files import read_json, write_json
from align.core.launch import quiet_libraries, run_unless_finished
from align.core.settings_parser import parse
from align.ppo import PPOConfig, run_ppo
from align.sampling.generation import SamplingParams
from benchmarks.kept import kept
from benchmarks.studies.runner import ROOT, compare_with_start, comparison_arguments


def main() -> None:
    """Do the runs that are not done yet, and write figures.json: all finished seeds, and how many collapsed."""
    parser = comparison_arguments(__doc__, "ppo-seeds", seeds=8)
    parser.add_argument("--config", default=str(ROOT / "configs/demo/smollm2-135m/ppo.yaml"), help="settings of PPO")
    options = parser.parse_args()
    quiet_libraries()
    for seed in options.seeds:
        kept(options.runs / f"seed-{seed}.json", lambda seed=seed: run_seed(options, seed))
        found = {path.stem: read_json(path) for path in sorted(options.runs.glob("seed-*.json"))}
        collapsed = sum(row["collapsed"] for row in found.values())
        write_json(options.results / "figures.json", {"seeds": found, "collapsed": collapsed, "of": len(found)})


def run_seed(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One run and its comparison with the start."""
    words = ["--config", options.config, "--model", options.sft, "--reward_model", options.reward, "--seed", str(seed)]
    config = parse(PPOConfig, [*words, "--output_dir", str(options.runs / f"seed-{seed}")])
    policy = str(run_unless_finished(run_ppo, config))
    sampling = SamplingParams(config.max_new_tokens, config.temperature)
    _, figures = compare_with_start(options, policy, sampling, seed, config.max_prompt_tokens)
    return figures


if __name__ == "__main__":
    main()
