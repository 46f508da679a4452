"""Policies beside their common start: the figures of the demo's table, for a policy of any method.

    python -m benchmarks.studies.policies --sft runs/demo/sft/model --reward runs/demo/reward/model dpo=runs/dpo/model

Prompts, seed and judge are the demo's; with `--samples 4` so are the answers to each prompt, and its own table is PPO's row.
"""

import argparse
from typing import Any

import numpy as np

from align.core.files import read_json, write_json
from align.core.launch import quiet_libraries
from align.sampling.generation import SamplingParams
from benchmarks.studies.runner import compare_with_start, comparison_arguments

FIRST = 40
"""Prompts for which the demo also takes the best of 16 answers."""


def main() -> None:
    """Compare every policy that is not in figures.json yet."""
    parser = comparison_arguments(__doc__, "dpo")
    parser.add_argument("policies", nargs="+", help="NAME=FOLDER of each policy")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    quiet_libraries()
    target = options.results / "figures.json"
    found = read_json(target) if target.exists() else {}
    for name, _, folder in (policy.partition("=") for policy in options.policies):
        if name not in found:
            found[name] = compare(options, folder)
            write_json(target, found)
        print(name, found[name], flush=True)


def compare(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """One policy's figures, with the mean rewards of all prompts and of the first ones."""
    sampling = SamplingParams(options.max_new_tokens, options.temperature)
    comparison, figures = compare_with_start(options, folder, sampling, options.seed)
    for name, side in (("reward before", comparison.before), ("reward after", comparison.after)):
        figures[name] = float(np.mean(side.rewards))
        figures[f"{name}, first {FIRST} prompts"] = float(np.mean(side.rewards[: FIRST * comparison.samples]))
    return figures


if __name__ == "__main__":
    main()
