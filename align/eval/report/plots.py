"""The plots of supervised fine-tuning and of the reward model. Each gives None where there is nothing to show."""

import math
from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from align.eval.report.compare import Share, accuracy_by_category, accuracy_by_distance, grouped, pair_differences
from align.eval.report.drawing import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    Plot,
    course,
    draw,
    line,
    over_updates,
    panels_plot,
    percent_axis,
)
from align.eval.report.runs import Series, StageRun
from align.reward.metrics import Scored, calibration


def sft_plots(run: StageRun) -> list[Plot]:
    """All plots of the SFT stage."""
    plots = [loss_plot(run, "sft-loss", "loss", "SFT loss", "nats a token", None), steps_plot(run, "sft-steps")]
    return [plot for plot in plots if plot]


def reward_plots(run: StageRun, rankings: Sequence[Scored]) -> list[Plot]:
    """All plots of the reward model."""
    told_apart = bool(len(pair_differences(rankings)))
    plots = [
        loss_plot(run, "reward-loss", "ranking_loss", "Reward model loss", "nats a pair", math.log(2)),
        accuracy_plot(run),
        distance_plot(accuracy_by_distance(rankings)) if told_apart else None,
        calibration_plot(rankings) if told_apart else None,
        category_plot(accuracy_by_category(rankings)) if told_apart else None,
        category_reward_plot(rankings),
        length_plot(rankings),
        steps_plot(run, "reward-steps"),
    ]
    return [plot for plot in plots if plot]


def _both(figure: Figure, train: Series, held_out: Series) -> Axes:
    """Training and validation as two lines."""
    axes = figure.subplots()
    line(axes, train, "training", BLUE)
    line(axes, held_out, "validation", ORANGE, "--", "o")
    return axes


def loss_plot(run: StageRun, name: str, metric: str, title: str, unit: str, chance: float | None) -> Plot | None:
    """Training and validation loss over updates, with the loss of a coin toss where there is one."""
    train, held_out = run.series(metric), run.series("validation/loss")
    if not train and not held_out:
        return None

    def paint(figure: Figure) -> None:
        axes = _both(figure, train, held_out)
        if chance is not None:
            axes.axhline(chance, color=INK, linewidth=1, linestyle=":", label="coin toss")
        over_updates(axes, unit)

    alt = " ".join([course(train, "Training loss"), course(held_out, "Validation loss")]).strip()
    caption = (
        "Lower is better. A validation loss that rises while training falls is overfitting; the model of the lowest is kept."
    )
    plot = draw(name, title, caption, f"{title} over updates. {alt}", paint)
    rows = [[str(update), f"{value:.4f}"] for update, value in zip(held_out.updates, held_out.values, strict=True)]
    return replace(plot, head=["update", "validation loss"], rows=rows) if len(rows) <= 60 else plot


def steps_plot(run: StageRun, name: str) -> Plot | None:
    """Learning rate and gradient norm."""
    panels = {"learning_rate": "learning rate", "gradient_norm": "gradient norm"}
    caption = (
        "The schedule, and how large gradients are before they are clipped. Spikes point to bad batches or too high a rate."
    )
    return panels_plot(run, name, "Optimiser steps", panels, caption)


def accuracy_plot(run: StageRun) -> Plot | None:
    """Pair accuracy over updates, on held-out rankings with its interval."""
    train, held_out = run.series("accuracy"), run.series("validation/accuracy")
    low, high = run.series("validation/accuracy/low"), run.series("validation/accuracy/high")
    if not train and not held_out:
        return None

    def paint(figure: Figure) -> None:
        axes = _both(figure, train, held_out)
        if low and low.updates == high.updates:
            axes.fill_between(
                low.updates, low.values, high.values, color=ORANGE, alpha=0.2, linewidth=0, label="95 % interval"
            )
        axes.axhline(0.5, color=INK, linewidth=1, linestyle=":")
        percent_axis(axes.yaxis)
        over_updates(axes, "pairs in the right order")

    caption = "Pairs that the model orders as the labelers did. Training figures are of one batch each. Dotted: chance."
    alt = " ".join([course(train, "Training accuracy"), course(held_out, "Validation accuracy")])
    return draw("reward-accuracy", "Accuracy", caption, f"Reward model pair accuracy over updates. {alt}", paint)


def distance_plot(shares: Sequence[Share]) -> Plot:
    """Pair accuracy by distance of rank, with intervals, beside chance."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        places = range(len(shares))
        below = [share.share - share.low for share in shares]
        above = [share.high - share.share for share in shares]
        axes.bar(
            places, [share.share for share in shares], yerr=[below, above], width=0.62, color=BLUE, ecolor=INK, capsize=3
        )
        axes.axhline(0.5, color=INK, linewidth=1, linestyle=":")
        axes.set_xticks(places, [f"{share.label}\n{share.pairs} pairs" for share in shares])
        axes.set_ylim(0, 1.05)
        percent_axis(axes.yaxis)
        axes.set_xlabel("ranks apart")
        axes.set_ylabel("pairs in the right order")
        axes.grid(axis="x", visible=False)

    caption = (
        "Responses that labelers put further apart should be easier to order. Dotted: chance. Whiskers: 95 % intervals."
    )
    alt = "Reward model accuracy by rank distance: " + _shares_in_words(shares)
    plot = draw("reward-distance", "Accuracy by distance of rank", caption, alt, paint)
    return replace(plot, head=["ranks apart", "accuracy", "95 % interval", "pairs"], rows=_share_rows(shares))


def category_plot(shares: Sequence[Share]) -> Plot | None:
    """Pair accuracy of each category, with intervals."""
    if not shares:
        return None
    shown = list(shares)[:24]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        places = range(len(shown))
        below = [share.share - share.low for share in shown]
        above = [share.high - share.share for share in shown]
        axes.errorbar([s.share for s in shown], places, xerr=[below, above], fmt="o", color=BLUE, capsize=3, markersize=6)
        axes.axvline(0.5, color=INK, linewidth=1, linestyle=":")
        axes.set_yticks(places, [_short(share.label) for share in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlim(0, 1.03)
        percent_axis(axes.xaxis)
        axes.set_xlabel("pairs in the right order")
        axes.grid(axis="y", visible=False)

    caption = (
        "Where the reward model agrees with the labelers, and where it does not. Dotted: chance. Whiskers: 95 % intervals."
    )
    alt = "Reward model accuracy by category: " + _shares_in_words(shown)
    plot = draw("reward-category-accuracy", "Accuracy by category", caption, alt, paint, height=0.9 + 0.27 * len(shown))
    return replace(plot, head=["category", "accuracy", "95 % interval", "pairs"], rows=_share_rows(shares))


def calibration_plot(rankings: Sequence[Scored]) -> Plot:
    """Reliability diagram: stated against actual probability, and how many pairs each bin holds."""
    table = calibration(pair_differences(rankings))
    stated, actual, counts = zip(*table, strict=True)

    def paint(figure: Figure) -> None:
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        axes.plot([0.5, 1], [0.5, 1], color=INK, linewidth=1, linestyle=":", label="perfect")
        axes.plot(stated, actual, color=BLUE, marker="o", label="reward model")
        axes.set_ylabel("actually right")
        percent_axis(axes.yaxis)
        axes.set_ylim(min(0.4, *actual) - 0.05, 1.05)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, borderaxespad=0.2)
        below.bar([0.5 + 0.05 * (min(9, int((p - 0.5) * 20)) + 0.5) for p in stated], counts, width=0.044, color=BLUE)
        below.set_ylabel("pairs")
        below.set_xlabel("probability that the model states for its choice")
        below.set_xlim(0.49, 1.01)
        percent_axis(below.xaxis)

    caption = "On the dotted line the stated probability is what comes true; below it the model is too sure of itself."
    words = "; ".join(f"stated {p:.0%}, right {a:.0%}, {n} pairs" for p, a, n in table)
    plot = draw(
        "reward-calibration", "Calibration", caption, f"Reliability diagram of the reward model: {words}.", paint, 3.3
    )
    rows = [[f"{p:.1%}", f"{a:.1%}", str(n)] for p, a, n in table]
    return replace(plot, head=["stated", "right", "pairs"], rows=rows)


def category_reward_plot(rankings: Sequence[Scored]) -> Plot | None:
    """Mean reward of the responses ranked best and of those ranked worst, by category."""
    rows = []
    for label, group in grouped(rankings, lambda item: item.category).items():
        best = [
            value for item in group for rank, value in zip(item.ranks, item.rewards, strict=True) if rank == min(item.ranks)
        ]
        worst = [
            value for item in group for rank, value in zip(item.ranks, item.rewards, strict=True) if rank == max(item.ranks)
        ]
        if best and worst:
            rows.append((label, sum(worst) / len(worst), sum(best) / len(best)))
    if not rows:
        return None
    caption = "Held-out responses as the reward model scores them. The further best lies to the right of worst, the better."
    return dumbbells("reward-category", "Reward by category", caption, ("ranked worst", "ranked best"), rows)


def dumbbells(name: str, title: str, caption: str, ends: tuple[str, str], rows: Sequence[tuple[str, float, float]]) -> Plot:
    """Two mean rewards for each label, joined by a line; `ends` names the two."""
    shown = list(rows)[:24]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        places = range(len(shown))
        axes.hlines(places, [row[1] for row in shown], [row[2] for row in shown], color=INK, linewidth=1)
        axes.plot([row[1] for row in shown], places, "s", color=ORANGE, markersize=6, label=ends[0])
        axes.plot([row[2] for row in shown], places, "o", color=GREEN, markersize=6.5, label=ends[1])
        axes.set_yticks(places, [_short(row[0]) for row in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlabel("mean reward")
        axes.grid(axis="y", visible=False)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, borderaxespad=0.2)

    words = "; ".join(f"{label}: {ends[0]} {left:.3g}, {ends[1]} {right:.3g}" for label, left, right in shown)
    plot = draw(name, title, caption, f"{title}: {words}.", paint, height=1.1 + 0.27 * len(shown))
    table = [[label, f"{left:.3f}", f"{right:.3f}", f"{right - left:+.3f}"] for label, left, right in rows]
    return replace(plot, head=["category", *ends, "difference"], rows=table)


def length_plot(rankings: Sequence[Scored]) -> Plot | None:
    """Reward against length of all held-out responses: a slope means that length itself is rewarded."""
    points = [point for item in rankings for point in zip(item.lengths, item.rewards, strict=True)]
    if len({length for length, _ in points}) < 2:
        return None
    shown = points[:: -(-len(points) // 1500)]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot(
            [p[0] for p in shown], [p[1] for p in shown], "o", color=BLUE, markersize=3.5, alpha=0.55, markeredgewidth=0
        )
        axes.set_xlabel("response length, tokens")
        axes.set_ylabel("reward")

    caption = (
        "One dot a held-out response. If reward simply rises with length, PPO will learn to write long instead of well."
    )
    alt = f"Scatter of reward against response length for {len(points)} held-out responses."
    return draw("reward-length", "Reward against length", caption, alt, paint)


def _short(label: str, most: int = 18) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"


def _shares_in_words(shares: Sequence[Share]) -> str:
    return "; ".join(f"{share.label}: {share.share:.0%} of {share.pairs} pairs" for share in shares) + "."


def _share_rows(shares: Sequence[Share]) -> list[list[str]]:
    return [[s.label, f"{s.share:.1%}", f"{s.low:.1%} to {s.high:.1%}", str(s.pairs)] for s in shares]
