"""The plots of distillation."""

from align.eval.report.common_plots import Curve, curves_plot, steps_plot
from align.eval.report.drawing import BLUE, GREEN, ORANGE, Plot
from align.eval.report.runs import StageRun

KL = [Curve("kl", "training", BLUE, "-"), Curve("validation/kl", "held out", ORANGE, "--")]
KL_CAPTION = "How far the student's distribution is from the teacher's, both at the temperature; 0 is the teacher itself."
PARTS = [
    Curve("loss/ce", "cross-entropy", BLUE, "-"),
    Curve("loss/lm", "language model", ORANGE, "-"),
    Curve("loss/cosine", "1 - cosine", GREEN, "-"),
]
PARTS_CAPTION = "The three losses before they are weighted. The cross-entropy ends at the teacher's entropy, not at 0."


def distill_plots(stage: StageRun) -> list[Plot]:
    """All plots of distillation."""
    plots = [
        curves_plot(stage, "distill-kl", "KL from teacher to student", "nats per token", KL, KL_CAPTION),
        curves_plot(stage, "distill-losses", "Losses", "nats per token; 1 - cosine", PARTS, PARTS_CAPTION),
        steps_plot(stage, "distill-steps"),
    ]
    return [plot for plot in plots if plot]
