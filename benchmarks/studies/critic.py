"""PPO with other critics, from the demo's SFT and reward models.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.critic --seeds 0 1 2 --variants demo rloo

`demo` is configs/demo/smollm2-135m/ppo.yaml, and the other variants change some of its settings. The policy that is kept
answers the held-out prompts as in `align demo`. A row of the results has the figures of one run.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from align.commands.demo import CONFIGS, JUDGES, MODELS, SAMPLES, answer_rows
from align.core.files import write_json, write_json_lines
from align.core.launch import quiet_libraries, run_unless_finished
from align.core.settings_parser import parse
from align.core.statistics import share_interval
from align.data.readers import read_records
from align.data.records import Prompt
from align.eval.policy_comparison import compare_policies, judged_win_rates
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.reward.checkpoint import load_reward_model
from align.sampling.generation import SamplingParams
from align.sft import SFTConfig, run_sft
from align.training.run_folder import read_metrics
from benchmarks.kept import kept

VARIANTS: dict[str, dict[str, object]] = {
    "demo": {},
    "rloo": {"advantage_estimator": "rloo", "critic": "shared", "samples_per_prompt": 4},
    "ptx": {
        **{"kl_coef": 0.15, "kl_target": 4.0, "kl_horizon": 128, "hold_length": 0.5, "max_kl": 5.0},
        **{"ptx.data": "data/demonstrations.jsonl", "ptx.coef": 0.3},
    },
    "larger-rollout": {
        **{"rollout_batch_size": 96, "learning_rate": 1e-3, "kl_coef": 0.15, "kl_target": 4.0, "kl_horizon": 200},
        **{"hold_length": 0.8, "eval_steps": 6, "max_kl": 6.0},
    },
    "separate-1-epoch": {"critic": "separate", "value_fit": "first"},
    "separate-2-epochs": {"critic": "separate", "value_fit": "first", "num_critic_epochs": 2},
    "separate-value-lam-1": {"critic": "separate", "value_fit": "first", "value_lam": 1.0},
    "separate-warmup": {"critic": "separate", "value_fit": "none", "critic_warmup": 2},
}
"""Changes to the demo's PPO settings."""
PER_UPDATE = (
    *("update", "reward/mean", "kl/k1", "value/explained_variance", "value/loss", "value/calibration", "response/length"),
    *("validation/reward", "validation/kl", "validation/length", "validation/is_best", "time/update"),
)
"""Metrics of the raw results."""


def stage(config_class: type[Any], path: Path, folder: Path, seed: int, **changes: object) -> Any:
    """Return the settings in a file with changes, for a stage that runs in `folder`."""
    changes |= {"output_dir": folder, "seed": seed}
    words = [word for key, value in changes.items() for word in (f"--{key}", str(value))]
    return parse(config_class, ["--config", str(path), *words])


def compare(folder: Path, policy: Path, seed: int, config: PPOConfig, judge: str) -> dict[str, Any]:
    """Compare a policy with the SFT model on the held-out prompts."""
    sft, reward = str(folder / "sft" / "model"), load_reward_model(str(folder / "reward" / "model"))
    sampling = SamplingParams(config.max_new_tokens, config.temperature)
    prompts, limit = read_records("data/prompts_heldout.jsonl", Prompt), config.max_prompt_tokens
    comparison = compare_policies(sft, str(policy), reward, prompts, sampling, seed, SAMPLES, max_prompt_tokens=limit)
    rates = judged_win_rates(comparison, load_reward_model(judge), sft) if judge else None
    words = [float(np.mean([len(text.split()) for text in side.texts])) for side in (comparison.before, comparison.after)]
    return {
        "gain": [comparison.gain, comparison.gain_low, comparison.gain_high],
        "kl": comparison.kl,
        "judge": None if rates is None else [float(rates.mean()), *share_interval(rates)],
        "words": words,
        "answers": answer_rows(comparison),
    }


def run_variant(model: str, runs: Path, seed: int, variant: str) -> dict[str, Any]:
    """Train a variant with a seed. Return its figures, without the answers."""
    base, folder, files = runs / f"seed{seed}", runs / f"seed{seed}" / variant, CONFIGS / MODELS[model]
    sft = run_unless_finished(run_sft, stage(SFTConfig, files / "sft.yaml", base / "sft", seed, model=model))
    settings = stage(RewardConfig, files / "reward.yaml", base / "reward", seed, model=sft)
    reward = run_unless_finished(run_reward, settings)
    config = stage(PPOConfig, files / "ppo.yaml", folder, seed, model=sft, reward_model=reward, **VARIANTS[variant])
    policy = run_unless_finished(run_ppo, config)
    judge = JUDGES.get(model, "")
    compared = kept(folder / "comparison.json", lambda: compare(base, policy, seed, config, judge))
    metrics = read_metrics(folder)
    last = [row for row in metrics if row["update"] > config.total_updates * 2 // 3]
    explained = [row["value/explained_variance"] for row in last if "value/explained_variance" in row]
    return {
        "seed": seed,
        "variant": variant,
        "explained_variance": float(np.mean(explained)) if explained else None,
        "kept_update": max(row["update"] for row in metrics if row.get("validation/is_best")),
        "seconds": sum(row.get("time/update", 0.0) for row in metrics),
        **{name: value for name, value in compared.items() if name != "answers"},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Do the missing runs, and write the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="smollm2-135m")
    parser.add_argument("--runs", type=Path, default=Path("runs/critic"), help="models and metrics")
    parser.add_argument("--results", type=Path, default=Path("runs/critic/results"), help="folder of results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    options = parser.parse_args(arguments)
    quiet_libraries()
    for variant in options.variants:
        for seed in options.seeds:
            figures = run_variant(options.model, options.runs, seed, variant)
            metrics = read_metrics(options.runs / f"seed{seed}" / variant)
            rows = [{name: row[name] for name in PER_UPDATE if name in row} for row in metrics]
            options.results.mkdir(parents=True, exist_ok=True)
            write_json_lines(options.results / f"{variant}-{seed}.jsonl", rows)
            write_json(options.results / f"{variant}-{seed}.json", figures)
            print(figures, flush=True)


if __name__ == "__main__":
    main()
