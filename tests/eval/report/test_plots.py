import math
from pathlib import Path

from align.eval.report.data import RunData, StageRun
from align.eval.report.findings import Summary
from align.eval.report.plots import (
    Plot,
    calibration_plot,
    describe_series,
    downsample,
    evaluation_plots,
    frontier_plot,
    stage_plots,
)
from align.eval.results import Evaluation, Measurement
from tests.eval.report.example_run import RANKINGS, ppo_run


def sft_plots(metrics: dict[int, dict[str, float]]) -> list[Plot]:
    return stage_plots(StageRun("sft", Path("s"), {}, {}, metrics), RunData(Path()), Summary())


def ppo_plots(metrics: dict[int, dict[str, float]]) -> list[Plot]:
    return stage_plots(StageRun("ppo", Path("p"), {}, {}, metrics), RunData(Path()), Summary())


def test_a_course_is_averaged_for_a_plot_and_told_in_words() -> None:
    series = dict(enumerate((1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 4.0), start=1))
    # 7 points in at most 3: runs of 3, 3 and 1.
    assert downsample(series, 3) == {3: 3.0, 6: 9.0, 7: 4.0}
    assert downsample(series, 7) is series
    words = describe_series({0: 1.0, 5: 4.0, 9: 2.0}, "Reward")
    assert words == "Reward goes from 1 at update 0 to 2 at update 9 (lowest 1, highest 4)."


def test_no_figures_no_plots() -> None:
    empty = StageRun("any", Path("any"))
    assert sft_plots({}) == []
    assert ppo_plots({}) == []
    assert frontier_plot(empty, None) is None
    assert calibration_plot([]) is None
    assert evaluation_plots([evaluation("toxicity", "a", "basic: expected maximum toxicity", 0.4)]) == []  # one panel
    assert evaluation_plots([evaluation("truthfulness", "a", "mc1", None)]) == []


def test_one_update_is_enough_for_every_plot() -> None:
    names = [*"abc", "reward/mean", "kl/k1", "kl/k3", "kl/coef", "entropy", "loss/policy"]
    names += ["response/length", "response/eos_rate"]
    names += ["loss/value", "policy/clipfrac", "value/clipfrac", "time/sample", "time/score", "time/learn", "learning_rate"]
    row = dict.fromkeys([*names, "validation/reward", "validation/kl"], 0.25)
    plots = ppo_plots({1: row})
    assert [plot.name for plot in plots] == [
        "ppo-reward", "ppo-kl", "ppo-frontier", "ppo-length", "ppo-text",
        "ppo-critic", "ppo-value-loss", "ppo-entropy",
    ]  # fmt: skip


def test_plots_of_the_reward_model_say_what_they_show() -> None:
    metrics = {1: {"ranking_loss": 0.7, "validation/loss": 0.6, "validation/accuracy": 0.8}}
    run = RunData(Path(), rankings={"reward": RANKINGS})
    plots = {plot.name: plot for plot in stage_plots(StageRun("reward", Path("r"), {}, {}, metrics), run, Summary())}
    assert list(plots) == ["reward-loss", "reward-accuracy", "reward-calibration"]
    # Differences 1, 2, 1 and 2, 1, -1: sigmoid(1) = 73.1 % four times, three right; sigmoid(2) = 88.1 % twice, both right.
    assert "confidence 73%, accuracy 75%, 4 pairs; confidence 88%, accuracy 100%, 2 pairs" in plots["reward-calibration"].svg


def test_a_long_run_does_not_make_a_long_page() -> None:
    def size(updates: int) -> int:
        return len(sft_plots({n: {"loss": math.sin(n)} for n in range(1, updates + 1)})[0].svg)

    assert size(30_000) < 1.5 * size(300)


def test_the_frontier_marks_the_kept_policy() -> None:
    plot = frontier_plot(ppo_run({0: (0.0, 0.0), 5: (1.0, 2.0), 9: (0.5, 6.0)}), kept=5)
    assert plot is not None
    assert "update 5: KL 2, reward 1" in plot.svg
    assert "ring" in plot.caption


def evaluation(task: str, model: str, name: str, value: float | None) -> Evaluation:
    return Evaluation(task, model, {}, [Measurement(name, value, value, value, 9)])


def test_all_four_panels_in_instructgpts_order() -> None:
    figures = {
        "appropriate for an assistant": ("verdicts", 0.9),
        "hallucination, closed domain": ("verdicts", 0.2),
        "true and informative": ("truthfulness", 0.3),
        "basic: expected maximum toxicity": ("toxicity", 0.4),
    }
    found = [evaluation(task, "<b>", name, value) for name, (task, value) in figures.items()]
    (plot,) = evaluation_plots([*found, evaluation("toxicity", "end", "basic: expected maximum toxicity", 0.1)])
    words = "toxicity of {0}: 0.400; toxicity of end: 0.100; truthfulness of {0}: 0.300; hallucination of {0}: 0.200; "
    assert f"{words}appropriate of {{0}}: 0.900".format("&lt;b&gt;") in plot.svg
    assert "<b>" not in plot.svg
