"""What PPO achieved and what it cost."""

from align.eval.report.compare import Pair, in_turn, max_kl, mean_interval, pair_samples
from align.eval.report.runs import Runs, StageRun
from align.eval.report.summary import Digest, Line, mood_of, number, percent


def ppo_findings(result: Digest, runs: Runs) -> None:
    """Fill in the headline, sentences, lines and samples; `result.first` and `result.kept` are known already."""
    run, first, kept = runs.stages["ppo"], result.first, result.kept
    _choose_samples(result, runs)
    if first is None or kept is None:
        return
    compared = [pair for pair in result.pairs if pair.before] if result.compared == (first, kept) else []
    _reward_change(result, run, first, kept, compared)
    _text_changes(result, run, first, kept)
    entropy = run.series("entropy")
    if len(entropy.values) > 1:
        begun, ended = entropy.values[0], entropy.values[-1]
        result.compare("PPO: entropy, nats a token", begun, ended, note="first and last rollout")
        if ended < 0.5 * begun:
            course = f"entropy fell from {number(begun)} to {number(ended)} nats a token"
            result.say("bad", f"Responses became less varied: {course}.")


def _choose_samples(result: Digest, runs: Runs) -> None:
    """Samples of the first and the kept evaluation; of the first and last that have any, where those are lost."""
    if not runs.samples:
        return
    first, last = min(runs.samples), max(runs.samples)
    after = result.kept if result.kept in runs.samples else last
    assert after is not None
    if after == first:
        result.pairs, result.compared = pair_samples([], runs.samples[after]), (None, after)
    else:
        result.pairs = in_turn(pair_samples(runs.samples[first], runs.samples[after]))
        result.compared = (first, after)


def _reward_change(result: Digest, run: StageRun, first: int, kept: int, compared: list[Pair]) -> None:
    rewards = run.series("validation/reward")
    before, after = rewards.at(first), rewards.at(kept)
    if before is None or after is None:
        return
    change = after - before
    found = mean_interval([pair.change for pair in compared])
    interval = f"{number(found[1], sign=True)} to {number(found[2], sign=True)}" if found else ""
    clear = found is not None and (found[1] > 0 or found[2] < 0)
    mood = mood_of(change, rising_is_good=True) if clear else ""
    note = f"update {first} against {kept}" + (f", {len(compared)} prompts" if compared else "")
    result.compare("PPO: reward on held-out prompts", before, after, interval=interval, note=note, mood=mood)
    what = f"{'rose' if change > 0 else 'fell'} by {number(abs(change))}" if change else "did not change"
    text = f"With PPO the reward on held-out prompts {what}, from {number(before)} to {number(after)}"
    text += f" (95 % interval of the change {interval})" if found else ""
    if mood == "bad":
        result.say("bad", f"The reward that PPO is there to raise {what}.")
    kl = run.series("validation/kl").at(kept)
    if kl is not None:
        name, start = "PPO: KL to the starting model, nats a response", run.series("validation/kl").at(first)
        result.lines.append(Line(name, number(start), number(kl), note="the price of the reward"))
        text += f", at a KL of {number(kl)} nats a response from the starting model"
        if kl > max_kl(run):
            result.say("bad", f"No policy stayed within the KL limit of {number(max_kl(run))}; the last one was kept.")
    unclear = "" if clear or not found else ". The interval includes no change, so this may be chance"
    result.headline = f"{text}{unclear}."
    _per_prompt(result, compared)
    _caveats(result, run, first, kept)


def _per_prompt(result: Digest, compared: list[Pair]) -> None:
    if not compared:
        return
    winners, losers = sum(pair.change > 0 for pair in compared), sum(pair.worse for pair in compared)
    of_all = f"of {len(compared)} held-out prompts got a response with a"
    result.say("good" if winners > losers else "note", f"{winners} {of_all} higher reward.")
    if losers:
        result.say("bad", f"{losers} {of_all} lower reward: see the samples.")


def _caveats(result: Digest, run: StageRun, first: int, kept: int) -> None:
    rewards = run.series("validation/reward")
    later = [update for update in rewards.updates if update > first]
    if len(later) > 1:
        chosen = f"Update {kept} was chosen as the best of {len(later)} evaluations on these same prompts"
        result.say("note", f"{chosen}, which flatters it a little.")
    last, end = rewards.updates[-1], rewards.values[-1]
    if last > kept and end < (rewards.at(kept) or 0.0):
        result.say("note", f"After update {kept} the reward fell again, to {number(end)} at update {last}.")


def _text_changes(result: Digest, run: StageRun, first: int, kept: int) -> None:
    """Length, endings and repetition, where a higher reward often hides what got worse.

    The limits are tighter than those of `align.ppo.watch.Drift`, which warns while a run goes on.
    """
    length = run.series("validation/length")
    before, after = length.at(first), length.at(kept)
    if before is not None and after is not None:
        result.compare("PPO: response length, tokens", before, after)
        if before and not 0.67 <= after / before <= 1.5:
            course = f"from {number(before)} to {number(after)} tokens"
            result.say("bad", f"Response length went {course}: check whether length alone earns reward.")
    shares = [
        ("ended", "PPO: responses that end by themselves", True, 0.05, "Fewer responses end by themselves"),
        ("repetition", "PPO: repeated three-token sequences", False, 0.02, "Responses repeat themselves more"),
    ]
    for metric, name, rising_is_good, limit, words in shares:
        series = run.series(f"validation/{metric}")
        before, after = series.at(first), series.at(kept)
        if before is None or after is None:
            continue
        change = after - before
        mood = mood_of(change, rising_is_good) if abs(change) > limit else ""
        result.lines.append(Line(name, percent(before), percent(after), percent(change, sign=True), mood=mood))
        if mood == "bad":
            result.say("bad", f"{words}: from {percent(before)} to {percent(after)}.")
