"""`align eval verdicts`: summarize human judgments from the labeling app.

Rule judgments give violation rates, LaMDA's groundedness and GPT-3's test of authorship; rankings give InstructGPT's ratings
and flags. An answer is `follows` (yes), `violates` (no) or `unsure`, as the app exports verdicts. A flag of
`align.data.records.FLAGS` counts as a question, answered with yes if the labeler set it.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from align.core.errors import UserError
from align.core.launch import run_stage
from align.core.settings import option, require_setting
from align.core.statistics import majority, statistic_interval
from align.data.conversation import to_json
from align.data.fields import check_flags, check_texts, field_error
from align.data.readers import parse_rows, read_records
from align.data.records import FLAGS, RATINGS, VERDICTS, RuleJudgment
from align.eval.answers import open_accelerator
from align.eval.results import Better, EvalConfig, Evaluation, Measurement, mean_measurement, publish, share_measurement
from align.eval.store import Json, content_hash
from align.sampling.settings import InferenceConfig

TASK = "verdicts"
PEOPLE, MAJORITY = "people", "people, majority of labelers"
OVERALL = "overall"
FOLLOWS, VIOLATES, UNSURE = "follows", "violates", "unsure"
CLAIM, SUPPORTED, KNOWN, CITES, HELPFUL, IN_ROLE = "makes-claim", "supported", "well-known", "cites", "helpful", "in-role"
"""Questions of forms/rules/grounding.yaml and role.yaml."""
AUTHORSHIP = "written-by-person"
"""Question of forms/rules/authorship.yaml: "A person" is exported as `follows`, "A model" as `violates`."""


@dataclass(kw_only=True)
class VerdictsConfig(EvalConfig, InferenceConfig):
    """Summarize human judgments: rules, forms and flags. No model is loaded."""

    judgments: list[str] = option([], "Rule judgments exported by the labeling app, one row per labeler or aggregated.")
    rankings: list[str] = option([], "Rankings exported by the labeling app, with ratings, flags and model.")
    person: list[str] = option(["person"], "Authorship: names in the `model` field that stand for people.", required=True)
    control: str = option("", "Authorship: name in the `model` field of a deliberately bad model, as a control.")
    closed_domain: list[str] = option(
        [],
        "Categories whose prompts contain all facts of the answer, such as summaries. Used for the hallucination rate.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "models", not self.models, "empty: this task does not load models")
        require_setting(self, "judgments", bool(self.judgments or self.rankings), "given, or rankings")
        require_setting(self, "control", self.control not in self.person, "a model that is not in person")


@dataclass(frozen=True)
class ResponseVotes:
    """Human answers about one response.

    Attributes:
        prompt: identifier of the prompt. Answers for one prompt are not independent.
        votes: answer of each labeler by question. A question that was not asked has no entry.
        decisions: answer of a lead by question, which counts instead.
    """

    model: str
    prompt: str
    votes: Mapping[str, Sequence[str]]
    category: str | None = None
    rating: int | None = None
    decisions: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def verdicts(self) -> dict[str, str]:
        """Return the verdict on each question: the lead's, or else the majority's. A tie is unsure."""
        return {
            question: self.decisions.get(question) or majority(votes, tie=UNSURE) for question, votes in self.votes.items()
        }

    def says_yes(self, question: str) -> bool:
        """Return whether the majority answered yes."""
        return self.verdicts.get(question) == FOLLOWS


def run_verdicts(config: VerdictsConfig) -> list[Evaluation]:
    """Summarize the judgments and write `verdicts.json`. Return an evaluation per model."""
    accelerator = open_accelerator(config.dtype)
    by_model: dict[str, list[ResponseVotes]] = {}
    skip = config.skip_bad_rows
    for response in [*read_judgments(config.judgments, skip), *read_rankings(config.rankings, skip)]:
        by_model.setdefault(response.model, []).append(response)
    by_author = texts_by_author(by_model, config.person, config.control, ", ".join(config.judgments))
    evaluations = []
    for model, responses in by_model.items():
        rules = sorted({rule for response in responses for rule in response.votes} - QUESTIONS)
        measurements = [*violation_measurements(responses, rules), *grounding_measurements(responses)]
        table = verdict_table(responses)
        tables = {"Verdicts by question": table} if table else {}
        if model in by_author and model not in config.person:
            people = [response for name in config.person for response in by_author.get(name, [])]
            control = by_author[config.control] if config.control not in ("", model) else []
            measurements += authorship_measurements(by_author[model], people, control)
            tables["Answers by author"] = []
            for author, texts in by_author.items():
                counts = Counter(vote for text in texts for vote in text.votes[AUTHORSHIP])
                answers = {"a person": counts[FOLLOWS], "a model": counts[VIOLATES], "don't know": counts[UNSURE]}
                tables["Answers by author"].append({"author": author, "texts": len(texts), **answers})
        if labeled := [response for response in responses if HALLUCINATION in response.votes]:
            measurements += label_measurements(labeled, config.closed_domain)
        if measurements:
            evaluations.append(Evaluation(TASK, model, config.result_settings(), measurements, tables))
    return publish(config, evaluations, accelerator)


# ---------------------------------------------------------------------------------------------------------------- input


def read_judgments(files: Sequence[str], skip_bad_rows: bool) -> list[ResponseVotes]:
    """Read the responses of rule judgments. Responses without a model are grouped by file name."""
    names = " + ".join(Path(path).stem for path in files)
    found: dict[tuple[str, str, str], tuple[dict[str, list[str]], dict[str, str]]] = {}
    for path in files:
        for record in read_records(path, RuleJudgment, skip_bad_rows=skip_bad_rows):
            if record.rule == AUTHORSHIP and record.model is None:
                text, advice = repr(record.response[:40]), "import the texts with their author in the model field"
                raise UserError(f"{path}: field 'model' is missing for {text}: {advice}")
            key = record.model or names, content_hash(to_json(record.prompt)), record.response
            votes, decisions = found.setdefault(key, ({}, {}))
            votes.setdefault(record.rule, []).extend([] if record.decision else [record.verdict])
            decisions |= {record.rule: record.verdict} if record.decision else {}
    return [ResponseVotes(*key[:2], votes, decisions=decisions) for key, (votes, decisions) in found.items()]


def read_rankings(files: Sequence[str], skip_bad_rows: bool) -> list[ResponseVotes]:
    """Read the responses of rankings with their flags, once per labeler.

    Comparisons, which the app exports with a `choice`, and decisions of leads are left out: neither asks for flags.
    """
    nothing = "no rankings with questions on each response (comparisons have none)"
    return parse_rows(files, _responses_of_ranking, nothing, skip_bad_rows=skip_bad_rows) if files else []


def _responses_of_ranking(fields: Mapping[str, Any], _number: str) -> list[ResponseVotes]:
    responses = check_texts(fields.get("responses"), "responses", may_be_empty=True)
    models = check_texts(fields.get("model"), "model", len(responses))
    ratings = fields.get("ratings") or fields.get("some_rated") or [None] * len(responses)
    wrong, (low, high) = not isinstance(ratings, list) or len(ratings) != len(responses), RATINGS
    if wrong or not all(rating is None or (type(rating) is int and low <= rating <= high) for rating in ratings):
        raise field_error("ratings", "is not a list of whole numbers from 1 to 7", "export it again")
    flags = check_flags(fields["flags"], len(responses)) if fields.get("flags") else [()] * len(responses)
    if any(isinstance(names, str) for names in flags):
        raise field_error("flags", "applies to the whole ranking", "use one list per response")
    if fields.get("choice") is not None or fields.get("decision"):
        return []
    other_models = [check_texts(names, "also_by") for names in fields.get("also_by") or [[]] * len(models)]
    prompt, category = str(fields.get("prompt")), fields.get("category")
    return [
        ResponseVotes(
            name, prompt, {flag_id(flag): [FOLLOWS if flag in names else VIOLATES] for flag in FLAGS}, category, rating
        )
        for model, others, rating, names in zip(models, other_models, ratings, flags, strict=True)
        for name in (model, *others)
    ]


def flag_id(flag: str) -> str:
    """Return the question id of a flag. It contains a space, unlike rule ids."""
    return f"flag {flag}"


UNFIT, HALLUCINATION = flag_id("unfit_for_assistant"), flag_id("hallucination")
QUESTIONS = {AUTHORSHIP, CLAIM, SUPPORTED, KNOWN, CITES, HELPFUL, IN_ROLE, *map(flag_id, FLAGS)}
"""Questions with separate measurements. All others are rules."""


Judged = Sequence[tuple[str, bool]]
"""The prompt of each answer, and whether the answer counts."""


def share_of(
    name: str, judged: Judged, note: str = "", better: Better = "", scorer: str = MAJORITY, nothing: str = ""
) -> Measurement:
    """Return the fraction of counted answers, with an interval over prompts."""
    nothing = nothing or (f"no such answer: {note}" if note else "no such answer was judged")
    prompts, counts = [prompt for prompt, _ in judged], [float(counted) for _, counted in judged]
    return share_measurement(name, counts, scorer, note, nothing, number_prompts(prompts), better)


def number_prompts(prompts: Sequence[str]) -> list[int]:
    """Return consecutive prompt numbers, from 0."""
    numbers = {prompt: number for number, prompt in enumerate(sorted(set(prompts)))}
    return [numbers[prompt] for prompt in prompts]


# ---------------------------------------------------------------------------------------------------------------- rules


def violation_measurements(
    responses: Sequence[ResponseVotes], rules: Sequence[str], scorer: str = MAJORITY
) -> list[Measurement]:
    """Return the fraction of violations among decided responses: overall, of any rule, and per rule."""
    measurements = []
    for name in [OVERALL, *rules] if rules else []:
        of_rule = rules if name == OVERALL else [name]
        decided, unsure, note = list[tuple[str, bool]](), 0, ""
        for response in responses:
            verdicts = {response.verdicts[rule] for rule in of_rule if rule in response.verdicts}
            unsure += UNSURE in verdicts and VIOLATES not in verdicts
            if VIOLATES in verdicts or verdicts == {FOLLOWS}:
                decided.append((response.prompt, VIOLATES in verdicts))
        violations = sum(violates for _, violates in decided)
        if unsure:
            count = len(decided) + unsure
            least, most = violations / count, (violations + unsure) / count
            note = f"excludes {unsure} of {count} unsure; including them, {least:.3f} to {most:.3f}"
        nothing = note or "nothing was judged"
        measurements.append(share_of(f"{name} violation rate", decided, note, "lower", scorer, nothing))
    return measurements


def verdict_table(responses: Sequence[ResponseVotes]) -> list[Json]:
    """Return the number of responses per verdict and the labeler agreement, by rule or question."""
    rows = []
    for question in sorted({question for response in responses for question in response.votes} - set(map(flag_id, FLAGS))):
        judged = [response for response in responses if question in response.votes]
        counts = Counter(response.verdicts[question] for response in judged)
        pairs = [first == second for response in judged for first, second in combinations(response.votes[question], 2)]
        row = {"question": question, "n": len(judged), **{verdict: counts[verdict] for verdict in VERDICTS}}
        rows.append({**row, "labelers agree": round(sum(pairs) / len(pairs), 3) if pairs else None})
    return rows


# -------------------------------------------------------------- claims and their sources: LaMDA, Thoppilan et al. 2022, 4


def grounding_measurements(responses: Sequence[ResponseVotes]) -> list[Measurement]:
    """Return LaMDA's measurements for the questions that were asked."""

    def informative(response: ResponseVotes) -> bool:
        return response.says_yes(CLAIM) and response.says_yes(SUPPORTED)

    def share(name: str, among: Sequence[ResponseVotes], counts: Callable[[ResponseVotes], bool], note: str) -> Measurement:
        return share_of(name, [(each.prompt, counts(each)) for each in among], note, "higher")

    judged, helpful, in_role = (
        [each for each in responses if question in each.votes] for question in (CLAIM, HELPFUL, IN_ROLE)
    )
    measurements, note = list[Measurement](), "of all responses"
    if judged:
        claims = [each for each in judged if each.says_yes(CLAIM)]
        not_known = [each for each in claims if not each.says_yes(KNOWN)]
        unknown = "of responses with a claim that is not well known"
        measurements += [
            share("groundedness", claims, informative, "of responses that make a claim"),
            share("informativeness", judged, informative, note),
            share("citation accuracy", not_known, lambda each: each.says_yes(CITES), unknown),
        ]
    if helpful:
        both = [each for each in helpful if CLAIM in each.votes]
        forms = "informative and helpful, of all responses that were judged by both forms"
        measurements.append(share("helpfulness", both, lambda each: informative(each) and each.says_yes(HELPFUL), forms))
    if in_role:
        measurements.append(share("role consistency", in_role, lambda each: each.says_yes(IN_ROLE), note))
    return measurements


# ----------------------------------------------------- written by a model or a person: GPT-3, Brown et al. 2020, 3.9.4


def texts_by_author(
    by_model: Mapping[str, list[ResponseVotes]], people: Sequence[str], control: str, where: str
) -> dict[str, list[ResponseVotes]]:
    """Return the responses with authorship judgments, by author.

    Raises:
        UserError: if people, models or the control (if not empty) wrote none of them. `where` names the files.
    """
    texts = {
        model: [response for response in responses if AUTHORSHIP in response.votes] for model, responses in by_model.items()
    }
    texts = {author: author_texts for author, author_texts in texts.items() if author_texts}
    models = [author for author in texts if author not in people]
    if control and not texts:
        raise UserError(f"{where}: no answers to rule {AUTHORSHIP}; label with forms/rules/authorship.yaml")
    if texts and not 0 < len(models) < len(texts):
        missing = " or ".join(people) if models else "a model"
        raise UserError(f"{where}: no text by {missing}; the authors are {', '.join(texts)}")
    if control and control not in models:
        raise UserError(f"{where}: no text by the control {control!r}; the models are {', '.join(models)}")
    return texts


def authorship_measurements(
    texts: Sequence[ResponseVotes], people: Sequence[ResponseVotes], control: Sequence[ResponseVotes]
) -> list[Measurement]:
    """Measure whether readers can distinguish a model's responses from people's, compared with a control.

    In Brown et al. (2020), accuracy is the fraction of correct answers among decided ones. Here it is the mean of the
    fractions for the model and for people, so the numbers of responses have no effect, and guessing scores one half.
    """

    def share(name: str, part: Sequence[ResponseVotes], counted: str, note: str = "") -> Side:
        """Return the fraction of decided answers that are `counted`."""
        answers = [(text.prompt, vote == counted) for text in part for vote in text.votes[AUTHORSHIP] if vote != UNSURE]
        return share_of(name, answers, note, scorer=PEOPLE), answers

    model = share("called a model", texts, VIOLATES, "share of the model's texts; of the answers that decide")
    person = share("people called people", people, FOLLOWS, "share of people's texts; of the answers that decide")
    answers = [(text.prompt, vote == UNSURE) for text in texts for vote in text.votes[AUTHORSHIP]]
    unsure = share_of("don't know", answers, "share of all answers on the model's texts", scorer=PEOPLE)
    measurements = [mean_of_shares("judged rightly", (model, person), "0.5 is chance"), model[0], person[0], unsure]
    if control:  # people's responses are the same on both sides, so subtract the control's rate
        other = share("control called a person", control, FOLLOWS)
        note = "below 0: harder to tell from people than the control"
        measurements.append(mean_of_shares("judged rightly, minus control", (model, other), note, minus=0.5))
    return measurements


Side = tuple[Measurement, Judged]
"""A fraction with its answers."""


def mean_of_shares(name: str, sides: tuple[Side, Side], note: str, minus: float = 0.0) -> Measurement:
    """Return the mean of two fractions minus a number.

    The interval combines the intervals of both fractions (Newcombe 1998, method 10, for independent proportions). It is at
    least as wide as the bootstrap over the prompts that both have in common.
    """
    shares = [share for share, _ in sides]
    if any(share.value is None for share in shares):
        return Measurement(name, None, None, None, 0, PEOPLE, "no answer decides")
    prompts = dict.fromkeys(prompt for _, answers in sides for prompt, _ in answers)
    place = {prompt: number for number, prompt in enumerate(prompts)}
    counts = np.zeros((2, 2, len(place)))  # [side, counted or total, prompt]
    for side, (_, answers) in enumerate(sides):
        for prompt, counted in answers:
            counts[side, :, place[prompt]] += (counted, 1)

    def measure(drawn: np.ndarray) -> np.ndarray:
        sums = counts[..., drawn].sum(-1)
        with np.errstate(invalid="ignore"):
            mean: np.ndarray = (sums[:, 0] / sums[:, 1]).mean(0) - minus
        return mean

    ends = np.array([[share.low, share.value, share.high] for share in shares])
    value = float(ends[:, 1].mean()) - minus
    low, high = statistic_interval(measure, len(place))
    below, above = (math.hypot(*gap) / 2 for gap in np.diff(ends).T)
    n = sum(share.n for share in shares)
    return Measurement(name, value, min(low, value - below), max(high, value + above), n, PEOPLE, note)


# ------------------------------------------------------- ratings and flags: InstructGPT, Ouyang et al. 2022, table 3


def label_measurements(responses: Sequence[ResponseVotes], closed_domain: Sequence[str]) -> list[Measurement]:
    """Return the mean rating, appropriateness, closed-domain hallucination rate and the rate of each flag.

    Each labeler's answer counts. Intervals resample prompts with all judgments of their answers.
    """
    rated = [response for response in responses if response.rating is not None]
    ratings, prompts = (
        [float(response.rating or 0) for response in rated],
        number_prompts([response.prompt for response in rated]),
    )
    fit = [(response.prompt, not response.says_yes(UNFIT)) for response in responses]
    measurements = [
        mean_measurement("rating", ratings, PEOPLE, "", "no such answer was judged", prompts, "higher"),
        share_of("appropriate for an assistant", fit, "", "higher", PEOPLE),
    ]
    flags = [("hallucination, closed domain", HALLUCINATION)] if closed_domain else []
    for name, question in [*flags, *((flag_id(flag), flag_id(flag)) for flag in FLAGS)]:
        among = responses if name == question else [response for response in responses if response.category in closed_domain]
        flagged = [(response.prompt, response.says_yes(question)) for response in among]
        measurements.append(share_of(name, flagged, "", "lower", PEOPLE))
    return measurements


if __name__ == "__main__":
    run_stage(VerdictsConfig, run_verdicts)
