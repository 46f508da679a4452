"""The rows of the demo's table: what each stage achieved on held-out data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from align.core.statistics import difference_interval, mean_interval, share_interval
from align.eval.instructions.constraints import Constraint
from align.eval.reward.curves import kl_bound
from align.eval.reward.policy_comparison import PolicyComparison, PolicyResponses, judged_win_rates
from align.reward.checkpoint import LoadedReward
from align.training.run_folder import read_metrics


def summary_rows(folder: Path, comparison: PolicyComparison) -> list[dict[str, Any]]:
    """The table at the end: what each stage achieved on held-out data."""
    sft, reward = read_metrics(folder / "sft"), read_metrics(folder / "reward")
    sft_start, sft_best = (
        sft[0],
        min((row for row in sft if "validation/loss" in row), key=lambda row: row["validation/loss"]),
    )
    reward_best = min((row for row in reward if "validation/loss" in row), key=lambda row: row["validation/loss"])
    low, high = reward_best["validation/accuracy/low"], reward_best["validation/accuracy/high"]

    def share(values: Sequence[bool]) -> str:
        return f"{sum(values) / len(values):.0%}"

    def length(rows: Sequence[Sequence[int]]) -> float:
        return round(sum(map(len, rows)) / len(rows), 1)

    before, after = comparison.before, comparison.after
    mean = [sum(responses.rewards) / len(responses.rewards) for responses in (before, after)]
    return [
        before_after_row(
            "SFT: perplexity of held-out demonstrations",
            sft_start["validation/perplexity"],
            sft_best["validation/perplexity"],
        ),
        before_after_row(
            "reward model: accuracy on held-out pairs", "50 % (chance)", f"{reward_best['validation/accuracy']:.1%}"
        )
        | {
            "interval": f"{low:.1%} to {high:.1%}",
            "note": f"{reward_best['validation/pairs']:.0f} pairs; 95 % interval over rankings",
        },
        before_after_row("PPO: mean reward on held-out prompts", mean[0], mean[1])
        | {
            "interval": f"gain {comparison.gain:+.2f} ({comparison.gain_low:+.2f} to {comparison.gain_high:+.2f})",
            "note": f"{len(comparison.prompts)} prompts, {comparison.samples} answers each, by the reward model that PPO "
            "was trained on; 95 % bootstrap over prompts",
        },
        before_after_row("KL to the fine-tuned model, nats per response", 0.0, comparison.kl)
        | {"note": f"{comparison.kl / length(after.ids):.2f} nats per token"},
        before_after_row("tokens a response", length(before.ids), length(after.ids))
        | {"note": f"{length(after.ids) / length(before.ids):.2f} times as long"},
        before_after_row("responses that end by themselves", share(before.ended), share(after.ended)),
        *instruction_rows(comparison),
    ]


def instruction_rows(comparison: PolicyComparison) -> list[dict[str, Any]]:
    """Share of answers that obey an instruction a program can check (`align eval instructions`); no row without any."""
    checked = [(i, Constraint.from_row(prompt.check)) for i, prompt in enumerate(comparison.prompts) if prompt.check]
    if not checked:
        return []
    samples = comparison.samples

    def obeyed(texts: Sequence[str]) -> np.ndarray:
        answers = ((check, texts[i * samples : (i + 1) * samples]) for i, check in checked)
        return np.array([np.mean([check.obeyed_by(text) for text in drawn]) for check, drawn in answers])

    before, after = obeyed(comparison.before.texts), obeyed(comparison.after.texts)
    low, high = difference_interval(after - before)
    row = before_after_row(
        "instructions obeyed, of those that a program can check", f"{before.mean():.0%}", f"{after.mean():.0%}"
    )
    interval = f"gain {(after - before).mean():+.1%} ({low:+.1%} to {high:+.1%})"
    return [
        row | {"interval": interval, "note": f"{len(checked)} prompts, {samples} answers each; 95 % interval over prompts"}
    ]


def best_of_row(comparison: PolicyComparison, best: PolicyResponses, n: int) -> dict[str, Any]:
    """What choosing the best of n answers by the same reward model gives instead of PPO; its KL has a known bound.

    Args:
        best: the fine-tuned model's best answer to each of the first prompts of the comparison.
    """
    prompts = len(best.rewards)
    before, after = (
        np.array(policy.rewards).reshape(-1, comparison.samples)[:prompts].mean(1)
        for policy in (comparison.before, comparison.after)
    )
    lead = after - np.array(best.rewards)
    low, high = mean_interval(lead)
    row = before_after_row(
        f"instead of PPO, the best of {n} answers: mean reward", float(before.mean()), float(np.mean(best.rewards))
    )
    note = f"{prompts} prompts; choosing one of {n} answers costs at most {kl_bound(n):.2f} nats of KL"
    return row | {"interval": f"PPO gains {lead.mean():+.2f} more ({low:+.2f} to {high:+.2f})", "note": note}


def judge_row(comparison: PolicyComparison, judge: LoadedReward, policy: str) -> dict[str, Any]:
    """How often a reward model that PPO was not trained on prefers the answers after PPO.

    Args:
        policy: folder of either policy, for its tokenizer.
    """
    rates = judged_win_rates(comparison, judge, policy)
    low, high = share_interval(rates)
    row = before_after_row("win rate by a judge that no model here learned from", "50 % (equal)", f"{rates.mean():.1%}")
    note = f"{len(rates)} prompts, {comparison.samples} pairs each; how far to trust it: data/README.md"
    return row | {"interval": f"{low:.1%} to {high:.1%}", "note": note}


def before_after_row(name: str, before: float | str, after: float | str) -> dict[str, Any]:
    """One row of the table, with room for an interval and a note."""

    def short(value: float | str) -> float | str:
        return value if isinstance(value, str) else round(value, 2)

    return {"name": name, "before": short(before), "after": short(after), "interval": "", "note": ""}
