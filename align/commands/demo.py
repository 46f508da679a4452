"""`align demo`: run all three stages on a model, compare it with the original, and write a report.

Finished stages are skipped, so an interrupted demo resumes where it stopped.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from align.core.errors import UserError
from align.core.files import package_data_root, write_json
from align.core.launch import run_unless_finished
from align.core.seeds import RngStream
from align.core.settings import ModelConfig
from align.core.settings_parser import parse
from align.core.statistics import mean_interval, share_interval
from align.data.readers import read_records
from align.data.records import Prompt
from align.eval.all import AllConfig, run_all
from align.eval.policy_comparison import (
    PolicyComparison,
    PolicyResponses,
    best_responses,
    compare_policies,
    judged_win_rates,
    kl_bound,
)
from align.eval.report.page import summary_table, write_report
from align.model_registry.registry import resolve_model
from align.models.loading import load_frozen
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.reward.checkpoint import LoadedReward, load_reward_model
from align.sampling.generation import SamplingParams, row_uniforms, sample
from align.sft import SFTConfig, run_sft
from align.training.run_folder import read_metrics

CONFIGS = package_data_root() / "configs" / "demo"
MODELS = {"smollm2-135m": "smollm2-135m", "tiny-llama": "tiny", "tiny-gpt2": "tiny", "tiny-t5": "tiny"}
"""Config folder of each model supported by the demo."""
JUDGES = {"smollm2-135m": "smollm2-135m-judge"}
"""Independent reward model for each model supported by the demo."""
SAMPLES = 2
"""Answers per policy and held-out prompt. With four, the win rate's interval is 8 points wide instead of 10."""
BEST_OF = 16
"""n of the best-of-n baseline."""
BEST_OF_PROMPTS = 24
"""Number of prompts of the best-of-n baseline. Using all would take longer than all other evaluations."""
SHOWN_PROMPTS = 3
"""Number of prompts whose answers are printed during the demo."""
HEADLINES = {"truthfulness": "mc2", "toxicity": "basic: expected maximum toxicity"}
"""Measurement of each evaluation shown in the demo's table."""
WIDTH = 160
"""Maximum printed characters of a prompt or answer."""


class PartTimes:
    """Duration of each part of the demo, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a part and print its name when it starts."""
        print(f"\n== {name} ==", flush=True)
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started

    def __str__(self) -> str:
        """Format the duration of each part and the total in one line."""
        times = self.seconds | {"total": sum(self.seconds.values())}
        return "time: " + ", ".join(f"{name} {int(value) // 60}:{int(value) % 60:02d}" for name, value in times.items())


def sample_answers(model: ModelConfig, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[str]:
    """Sample one answer of a model to each prompt."""
    loaded = load_frozen(model.model, model.dtype, model.chat_template)
    ids = [loaded.tokenization.prompt_ids(prompt.prompt) for prompt in prompts]
    uniforms = row_uniforms(len(ids), sampling, seed, RngStream.POLICY_COMPARISON)
    responses = sample(loaded.backbone, ids, uniforms, sampling, loaded.tokenization.end_ids)
    return [loaded.tokenization.text(response) for response in responses.ids]


def print_answers(
    prompts: Sequence[Prompt], answers: Mapping[str, Sequence[str]], rewards: Mapping[str, Sequence[float]] | None = None
) -> None:
    """Print each prompt with the models' answers and, where available, rewards."""
    width = max(map(len, ("prompt", *answers)))
    for i, prompt in enumerate(prompts):
        print(f"  {'prompt':<{width}}  {_one_line(prompt.prompt[-1]['content'])}")
        for name, texts in answers.items():
            reward = f"  [reward {rewards[name][i]:+.2f}]" if rewards else ""
            print(f"  {name:<{width}}  {_one_line(texts[i]) or '(empty)'}{reward}")
    print(flush=True)


def _one_line(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= WIDTH else words[: WIDTH - 3] + "..."


def main(arguments: Sequence[str]) -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(prog="align demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help=f"Model to align: {', '.join(MODELS)}.")
    parser.add_argument(
        "--output_dir", "--output-dir", default="runs/demo", help="Output folder for the runs and the report."
    )
    parser.add_argument("--seed", type=int, default=0, help="Random seed.")
    options = parser.parse_args(list(arguments))
    if options.model not in MODELS:
        raise UserError(f"--model {options.model}: not supported by the demo; use one of {', '.join(MODELS)}")
    folder, times = Path(options.output_dir), PartTimes()
    rows = run_demo(options.model, folder, options.seed, times)
    report = write_report(folder)
    print(summary_table(rows))
    print(f"{times}\nreport: {report}")


def run_demo(model: str, folder: Path, seed: int, times: PartTimes) -> list[dict[str, Any]]:
    """Run all three stages and the comparison. Return the summary rows, which are also written to summary.json."""

    def settings(config_class: type[Any], stage: str, **more: str) -> Any:
        more |= {"output_dir": str(folder / stage), "seed": str(seed)}
        words = [word for key, value in more.items() for word in (f"--{key}", value)]
        return parse(config_class, ["--config", str(CONFIGS / MODELS[model] / f"{stage}.yaml"), *words])

    sft = settings(SFTConfig, "sft", model=model)
    resolve_model(sft.model)
    ppo = settings(PPOConfig, "ppo", model=str(folder / "sft" / "model"), reward_model=str(folder / "reward" / "model"))
    sampling = SamplingParams(ppo.max_new_tokens, ppo.temperature)
    prompts = read_records("data/prompts_heldout.jsonl", Prompt)
    if ppo.overlong == "truncate":  # tiny models have byte-level tokens, so only short prompts fit
        prompts = [prompt for prompt in prompts if len(prompt.prompt) == 1]
    shown = prompts[:SHOWN_PROMPTS]
    with times.part("SFT"):
        answers = {"before": sample_answers(sft, shown, sampling, seed)}
        print_answers(shown, answers)
        policy = str(run_unless_finished(run_sft, sft))
        answers["SFT"] = sample_answers(ModelConfig(model=policy), shown, sampling, seed)
        print_answers(shown, answers)
    with times.part("reward model"):
        reward = str(run_unless_finished(run_reward, settings(RewardConfig, "reward", model=policy)))
    with times.part("PPO"):
        aligned = str(run_unless_finished(run_ppo, ppo))
    with times.part("comparison"):
        scorer = load_reward_model(reward)
        comparison = compare_policies(policy, aligned, scorer, prompts, sampling, seed, SAMPLES)
        compared, sides = answer_rows(comparison), {"SFT": "before", "PPO": "after"}
        texts, rewards = (
            {name: [row[prefix + side] for row in compared] for name, side in sides.items()} for prefix in ("", "reward_")
        )
        print_answers(shown, texts, rewards)
        write_json(folder / "comparison.json", compared)
        best = best_responses(policy, scorer, comparison.prompts[:BEST_OF_PROMPTS], BEST_OF, sampling, seed)
        rows = [*summary_rows(folder, comparison), best_of_row(comparison, best, BEST_OF)]
        if model in JUDGES:
            rows.append(judge_row(comparison, load_reward_model(JUDGES[model]), policy))
    with times.part("evaluation"):
        rows += evaluate_start_and_end(CONFIGS / MODELS[model] / "eval.yaml", folder, sft.model, seed)
    write_json(folder / "summary.json", rows)
    return rows


def answer_rows(comparison: PolicyComparison) -> list[dict[str, Any]]:
    """Return the first answers to each prompt before and after PPO, side by side."""
    before, after = comparison.before, comparison.after
    return [
        {
            "prompt": list(prompt.prompt),
            "before": before.texts[first],
            "after": after.texts[first],
            "reward_before": before.rewards[first],
            "reward_after": after.rewards[first],
        }
        for first, prompt in zip(count(0, comparison.samples), comparison.prompts, strict=False)
    ]


def evaluate_start_and_end(settings: Path, folder: Path, start: str, seed: int) -> list[dict[str, Any]]:
    """Evaluate the model before and after training on the small built-in data sets. Return one row per task.

    Return no rows if the config file of `align eval all` does not exist, as for the tiny models.
    """
    if not settings.exists():
        return []
    words = ["--config", str(settings), "--models", start, str(folder / "ppo"), "--output", str(folder / "eval")]
    evaluations = run_all(parse(AllConfig, [*words, "--seed", str(seed), "--table", "false"]))
    rows = []
    for task, name in HEADLINES.items():
        measurements = [
            measurement
            for result in evaluations
            if result.task == task
            for measurement in result.measurements
            if measurement.name == name
        ]
        values = [measurement.value for measurement in measurements if measurement.value is not None]
        if measurements and len(values) == len(measurements):
            after = measurements[-1]
            by = f", by {after.scorer}" if after.scorer else ""
            interval = f"{after.low:.2f} to {after.high:.2f}" if after.low is not None else ""
            note = f"{after.n} items{by}; 95 % interval of the value after"
            rows.append(before_after_row(f"{task}: {name}", values, interval, note))
    return rows


def summary_rows(folder: Path, comparison: PolicyComparison) -> list[dict[str, Any]]:
    """Return the final table: results of each stage on held-out data."""
    sft, reward = read_metrics(folder / "sft"), read_metrics(folder / "reward")
    sft_best, reward_best = (
        min((row for row in rows if "validation/loss" in row), key=lambda row: row["validation/loss"])
        for rows in (sft, reward)
    )
    perplexity, accuracy = "validation/perplexity", "validation/accuracy"
    low, high = reward_best["validation/accuracy/low"], reward_best["validation/accuracy/high"]
    before, after = comparison.before, comparison.after
    rewards = [sum(responses.rewards) / len(responses.rewards) for responses in (before, after)]
    lengths = [round(float(np.mean([len(answer.ids) for answer in side.answers])), 1) for side in (before, after)]
    ended = [f"{np.mean([answer.ended for answer in side.answers]):.0%}" for side in (before, after)]
    return [
        before_after_row("SFT: perplexity of held-out demonstrations", [sft[0][perplexity], sft_best[perplexity]]),
        before_after_row(
            "reward model: accuracy on held-out pairs",
            ["50 % (chance)", f"{reward_best[accuracy]:.1%}"],
            f"{low:.1%} to {high:.1%}",
            f"{reward_best['validation/pairs']:.0f} pairs; 95 % interval over rankings",
        ),
        before_after_row(
            "PPO: mean reward on held-out prompts",
            rewards,
            f"gain {comparison.gain:+.2f} ({comparison.gain_low:+.2f} to {comparison.gain_high:+.2f})",
            f"{len(comparison.prompts)} prompts, {comparison.samples} answers each, by the reward model that PPO was "
            "trained on; 95 % bootstrap over prompts",
        ),
        before_after_row(
            "KL to the fine-tuned model, nats per response",
            [0.0, comparison.kl],
            note=f"{comparison.kl / lengths[1]:.2f} nats per token",
        ),
        before_after_row("tokens a response", lengths, note=f"{lengths[1] / lengths[0]:.2f} times as long"),
        before_after_row("responses that end by themselves", ended),
    ]


def best_of_row(comparison: PolicyComparison, best: PolicyResponses, n: int) -> dict[str, Any]:
    """Return the reward of best-of-n sampling from the fine-tuned model, as a baseline for PPO with a bounded KL."""
    prompts = len(best.rewards)
    before, after = (
        np.array(policy.rewards).reshape(-1, comparison.samples)[:prompts].mean(1)
        for policy in (comparison.before, comparison.after)
    )
    lead = after - np.array(best.rewards)
    low, high = mean_interval(lead)
    return before_after_row(
        f"instead of PPO, the best of {n} answers: mean reward",
        [float(before.mean()), float(np.mean(best.rewards))],
        f"PPO gains {lead.mean():+.2f} more ({low:+.2f} to {high:+.2f})",
        f"{prompts} prompts; choosing one of {n} answers costs at most {kl_bound(n):.2f} nats of KL",
    )


def judge_row(comparison: PolicyComparison, judge: LoadedReward, policy: str) -> dict[str, Any]:
    """Return the win rate of PPO according to an independent reward model. `policy` provides the tokenizer."""
    rates = judged_win_rates(comparison, judge, policy)
    low, high = share_interval(rates)
    note = f"{len(rates)} prompts, {comparison.samples} pairs each; how far to trust it: data/README.md"
    name = "win rate by a judge that no model here learned from"
    return before_after_row(name, ["50 % (equal)", f"{rates.mean():.1%}"], f"{low:.1%} to {high:.1%}", note)


def before_after_row(
    name: str, values: Sequence[float] | Sequence[str], interval: str = "", note: str = ""
) -> dict[str, Any]:
    """Build a table row from the values before and after."""
    # Adding 0 converts -0.0 to 0.0.
    before, after = (value if isinstance(value, str) else round(value, 2) + 0.0 for value in values)
    return {"name": name, "before": before, "after": after, "interval": interval, "note": note}
