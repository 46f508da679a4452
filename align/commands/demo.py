"""`align demo`: train a model through all three stages, compare it with the original one, and write a report.

Finished stages are skipped, so an interrupted demo resumes where it stopped.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from align.builtin.zoo import resolve_model
from align.commands.demo_table import before_after_row, best_of_row, judge_row, summary_rows
from align.commands.stages import run_unless_finished
from align.core.errors import UserError
from align.core.files import write_json
from align.core.settings_parser import parse
from align.core.shipped import shipped_root
from align.data.readers import read_records
from align.data.records import Prompt
from align.eval.all import AllConfig, run_all
from align.eval.report import summary_table, write_report
from align.eval.reward.policy_comparison import PolicyComparison, best_responses, compare_policies
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.reward.checkpoint import load_reward_model
from align.sampling.generation import Sampling
from align.sft import SFTConfig, run_sft

CONFIGS = shipped_root() / "configs" / "demo"
MODELS = {"smollm2-135m": "smollm2-135m", "tiny-llama": "tiny", "tiny-gpt2": "tiny", "tiny-t5": "tiny"}
"""The folder of settings of each model that the demo aligns."""
JUDGES = {"smollm2-135m": "smollm2-135m-judge"}
"""Reward models that no policy of the demo was trained on, by the name of the model that the demo aligns."""
BEST_OF = 16
"""Answers among which the fine-tuned model's best is chosen, to compare PPO with."""
BEST_OF_PROMPTS = 40
"""Number of prompts for that: 16 answers to every prompt would take longer than all other evaluations."""
HEADLINES = {"truthfulness": "mc2", "toxicity": "basic: expected maximum toxicity"}
"""The figure of each evaluation that the demo's table shows."""


def main(arguments: Sequence[str]) -> None:
    """Run the demo.

    Raises:
        UserError: for an unknown model, or a folder that cannot be written.
    """
    parser = argparse.ArgumentParser(prog="align demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help=f"one of {', '.join(MODELS)}")
    parser.add_argument("--output_dir", "--output-dir", default="runs/demo", help="folder of the demo's runs and its report")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    options = parser.parse_args(list(arguments))
    if options.model not in MODELS:
        raise UserError(f"--model {options.model}: the demo has no settings for it; use one of {', '.join(MODELS)}")
    started = time.monotonic()
    folder = Path(options.output_dir)
    rows = run_demo(options.model, folder, options.seed)
    report = write_report(folder)
    print(summary_table(rows))
    print(f"{(time.monotonic() - started) / 60:.1f} minutes; the report: {report}")


def run_demo(model: str, folder: Path, seed: int) -> list[dict[str, Any]]:
    """All three stages and the comparison; returns the rows of the summary, which are also in summary.json."""

    def settings(config_class: type[Any], stage: str, **more: str) -> Any:
        more |= {"output_dir": str(folder / stage), "seed": str(seed)}
        words = [word for key, value in more.items() for word in (f"--{key}", value)]
        return parse(config_class, ["--config", str(CONFIGS / MODELS[model] / f"{stage}.yaml"), *words])

    sft = settings(SFTConfig, "sft", model=model)
    resolve_model(sft.model)
    policy = run_unless_finished(run_sft, sft)
    reward = run_unless_finished(run_reward, settings(RewardConfig, "reward", model=str(policy)))
    ppo = settings(PPOConfig, "ppo", model=str(policy), reward_model=str(reward))
    aligned = run_unless_finished(run_ppo, ppo)
    prompts = read_records("data/prompts_heldout.jsonl", Prompt)
    sampling = Sampling(ppo.max_new_tokens, ppo.temperature)
    if ppo.overlong == "truncate":  # the tiny models read bytes, so only short prompts fit
        prompts = [prompt for prompt in prompts if len(prompt.prompt) == 1]
    scorer = load_reward_model(str(reward))
    comparison = compare_policies(str(policy), str(aligned), scorer, prompts, sampling, seed)
    write_json(folder / "comparison.json", answer_rows(comparison))
    best = best_responses(str(policy), scorer, comparison.prompts[:BEST_OF_PROMPTS], BEST_OF, sampling, seed)
    rows = [*summary_rows(folder, comparison), best_of_row(comparison, best, BEST_OF)]
    if model in JUDGES:
        rows.append(judge_row(comparison, load_reward_model(JUDGES[model]), str(policy)))
    rows += evaluate_start_and_end(CONFIGS / MODELS[model] / "eval.yaml", folder, sft.model, seed)
    write_json(folder / "summary.json", rows)
    return rows


def answer_rows(comparison: PolicyComparison) -> list[dict[str, Any]]:
    """The first answers to each prompt side by side, for the report."""
    return [
        {
            "prompt": list(prompt.prompt),
            "before": comparison.before.texts[i * comparison.samples],
            "after": comparison.after.texts[i * comparison.samples],
            "reward_before": comparison.before.rewards[i * comparison.samples],
            "reward_after": comparison.after.rewards[i * comparison.samples],
        }
        for i, prompt in enumerate(comparison.prompts)
    ]


def evaluate_start_and_end(settings: Path, folder: Path, start: str, seed: int) -> list[dict[str, Any]]:
    """The model before all training and after it on the project's small sets of questions and tempting prompts.

    All figures go to `folder/eval` and into the report; the rows hold one of each task.

    Args:
        settings: settings of `align eval all`; if the file does not exist, as for the tiny models, there are no rows.
    """
    if not settings.exists():
        return []
    words = ["--config", str(settings), "--models", start, str(folder / "ppo"), "--output", str(folder / "eval")]
    evaluations = run_all(parse(AllConfig, [*words, "--seed", str(seed), "--table", "false"]))
    rows = []
    for task, name in HEADLINES.items():
        pair = [figure for result in evaluations if result.task == task for figure in result.figures if figure.name == name]
        if pair and all(figure.value is not None for figure in pair):
            after = pair[-1]
            by = f", by {after.scorer}" if after.scorer else ""
            row = before_after_row(f"{task}: {name}", *(float(figure.value or 0.0) for figure in pair))
            interval = f"{after.low:.2f} to {after.high:.2f}" if after.low is not None else ""
            rows.append(row | {"interval": interval, "note": f"{after.n} items{by}; 95 % interval of the value after"})
    return rows
