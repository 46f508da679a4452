"""What a run achieved and what it cost, in sentences from its files."""

from align.eval.report.comparisons import first_and_kept_updates
from align.eval.report.evaluation_findings import add_evaluation_findings
from align.eval.report.pair_accuracy import PairAccuracy, pair_accuracy
from align.eval.report.ppo_findings import add_ppo_findings
from align.eval.report.runs import RunData, StageRun
from align.eval.report.summary import Summary, TableRow, rate_change
from align.eval.report.text import format_number, format_percent
from align.reward.metrics import ranking_metrics

STAGE_NAMES = {
    "sft": "supervised fine-tuning",
    "reward": "the reward model",
    "dpo": "DPO",
    "ppo": "PPO",
    "distill": "distillation",
}
LENGTH_LIMIT = 0.4
"""Correlation of reward with length above which the report warns that length is rewarded."""
CALIBRATION_LIMIT = 0.1
"""Calibration error above which the report warns."""


def summarize_run(run: RunData) -> Summary:
    """Find out what improved, by how much, at which KL, and what got worse."""
    summary = Summary()
    summary.first, summary.kept = first_and_kept_updates(run)
    if "sft" in run.stages:
        _add_sft_findings(summary, run.stages["sft"])
    if "reward" in run.stages:
        _add_reward_findings(summary, run)
    if "dpo" in run.stages:
        _add_dpo_findings(summary, run)
    if "distill" in run.stages:
        _add_distill_findings(summary, run.stages["distill"])
    if "ppo" in run.stages:
        add_ppo_findings(summary, run)
    add_evaluation_findings(summary, run.evaluations)
    if not summary.headline:
        stages = " and ".join(STAGE_NAMES[stage] for stage in run.stages)
        summary.headline = f"This run has {stages}; a policy before and after PPO cannot be compared yet."
    return summary


def _add_sft_findings(summary: Summary, sft: StageRun) -> None:
    losses = sft.series("validation/loss")
    if not losses:
        return
    name, first, best = "SFT: validation loss", losses.values[0], min(losses.values)
    at = losses.updates[losses.values.index(best)]
    perplexity = sft.series("validation/perplexity").at(at)
    note = f"lower is better; best at update {at}" + (f"; perplexity {format_number(perplexity)}" if perplexity else "")
    if len(losses.values) == 1:
        summary.add_row(name, None, best, note=note)
        return
    summary.add_row(name, first, best, note=note, rating=rate_change(best - first, rising_is_good=False))
    if best < first:
        change = f"from {format_number(first)} (update {losses.updates[0]}) to {format_number(best)} (update {at})"
        text = f"Fine-tuning taught the model the style of the demonstrations: its loss on held-out ones fell {change}."
        summary.add_finding("good", text)
    if losses.values[-1] > best * 1.02:
        end = format_number(losses.values[-1])
        summary.add_finding("note", f"Fine-tuning overfits after update {at}: its validation loss ends at {end}.")


def _add_distill_findings(summary: Summary, distill: StageRun) -> None:
    kl = distill.series("validation/kl")
    if kl:
        first, best = kl.values[0], min(kl.values)
        at = kl.updates[kl.values.index(best)]
        note = f"nats per token, 0 is the teacher; best at update {at}"
        summary.add_row(
            "Distillation: KL to the teacher", first, best, note=note, rating=rate_change(best - first, rising_is_good=False)
        )


def _add_reward_findings(summary: Summary, run: RunData) -> None:
    accuracy = pair_accuracy(run.rankings)
    if accuracy is None:
        return
    figures = ranking_metrics(run.rankings)
    accuracy_row, above = _accuracy_row("Reward model", accuracy, len(run.rankings))
    interval = accuracy_row.interval
    tau, length_correlation, error = figures["kendall_tau"], figures["length_correlation"], figures["calibration_error"]
    summary.rows += [
        accuracy_row,
        TableRow("Reward model: calibration error", "–", format_percent(error), note="0 is perfect"),
        TableRow("Reward model: Kendall's tau", "–", format_number(tau), note="1: the labelers' order, 0: none"),
        TableRow("Reward model: correlation with length", "–", format_number(length_correlation), note="near 0 is best"),
    ]
    text = f"The reward model agrees with the labelers on {format_percent(accuracy.accuracy)} of held-out pairs"
    text += f" (95 % interval {interval}; chance is 50 %)"
    if above:
        summary.add_finding("good", text + ".")
    else:
        summary.add_finding("bad", text + ": not clearly better than chance, so the rewards below mean little.")
    if abs(length_correlation) > LENGTH_LIMIT:
        preferred = "long" if length_correlation > 0 else "short"
        text = f"The reward model favors {preferred} responses"
        summary.add_finding("bad", f"{text} (correlation with length {format_number(length_correlation)}).")
    if error > CALIBRATION_LIMIT:
        text = "The reward model's confidence differs from its accuracy"
        summary.add_finding("bad", f"{text} by {format_percent(error)} on average.")
    _note_other_update(summary, run.stages["reward"], figures["loss"])


def _accuracy_row(name: str, accuracy: PairAccuracy, rankings: int) -> tuple[TableRow, bool]:
    """The row of held-out pairs in the right order, and whether there are clearly more of them than by chance."""
    above = accuracy.low > 0.5
    row = TableRow(
        f"{name}: pairs in the right order",
        "50 %",
        format_percent(accuracy.accuracy),
        format_percent(accuracy.accuracy - 0.5, sign=True),
        f"{format_percent(accuracy.low)} to {format_percent(accuracy.high)}",
        f"against chance; {accuracy.pairs} pairs of {rankings} held-out rankings",
        "good" if above else "bad" if accuracy.high < 0.5 else "",
    )
    return row, above


def _add_dpo_findings(summary: Summary, run: RunData) -> None:
    accuracy = pair_accuracy(run.dpo_rankings)
    if accuracy is None:
        return
    row, above = _accuracy_row("DPO", accuracy, len(run.dpo_rankings))
    summary.rows.append(row)
    text = f"DPO moved the policy the labelers' way on {row.after} of held-out pairs (95 % interval {row.interval})"
    if above:
        summary.add_finding("good", text + ".")
    else:
        summary.add_finding("note", text + ": not clearly better than chance.")


def _note_other_update(summary: Summary, stage: StageRun, loss: float) -> None:
    """Add a note if validation.json is from a different evaluation than that of the kept model."""
    losses = stage.series("validation/loss")
    if not losses:
        return
    best, shown = min(losses.values), min(losses.values, key=lambda value: abs(value - loss))
    if shown > best:
        kept, update = (losses.updates[losses.values.index(value)] for value in (best, shown))
        text = f"The figures of the reward model are those of update {update}; the model of update {kept} was kept."
        summary.add_finding("note", text)
