"""The plots of PPO. Each gives None where there is nothing to show."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from align.eval.report.compare import Pair, grouped, max_kl
from align.eval.report.drawing import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    VIOLET,
    Curve,
    Plot,
    course,
    curves_plot,
    draw,
    line,
    over_updates,
    panels_plot,
    percent_axis,
    thin,
)
from align.eval.report.plots import dumbbells, steps_plot
from align.eval.report.runs import StageRun


def ppo_plots(run: StageRun, pairs: Sequence[Pair], kept: int | None) -> list[Plot]:
    """All plots of PPO.

    Args:
        pairs: samples before and after.
        kept: the update whose policy was kept.
    """
    plots = [
        reward_plot(run),
        kl_plot(run),
        frontier_plot(run, kept),
        category_change_plot(pairs),
        curves_plot(
            run, "ppo-length", "Response length", "tokens", LENGTH, "Mean length. Sudden growth or collapse is a warning."
        ),
        curves_plot(run, "ppo-text", "Endings and repetition", "share", TEXT, TEXT_CAPTION, percent=True),
        curves_plot(run, "ppo-entropy", "Entropy", "nats a token", ENTROPY, ENTROPY_CAPTION),
        panels_plot(run, "ppo-losses", "Losses", LOSSES, LOSSES_CAPTION),
        curves_plot(run, "ppo-clips", "Clip shares", "share of tokens", CLIPS, CLIPS_CAPTION, percent=True),
        steps_plot(run, "ppo-steps"),
        time_plot(run),
    ]
    return [plot for plot in plots if plot]


LENGTH: list[Curve] = [
    ("text/length", "rollouts", BLUE, "-"),
    ("validation/length", "held-out prompts", ORANGE, "--"),
]
TEXT: list[Curve] = [
    ("text/ended", "ended", BLUE, "-"),
    ("validation/ended", "ended, held out", BLUE, "--"),
    ("text/repetition", "repeated", ORANGE, "-"),
    ("validation/repetition", "repeated, held out", ORANGE, "--"),
]
ENTROPY: list[Curve] = [("entropy", "policy", BLUE, "-")]
CLIPS: list[Curve] = [("clipped/policy", "policy", BLUE, "-"), ("clipped/value", "value", ORANGE, "--")]
LOSSES = {"loss/policy": "policy", "loss/value": "value", "loss/ptx": "text (ptx)"}
LOSSES_CAPTION = "The policy loss hovers near 0 by design; the value loss should fall as the critic learns to predict."
TEXT_CAPTION = "Responses that end by themselves (more is better), and three-token sequences that repeat within a response."
ENTROPY_CAPTION = "How varied the next token is. Falling is normal; close to 0 the policy says one thing only."
CLIPS_CAPTION = "Tokens on which the clip decided. Steadily above 30 % means that each update moves too far."


def reward_plot(run: StageRun) -> Plot | None:
    """Reward of rollouts and of the fixed prompts over updates, the latter with their standard error."""
    train, held_out, error = (
        run.series("reward/mean"),
        run.series("validation/reward"),
        run.series("validation/reward_error"),
    )
    if not train and not held_out:
        return None

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        line(axes, train, "rollouts", BLUE)
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
        over_updates(axes, "reward")

    alt = " ".join(["Reward over updates.", course(train, "Rollouts"), course(held_out, "Held-out prompts")])
    caption = "Higher is what PPO aims for. Whiskers: one standard error over the held-out prompts."
    plot = draw("ppo-reward", "Reward", caption, alt, paint)
    rows = [
        [str(update), f"{value:.4f}", f"{error.at(update) or 0.0:.4f}", _figure(run.series("validation/kl").at(update))]
        for update, value in zip(held_out.updates, held_out.values, strict=True)
    ]
    return replace(plot, head=["update", "held-out reward", "standard error", "KL"], rows=rows) if len(rows) <= 60 else plot


def kl_plot(run: StageRun) -> Plot | None:
    """KL to the reference over updates, both estimators, and its coefficient where that adapts."""
    k1, k3, held_out, beta = (run.series(name) for name in ("kl/k1", "kl/k3", "validation/kl", "kl/beta"))
    if not k1 and not held_out:
        return None
    adapts = len(set(beta.values)) > 1

    def paint(figure: Figure) -> None:
        panels = figure.subplots(2 if adapts else 1, 1, squeeze=False, sharex=True, height_ratios=[3, 1] if adapts else None)
        axes = panels[0][0]
        line(axes, k1, "rollouts", BLUE)
        line(axes, k3, "rollouts, k3", VIOLET, ":")
        line(axes, held_out, "held-out prompts", ORANGE, "--", "o")
        if max(*k1.values, *held_out.values, 0.0) > 0.5 * max_kl(run):
            axes.axhline(max_kl(run), color=INK, linewidth=1, linestyle="-.")
        over_updates(axes, "nats a response")
        if adapts:
            axes.set_xlabel("")
            line(panels[1][0], beta, "", GREEN)
            over_updates(panels[1][0], "beta", legend=False)

    alt = " ".join(["KL to the reference over updates.", course(k1, "Rollouts"), course(held_out, "Held-out prompts")])
    caption = "How far the policy has moved from where it started; 0 is no change."
    if max_kl(run) < float("inf"):
        caption += f" A policy beyond {max_kl(run):g} is never kept."
    return draw("ppo-kl", "KL to the starting model", caption, alt, paint, height=3.2 if adapts else 2.6)


def frontier_plot(run: StageRun, kept: int | None) -> Plot | None:
    """Held-out reward against KL, a point an evaluation, labelled by its update."""
    rewards, kl = run.series("validation/reward"), run.series("validation/kl")
    points = [
        (x, y, update) for update, y in zip(rewards.updates, rewards.values, strict=True) if (x := kl.at(update)) is not None
    ]
    if not points:
        return None
    step = -(-len(points) // 14)  # a label for each of many points would cover them

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot([p[0] for p in points], [p[1] for p in points], color=BLUE, marker="o", linewidth=1.2)
        for number, (x, y, update) in enumerate(points):
            if update == kept:
                axes.plot([x], [y], "o", markersize=11, markerfacecolor="none", markeredgecolor=ORANGE, markeredgewidth=2)
            if number % step == 0 or update == kept:
                aside = (6, -13) if update == kept else (-3, 7)
                axes.annotate(str(update), (x, y), xytext=aside, textcoords="offset points")
        axes.margins(0.13)
        axes.set_xlabel("KL to the starting model, nats a response")
        axes.set_ylabel("held-out reward")

    words = "; ".join(f"update {update}: KL {x:.3g}, reward {y:.3g}" for x, y, update in points[:30])
    caption = "Reward bought for distance; labels are updates. Up and to the left is better."
    caption += " The ring marks the policy that was kept." if kept is not None else ""
    return draw("ppo-frontier", "Reward against KL", caption, f"Held-out reward against KL. {words}.", paint)


def category_change_plot(pairs: Sequence[Pair]) -> Plot | None:
    """Mean held-out reward before and after, by category, where the samples name one."""
    rows = []
    for label, group in grouped(pairs, lambda pair: pair.after.category).items():
        both = [(pair.before.reward, pair.after.reward) for pair in group if pair.before]
        if both:
            rows.append((label, sum(row[0] for row in both) / len(both), sum(row[1] for row in both) / len(both)))
    if not rows:
        return None
    caption = "Mean reward of the held-out prompts of each category, before and after PPO."
    return dumbbells("ppo-category", "Reward by category", caption, ("before", "after"), rows)


def time_plot(run: StageRun) -> Plot | None:
    """Where the time of each update went."""
    parts = {"time/sample": "sampling", "time/score": "scoring", "time/learn": "learning"}
    columns = [thin(run.series(name)) for name in parts]
    if not all(columns) or len({column.updates for column in columns}) > 1:
        return None
    updates, values = columns[0].updates, [column.values for column in columns]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        if len(updates) == 1:
            axes.barh(list(parts.values()), [value[0] for value in values], color=BLUE)
            percent_axis(axes.xaxis)
            return
        axes.stackplot(updates, values, labels=list(parts.values()), colors=[BLUE, GREEN, ORANGE], alpha=0.75)
        axes.set_ylim(0, 1)
        axes.margins(x=0)
        percent_axis(axes.yaxis)
        over_updates(axes, "share of time")

    means = [sum(value) / len(value) for value in values]
    words = ", ".join(f"{label} {mean:.0%}" for label, mean in zip(parts.values(), means, strict=True))
    seconds = run.series("time/update")
    pace = f" An update takes {sum(seconds.values) / len(seconds.values):.1f} s on average." if seconds else ""
    return draw("ppo-time", "Where the time goes", f"On average {words}.{pace}", f"Shares of time: {words}.", paint)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
