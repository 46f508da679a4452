"""What a run achieved and what it cost: sentences for anyone, and a table of the numbers behind them."""

from dataclasses import dataclass, field
from typing import Literal

from align.eval.report.compare import Pair, accuracy, first_and_kept, in_turn, max_kl, mean_interval, pair_samples
from align.eval.report.runs import Runs, StageRun, SummaryRow
from align.reward.metrics import summarize

Mood = Literal["good", "bad", "note"]


@dataclass(frozen=True)
class Finding:
    """One sentence; `good` and `bad` sort it under what improved and what got worse, `note` under neither."""

    mood: Mood
    text: str


@dataclass(frozen=True)
class Line:
    """A line of the table of numbers, ready to be shown."""

    name: str
    before: str
    after: str
    change: str = ""
    interval: str = ""
    note: str = ""
    mood: str = ""


@dataclass
class Digest:
    """A report's summary.

    Attributes:
        headline: the outcome in one sentence.
        lines: the numbers.
        pairs: samples of the first evaluation beside those of the kept policy, largest gains and losses in turn.
        first, kept: the updates of those two evaluations.
    """

    headline: str = ""
    findings: list[Finding] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    first: int | None = None
    kept: int | None = None

    def say(self, mood: Mood, text: str) -> None:
        """Add a sentence."""
        self.findings.append(Finding(mood, text))


def number(value: float | str | None, sign: bool = False) -> str:
    """Three significant digits, no exponent for everyday sizes; text stays as it is, None becomes a dash."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if value != value or abs(value) in (float("inf"),):
        return "not a number"
    text = f"{value:{'+' if sign else ''},.0f}" if abs(value) >= 1000 else f"{value:{'+' if sign else ''}.3g}"
    return text.replace("-", "−") if "e" not in text else text


def percent(value: float, sign: bool = False) -> str:
    """A share as a percentage with one digit; with a sign it is a difference, in percentage points."""
    return (f"{100 * value:+.1f} points" if sign else f"{100 * value:.1f} %").replace("-", "−")


def line_of(row: SummaryRow) -> Line:
    """A row of summary.json as the table shows it; the change is there where both ends are numbers."""
    both = not isinstance(row.before, str) and not isinstance(row.after, str)
    change = number(float(row.after) - float(row.before), sign=True) if both else ""
    return Line(row.name, number(row.before), number(row.after), change, row.interval, row.note)


def digest(runs: Runs) -> Digest:
    """Find out what improved, by how much, at which KL, and what got worse."""
    result = Digest()
    result.first, result.kept = first_and_kept(runs)
    if "sft" in runs.stages:
        _sft(result, runs.stages["sft"])
    if "reward" in runs.stages:
        _reward(result, runs)
    if "ppo" in runs.stages:
        _ppo(result, runs)
    result.headline = result.headline or _plain_headline(runs)
    return result


def _plain_headline(runs: Runs) -> str:
    names = {"sft": "supervised fine-tuning", "reward": "the reward model", "ppo": "PPO"}
    return f"This run has {' and '.join(names[stage] for stage in runs.stages)}; a policy before and after PPO cannot be compared yet."


def _sft(result: Digest, run: StageRun) -> None:
    losses = run.series("validation/loss")
    if not losses:
        return
    best = min(losses.values)
    at = losses.updates[losses.values.index(best)]
    perplexity = run.series("validation/perplexity").at(at)
    note = f"lower is better; perplexity {number(perplexity)}; best at update {at}" if perplexity else f"best at update {at}"
    if len(losses.values) == 1:
        result.lines.append(Line("SFT: validation loss", "–", number(best), note=note))
        return
    first = losses.values[0]
    result.lines.append(
        Line(
            "SFT: validation loss",
            number(first),
            number(best),
            number(best - first, True),
            "",
            note,
            _mood(best - first, False),
        )
    )
    if best < first:
        result.say(
            "good",
            f"Fine-tuning taught the model the style of the demonstrations: its loss on held-out ones fell from {number(first)} "
            f"(update {losses.updates[0]}) to {number(best)} (update {at}).",
        )
    if losses.values[-1] > best * 1.02:
        result.say(
            "note", f"Fine-tuning overfits after update {at}: its validation loss ends at {number(losses.values[-1])}."
        )


def _reward(result: Digest, runs: Runs) -> None:
    share = accuracy(runs.rankings)
    if share is None:
        return
    figures = summarize(runs.rankings)
    interval = f"{percent(share.low)} to {percent(share.high)}"
    note = f"{share.pairs} pairs of {len(runs.rankings)} held-out rankings; 50 % is chance"
    above = share.low > 0.5
    mood = "good" if above else "bad" if share.high < 0.5 else ""
    result.lines += [
        Line(
            "Reward model: pairs in the right order",
            "50 %",
            percent(share.share),
            percent(share.share - 0.5, True),
            interval,
            note,
            mood,
        ),
        Line("Reward model: calibration error", "–", percent(figures["calibration_error"]), note="0 is perfect"),
        Line("Reward model: Kendall's tau", "0", number(figures["kendall_tau"]), note="1: the labelers' order, 0: none"),
        Line("Reward model: correlation with length", "–", number(figures["length_correlation"]), note="near 0 is best"),
    ]
    text = f"The reward model agrees with the labelers on {percent(share.share)} of held-out pairs (95 % interval {interval}; chance is 50 %)"
    result.say(
        "good" if above else "bad", text + ("." if above else ": not clearly better than chance. Rewards below mean little.")
    )
    if abs(figures["length_correlation"]) > 0.4:
        way = "long" if figures["length_correlation"] > 0 else "short"
        result.say(
            "bad",
            f"The reward model favours {way} responses (correlation with length {number(figures['length_correlation'])}).",
        )
    if figures["calibration_error"] > 0.1:
        result.say(
            "bad", f"The reward model is off by {percent(figures['calibration_error'])} on average in how sure it is."
        )
    losses = runs.stages["reward"].series("validation/loss")
    nearest = min(losses.values, key=lambda loss: abs(loss - figures["loss"]), default=0.0)
    if losses and nearest > min(losses.values):
        best, shown = (losses.updates[losses.values.index(loss)] for loss in (min(losses.values), nearest))
        result.say(
            "note", f"These figures of the reward model are of update {shown}; the model kept is that of update {best}."
        )


def _ppo(result: Digest, runs: Runs) -> None:
    run, first, kept = runs.stages["ppo"], result.first, result.kept
    if first is not None and kept is None and runs.samples:
        only = max(runs.samples)
        result.pairs = sorted(pair_samples([], runs.samples[only]), key=lambda pair: -pair.after.reward)
    if first is None or kept is None:
        return
    shown = kept if kept in runs.samples else max(runs.samples, default=kept)
    result.pairs = in_turn(pair_samples(runs.samples.get(first, []), runs.samples.get(shown, [])))
    _reward_change(result, run, first, kept)
    _text_changes(result, run, first, kept)
    entropy = run.series("entropy")
    if len(entropy.values) > 1:
        begun, ended = entropy.values[0], entropy.values[-1]
        result.lines.append(
            Line(
                "PPO: entropy, nats a token",
                number(begun),
                number(ended),
                number(ended - begun, True),
                note="first and last rollout",
            )
        )
        if ended < 0.5 * begun:
            result.say(
                "bad", f"Responses became less varied: entropy fell from {number(begun)} to {number(ended)} nats a token."
            )


def _reward_change(result: Digest, run: StageRun, first: int, kept: int) -> None:
    rewards, distances = run.series("validation/reward"), run.series("validation/kl")
    before, after, kl = rewards.at(first), rewards.at(kept), distances.at(kept)
    changes = [pair.change for pair in result.pairs if pair.before]
    found = mean_interval(changes)
    if before is None or after is None:
        return
    change = after - before
    interval = f"{number(found[1], True)} to {number(found[2], True)}" if found else ""
    clear = found is not None and (found[1] > 0 or found[2] < 0)
    mood = ("good" if change > 0 else "bad") if clear else ""
    note = f"update {first} against update {kept}, " + (
        f"{len(changes)} prompts" if changes else "no samples to take an interval from"
    )
    result.lines.append(
        Line("PPO: reward on held-out prompts", number(before), number(after), number(change, True), interval, note, mood)
    )
    if kl is not None:
        start = distances.at(first)
        result.lines.append(
            Line("PPO: KL to the starting model, nats a response", number(start), number(kl), note="the price of the reward")
        )
    what = "rose" if change > 0 else "fell" if change < 0 else "stayed the same"
    inside = f"by {number(abs(change))}, from {number(before)} to {number(after)}" + (
        f" (95 % interval of the change {interval})" if interval else ""
    )
    price = f", at a KL of {number(kl)} nats a response from the starting model" if kl is not None else ""
    verdict = "" if clear or not found else ". The interval includes no change"
    result.headline = f"With PPO the reward on held-out prompts {what} {inside}{price}{verdict}."
    later = [update for update in rewards.updates if update > first]
    if len(later) > 1:
        result.say(
            "note",
            f"Update {kept} was chosen as the best of {len(later)} evaluations on these same prompts, which flatters it a little.",
        )
    _losers(result, len(changes))
    if (last := rewards.values[-1]) < after and rewards.updates[-1] > kept:
        result.say("note", f"After update {kept} the reward fell again, to {number(last)} at update {rewards.updates[-1]}.")
    if kl is not None and kl > max_kl(run):
        result.say("bad", f"No policy stayed within the KL limit of {number(max_kl(run))}; the last one was kept.")


def _losers(result: Digest, compared: int) -> None:
    losers = sum(pair.worse for pair in result.pairs if pair.before)
    if compared:
        winners = sum(pair.change > 0 for pair in result.pairs if pair.before)
        result.say(
            "good" if winners else "note", f"{winners} of {compared} held-out prompts got a response with a higher reward."
        )
    if losers:
        result.say("bad", f"{losers} of {compared} held-out prompts got a response with a lower reward: see the samples.")


def _text_changes(result: Digest, run: StageRun, first: int, kept: int) -> None:
    """Length, endings and repetition: where reward often hides what got worse. Limits as in `align.ppo.watch.Drift` or tighter."""
    length, ended, repeated = (run.series(f"validation/{name}") for name in ("length", "ended", "repetition"))
    before, after = length.at(first), length.at(kept)
    if before is not None and after is not None:
        result.lines.append(
            Line("PPO: response length, tokens", number(before), number(after), number(after - before, True))
        )
        if before and not 0.67 <= after / before <= 1.5:
            result.say(
                "bad",
                f"Responses went from {number(before)} to {number(after)} tokens: check whether length alone earns reward.",
            )
    for series, name, rising_is_good, limit, words in (
        (ended, "PPO: responses that end by themselves", True, 0.05, "Fewer responses end by themselves"),
        (repeated, "PPO: repeated three-token sequences", False, 0.02, "Responses repeat themselves more"),
    ):
        before, after = series.at(first), series.at(kept)
        if before is None or after is None:
            continue
        change = after - before
        mood = _mood(change, rising_is_good) if abs(change) > limit else ""
        result.lines.append(Line(name, percent(before), percent(after), percent(change, True), mood=mood))
        if mood == "bad":
            result.say("bad", f"{words}: from {percent(before)} to {percent(after)}.")


def _mood(change: float, rising_is_good: bool) -> str:
    return "" if change == 0 else "good" if (change > 0) == rising_is_good else "bad"
