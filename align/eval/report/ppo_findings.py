"""What PPO achieved and what it cost."""

from align.eval.report.comparisons import (
    SamplePair,
    alternate_gains_and_losses,
    max_kl,
    mean_with_interval,
    pair_samples,
)
from align.eval.report.runs import RunData, Series, StageRun
from align.eval.report.summary import Summary, TableRow, rate_change
from align.eval.report.text import format_number, format_percent

RULE_PREFIX = "validation/rule/"
RULE_CHANGE = 0.02
"""Changes of the share of violations below this are not rated."""
ENTROPY_LIMIT = 0.5
"""Share of the first entropy below which the report warns."""


def add_ppo_findings(summary: Summary, run: RunData) -> None:
    """Fill in the headline, sentences, rows and samples; `summary.first` and `summary.kept` are set already."""
    ppo, first, kept = run.stages["ppo"], summary.first, summary.kept
    _choose_samples(summary, run)
    if first is None or kept is None:
        return
    compared = [pair for pair in summary.pairs if pair.before] if summary.compared == (first, kept) else []
    _add_reward_change(summary, ppo, first, kept, compared)
    _add_rule_changes(summary, ppo, first, kept)
    _add_text_changes(summary, ppo, first, kept)
    entropy = ppo.series("entropy")
    if len(entropy.values) > 1:
        at_start, at_end = entropy.values[0], entropy.values[-1]
        summary.add_row("PPO: entropy, nats per token", at_start, at_end, note="first and last rollout")
        if at_end < ENTROPY_LIMIT * at_start:
            change = f"entropy fell from {format_number(at_start)} to {format_number(at_end)} nats per token"
            summary.add_finding("bad", f"Responses became less varied: {change}.")


def _choose_samples(summary: Summary, run: RunData) -> None:
    """Samples of the first and the kept evaluation; where those are lost, of the first and last update that have any."""
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
    rewards = ppo.series("validation/reward")
    before, after = rewards.at(first), rewards.at(kept)
    if before is None or after is None:
        return
    change = after - before
    mean = mean_with_interval([pair.change for pair in compared])
    interval = f"{format_number(mean[1], sign=True)} to {format_number(mean[2], sign=True)}" if mean else ""
    clear = mean is not None and (mean[1] > 0 or mean[2] < 0)
    rating = rate_change(change, rising_is_good=True) if clear else ""
    note = f"update {first} against {kept}" + (f", {len(compared)} prompts" if compared else "")
    summary.add_row("PPO: reward on held-out prompts", before, after, interval=interval, note=note, rating=rating)
    outcome = f"{'rose' if change > 0 else 'fell'} by {format_number(abs(change))}" if change else "did not change"
    text = f"With PPO the reward on held-out prompts {outcome}, from {format_number(before)} to {format_number(after)}"
    text += f" (95 % interval of the change {interval})" if mean else ""
    if rating == "bad":
        summary.add_finding("bad", f"The reward that PPO should raise {outcome}.")
    kl = ppo.series("validation/kl").at(kept)
    if kl is not None:
        name, start = "PPO: KL to the starting model, nats per response", ppo.series("validation/kl").at(first)
        summary.rows.append(TableRow(name, format_number(start), format_number(kl), note="distance moved for the reward"))
        text += f", at a KL of {format_number(kl)} nats per response from the starting model"
        if kl > max_kl(ppo):
            limit = format_number(max_kl(ppo))
            summary.add_finding("bad", f"No policy stayed within the KL limit of {limit}; the last one was kept.")
    unclear = "" if clear or not mean else ". The interval includes no change, so this may be chance"
    summary.headline = f"{text}{unclear}."
    _add_prompt_counts(summary, compared)
    _add_caveats(summary, ppo, first, kept)


def _add_prompt_counts(summary: Summary, compared: list[SamplePair]) -> None:
    if not compared:
        return
    winners, losers = sum(pair.change > 0 for pair in compared), sum(pair.worse for pair in compared)
    of_all = f"of {len(compared)} held-out prompts got a response with a"
    summary.add_finding("good" if winners > losers else "note", f"{winners} {of_all} higher reward.")
    if losers:
        summary.add_finding("bad", f"{losers} {of_all} lower reward: see the samples.")


def _add_caveats(summary: Summary, ppo: StageRun, first: int, kept: int) -> None:
    rewards = ppo.series("validation/reward")
    later = [update for update in rewards.updates if update > first]
    judge = ppo.series("validation/judge")
    if judge:
        _add_judge_change(summary, judge, first, kept, ppo.config.get("judge_model"))
    elif len(later) > 1:
        chosen = f"Update {kept} was chosen as the best of {len(later)} evaluations on these same prompts"
        summary.add_finding("note", f"{chosen}, so its reward is slightly overestimated.")
        summary.add_finding(
            "note", "The policy was selected by the same reward that it was trained on: there was no independent judge."
        )
    last, end = rewards.updates[-1], rewards.values[-1]
    if last > kept and end < (rewards.at(kept) or 0.0):
        summary.add_finding("note", f"After update {kept} the reward fell again, to {format_number(end)} at update {last}.")


def _add_judge_change(summary: Summary, judge: Series, first: int, kept: int, name: object) -> None:
    """How the score of the judge, which the policy was not trained on, changed."""
    before, after = judge.at(first), judge.at(kept)
    if before is None or after is None:
        return
    rating = rate_change(after - before, rising_is_good=True)
    summary.add_row("PPO: judge on held-out prompts", before, after, note=f"chose update {kept}", rating=rating)
    change = f"from {format_number(before)} to {format_number(after)}"
    summary.add_finding(
        "good" if after > before else "bad",
        f"The judge {name or ''}, which was not trained on, chose update {kept}: {change}.",
    )


def _add_rule_changes(summary: Summary, ppo: StageRun, first: int, kept: int) -> None:
    """A line for each rule of a rule model: how likely responses violate it."""
    rules = sorted({name for figures in ppo.metrics.values() for name in figures if name.startswith(RULE_PREFIX)})
    preference = ppo.series("validation/preference")
    before, after = preference.at(first), preference.at(kept)
    if before is not None and after is not None:
        rating = rate_change(after - before, rising_is_good=True)
        summary.add_row("PPO: preference reward on held-out prompts", before, after, note="without rules", rating=rating)
    for metric in rules:
        before, after = ppo.series(metric).at(first), ppo.series(metric).at(kept)
        if before is None or after is None:
            continue
        rule, change = metric.removeprefix(RULE_PREFIX), after - before
        rating = rate_change(change, rising_is_good=False) if abs(change) > RULE_CHANGE else ""
        cells = format_percent(before), format_percent(after), format_percent(change, sign=True)
        summary.rows.append(TableRow(f"PPO: violations of {rule}", *cells, note="by the rule model", rating=rating))
        if rating == "bad":
            summary.add_finding(
                "bad", f"Rule {rule} is violated more often: {format_percent(before)} to {format_percent(after)}."
            )


def _add_text_changes(summary: Summary, ppo: StageRun, first: int, kept: int) -> None:
    """Report length, endings and repetition, which often get worse while the reward rises.

    The limits are tighter than those of `align.ppo.watch.DriftWatch`, which warns during a run.
    """
    length = ppo.series("validation/length")
    before, after = length.at(first), length.at(kept)
    if before is not None and after is not None:
        summary.add_row("PPO: response length, tokens", before, after)
        if before and not 0.67 <= after / before <= 1.5:
            endpoints = f"from {format_number(before)} to {format_number(after)} tokens"
            summary.add_finding("bad", f"Response length went {endpoints}: check whether length alone earns reward.")
    shares = [
        ("ended", "PPO: responses that end by themselves", True, 0.05, "Fewer responses end by themselves"),
        ("repetition", "PPO: repeated three-token sequences", False, 0.02, "Responses repeat themselves more"),
    ]
    for metric, name, rising_is_good, limit, words in shares:
        series = ppo.series(f"validation/{metric}")
        before, after = series.at(first), series.at(kept)
        if before is None or after is None:
            continue
        change = after - before
        rating = rate_change(change, rising_is_good) if abs(change) > limit else ""
        cells = format_percent(before), format_percent(after), format_percent(change, sign=True)
        summary.rows.append(TableRow(name, *cells, rating=rating))
        if rating == "bad":
            summary.add_finding("bad", f"{words}: from {format_percent(before)} to {format_percent(after)}.")
