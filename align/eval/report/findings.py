"""What a run achieved and what it cost, found in its files."""

from align.eval.report.compare import accuracy, first_and_kept
from align.eval.report.evaluations import evaluation_findings
from align.eval.report.ppo_findings import ppo_findings
from align.eval.report.runs import Runs, StageRun
from align.eval.report.summary import Digest, Line, mood_of, number, percent
from align.reward.metrics import summarize

STAGE_WORDS = {"sft": "supervised fine-tuning", "reward": "the reward model", "ppo": "PPO"}
LENGTH_LIMIT = 0.4
"""Correlation of reward with length from which on length counts as rewarded."""

CALIBRATION_LIMIT = 0.1


def digest(runs: Runs) -> Digest:
    """Find out what improved, by how much, at which KL, and what got worse."""
    result = Digest()
    result.first, result.kept = first_and_kept(runs)
    if "sft" in runs.stages:
        _sft(result, runs.stages["sft"])
    if "reward" in runs.stages:
        _reward(result, runs)
    if "ppo" in runs.stages:
        ppo_findings(result, runs)
    evaluation_findings(result, runs.evaluations)
    if not result.headline:
        stages = " and ".join(STAGE_WORDS[stage] for stage in runs.stages)
        result.headline = f"This run has {stages}; a policy before and after PPO cannot be compared yet."
    return result


def _sft(result: Digest, run: StageRun) -> None:
    losses = run.series("validation/loss")
    if not losses:
        return
    name, first, best = "SFT: validation loss", losses.values[0], min(losses.values)
    at = losses.updates[losses.values.index(best)]
    perplexity = run.series("validation/perplexity").at(at)
    note = f"lower is better; best at update {at}" + (f"; perplexity {number(perplexity)}" if perplexity else "")
    if len(losses.values) == 1:
        result.compare(name, None, best, note=note)
        return
    result.compare(name, first, best, note=note, mood=mood_of(best - first, rising_is_good=False))
    if best < first:
        course = f"from {number(first)} (update {losses.updates[0]}) to {number(best)} (update {at})"
        text = f"Fine-tuning taught the model the style of the demonstrations: its loss on held-out ones fell {course}."
        result.say("good", text)
    if losses.values[-1] > best * 1.02:
        end = number(losses.values[-1])
        result.say("note", f"Fine-tuning overfits after update {at}: its validation loss ends at {end}.")


def _reward(result: Digest, runs: Runs) -> None:
    share = accuracy(runs.rankings)
    if share is None:
        return
    figures = summarize(runs.rankings)
    interval = f"{percent(share.low)} to {percent(share.high)}"
    above = share.low > 0.5
    accurate = Line(
        "Reward model: pairs in the right order",
        "50 %",
        percent(share.share),
        percent(share.share - 0.5, sign=True),
        interval,
        f"against chance; {share.pairs} pairs of {len(runs.rankings)} held-out rankings",
        "good" if above else "bad" if share.high < 0.5 else "",
    )
    tau, slope, error = figures["kendall_tau"], figures["length_correlation"], figures["calibration_error"]
    result.lines += [
        accurate,
        Line("Reward model: calibration error", "–", percent(error), note="0 is perfect"),
        Line("Reward model: Kendall's tau", "–", number(tau), note="1: the labelers' order, 0: none"),
        Line("Reward model: correlation with length", "–", number(slope), note="near 0 is best"),
    ]
    text = f"The reward model agrees with the labelers on {percent(share.share)} of held-out pairs"
    text += f" (95 % interval {interval}; chance is 50 %)"
    if above:
        result.say("good", text + ".")
    else:
        result.say("bad", text + ": not clearly better than chance, so the rewards below mean little.")
    if abs(slope) > LENGTH_LIMIT:
        way = "long" if slope > 0 else "short"
        result.say("bad", f"The reward model favours {way} responses (correlation with length {number(slope)}).")
    if error > CALIBRATION_LIMIT:
        result.say("bad", f"How sure the reward model is misses how often it is right by {percent(error)} on average.")
    _which_model(result, runs.stages["reward"], figures["loss"])


def _which_model(result: Digest, run: StageRun, loss: float) -> None:
    """Say so if validation.json was written at another evaluation than that of the model that was kept."""
    losses = run.series("validation/loss")
    if not losses:
        return
    best, shown = min(losses.values), min(losses.values, key=lambda value: abs(value - loss))
    if shown > best:
        kept, update = (losses.updates[losses.values.index(value)] for value in (best, shown))
        result.say("note", f"The figures of the reward model are of update {update}, the kept one is of update {kept}.")
