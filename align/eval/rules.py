"""`align eval rules`: how often each rule is violated, by people's judgments and by a rule scorer, and how the two agree.

From a launcher: `accelerate launch align/eval/rules.py --config FILE`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from accelerate import Accelerator

from align.cli import run_stage
from align.config import option, require
from align.data.conversation import check_prompt, to_json
from align.data.fields import check_row, check_texts
from align.data.fields import require as required
from align.data.readers import read_records
from align.data.records import RuleJudgment
from align.data.sources import iter_rows
from align.distributed import map_shared
from align.errors import UserError
from align.eval.chat_judge import ChatJudgeConfig
from align.eval.intervals import mean_interval, statistic_interval
from align.eval.results import Evaluation, Figure, Json, Rows, publish
from align.eval.rule_judging import FOLLOWS, UNSURE, VIOLATES, Agreement, Rate, majority, overall
from align.eval.rule_scorers import Case, RuleScorer, read_rules, rule_classifier, rule_endpoint, rule_function
from align.eval.subjects import open_accelerator

TASK = "rules"
CHUNK = 32
"""Cases that are scored before they are written down."""
Verdicts = dict[Case, str]


@dataclass(kw_only=True)
class RulesConfig(ChatJudgeConfig):
    """Violations of rules in judgments of people, in responses of models, or both. No model is opened."""

    judgments: list[str] = option([], "rule judgments that the labelling app exported, one row a labeler or aggregated")
    responses: list[str] = option([], "responses to judge by every rule, as `align sample` writes them; needs a scorer")
    rules: list[str] = option(["configs/rules/sparrow-dialogue.yaml"], "files of rules, for the scorer")
    scorer: str = option(
        "", "judges too: module:function, model:NAME (a classifier) or the URL of an OpenAI-compatible service"
    )
    scorer_label: str = option("violates", "of a classifier: the label whose probability is the score")
    scorer_batch: int = option(32, "of a classifier: texts that are scored at once")
    threshold: float = option(0.5, "a score above it is a violation, below it none; exactly there it is unsure")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "models", not self.models, "empty: write responses with `align sample` and name the file in responses")
        require(self, "judgments", bool(self.judgments or self.responses), "given, or responses")
        require(self, "scorer", bool(self.scorer) or not self.responses, "given: somebody has to judge the responses")
        require(self, "threshold", 0 < self.threshold < 1, "above 0 and below 1")
        require(self, "judge_model", bool(self.judge_model) or not self.is_service, "given with a service")
        require(self, "scorer_batch", self.scorer_batch > 0, "above 0")

    @property
    def is_service(self) -> bool:
        """Whether the scorer is a URL."""
        return self.scorer.startswith(("http://", "https://"))


def run_rules(config: RulesConfig) -> list[Evaluation]:
    """Count violations and write `rules.json`; an evaluation for the judgments and one for each model of the responses.

    Raises:
        UserError: for anything that the settings, the data or the scorer have wrong; what was scored is kept.
    """
    accelerator = open_accelerator(config)
    texts = read_rules(config.rules) if config.scorer else {}
    people = {case: majority(votes) for case, votes in read_judgments(config, texts).items()}
    by_model = read_responses(config, texts)
    cases = list(dict.fromkeys([*people, *(case for of in by_model.values() for case in of)]))
    scored, title = _scored(config, cases, accelerator) if config.scorer else ({}, "")
    found = []
    if people:
        found.append(_judged(config, people, {case: scored[case] for case in people} if scored else {}, title))
    for model, of in by_model.items():
        figures, table = violation_figures("scorer", {case: scored[case] for case in of}, config.resamples, title)
        found.append(Evaluation(TASK, model, _settings(config, title), figures, {"Verdicts by rule, scorer": table}))
    return publish(config, found, accelerator)


def _settings(config: RulesConfig, title: str) -> Json:
    return {**config.deciding("timeout", "retries", "parallel"), "scorer": title}


# ---------------------------------------------------------------------------------------------------------------- input


def read_judgments(config: RulesConfig, texts: Mapping[str, str]) -> dict[Case, list[str]]:
    """The verdicts on each case.

    Args:
        texts: rules by id; empty where no scorer has to read them.

    Raises:
        UserError: for a bad row, or a rule that is in no file of rules.
    """
    found: dict[Case, list[str]] = {}
    for path in config.judgments:
        for record in read_records(path, RuleJudgment, skip_bad_rows=config.skip_bad_rows):
            if texts and record.rule not in texts:
                raise UserError(
                    f"{path}: rule '{record.rule}' is in none of {', '.join(config.rules)}; name its file in rules"
                )
            case = Case(record.rule, texts.get(record.rule, ""), record.prompt, record.response)
            found.setdefault(case, []).append(record.verdict)
    return found


def read_responses(config: RulesConfig, texts: Mapping[str, str]) -> dict[str, list[Case]]:
    """For each model that wrote responses, each of them under each rule.

    Raises:
        UserError: for a row that is not as `align sample` writes it.
    """
    found: dict[str, list[Case]] = {}
    for path in config.responses:
        for row in iter_rows(path):
            try:
                if row.error is not None:
                    raise UserError(row.error)
                fields = check_row(row.row)
                prompt = check_prompt(required(fields, "prompt", "write the text that was answered"))
                responses = check_texts(fields.get("responses"), "responses")
                models = check_texts(fields.get("model"), "model", len(responses))
            except UserError as error:
                if not config.skip_bad_rows:
                    raise UserError(f"{row.where}: {error}") from error
                continue
            for model, response in zip(models, responses, strict=True):
                found.setdefault(model, []).extend(Case(rule, text, prompt, response) for rule, text in texts.items())
    return found


# --------------------------------------------------------------------------------------------------------------- scoring


def _scored(config: RulesConfig, cases: Sequence[Case], accelerator: Accelerator) -> tuple[Verdicts, str]:
    """The scorer's verdict on each case, and its name with its version."""
    scorer, title = _open(config, accelerator)
    settings = {"scorer": title, "judge_model": config.judge_model, "label": config.scorer_label}
    rows = Rows(Path(config.output) / f"{TASK}-scores.jsonl", settings, accelerator)

    def ask(part: list[Case]) -> list[float]:
        return map_shared(part, lambda mine: scorer(mine) if mine else [], accelerator)

    scores = rows.fill(
        {_key(case): case for case in cases},
        lambda part: [{"rule": case.rule, "score": score} for case, score in zip(part, ask(part), strict=True)],
        CHUNK * accelerator.num_processes,
        "rules",
    )

    return {case: verdict(row["score"], config.threshold) for case, row in zip(cases, scores, strict=True)}, title


def _open(config: RulesConfig, accelerator: Accelerator) -> tuple[RuleScorer, str]:
    if config.is_service:
        return rule_endpoint(config.scorer, config), f"{config.judge_model} at {config.scorer}"
    if config.scorer.startswith("model:"):
        name = config.scorer.removeprefix("model:")
        scorer, version = rule_classifier(name, config.scorer_label, config.scorer_batch, accelerator.device)
        return scorer, f"{config.scorer} ({version})"
    return rule_function(config.scorer), config.scorer


def verdict(score: float, threshold: float) -> str:
    """What a chance of violation means."""
    return VIOLATES if score > threshold else FOLLOWS if score < threshold else UNSURE


def _key(case: Case) -> str:
    """A case's name in the file of rows."""
    content = json.dumps([case.rule, case.rule_text, to_json(case.conversation), case.response])
    return f"{case.rule} {hashlib.sha256(content.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


# --------------------------------------------------------------------------------------------------------------- figures


def _judged(config: RulesConfig, people: Verdicts, scored: Verdicts, title: str) -> Evaluation:
    """People's judgments, and the scorer's on the same cases."""
    figures, table = violation_figures("people", people, config.resamples, "people, majority of labelers")
    tables = {"Verdicts by rule, people": table}
    if scored:
        more, table = violation_figures("scorer", scored, config.resamples, title)
        figures += [*more, *agreement_figures(people, scored, config.resamples, title)]
        tables["Verdicts by rule, scorer"] = table
        tables["People against the scorer"] = confusion(people, scored)
    return Evaluation(
        TASK, " + ".join(Path(path).stem for path in config.judgments), _settings(config, title), figures, tables
    )


def violation_figures(who: str, verdicts: Verdicts, resamples: int, scorer: str) -> tuple[list[Figure], list[Json]]:
    """The rate overall (responses that break any rule that was judged) and for each rule, and a table of the counts."""
    by_response: dict[tuple[str, str], list[str]] = {}
    by_rule: dict[str, list[str]] = {}
    for case, said in verdicts.items():
        by_response.setdefault((case.dialogue, case.response), []).append(said)
        by_rule.setdefault(case.rule, []).append(said)
    groups = {"overall": [overall(said) for said in by_response.values()], **dict(sorted(by_rule.items()))}
    figures, table = [], []
    for name, given in groups.items():
        rate = Rate.of(given)
        least, most = rate.bounds
        decided = [float(said == VIOLATES) for said in given if said != UNSURE]
        low, high = mean_interval(decided, resamples) if len(decided) > 1 else (None, None)
        note = f"{rate.unsure} of {len(given)} unsure, left out; with them {least:.3f} to {most:.3f}" if rate.unsure else ""
        figures.append(Figure(f"{who}: {name} violation rate", rate.value, low, high, rate.decided, scorer, note))
        counts = {"violates": rate.violates, "unsure": rate.unsure, "follows": rate.follows}
        table.append({"rule": name, "n": len(given), **counts})
    return figures, table


def agreement_figures(people: Verdicts, scored: Verdicts, resamples: int, scorer: str) -> list[Figure]:
    """Accuracy of the scorer against people, and Cohen's kappa, where both decided; intervals over cases."""
    found = Agreement.of(people, scored)
    both = [case for case in people if UNSURE not in (people[case], scored[case])]
    first, second = (np.array([side[case] == VIOLATES for case in both]) for side in (people, scored))

    def accuracy(drawn: np.ndarray) -> np.ndarray:
        same: np.ndarray = (first[drawn] == second[drawn]).mean(-1)
        return same

    def kappa(drawn: np.ndarray) -> np.ndarray:
        one, other = first[drawn].mean(-1), second[drawn].mean(-1)
        chance = one * other + (1 - one) * (1 - other)
        with np.errstate(invalid="ignore", divide="ignore"):
            values: np.ndarray = np.where(chance < 1, (accuracy(drawn) - chance) / (1 - chance), np.nan)
        return values

    nothing = (None, None)
    sure = nothing if len(both) < 2 else statistic_interval(accuracy, len(both), resamples)
    beyond = nothing if found.kappa is None else statistic_interval(kappa, len(both), resamples)
    note = "" if found.kappa is not None else "both gave one and the same verdict throughout, or decided nothing together"
    return [
        Figure("agreement: accuracy", found.accuracy, sure[0], sure[1], found.n, scorer),
        Figure("agreement: Cohen's kappa", found.kappa, beyond[0], beyond[1], found.n, scorer, note),
    ]


def confusion(people: Verdicts, scored: Verdicts) -> list[Json]:
    """How often the scorer gave each verdict where people gave a certain one, unsure ones too."""
    kinds = (VIOLATES, UNSURE, FOLLOWS)
    return [
        {
            "people": said,
            **{f"scorer {kind}": sum(people[case] == said and scored[case] == kind for case in people) for kind in kinds},
        }
        for said in kinds
    ]


if __name__ == "__main__":
    run_stage(RulesConfig, run_rules)
