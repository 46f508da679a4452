"""The four panels: drawn from evaluations of several models where at least two were measured."""

from align.eval.core.results import Evaluation, Figure
from align.eval.report.evaluation_plots import evaluation_plots


def evaluation(task: str, model: str, name: str, value: float | None) -> Evaluation:
    return Evaluation(task, model, {}, [Figure(name, value, value, value, 9)])


def test_the_panels_show_each_model_and_its_interval() -> None:
    (plot,) = evaluation_plots(
        [
            evaluation("toxicity", "before", "basic: expected maximum toxicity", 0.4),
            evaluation("toxicity", "after <b>", "basic: expected maximum toxicity", 0.3),
            evaluation("verdicts", "after <b>", "appropriate for an assistant", 0.9),
        ]
    )
    assert [row[0] for row in plot.rows] == ["toxicity", "toxicity", "appropriate"]
    assert [row[3] for row in plot.rows] == ["0.400", "0.300", "0.900"]
    assert "toxicity of before: 0.400" in plot.svg
    assert "<b>" not in plot.svg


def test_all_four_panels_in_instructgpts_order() -> None:
    figures = {
        "appropriate for an assistant": ("verdicts", 0.9),
        "hallucination, closed domain": ("verdicts", 0.2),
        "true and informative": ("truthfulness", 0.3),
        "basic: expected maximum toxicity": ("toxicity", 0.4),
    }
    (plot,) = evaluation_plots([evaluation(task, "a", name, value) for name, (task, value) in figures.items()])
    shown = [("toxicity", "0.400"), ("truthfulness", "0.300"), ("hallucination", "0.200"), ("appropriate", "0.900")]
    assert [(row[0], row[3]) for row in plot.rows] == shown
    assert all(panel in plot.svg for panel, _ in shown)


def test_one_panel_alone_is_no_picture() -> None:
    assert evaluation_plots([evaluation("toxicity", "a", "basic: expected maximum toxicity", 0.4)]) == []
    assert evaluation_plots([evaluation("truthfulness", "a", "mc1", None)]) == []
