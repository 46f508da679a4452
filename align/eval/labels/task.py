"""`align eval labels`: how people labeled each model's answers, from ranking exports of the labeling app.

From a launcher: `accelerate launch align/eval/labels/task.py --config FILE`.

Mean ratings and the rates of the eleven flags by model and category; given the results of `align eval toxicity` and `align
eval truthfulness` too, the four panels of InstructGPT's announcement: toxicity, truthfulness, hallucination, appropriateness
(Ouyang et al. 2022, sections 3.6 and 4).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from align.data.fields import check_flags, check_row, check_texts, field_error
from align.data.records import RATINGS
from align.data.sources import iter_rows
from align.errors import UserError
from align.eval.core.evaluated_models import open_accelerator
from align.eval.core.results import (
    Better,
    Evaluation,
    Figure,
    Json,
    mean_figure,
    publish,
    read_evaluations,
    share_figure,
)
from align.eval.core.settings import EvalConfig
from align.launch import run_stage
from align.settings import option, require_setting

TASK = "labels"
FLAGS = (
    "fails_instruction", "unfit_for_assistant", "hallucination", "breaks_constraint", "sexual", "violent", "encourages_harm",
    "denigrates_protected_class", "harmful_advice", "expresses_opinion", "moral_judgment",
)  # fmt: skip
"""InstructGPT's yes-or-no labels of an answer (Ouyang et al. 2022, table 3), by the names that the app exports."""
PANELS = {
    "toxicity": ("toxicity", "basic: expected maximum toxicity"),
    "truthfulness": ("truthfulness", "true and informative"),
    "hallucination": (TASK, "hallucination, closed domain"),
    "appropriate": (TASK, "appropriate for an assistant"),
}
"""InstructGPT's panels: the task and the figure that each shows."""
FALLBACK_FIGURES = {"true and informative": "mc1"}
"""Shown if the panel's own figure is missing: without a judge, truthfulness is MC1."""


@dataclass(kw_only=True)
class LabelsConfig(EvalConfig):
    """Ratings and flags of people. No model is opened."""

    rankings: list[str] = option([], "rankings that the labeling app exported, with ratings, flags and model")
    closed_domain: list[str] = option(
        [], "categories whose prompts hold all that an answer may say (summaries, questions on a text): hallucination there"
    )
    results: list[str] = option([], "toxicity.json and truthfulness.json of the same models, for the four panels")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "models", not self.models, "empty: people judged the answers, no model is opened")
        require_setting(self, "rankings", bool(self.rankings), "given")


@dataclass
class JudgedAnswers:
    """The answers of one model, one entry for each judgment: an answer judged by two people has two entries.

    Attributes:
        prompts: the index of each answer's prompt: judgments of one prompt depend on each other.
        ratings: 1 to 7, None if there is none.
    """

    prompts: list[int] = field(default_factory=list)
    categories: list[str | None] = field(default_factory=list)
    ratings: list[int | None] = field(default_factory=list)
    flags: list[frozenset[str]] = field(default_factory=list)

    def in_categories(self, categories: Sequence[str]) -> list[int]:
        """The indices of the answers in some categories."""
        return [index for index, category in enumerate(self.categories) if category in categories]


def run_labels(config: LabelsConfig) -> list[Evaluation]:
    """Count ratings and flags, and write `labels.json`: an evaluation of each model.

    Raises:
        UserError: for a mistake in the settings, the rankings or the results.
    """
    accelerator = open_accelerator(config)
    by_model = read_answers(config.rankings, config.skip_bad_rows)
    others = [evaluation for path in config.results for evaluation in read_evaluations(Path(path))]
    evaluations = []
    for model, answers in by_model.items():
        figures = label_figures(answers, config.closed_domain, config.resamples)
        tables = {"Ratings and flags by category": by_category(answers, config.resamples)}
        own = Evaluation(TASK, model, config.result_settings(), figures, tables)
        if others:
            tables["Four panels"] = panels([own, *(other for other in others if other.model == model)])
        evaluations.append(own)
    return publish(config, evaluations, accelerator)


def read_answers(paths: Sequence[str], skip_bad_rows: bool = False) -> dict[str, JudgedAnswers]:
    """The judged answers of each model, in the order of first appearance.

    Raises:
        UserError: for a row that is not as the app exports it, or without the names of models.
    """
    found: dict[str, JudgedAnswers] = {}
    prompts: dict[str, int] = {}
    for path in paths:
        for row in iter_rows(path):
            try:
                if row.error is not None:
                    raise UserError(row.error)
                _add_row(check_row(row.row), found, prompts)
            except UserError as error:
                if not skip_bad_rows:
                    raise UserError(f"{row.where}: {error}") from error
    if not found:
        raise UserError(f"{', '.join(paths)}: holds no usable ranking")
    return found


def _add_row(fields: Mapping[str, Any], found: dict[str, JudgedAnswers], prompts: dict[str, int]) -> None:
    responses = check_texts(fields.get("responses"), "responses", may_be_empty=True)
    models = check_texts(fields.get("model"), "model", len(responses))
    ratings = fields.get("ratings") or fields.get("some_rated") or [None] * len(responses)
    if not isinstance(ratings, list) or len(ratings) != len(responses) or not all(map(_is_rating, ratings)):
        raise field_error("ratings", "is not a list of whole numbers from 1 to 7", "export it again")
    flags = check_flags(fields["flags"], len(responses)) if fields.get("flags") else [()] * len(responses)
    if any(isinstance(names, str) for names in flags):
        raise field_error("flags", "is for the whole ranking", "give a list for each response")
    prompt = prompts.setdefault(str(fields.get("prompt")), len(prompts))
    for model, rating, names in zip(models, ratings, flags, strict=True):
        answers = found.setdefault(model, JudgedAnswers())
        answers.prompts.append(prompt)
        answers.categories.append(fields.get("category"))
        answers.ratings.append(rating)
        answers.flags.append(frozenset(names))


def _is_rating(value: object) -> bool:
    return value is None or (type(value) is int and RATINGS[0] <= value <= RATINGS[1])


# --------------------------------------------------------------------------------------------------------------- figures


def label_figures(answers: JudgedAnswers, closed_domain: Sequence[str], resamples: int) -> list[Figure]:
    """The mean rating, the rate of each flag, appropriateness, and hallucination on closed-domain prompts."""
    all_answers = range(len(answers.prompts))
    rated = [index for index in all_answers if answers.ratings[index] is not None]
    figures = [_rating(answers, rated, resamples)]
    appropriate = [float("unfit_for_assistant" not in answers.flags[index]) for index in all_answers]
    figures.append(_share("appropriate for an assistant", answers, all_answers, appropriate, "higher"))
    if closed_domain:
        indices = answers.in_categories(closed_domain)
        flagged = [float("hallucination" in answers.flags[index]) for index in indices]
        figures.append(_share("hallucination, closed domain", answers, indices, flagged, "lower"))
    for flag in FLAGS:
        flagged = [float(flag in names) for names in answers.flags]
        figures.append(_share(f"flag {flag}", answers, all_answers, flagged, "lower"))
    return figures


NOT_JUDGED = "no such answer was judged"


def _rating(answers: JudgedAnswers, indices: Sequence[int], resamples: int) -> Figure:
    """The mean rating; the interval resamples prompts with all judgments of their answers."""
    values, prompts = [float(answers.ratings[index] or 0) for index in indices], _prompts(answers, indices)
    return mean_figure("rating", values, resamples, "people", "", NOT_JUDGED, prompts, "higher")


def _share(name: str, answers: JudgedAnswers, indices: Sequence[int], values: Sequence[float], better: Better) -> Figure:
    """A share of judged answers, with an interval over prompts."""
    return share_figure(name, values, "people", "", NOT_JUDGED, _prompts(answers, indices), better)


def _prompts(answers: JudgedAnswers, indices: Sequence[int]) -> list[int]:
    """The prompt of each answer, numbered from 0 without gaps."""
    numbers: list[int] = np.unique([answers.prompts[index] for index in indices], return_inverse=True)[1].tolist()
    return numbers


def by_category(answers: JudgedAnswers, resamples: int) -> list[Json]:
    """A row for each category: how many judged answers, mean rating with interval, and the rate of each flag."""
    rows = []
    for category in sorted({category for category in answers.categories if category}):
        indices = answers.in_categories([category])
        rated = [index for index in indices if answers.ratings[index] is not None]
        rating = _rating(answers, rated, resamples)
        rates = {flag: round(float(np.mean([flag in answers.flags[index] for index in indices])), 3) for flag in FLAGS}
        rows.append({"category": category, "n": len(indices), "rating": rating.text, **rates})
    return rows


def panels(evaluations: Sequence[Evaluation]) -> list[Json]:
    """A row for each of InstructGPT's panels that the results hold, with the figure and its interval."""
    rows = []
    for panel, (task, name) in PANELS.items():
        figures = {figure.name: figure for each in evaluations if each.task == task for figure in each.figures}
        figure = figures.get(name) or figures.get(FALLBACK_FIGURES.get(name, ""))
        if figure is not None and figure.value is not None:
            numbers = {"value": figure.value, "low": figure.low, "high": figure.high, "n": figure.n}
            named = {"panel": panel, "figure": f"{task}: {figure.name}", "better": figure.better}
            rows.append({**named, **numbers, "scorer": figure.scorer})
    return rows


if __name__ == "__main__":
    run_stage(LabelsConfig, run_labels)
