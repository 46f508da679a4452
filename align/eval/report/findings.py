"""What a run achieved and what got worse: sentences, and rows of a table with numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from align.eval.core.results import Better, Evaluation, Figure
from align.eval.report.comparisons import (
    SamplePair,
    alternate_gains_and_losses,
    first_and_kept_updates,
    max_kl,
    mean_with_interval,
    pair_accuracy,
    pair_samples,
)
from align.eval.report.data import STAGES, RunData, StageRun, TableRow, format_number, format_percent
from align.reward.rankings import ScoredRanking, ranking_metrics

Rating = Literal["good", "bad", "note"]
"""`good` and `bad` put a sentence under what improved and what got worse, `note` under neither."""
REWARD_MODEL_TASKS = ("reward", "rewardbench", "rewardbench-2")
"""Tasks whose models are reward models side by side, not a start and what was trained from it."""


@dataclass(frozen=True)
class Check:
    """A row of the table of numbers, and sentences for a value that got better or worse.

    The texts are templates: all may name the words that `Summary.add` gets, the sentences also `{before}`, `{after}` and
    `{size}`, the absolute change.

    Attributes:
        better: the better direction; empty: the change is not rated.
        limit: absolute change up to which a value counts as unchanged.
        ratios: least and greatest value after, relative to the value before; outside of them it got worse.
        most: greatest absolute value after; above it got worse.
        percent: whether the value is a share.
    """

    name: str
    better: Better = ""
    limit: float = 0.0
    ratios: tuple[float, float] | None = None
    most: float = float("inf")
    percent: bool = False
    note: str = ""
    good: str = ""
    bad: str = ""

    def rate(self, before: float | None, after: float) -> Literal["good", "bad", ""]:
        """Return `good`, `bad`, or empty for no change or an unrated one."""
        if before is None:
            return "bad" if abs(after) > self.most else ""
        if self.ratios:
            return "bad" if before and not self.ratios[0] <= after / before <= self.ratios[1] else ""
        if not self.better or abs(after - before) <= self.limit:
            return ""
        return "good" if (after > before) == (self.better == "higher") else "bad"


SFT_LOSS = Check(
    "SFT: validation loss",
    "lower",
    note="lower is better; best at update {update}; perplexity {perplexity}",
    good="Fine-tuning taught the model the style of the demonstrations: its loss on held-out ones fell from {before} "
    "(update {first}) to {after} (update {update}).",
)
DISTILL_KL = Check(
    "Distillation: KL to the teacher", "lower", note="nats per token, 0 is the teacher; best at update {update}"
)
REWARD_CHECKS = {
    "calibration_error": Check(
        "Reward model: calibration error",
        most=0.1,
        percent=True,
        note="0 is perfect",
        bad="The reward model's confidence differs from its accuracy by {after} on average.",
    ),
    "kendall_tau": Check("Reward model: Kendall's tau", note="1: the labelers' order, 0: none"),
    "length_correlation": Check(
        "Reward model: correlation with length",
        most=0.4,
        note="near 0 is best",
        bad="The reward model favors {preferred} responses (correlation with length {after}).",
    ),
}
"""Checks of the reward model, by the figure of `align.reward.rankings.ranking_metrics`."""
PPO_REWARD = Check(
    "PPO: reward on held-out prompts",
    "higher",
    note="update {first} against {kept}{prompts}",
    bad="The reward that PPO should raise fell by {size}.",
)
JUDGE_CHANGE = "The judge {judge}, which was not trained on, chose update {kept}: from {before} to {after}."
PPO_CHECKS = {
    "validation/judge": Check(
        "PPO: judge on held-out prompts", "higher", note="chose update {kept}", good=JUDGE_CHANGE, bad=JUDGE_CHANGE
    ),
    "validation/preference": Check("PPO: preference reward on held-out prompts", "higher", note="without rules"),
    "validation/rule/": Check(
        "PPO: violations of {rule}",
        "lower",
        limit=0.02,
        percent=True,
        note="by the rule model",
        bad="Rule {rule} is violated more often: {before} to {after}.",
    ),
    "validation/length": Check(
        "PPO: response length, tokens",
        ratios=(0.67, 1.5),
        bad="Response length went from {before} to {after} tokens: check whether length alone earns reward.",
    ),
    "validation/ended": Check(
        "PPO: responses that end by themselves",
        "higher",
        limit=0.05,
        percent=True,
        bad="Fewer responses end by themselves: from {before} to {after}.",
    ),
    "validation/repetition": Check(
        "PPO: repeated three-token sequences",
        "lower",
        limit=0.02,
        percent=True,
        bad="Responses repeat themselves more: from {before} to {after}.",
    ),
}
"""Checks of the kept policy against the first evaluation, by metric; a name that ends in `/` is a prefix.

The limits are tighter than those of `align.ppo.metrics.DriftWatch`, which warns during a run.
"""
ENTROPY = Check(
    "PPO: entropy, nats per token",
    ratios=(0.5, float("inf")),
    note="first and last rollout",
    bad="Responses became less varied: entropy fell from {before} to {after} nats per token.",
)


@dataclass
class Summary:
    """The outcome of a run.

    Attributes:
        first, kept: the updates of the first evaluation and of the policy that was kept.
        pairs: samples of two evaluations, the largest gains and losses alternating.
        compared: the updates of those two; the first is None if only one evaluation has samples.
    """

    headline: str = ""
    findings: list[tuple[Rating, str]] = field(default_factory=list)
    rows: list[TableRow] = field(default_factory=list)
    first: int | None = None
    kept: int | None = None
    pairs: list[SamplePair] = field(default_factory=list)
    compared: tuple[int | None, int | None] = (None, None)

    def add_finding(self, rating: Rating, text: str) -> None:
        """Add a sentence."""
        self.findings.append((rating, text))

    def texts(self, rating: Rating) -> list[str]:
        """Return the sentences of one kind."""
        return [text for kind, text in self.findings if kind == rating]

    def add(
        self, check: Check, before: float | None, after: float, interval: str = "", clear: bool = True, **words: object
    ) -> None:
        """Add a row with its change, and the check's sentence where the value got better or worse.

        Without `clear` the change may be chance and is not rated; `words` fill the check's templates.
        """
        show = format_percent if check.percent else format_number
        change = "" if before is None else show(after - before, sign=True)
        rating = check.rate(before, after) if clear else ""
        name, note = check.name.format(**words), check.note.format(**words)
        self.rows.append(TableRow(name, show(before), show(after), change, interval, note, rating))
        template = {"good": check.good, "bad": check.bad}.get(rating)
        if rating and template:
            words |= {"before": show(before), "after": show(after), "size": show(abs(after - (before or 0.0)))}
            self.add_finding(rating, template.format(**words))


def summarize_run(run: RunData) -> Summary:
    """Find out what improved, by how much, at which KL, and what got worse."""
    summary = Summary()
    summary.first, summary.kept = first_and_kept_updates(run)
    for stage in run.stages.values():
        if stage.stage == "sft":
            _add_best(summary, stage, "validation/loss", SFT_LOSS)
        elif stage.stage == "reward":
            _add_reward_findings(summary, stage, run.rankings["reward"])
        elif stage.stage == "dpo":
            claim = "DPO moved the policy the labelers' way"
            _add_pair_accuracy(summary, "DPO", claim, run.rankings["dpo"], "note", "")
        elif stage.stage == "distill":
            _add_best(summary, stage, "validation/kl", DISTILL_KL)
        else:
            _add_ppo_findings(summary, stage, run)
    add_evaluation_findings(summary, run.evaluations)
    if not summary.headline:
        stages = ", ".join(STAGES[stage][0] for stage in run.stages)
        summary.headline = f"Stages of this run: {stages}. A policy before and after PPO cannot be compared yet."
    return summary


def _add_best(summary: Summary, stage: StageRun, metric: str, check: Check) -> None:
    """Compare the first value of a validation metric with the lowest."""
    series = stage.series(metric)
    if not series:
        return
    best, last = min(series.values), series.values[-1]
    update = series.updates[series.values.index(best)]
    perplexity = format_number(stage.series("validation/perplexity").at(update))
    before = series.values[0] if len(series.values) > 1 else None
    summary.add(check, before, best, first=series.updates[0], update=update, perplexity=perplexity)
    if stage.stage == "sft" and last > best * 1.02:
        text = f"Fine-tuning overfits after update {update}: its validation loss ends at {format_number(last)}."
        summary.add_finding("note", text)


def _add_reward_findings(summary: Summary, stage: StageRun, rankings: Sequence[ScoredRanking]) -> None:
    claim, consequence = "The reward model agrees with the labelers", ", so the rewards below mean little"
    if not _add_pair_accuracy(summary, "Reward model", claim, rankings, "bad", consequence):
        return
    figures = ranking_metrics(rankings)
    preferred = "long" if figures["length_correlation"] > 0 else "short"
    for name, check in REWARD_CHECKS.items():
        summary.add(check, None, figures[name], preferred=preferred)
    losses = stage.series("validation/loss")
    best, shown = (
        min(losses.values, default=0.0),
        min(losses.values, key=lambda value: abs(value - figures["loss"]), default=0.0),
    )
    if shown > best:  # validation.json is from a different evaluation than the kept model
        kept, update = (losses.updates[losses.values.index(value)] for value in (best, shown))
        text = f"The figures of the reward model are those of update {update}; the model of update {kept} was kept."
        summary.add_finding("note", text)


def _add_pair_accuracy(
    summary: Summary, name: str, claim: str, rankings: Sequence[ScoredRanking], unclear: Rating, consequence: str
) -> bool:
    """Add the share of held-out pairs in the right order; return False if there are none."""
    accuracy = pair_accuracy(rankings)
    if accuracy is None:
        return False
    above, share = accuracy.low > 0.5, format_percent(accuracy.accuracy)
    interval = f"{format_percent(accuracy.low)} to {format_percent(accuracy.high)}"
    row = TableRow(
        f"{name}: pairs in the right order",
        "50 %",
        share,
        format_percent(accuracy.accuracy - 0.5, sign=True),
        interval,
        f"against chance; {accuracy.pairs} pairs of {len(rankings)} held-out rankings",
        "good" if above else "bad" if accuracy.high < 0.5 else "",
    )
    summary.rows.append(row)
    text = f"{claim} on {share} of held-out pairs (95 % interval {interval}; chance is 50 %)"
    if above:
        summary.add_finding("good", text + ".")
    else:
        summary.add_finding(unclear, f"{text}: not clearly better than chance{consequence}.")
    return True


def _add_ppo_findings(summary: Summary, ppo: StageRun, run: RunData) -> None:
    """Fill in the headline, sentences, rows and samples; `summary.first` and `summary.kept` are set already."""
    first, kept = summary.first, summary.kept
    _choose_samples(summary, run)
    if first is None or kept is None:
        return
    compared = [pair for pair in summary.pairs if pair.before] if summary.compared == (first, kept) else []
    _add_reward_change(summary, ppo, first, kept, compared)
    _add_ppo_checks(summary, ppo, first, kept)
    entropy = ppo.series("entropy")
    if len(entropy.values) > 1:
        summary.add(ENTROPY, entropy.values[0], entropy.values[-1])


def _choose_samples(summary: Summary, run: RunData) -> None:
    """Choose samples of the first and the kept evaluation, or else of the first and last update that have any."""
    if not run.samples:
        return
    first, last = min(run.samples), max(run.samples)
    after = summary.kept if summary.kept in run.samples else last
    assert after is not None
    if after == first:
        summary.pairs, summary.compared = pair_samples([], run.samples[after]), (None, after)
    else:
        summary.pairs = alternate_gains_and_losses(pair_samples(run.samples[first], run.samples[after]))
        summary.compared = (first, after)


def _add_reward_change(summary: Summary, ppo: StageRun, first: int, kept: int, compared: list[SamplePair]) -> None:
    rewards, kls = ppo.series("validation/reward"), ppo.series("validation/kl")
    before, after, kl = rewards.at(first), rewards.at(kept), kls.at(kept)
    if before is None or after is None:
        return
    change = after - before
    mean = mean_with_interval([pair.change for pair in compared])
    interval = f"{format_number(mean[1], sign=True)} to {format_number(mean[2], sign=True)}" if mean else ""
    clear = mean is not None and (mean[1] > 0 or mean[2] < 0)
    prompts = f", {len(compared)} prompts" if compared else ""
    summary.add(PPO_REWARD, before, after, interval, clear, first=first, kept=kept, prompts=prompts)
    outcome = f"{'rose' if change > 0 else 'fell'} by {format_number(abs(change))}" if change else "did not change"
    text = f"With PPO the reward on held-out prompts {outcome}, from {format_number(before)} to {format_number(after)}"
    text += f" (95 % interval of the change {interval})" if mean else ""
    if kl is not None:
        name, note = "PPO: KL to the starting model, nats per response", "distance moved for the reward"
        summary.rows.append(TableRow(name, format_number(kls.at(first)), format_number(kl), note=note))
        text += f", at a KL of {format_number(kl)} nats per response from the starting model"
        if kl > max_kl(ppo):
            limit = format_number(max_kl(ppo))
            summary.add_finding("bad", f"No policy stayed within the KL limit of {limit}; the last one was kept.")
    unclear = "" if clear or not mean else ". The interval includes no change, so this may be chance"
    summary.headline = f"{text}{unclear}."
    if compared:
        winners, losers = sum(pair.change > 0 for pair in compared), sum(pair.worse for pair in compared)
        of_all = f"of {len(compared)} held-out prompts got a response with a"
        summary.add_finding("good" if winners > losers else "note", f"{winners} {of_all} higher reward.")
        if losers:
            summary.add_finding("bad", f"{losers} {of_all} lower reward: see the samples.")
    _add_caveats(summary, ppo, first, kept)


def _add_caveats(summary: Summary, ppo: StageRun, first: int, kept: int) -> None:
    rewards = ppo.series("validation/reward")
    later = [update for update in rewards.updates if update > first]
    if len(later) > 1 and not ppo.series("validation/judge"):
        chosen = f"Update {kept} was chosen as the best of {len(later)} evaluations on these same prompts"
        summary.add_finding("note", f"{chosen}, so its reward is slightly overestimated.")
        summary.add_finding(
            "note", "The policy was selected by the same reward that it was trained on: there was no independent judge."
        )
    last, end = rewards.updates[-1], rewards.values[-1]
    if last > kept and end < (rewards.at(kept) or 0.0):
        summary.add_finding("note", f"After update {kept} the reward fell again, to {format_number(end)} at update {last}.")


def _add_ppo_checks(summary: Summary, ppo: StageRun, first: int, kept: int) -> None:
    """Compare the kept policy with the first evaluation by each of `PPO_CHECKS` that has values of both."""
    metrics = sorted({name for figures in ppo.metrics.values() for name in figures})
    judge = (ppo.config.get("selection") or {}).get("reward_model", "")
    for checked, check in PPO_CHECKS.items():
        for metric in metrics:
            if metric == checked or (checked.endswith("/") and metric.startswith(checked)):
                before, after = ppo.series(metric).at(first), ppo.series(metric).at(kept)
                if before is not None and after is not None:
                    summary.add(check, before, after, kept=kept, judge=judge, rule=metric.removeprefix(checked))


def add_evaluation_findings(summary: Summary, evaluations: Sequence[Evaluation]) -> None:
    """Add which figures of the first and the last model have 95 % intervals that do not overlap.

    `Figure.better` decides whether a change is good; figures without a better direction are left out.
    """
    for task, group in groupby(evaluations, lambda evaluation: evaluation.task):
        models = list(group)
        if len(models) < 2 or task in REWARD_MODEL_TASKS:
            continue
        first, last = models[0], models[-1]
        pairs = [(before, after) for before in first.figures for after in last.figures if before.name == after.name]
        rated = [(before, after) for before, after in pairs if after.better]
        differences = 0
        for before, after in rated:
            direction = _clear_direction(before, after)
            if direction:
                differences += 1
                verb = "rose" if direction > 0 else "fell"
                text = f"{task.capitalize()}: {before.name} {verb} from {before.text} ({first.model}) to {after.text}"
                rating: Rating = "good" if (direction > 0) == (after.better == "higher") else "bad"
                summary.add_finding(rating, f"{text} ({last.model}), beyond both 95 % intervals.")
        if rated and not differences:
            text = f"{task.capitalize()}: no figure of {first.model} and {last.model} differs beyond its 95 % interval"
            summary.add_finding("note", f"{text} (n = {rated[0][0].n}).")


def _clear_direction(before: Figure, after: Figure) -> int:
    """Return 1 where the interval after lies above the one before, -1 below, 0 where they overlap or one is unknown."""
    if before.low is None or before.high is None or after.low is None or after.high is None:
        return 0
    return (after.low > before.high) - (after.high < before.low)
