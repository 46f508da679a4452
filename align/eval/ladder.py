"""`align eval ladder`: how often each step of alignment is preferred to one of them, as in InstructGPT's first figure.

From a launcher: `accelerate launch align/eval/ladder.py --config FILE`.

The rungs are the models in their order, usually a base model, itself with a prompt (`MODEL+shots`), SFT, PPO, PPO with a
pretraining loss, and best-of-n (`MODEL+best`); Ouyang et al. 2022, figure 1.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from align.errors import UserError
from align.eval.core.evaluated_models import open_accelerator, short_names
from align.eval.core.results import Evaluation, Figure, publish
from align.eval.winrate.by_judge import compare_by_judge
from align.eval.winrate.by_reward_model import compare_by_reward_model
from align.eval.winrate.pairwise import PairwiseComparison, pair_table, win_rate
from align.eval.winrate.settings import WinrateConfig
from align.files import write_text
from align.launch import run_stage
from align.settings import option, require_setting

TASK = "ladder"
PICTURE = "ladder.svg"


@dataclass(kw_only=True)
class LadderConfig(WinrateConfig):
    """The rungs of a ladder against one of them. One of `reward_model`, `judge` and `endpoint` decides."""

    against: str = option("", "the rung that all are compared with, by its name in the table; empty: the first")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "comparisons", not self.comparisons, "empty: a ladder lets its models answer")
        require_setting(self, "models", len(self.models) != 1, "two or more models, from the lowest rung to the highest")
        names = short_names(self.models)
        require_setting(self, "against", self.against in ("", *names), f"one of {', '.join(names)}")


def run_ladder(config: LadderConfig) -> list[Evaluation]:
    """Compare all rungs and write `ladder.json` and the picture `ladder.svg`; returns an evaluation for each rung.

    Raises:
        UserError: for a mistake in the settings or the data, or a judge that fails; what was judged is kept.
    """
    if not config.models:
        raise UserError("models is empty: name the rungs, from the lowest to the highest")
    accelerator = open_accelerator(config)
    compare = compare_by_reward_model if config.reward_model else compare_by_judge
    comparisons, scorer = compare(config, accelerator)
    rungs = short_names(config.models)
    against = config.against or rungs[0]
    figures = {rung: rung_figure(comparisons, rung, against, scorer) for rung in rungs}
    table = {"pairs": pair_table(comparisons, rungs)}
    evaluations = [Evaluation(TASK, rung, asdict(config), [figure], table) for rung, figure in figures.items()]
    published = publish(config, evaluations, accelerator)
    if accelerator.is_main_process:
        write_text(Path(config.output) / PICTURE, draw_ladder(figures, against))
    return published


def rung_figure(comparisons: Sequence[PairwiseComparison], rung: str, against: str, scorer: str) -> Figure:
    """How often a rung is preferred to `against`; that one itself is at one half."""
    name = f"preferred to {against}"
    if rung == against:
        return Figure(name, 0.5, None, None, 0, scorer)
    own = [each for each in comparisons if {each.first, each.second} == {rung, against}]
    if not own:
        return Figure(name, None, None, None, 0, scorer, "no prompt was answered by both")
    return Figure(name, *win_rate(own, rung), len(own), scorer, "a tie counts as half", "higher")


def draw_ladder(figures: dict[str, Figure], against: str) -> str:
    """The rungs from left to right as an SVG: points with their intervals, and a line at one half."""
    import io

    import matplotlib
    from matplotlib.figure import Figure as Drawing

    shown = {rung: figure for rung, figure in figures.items() if figure.value is not None}
    with matplotlib.rc_context({"svg.hashsalt": TASK, "svg.fonttype": "none", "text.parse_math": False}):
        drawing = Drawing(figsize=(1.2 + 1.1 * len(shown), 3.2), layout="constrained")
        axes = drawing.subplots()
        for place, figure in enumerate(shown.values()):
            value = float(figure.value or 0)
            low, high = (value if end is None else end for end in (figure.low, figure.high))
            axes.errorbar([place], [value], [[value - low], [high - value]], fmt="o", capsize=4, color="#1d5fa8")
        axes.axhline(0.5, color="#c9d1d9", zorder=0)
        axes.set_xticks(range(len(shown)), list(shown), rotation=20, ha="right")
        axes.set_ylim(0, 1)
        axes.set_ylabel(f"preferred to {against}")
        buffer = io.StringIO()
        drawing.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


if __name__ == "__main__":
    run_stage(LadderConfig, run_ladder)
