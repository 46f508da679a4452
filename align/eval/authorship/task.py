"""`align eval authorship`: can people tell a model's text from a person's? From their answers in the labeling app.

From a launcher: `accelerate launch align/eval/authorship/task.py --config FILE`.

The test of GPT-3's news articles (Brown et al. 2020, arXiv 2005.14165, section 3.9.4): readers say of each text whether a
person or a model wrote it, or that they do not know; a control, a deliberately bad model, shows whether they can tell at
all. There, accuracy is the share of correct answers among those that decide, over texts of people and of one model
together. Here it is the mean of the two shares, so that the numbers of texts do not matter: guessing, or always answering
"a model", scores one half.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from align.data.conversation import to_json
from align.data.judgments import RuleJudgment
from align.data.readers import read_records
from align.errors import UserError
from align.eval.core.evaluated_models import open_accelerator
from align.eval.core.fingerprints import content_hash
from align.eval.core.results import Evaluation, Figure, Json, publish
from align.eval.core.settings import EvalConfig
from align.launch import run_stage
from align.settings import option, require_setting
from align.statistics import share_interval, statistic_interval

TASK = "authorship"
AUTHORSHIP_RULE = "written-by-person"
"""The rule's id in forms/rules/authorship.yaml."""
ANSWER_VERDICTS = ("follows", "violates", "unsure")
"""How the app exports the answers "A person", "A model" and "I don't know"."""
PERSON, MODEL, UNSURE = range(3)
NOTES = {
    "judged rightly": "0.5 is chance",
    "called a model": "share of the model's texts; of the answers that decide",
    "people called people": "share of people's texts; of the answers that decide",
    "don't know": "share of all answers on the model's texts",
    "judged rightly, minus control": "below 0: harder to tell from people than the control",
}


@dataclass(kw_only=True)
class AuthorshipConfig(EvalConfig):
    """Whether a person or a model wrote it, by people. No model is opened."""

    judgments: list[str] = option(
        [], "rule judgments that the labeling app exported for the form authorship, one row a labeler, with model"
    )
    person: list[str] = option(["person"], "names under `model` that stand for people")
    control: str = option("", "name under `model` of a deliberately bad model, for comparison; empty: none")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "models", not self.models, "empty: people judged the texts, no model is opened")
        require_setting(self, "judgments", bool(self.judgments), "given")
        require_setting(self, "person", bool(self.person), "given")
        require_setting(self, "control", self.control not in self.person, "a model, not one of person")


@dataclass(frozen=True)
class AuthorAnswers:
    """Readers' answers on one author's texts.

    Attributes:
        texts: number of texts.
        counts: [3, P], for each prompt the number of answers "a person", "a model" and "I don't know".
    """

    texts: int
    counts: np.ndarray


def run_authorship(config: AuthorshipConfig) -> list[Evaluation]:
    """Count answers and write `authorship.json`: an evaluation of each model, the control among them.

    Raises:
        UserError: for a mistake in the settings or the judgments, or if people or models wrote none of the texts.
    """
    accelerator = open_accelerator(config)
    by_author = read_answers(config.judgments, config.skip_bad_rows)
    where = ", ".join(config.judgments)
    people = [by_author[name].counts for name in config.person if name in by_author]
    models = [name for name in by_author if name not in config.person]
    if not people or not models:
        missing = "a model" if people else " or ".join(config.person)
        raise UserError(f"{where}: no text by {missing}; the authors are {', '.join(by_author)}")
    if config.control and config.control not in models:
        raise UserError(f"{where}: no text by the control {config.control!r}; the models are {', '.join(models)}")
    tables = {"Answers by author": [count_answers(author, answers) for author, answers in by_author.items()]}
    evaluations = []
    for name in models:
        control = by_author[config.control].counts if config.control not in ("", name) else None
        figures = authorship_figures(by_author[name].counts, np.sum(people, axis=0), control, config.resamples)
        evaluations.append(Evaluation(TASK, name, config.result_settings(), figures, tables))
    return publish(config, evaluations, accelerator)


def read_answers(paths: Sequence[str], skip_bad_rows: bool = False) -> dict[str, AuthorAnswers]:
    """Readers' answers by author, in the order of each author's first text.

    Raises:
        UserError: for a bad row, a text without an author, or if no answer to the question is there.
    """
    prompts: dict[str, int] = {}
    texts: dict[str, set[tuple[int, str]]] = {}
    answers: dict[str, list[tuple[int, int]]] = {}
    for path in paths:
        for record in read_records(path, RuleJudgment, skip_bad_rows=skip_bad_rows):
            if record.rule != AUTHORSHIP_RULE:
                continue
            if record.model is None:
                text = f"{record.response[:40]!r}"
                raise UserError(
                    f"{path}: field 'model' is missing for {text}: import the texts with their author under model"
                )
            prompt = prompts.setdefault(content_hash(to_json(record.prompt)), len(prompts))
            texts.setdefault(record.model, set()).add((prompt, record.response))
            answers.setdefault(record.model, []).append((ANSWER_VERDICTS.index(record.verdict), prompt))
    if not answers:
        raise UserError(
            f"{', '.join(paths)}: has no answer to rule {AUTHORSHIP_RULE}; label with forms/rules/authorship.yaml"
        )
    found = {}
    for author, pairs in answers.items():
        counts = np.zeros((len(ANSWER_VERDICTS), len(prompts)))
        np.add.at(counts, tuple(np.transpose(pairs)), 1)
        found[author] = AuthorAnswers(len(texts[author]), counts)
    return found


def count_answers(author: str, answers: AuthorAnswers) -> Json:
    """A row of the table: how many texts, and how many answers of each kind."""
    person, model, unsure = (int(number) for number in answers.counts.sum(1))
    return {"author": author, "texts": answers.texts, "a person": person, "a model": model, "don't know": unsure}


def authorship_figures(model: np.ndarray, people: np.ndarray, control: np.ndarray | None, resamples: int) -> list[Figure]:
    """The figures of one model. Intervals are over prompts, each with all texts and answers of all authors.

    Args:
        model: answers on the model's texts [3, P].
        people: answers on texts of people [3, P].
        control: answers on texts of the control [3, P]; None: no comparison.
        resamples: number of bootstrap resamples.
    """
    authors = np.stack([model, people, *([] if control is None else [control])])  # [authors, 3, P]
    called_model = [_share_of_verdict(of_author[[PERSON, MODEL]], MODEL) for of_author in authors]
    unsure = _share_of_verdict(model, UNSURE)
    decided = [int(of_author[[PERSON, MODEL]].sum()) for of_author in authors]
    found: list[tuple[Interval | None, int]] = [
        (_mean_of_two(authors, called_model, 0, 1, resamples), sum(decided[:2])),
        (called_model[0], decided[0]),
        (_complement(called_model[1]), decided[1]),
        (unsure, int(model.sum())),
    ]
    if control is not None:  # the same texts of people on both sides
        apart = _mean_of_two(authors, called_model, 0, 2, resamples)
        minus = None if apart is None else Interval(*(end - 0.5 for end in apart))
        found.append((minus, decided[0] + decided[-1]))
    figures = []
    for (name, note), (interval, n) in zip(NOTES.items(), found, strict=False):
        if interval is None:
            figures.append(Figure(name, None, None, None, 0, "people", "nobody decided"))
        else:
            figures.append(Figure(name, *interval, n, "people", note))
    return figures


class Interval(NamedTuple):
    """A value with the ends of its interval."""

    value: float
    low: float
    high: float


def _share_of_verdict(counts: np.ndarray, verdict: int) -> Interval | None:
    """The share of answers that are `verdict`, the interval over prompts; None without an answer.

    Args:
        counts: [verdicts, P].
    """
    if not counts.sum():
        return None
    verdicts, prompts = np.divmod(np.repeat(np.arange(counts.size), counts.astype(int).ravel()), counts.shape[1])
    chosen = verdicts == verdict
    return Interval(float(chosen.mean()), *share_interval(chosen, prompts))


def _complement(share: Interval | None) -> Interval | None:
    return None if share is None else Interval(1 - share.value, 1 - share.high, 1 - share.low)


def _mean_of_two(
    authors: np.ndarray, shares: Sequence[Interval | None], first: int, second: int, resamples: int
) -> Interval | None:
    """The mean of one author's share and of what another's lacks to 1.

    The interval combines those of both shares (Newcombe 1998, method 10, for independent shares), and is at least as wide
    as the bootstrap over prompts, which both share.
    """
    left, right = shares[first], _complement(shares[second])
    if left is None or right is None:
        return None

    def measure(drawn: np.ndarray) -> np.ndarray:
        sums = authors[..., drawn].sum(-1)
        with np.errstate(invalid="ignore"):
            called_model = sums[:, MODEL] / (sums[:, MODEL] + sums[:, PERSON])
        mean: np.ndarray = (called_model[first] + 1 - called_model[second]) / 2
        return mean

    value = (left.value + right.value) / 2
    low, high = statistic_interval(measure, authors.shape[-1], resamples)
    below = math.hypot(left.value - left.low, right.value - right.low) / 2
    above = math.hypot(left.high - left.value, right.high - right.value) / 2
    return Interval(value, min(low, value - below), max(high, value + above))


if __name__ == "__main__":
    run_stage(AuthorshipConfig, run_authorship)
