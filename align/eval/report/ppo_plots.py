"""The plots of PPO. Each function returns None where there is nothing to show."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from align.eval.report.common_plots import MAX_TABLE_ROWS, Curve, curves_plot, dumbbell_plot, panels_plot, steps_plot
from align.eval.report.comparisons import SamplePair, group_by_category, max_kl
from align.eval.report.drawing import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    VIOLET,
    Plot,
    describe_series,
    downsample,
    draw_line,
    draw_plot,
    format_as_percent,
    label_update_axes,
)
from align.eval.report.runs import StageRun

MAX_LABELS = 14
"""Labels of updates on the plot of reward against KL: a label for each of many points would cover them."""
MAX_POINTS_IN_WORDS = 30
"""Points of that plot that its text alternative names."""


def ppo_plots(stage: StageRun, pairs: Sequence[SamplePair], kept: int | None) -> list[Plot]:
    """All plots of PPO.

    Args:
        pairs: samples before and after.
        kept: the update whose policy was kept.
    """
    plots = [
        reward_plot(stage),
        curves_plot(stage, "ppo-judge", "Judge", "judge's reward", JUDGE, JUDGE_CAPTION),
        kl_plot(stage),
        frontier_plot(stage, kept),
        category_change_plot(pairs),
        curves_plot(
            stage, "ppo-length", "Response length", "tokens", LENGTH, "Mean length. Sudden growth or collapse is a warning."
        ),
        curves_plot(stage, "ppo-text", "Endings and repetition", "share", TEXT, TEXT_CAPTION, percent=True),
        curves_plot(stage, "ppo-entropy", "Entropy", "nats per token", ENTROPY, ENTROPY_CAPTION),
        panels_plot(stage, "ppo-losses", "Losses", LOSSES, LOSSES_CAPTION),
        curves_plot(stage, "ppo-clips", "Clip shares", "share of tokens", CLIPS, CLIPS_CAPTION, percent=True),
        steps_plot(stage, "ppo-steps"),
        time_plot(stage),
    ]
    return [plot for plot in plots if plot]


JUDGE: list[Curve] = [Curve("validation/judge", "held-out prompts", ORANGE, "--")]
JUDGE_CAPTION = "A reward model that was not trained on. Where it falls while the reward rises, the reward is exploited."
LENGTH: list[Curve] = [
    Curve("text/length", "rollouts", BLUE, "-"),
    Curve("validation/length", "held-out prompts", ORANGE, "--"),
]
TEXT: list[Curve] = [
    Curve("text/ended", "ended", BLUE, "-"),
    Curve("validation/ended", "ended, held out", BLUE, "--"),
    Curve("text/repetition", "repeated", ORANGE, "-"),
    Curve("validation/repetition", "repeated, held out", ORANGE, "--"),
]
ENTROPY: list[Curve] = [Curve("entropy", "policy", BLUE, "-")]
CLIPS: list[Curve] = [Curve("clipped/policy", "policy", BLUE, "-"), Curve("clipped/value", "value", ORANGE, "--")]
LOSSES = {"loss/policy": "policy", "loss/value": "value", "loss/ptx": "text (ptx)"}
LOSSES_CAPTION = "The policy loss hovers near 0 by design; the value loss should fall as the critic learns to predict."
TEXT_CAPTION = "Responses that end by themselves (more is better), and three-token sequences that repeat within a response."
ENTROPY_CAPTION = "How varied the next token is. Falling is normal; close to 0 the policy gives one answer only."
CLIPS_CAPTION = "Tokens whose loss the clipping decided. Steadily above 30 % means that each update moves too far."


def reward_plot(stage: StageRun) -> Plot | None:
    """Reward of rollouts and of the held-out prompts over updates, the latter with its standard error."""
    train, held_out = stage.series("reward/mean"), stage.series("validation/reward")
    error, kl = stage.series("validation/reward_error"), stage.series("validation/kl")
    if not train and not held_out:
        return None

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        draw_line(axes, train, "rollouts", BLUE)
        if held_out:
            whiskers = [error.at(update) or 0.0 for update in held_out.updates]
            axes.errorbar(
                held_out.updates,
                held_out.values,
                yerr=whiskers,
                label="held-out prompts ± s.e.",
                color=ORANGE,
                marker="o",
                linestyle="--",
                capsize=3,
                elinewidth=1.2,
            )
        label_update_axes(axes, "reward")

    alt = " ".join(
        ["Reward over updates.", describe_series(train, "Rollouts"), describe_series(held_out, "Held-out prompts")]
    )
    caption = "Higher is what PPO aims for. Whiskers: one standard error over the held-out prompts."
    plot = draw_plot("ppo-reward", "Reward", caption, alt, paint)
    rows = [
        [str(update), f"{value:.4f}", f"{error.at(update) or 0.0:.4f}", _format_cell(kl.at(update))]
        for update, value in zip(held_out.updates, held_out.values, strict=True)
    ]
    head = ["update", "held-out reward", "standard error", "KL"]
    return replace(plot, head=head, rows=rows) if len(rows) <= MAX_TABLE_ROWS else plot


def kl_plot(stage: StageRun) -> Plot | None:
    """KL to the reference over updates, both estimators, and its coefficient where that adapts."""
    k1, k3, held_out, beta = (stage.series(name) for name in ("kl/k1", "kl/k3", "validation/kl", "kl/beta"))
    if not k1 and not held_out:
        return None
    adapts = len(set(beta.values)) > 1

    def paint(figure: Figure) -> None:
        panels = figure.subplots(2 if adapts else 1, 1, squeeze=False, sharex=True, height_ratios=[3, 1] if adapts else None)
        axes = panels[0][0]
        draw_line(axes, k1, "rollouts", BLUE)
        draw_line(axes, k3, "rollouts, k3", VIOLET, ":")
        draw_line(axes, held_out, "held-out prompts", ORANGE, "--", "o")
        if max(*k1.values, *held_out.values, 0.0) > 0.5 * max_kl(stage):
            axes.axhline(max_kl(stage), color=INK, linewidth=1, linestyle="-.")
        label_update_axes(axes, "nats per response")
        if adapts:
            axes.set_xlabel("")
            draw_line(panels[1][0], beta, "", GREEN)
            label_update_axes(panels[1][0], "beta", legend=False)

    alt = " ".join(
        ["KL to the reference over updates.", describe_series(k1, "Rollouts"), describe_series(held_out, "Held-out prompts")]
    )
    caption = "How far the policy has moved from where it started; 0 is no change."
    if max_kl(stage) < float("inf"):
        caption += f" A policy with a KL above {max_kl(stage):g} is never kept."
    return draw_plot("ppo-kl", "KL to the starting model", caption, alt, paint, height=3.2 if adapts else 2.6)


def frontier_plot(stage: StageRun, kept: int | None) -> Plot | None:
    """Held-out reward against KL: one point for each evaluation, labeled by its update."""
    rewards, kl = stage.series("validation/reward"), stage.series("validation/kl")
    points = [
        (x, y, update) for update, y in zip(rewards.updates, rewards.values, strict=True) if (x := kl.at(update)) is not None
    ]
    if not points:
        return None
    step = -(-len(points) // MAX_LABELS)

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot([p[0] for p in points], [p[1] for p in points], color=BLUE, marker="o", linewidth=1.2)
        for number, (x, y, update) in enumerate(points):
            if update == kept:
                axes.plot([x], [y], "o", markersize=11, markerfacecolor="none", markeredgecolor=ORANGE, markeredgewidth=2)
            if number % step == 0 or update == kept:
                label_offset = (6, -13) if update == kept else (-3, 7)
                axes.annotate(str(update), (x, y), xytext=label_offset, textcoords="offset points")
        axes.margins(0.13)
        axes.set_xlabel("KL to the starting model, nats per response")
        axes.set_ylabel("held-out reward")

    words = "; ".join(f"update {update}: KL {x:.3g}, reward {y:.3g}" for x, y, update in points[:MAX_POINTS_IN_WORDS])
    caption = "What reward costs in distance; labels are updates. Up and to the left is better."
    caption += " The ring marks the policy that was kept." if kept is not None else ""
    return draw_plot("ppo-frontier", "Reward against KL", caption, f"Held-out reward against KL. {words}.", paint)


def category_change_plot(pairs: Sequence[SamplePair]) -> Plot | None:
    """Mean held-out reward before and after, by category; None if the samples name none."""
    rows = []
    for label, group in group_by_category(pairs, lambda pair: pair.after.category).items():
        before = [pair.before.reward for pair in group if pair.before]
        after = [pair.after.reward for pair in group if pair.before]
        if before:
            rows.append((label, sum(before) / len(before), sum(after) / len(after)))
    if not rows:
        return None
    caption = "Mean reward of the held-out prompts of each category, before and after PPO."
    return dumbbell_plot("ppo-category", "Reward by category", caption, ("before", "after"), rows)


def time_plot(stage: StageRun) -> Plot | None:
    """Where the time of each update went."""
    parts = {"time/sample": "sampling", "time/score": "scoring", "time/learn": "learning"}
    columns = [downsample(stage.series(name)) for name in parts]
    if not all(columns) or len({column.updates for column in columns}) > 1:
        return None
    updates, values = columns[0].updates, [column.values for column in columns]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        if len(updates) == 1:
            axes.barh(list(parts.values()), [value[0] for value in values], color=BLUE)
            format_as_percent(axes.xaxis)
            return
        axes.stackplot(updates, values, labels=list(parts.values()), colors=[BLUE, GREEN, ORANGE], alpha=0.75)
        axes.set_ylim(0, 1)
        axes.margins(x=0)
        format_as_percent(axes.yaxis)
        label_update_axes(axes, "share of time")

    means = [sum(value) / len(value) for value in values]
    words = ", ".join(f"{label} {mean:.0%}" for label, mean in zip(parts.values(), means, strict=True))
    seconds = stage.series("time/update")
    pace = f" An update takes {sum(seconds.values) / len(seconds.values):.1f} s on average." if seconds else ""
    return draw_plot("ppo-time", "Where the time goes", f"On average {words}.{pace}", f"Shares of time: {words}.", paint)


def _format_cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
