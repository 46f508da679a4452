"""The gains and losses of a run: sentences, table rows with numbers, and samples."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, zip_longest
from statistics import fmean
from typing import Any, Literal

from align.core.statistics import mean_interval
from align.eval.report.data import STAGES, RunData, Sample, StageRun, TableRow, format_number, format_percent
from align.eval.results import Better, Evaluation, Measurement
from align.reward.rankings import ScoredRanking, pairs_and_differences, ranking_metrics

Rating = Literal["good", "bad", "note"]
"""Rating of a sentence: `good` for an improvement, `bad` for a regression, `note` for neither."""
REWARD_MODEL_TASKS = ("reward", "rewardbench-2")
"""Tasks that compare reward models, not a trained model with its initial model."""
RULE = "validation/rule/"
"""Prefix of the name of a rule's metric."""


@dataclass(frozen=True)
class SamplePair:
    """Responses to the same prompt before and after training; `before` is None if there is no earlier response."""

    before: Sample | None
    after: Sample

    @property
    def change(self) -> float:
        """Reward after minus reward before; 0 without a response before."""
        return self.after.reward - self.before.reward if self.before else 0.0


@dataclass
class Summary:
    """Outcome of a run.

    Attributes:
        findings: sentences by rating.
        first, kept: updates of the first evaluation and of the saved policy.
        pairs: samples from two evaluations, alternating between the largest gains and losses.
        compared: updates of these two evaluations. The first is None if only one evaluation has samples.
    """

    headline: str = ""
    findings: dict[Rating, list[str]] = field(default_factory=lambda: defaultdict(list))
    rows: list[TableRow] = field(default_factory=list)
    first: int | None = None
    kept: int | None = None
    pairs: list[SamplePair] = field(default_factory=list)
    compared: tuple[int | None, int | None] = (None, None)

    def add_row(
        self,
        name: str,
        before: float | None,
        after: float,
        rating: str = "",
        *,
        percent: bool = False,
        interval: str = "",
        note: str = "",
        if_good: str = "",
        if_bad: str = "",
    ) -> None:
        """Add a row with the change, and a finding if the change is good or bad.

        Args:
            percent: format the values as percentages.
            if_good: finding for a good change. {} is replaced by both values.
            if_bad: finding for a bad change.
        """
        show = format_percent if percent else format_number
        change = "" if before is None else show(after - before, sign=True)
        self.rows.append(TableRow(name, show(before), show(after), change, interval, note, rating))
        kind: Rating
        for kind, text in (("good", if_good), ("bad", if_bad)):
            if rating == kind and text:
                self.findings[kind].append(text.replace("{}", f"{show(before)} to {show(after)}"))


def rate(before: float | None, after: float, better: Better, tolerance: float = 0.0) -> str:
    """Return `good` or `bad`; empty if a value changed by no more than `tolerance`."""
    if before is None or abs(after - before) <= tolerance:
        return ""
    return "good" if (after > before) == (better == "higher") else "bad"


def summarize_run(run: RunData) -> Summary:
    """List improvements, with their size and KL, and regressions."""
    summary, ppo = Summary(), run.stages.get("ppo")
    first, kept = summary.first, summary.kept = first_and_kept_updates(run)
    if "sft" in run.stages:
        _add_sft_findings(summary, run.stages["sft"])
    if "reward" in run.stages:
        _add_reward_findings(summary, run.rankings["reward"])
    if "dpo" in run.stages:
        claim = "DPO's implicit reward agrees with the labels"
        _add_pair_accuracy(summary, "DPO", claim, run.rankings["dpo"], "note", "")
    if ppo:
        _choose_samples(summary, run)
        compared = kept
        if first is not None and kept is None and (last := max(ppo.series("validation/reward"), default=first)) > first:
            compared = last
            text = "No later policy had a higher reward, so the initial policy was kept"
            summary.findings["bad"].append(f"{text}. This report compares it with the last policy.")
        if first is not None and compared is not None:
            _add_reward_change(summary, ppo, first, compared)
            _add_ppo_changes(summary, ppo, first, compared)
    add_evaluation_findings(summary, run.evaluations)
    summary.findings["bad"][:0] = alarms(run)
    if not summary.headline:
        stages = ", ".join(STAGES[stage][0] for stage in run.stages)
        summary.headline = f"Stages in this run: {stages}. There is no policy before and after PPO to compare yet."
    return summary


# --------------------------------------------------------------------------------------------------------------- alarms

CHANCE_LOSS = math.log(2)
"""Pairwise loss of a reward model, or of DPO, that assigns probability 1/2 to either response."""


def alarms(run: RunData) -> list[str]:
    """Return a warning for each value that invalidates the rest of the report. They are listed first."""
    warnings = []
    for stage, what in (("reward", "The reward model"), ("dpo", "DPO")):
        losses = run.stages[stage].series("validation/loss") if stage in run.stages else {}
        if losses and run.stages[stage].config.get("loss", "sigmoid") != "ipo" and min(losses.values()) > CHANCE_LOSS:
            text = f"{what} is worse than chance: its lowest validation loss is {format_number(min(losses.values()))}"
            warnings.append(f"{text} (chance is {format_number(CHANCE_LOSS)}). Check labels, limits and learning rate.")
    for name, stage_run in run.stages.items():
        series = stage_run.series("validation/loss")
        first, last = (series[min(series)], series[max(series)]) if series else (0.0, 0.0)
        if name == "sft" and len(series) > 1 and min(series.values()) >= first < last:
            change = f"from {format_number(first)} to {format_number(last)}"
            warnings.append(f"SFT made the model worse on held-out demonstrations: the validation loss rose {change}.")
        if any("loss" in row and not math.isfinite(row["loss"]) for row in stage_run.metrics.values()):
            warnings.append(f"{STAGES[name][0]}: a loss was NaN or infinite.")
    return warnings


# -------------------------------------------------------------------------------------------------- SFT and reward model


def _add_sft_findings(summary: Summary, stage: StageRun) -> None:
    series = stage.series("validation/loss")
    if not series:
        return
    values, update = list(series.values()), min(series, key=lambda update: series[update])
    best, last, before = series[update], values[-1], values[0] if len(values) > 1 else None
    perplexity = format_number(stage.series("validation/perplexity").get(update))
    rating, note = rate(before, best, "lower"), f"lower is better; best at update {update}; perplexity {perplexity}"
    summary.add_row("SFT: validation loss", before, best, rating, note=note)
    if rating == "good":
        text = f"SFT reduced the loss on held-out demonstrations from {format_number(before)} (update {min(series)})"
        text += f" to {format_number(best)} (update {update})."
        summary.findings["good"].append(text)
    if last > best * 1.02:
        text = f"SFT overfits after update {update}: the final validation loss is {format_number(last)}."
        summary.findings["note"].append(text)


def _add_reward_findings(summary: Summary, rankings: Sequence[ScoredRanking]) -> None:
    claim, consequence = "The reward model agrees with the labels", ", so the rewards below are not meaningful"
    if not _add_pair_accuracy(summary, "Reward model", claim, rankings, "bad", consequence):
        return
    metrics = ranking_metrics(rankings)
    error, correlation = metrics["calibration_error"], metrics["length_correlation"]
    text = (
        f"The reward model is miscalibrated: its confidence differs from its accuracy by {format_percent(error)} on average."
    )
    rating, note = "bad" if error > 0.1 else "", "0 is perfect"
    summary.add_row("Reward model: calibration error", None, error, rating, percent=True, note=note, if_bad=text)
    note = "1 is perfect agreement, 0 is chance"
    summary.add_row("Reward model: Kendall's tau", None, metrics["kendall_tau"], note=note)
    preferred = "long" if correlation > 0 else "short"
    text = f"The reward model favors {preferred} responses (correlation with length: {format_number(correlation)})."
    rating, note = "bad" if abs(correlation) > 0.4 else "", "near 0 is best"
    summary.add_row("Reward model: correlation with length", None, correlation, rating, note=note, if_bad=text)


def _add_pair_accuracy(
    summary: Summary, name: str, claim: str, rankings: Sequence[ScoredRanking], unclear: Rating, consequence: str
) -> bool:
    """Add the accuracy on held-out pairs. Return False if there are none."""
    pairs, _ = pairs_and_differences(rankings)
    if not len(pairs.better):
        return False
    metrics = ranking_metrics(rankings)
    accuracy, low, high = metrics["accuracy"], metrics["accuracy/low"], metrics["accuracy/high"]
    interval = f"{format_percent(low)} to {format_percent(high)}"
    note = f"before: chance; {int(metrics['pairs'])} pairs from {len(rankings)} held-out rankings"
    rating, change = "good" if low > 0.5 else "bad" if high < 0.5 else "", format_percent(accuracy - 0.5, sign=True)
    title, share = f"{name}: pairwise accuracy", format_percent(accuracy)
    summary.rows.append(TableRow(title, "50 %", share, change, interval, note, rating))
    text = f"{claim} on {share} of held-out pairs (95 % interval {interval}; chance is 50 %)"
    if rating == "good":
        summary.findings["good"].append(text + ".")
    else:
        summary.findings[unclear].append(f"{text}. This is not clearly better than chance{consequence}.")
    return True


# ------------------------------------------------------------------------------------------------------------------ PPO


def first_and_kept_updates(run: RunData) -> tuple[int | None, int | None]:
    """Return the updates of the first evaluation and of the saved policy, or None if there is none.

    If no evaluation qualified, the trainer saves the last policy. A resumed run can also lose its best one.
    """
    ppo = run.stages.get("ppo")
    updates = sorted(ppo.series("validation/reward").keys() | run.samples.keys()) if ppo else []
    if not ppo or not updates:
        return None, None
    saved = ppo.saved_update or max(ppo.series("validation/is_best"), default=updates[-1])
    kept = max((update for update in updates if update <= saved), default=updates[0])
    return updates[0], kept if kept > updates[0] else None


def saves_last(ppo: StageRun) -> bool:
    """Return whether the run saved its last policy instead of the best one."""
    return ppo.config.get("save_best_policy") is False


def max_kl(ppo: StageRun) -> float:
    """Return the KL limit for checkpoint selection (nats per response), or infinity if the config is missing."""
    limit = ppo.config.get("max_kl")
    return float(limit) if isinstance(limit, int | float) else float("inf")


def _choose_samples(summary: Summary, run: RunData) -> None:
    """Choose samples of the first evaluation and the saved policy, or of the first and last update with samples."""
    if not run.samples:
        return
    first, last = min(run.samples), max(run.samples)
    after = summary.kept if summary.kept is not None and summary.kept in run.samples else last
    if after == first:
        summary.pairs, summary.compared = pair_samples([], run.samples[after]), (None, after)
    else:
        summary.pairs = alternate_gains_and_losses(pair_samples(run.samples[first], run.samples[after]))
        summary.compared = (first, after)


def pair_samples(before: Sequence[Sample], after: Sequence[Sample]) -> list[SamplePair]:
    """Pair each later response with the earlier one to the same prompt. Repeated prompts are matched in order."""
    earlier: dict[object, list[Sample]] = defaultdict(list)
    for sample in before:
        earlier[sample.prompt].append(sample)
    return [SamplePair(earlier[sample.prompt].pop(0) if earlier[sample.prompt] else None, sample) for sample in after]


def alternate_gains_and_losses(pairs: Sequence[SamplePair]) -> list[SamplePair]:
    """Sort pairs: the largest gain, the largest loss, the next gain, the next loss, and so on. Unchanged pairs come last."""
    gains = sorted((pair for pair in pairs if pair.change > 0), key=lambda pair: -pair.change)
    losses = sorted((pair for pair in pairs if pair.change < 0), key=lambda pair: pair.change)
    alternating = [pair for gain_and_loss in zip_longest(gains, losses) for pair in gain_and_loss if pair]
    return alternating + [pair for pair in pairs if pair.change == 0]


def _add_reward_change(summary: Summary, ppo: StageRun, first: int, kept: int) -> None:
    """Add the headline: the change of the reward with its confidence interval over prompts, and the KL."""
    rewards, kls = ppo.series("validation/reward"), ppo.series("validation/kl")
    before, after, kl = rewards.get(first), rewards.get(kept), kls.get(kept)
    if before is None or after is None:
        return
    changes = [pair.change for pair in summary.pairs if pair.before] if summary.compared == (first, kept) else []
    low, high = mean_interval(changes) if len(set(changes)) > 1 else (0.0, 0.0)
    interval = f"{format_number(low, sign=True)} to {format_number(high, sign=True)}" if high > low else ""
    clear, size = low > 0 or high < 0, format_number(abs(after - before))
    note = f"update {first} to {kept}" + (f", {len(changes)} prompts" if changes else "")
    rating, fell = rate(before, after, "higher") if clear else "", f"The reward fell by {size} during PPO."
    name = "PPO: reward on held-out prompts"
    summary.add_row(name, before, after, rating, interval=interval, note=note, if_bad=fell)
    outcome = f"{'rose' if after > before else 'fell'} by {size}" if after != before else "did not change"
    text = f"During PPO, the reward on held-out prompts {outcome}, from {format_number(before)} to {format_number(after)}"
    text += f" (95 % interval of the change: {interval})" if interval else ""
    if kl is not None:
        name, note = "PPO: KL to the initial policy, nats per response", "distance from the initial policy"
        summary.rows.append(TableRow(name, format_number(kls.get(first)), format_number(kl), note=note))
        text += f", at a KL of {format_number(kl)} nats per response from the initial policy"
        if kl > max_kl(ppo) and not saves_last(ppo):
            limit = format_number(max_kl(ppo))
            summary.findings["bad"].append(f"No policy stayed within the KL limit of {limit}, so the last one was saved.")
    text += "" if clear or not interval else ". The interval includes 0, so the change may be due to chance"
    summary.headline = f"{text}."
    if changes:
        winners, losers = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
        total = len(changes)
        text = f"The reward rose on {winners} of {total} held-out prompts."
        summary.findings["good" if winners > losers else "note"].append(text)
        if losers:
            summary.findings["bad"].append(f"The reward fell on {losers} of {total} held-out prompts: see the samples.")
    _add_caveats(summary, ppo, first, kept)


def _add_caveats(summary: Summary, ppo: StageRun, first: int, kept: int) -> None:
    rewards = ppo.series("validation/reward")
    later = [update for update in rewards if update > first]
    if len(later) > 1 and not ppo.series("validation/selection_reward") and not saves_last(ppo):
        chosen = f"Update {kept} was selected as the best of {len(later)} evaluations on the same prompts"
        summary.findings["note"].append(f"{chosen}, so its reward is slightly overestimated.")
        text = "The policy was selected by its training reward. No independent reward model was used."
        summary.findings["note"].append(text)
    last, end = max(rewards.items())
    if last > kept and end < rewards.get(kept, 0.0):
        text = f"After update {kept}, the reward fell to {format_number(end)} at update {last}."
        summary.findings["note"].append(text)


def _add_ppo_changes(summary: Summary, ppo: StageRun, first: int, kept: int) -> None:
    """Compare the saved policy with the first evaluation on every metric that both have.

    The thresholds are tighter than in `align.ppo.metrics.DriftWatch`, which warns during a run.
    """

    def compare(metric: str, name: str, rating: Callable[[float, float], str] = lambda *_: "", **kwargs: Any) -> None:
        before, after = ppo.series(metric).get(first), ppo.series(metric).get(kept)
        if before is not None and after is not None:
            summary.add_row(f"PPO: {name}", before, after, rating(before, after), **kwargs)

    def rate_length(before: float, after: float) -> str:
        return "bad" if before and not 0.67 <= after / before <= 1.5 else ""

    higher, lower = partial(rate, better="higher"), partial(rate, better="lower", tolerance=0.02)
    selecting = (ppo.config.get("selection") or {}).get("reward_model", "")
    text = f"The independent reward model {selecting} selected update {kept}; its reward went from {{}}."
    name, note = "selection reward on held-out prompts", f"selected update {kept}"
    if saves_last(ppo):
        compare("validation/selection_reward", name, higher)
    else:
        compare("validation/selection_reward", name, higher, note=note, if_good=text, if_bad=text)
    compare("validation/preference", "preference reward on held-out prompts", higher, note="without rules")
    for metric in sorted({name for row in ppo.metrics.values() for name in row if name.startswith(RULE)}):
        rule = metric.removeprefix(RULE)
        text, note = f"Violations of rule {rule} increased from {{}}.", "judged by the rule model"
        compare(metric, f"violations of {rule}", lower, percent=True, note=note, if_bad=text)
    text = "Response length changed from {} tokens: check whether the reward depends on length alone."
    compare("validation/length", "response length, tokens", rate_length, if_bad=text)
    name, text = "EOS rate", "Fewer responses end with EOS: from {}."
    compare("validation/eos_rate", name, partial(higher, tolerance=0.05), percent=True, if_bad=text)
    name, text = "repeated trigrams", "Responses became more repetitive: repeated trigrams rose from {}."
    compare("validation/repetition", name, lower, percent=True, if_bad=text)
    entropy = list(ppo.series("entropy").values())
    if len(entropy) > 1:
        rating, note = "bad" if entropy[0] and entropy[-1] / entropy[0] < 0.5 else "", "first and last rollout"
        text = "Responses became less diverse: entropy fell from {} nats per token."
        summary.add_row("PPO: entropy, nats per token", entropy[0], entropy[-1], rating, note=note, if_bad=text)
    explained = list(ppo.series("value/explained_variance").values())
    if len(explained) > 1:
        third = max(1, len(explained) // 3)
        start, end = fmean(explained[:third]), fmean(explained[-third:])
        rating, note = "bad" if end < 0 else "", "means over the first and last third of the rollouts"
        text = "The critic adds noise to the advantages: its explained variance went from {}."
        summary.add_row("PPO: explained variance of the critic", start, end, rating, note=note, if_bad=text)


# ----------------------------------------------------------------------------------------------------------- evaluations


def add_evaluation_findings(summary: Summary, evaluations: Sequence[Evaluation]) -> None:
    """Add findings for measurements whose 95 % intervals do not overlap between the first and the last model.

    `Measurement.better` decides whether a change is good. Measurements without it are skipped.
    """
    for task, group in groupby(evaluations, lambda evaluation: evaluation.task):
        models = list(group)
        first, last = models[0], models[-1]
        if first is last or task in REWARD_MODEL_TASKS:
            continue
        later = {measurement.name: measurement for measurement in last.measurements}
        pairs = [(old, later[old.name]) for old in first.measurements if old.name in later and later[old.name].better]
        directions = [_clear_direction(*pair) for pair in pairs]
        for (before, after), direction in zip(pairs, directions, strict=True):
            if direction:
                verb = "rose" if direction > 0 else "fell"
                text = f"{task.capitalize()}: {before.name} {verb} from {before.text} ({first.model}) to {after.text}"
                rating: Rating = "good" if (direction > 0) == (after.better == "higher") else "bad"
                summary.findings[rating].append(f"{text} ({last.model}). The 95 % intervals do not overlap.")
        if pairs and not any(directions):
            text = f"{task.capitalize()}: {first.model} and {last.model} do not differ significantly on any measurement"
            summary.findings["note"].append(f"{text} (n = {pairs[0][0].n}).")


def _clear_direction(before: Measurement, after: Measurement) -> int:
    """Return 1 if the later interval is above the earlier one, -1 if below, 0 if they overlap or one is unknown."""
    if before.low is None or before.high is None or after.low is None or after.high is None:
        return 0
    return (after.low > before.high) - (after.high < before.low)
