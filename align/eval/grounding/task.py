"""`align eval grounding`: are claims supported, and are sources cited? From people's answers in the labeling app.

From a launcher: `accelerate launch align/eval/grounding/task.py --config FILE`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from align.data.conversation import to_json
from align.data.judgments import RuleJudgment
from align.data.readers import read_records
from align.errors import UserError
from align.eval.core.evaluated_models import open_accelerator
from align.eval.core.fingerprints import content_hash
from align.eval.core.results import Evaluation, Figure, Json, publish, share_figure
from align.eval.core.settings import EvalConfig
from align.eval.rules.judgments import FOLLOWS, UNSURE
from align.launch import run_stage
from align.settings import option, require_setting
from align.statistics import majority

TASK = "grounding"
CLAIM, SUPPORTED, KNOWN, CITES = "makes-claim", "supported", "well-known", "cites"
HELPFUL, IN_ROLE = "helpful", "in-role"
QUESTIONS = (CLAIM, SUPPORTED, KNOWN, CITES, HELPFUL, IN_ROLE)
"""The ids in forms/rules/grounding.yaml and forms/rules/role.yaml."""


@dataclass(kw_only=True)
class GroundingConfig(EvalConfig):
    """Claims and their sources, by people. No model is opened."""

    judgments: list[str] = option(
        [], "rule judgments that the labeling app exported for the forms grounding and role, one row a labeler or aggregated"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "models", not self.models, "empty: people judged the responses, no model is opened")
        require_setting(self, "judgments", bool(self.judgments), "given")


@dataclass(frozen=True)
class MajorityAnswers:
    """The labelers' majority answers on one response.

    Attributes:
        prompt: a hash of the prompt: responses to one prompt depend on each other.
        answers: by question: `follows` for yes, `violates` for no, `unsure` also for a tie; a question that was not
            asked has no entry.
    """

    prompt: str
    answers: Mapping[str, str]

    def is_yes(self, question: str) -> bool:
        """Whether the answer is yes, not unsure, and the question was asked."""
        return self.answers.get(question) == FOLLOWS

    @property
    def informative(self) -> bool:
        """Whether it makes a claim that is supported."""
        return self.is_yes(CLAIM) and self.is_yes(SUPPORTED)


def run_grounding(config: GroundingConfig) -> list[Evaluation]:
    """Count answers and write `grounding.json`.

    Raises:
        UserError: for a mistake in the settings or the judgments.
    """
    accelerator = open_accelerator(config)
    responses = read_answers(config.judgments, config.skip_bad_rows)
    name = " + ".join(Path(path).stem for path in config.judgments)
    table = {"Answers by question, majority of labelers": count_answers(responses)}
    figures = grounding_figures(responses)
    return publish(config, [Evaluation(TASK, name, config.result_settings(), figures, table)], accelerator)


def read_answers(paths: Sequence[str], skip_bad_rows: bool = False) -> list[MajorityAnswers]:
    """The majority's answers to the questions on each response.

    Raises:
        UserError: for a bad row, or if no question of the forms was answered.
    """
    votes: dict[tuple[str, str], dict[str, list[str]]] = {}
    for path in paths:
        for record in read_records(path, RuleJudgment, skip_bad_rows=skip_bad_rows):
            if record.rule in QUESTIONS:
                key = content_hash(to_json(record.prompt)), record.response
                votes.setdefault(key, {}).setdefault(record.rule, []).append(record.verdict)
    if not votes:
        raise UserError(
            f"{', '.join(paths)}: holds no answer to {', '.join(QUESTIONS)}; label with forms/rules/grounding.yaml"
        )
    return [
        MajorityAnswers(prompt, {question: majority(given, tie=UNSURE) for question, given in of_response.items()})
        for (prompt, _), of_response in votes.items()
    ]


ResponseTest = Callable[[MajorityAnswers], bool]


def grounding_figures(responses: Sequence[MajorityAnswers]) -> list[Figure]:
    """LaMDA's figures (Thoppilan et al. 2022, section 4), each a share with an interval over prompts."""
    asked = {question: [each for each in responses if question in each.answers] for question in QUESTIONS}
    judged = asked[CLAIM]

    def claims(each: MajorityAnswers) -> bool:
        return each.is_yes(CLAIM)

    def needs_source(each: MajorityAnswers) -> bool:
        return each.is_yes(CLAIM) and not each.is_yes(KNOWN)

    def helpful(each: MajorityAnswers) -> bool:
        return each.informative and each.is_yes(HELPFUL)

    figures = [
        _share("groundedness", judged, lambda each: each.informative, claims, "of responses that make a claim"),
        _share("informativeness", judged, lambda each: each.informative, lambda each: True, "of all responses"),
        _share(
            "citation accuracy",
            judged,
            lambda each: needs_source(each) and each.is_yes(CITES),
            needs_source,
            "of responses with a claim that is not well known",
        ),
    ]
    if asked[HELPFUL]:
        note = "informative and helpful, of all responses that were judged by both forms"
        both = [each for each in asked[HELPFUL] if CLAIM in each.answers]
        figures.append(_share("helpfulness", both, helpful, lambda each: True, note))
    if asked[IN_ROLE]:
        in_role = asked[IN_ROLE]
        figures.append(
            _share(
                "role consistency",
                in_role,
                lambda each: each.is_yes(IN_ROLE),
                lambda each: True,
                "of all responses",
            )
        )
    return figures


def _share(name: str, responses: Sequence[MajorityAnswers], part: ResponseTest, whole: ResponseTest, note: str) -> Figure:
    """The share of responses that pass `part` among those that pass `whole`; the interval is over prompts."""
    chosen = [each for each in responses if whole(each)]
    prompts = {prompt: number for number, prompt in enumerate(dict.fromkeys(each.prompt for each in chosen))}
    return share_figure(
        name,
        [part(each) for each in chosen],
        "people, majority of labelers",
        note,
        f"no such response: {note}",
        [prompts[each.prompt] for each in chosen],
        "higher",
    )


def count_answers(responses: Sequence[MajorityAnswers]) -> list[Json]:
    """How many responses got each answer to each question."""
    rows = []
    for question in QUESTIONS:
        given = [each.answers[question] for each in responses if question in each.answers]
        yes, unsure = given.count(FOLLOWS), given.count(UNSURE)
        rows.append(
            {"question": question, "asked": len(given), "yes": yes, "no": len(given) - yes - unsure, "unsure": unsure}
        )
    return rows


if __name__ == "__main__":
    run_stage(GroundingConfig, run_grounding)
