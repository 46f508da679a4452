"""`align score`: scores of the answers in a file by reward models, rules, attributes, toxicity, rubrics and functions.

The file may have any layout of `align.data.formats`. Each row keeps its fields and gets `scores`: by scorer name, a number
or a list of numbers in the order of the row's responses. Finished chunks are kept in a file beside the output, from which
an interrupted command continues.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator

from align.core.errors import UserError, counted
from align.core.files import new_file
from align.core.plugins import checked_scores, source_version
from align.core.settings import block, option, require_setting
from align.data.conversation import check_answer, to_json
from align.data.fields import check_row, field_error
from align.data.formats import convert_row, find_format
from align.data.layouts import RatedAnswer
from align.data.readers import warn_of_bad_rows
from align.data.records import AttributeJudgment, Demonstration, Prompt, Ranking, RuleJudgment, is_cut
from align.data.sources import column_names, iter_rows
from align.eval.answers import weights_version
from align.eval.store import compute_once, fingerprint
from align.extras.attributes.attribute_rewards import AttributeScorer
from align.extras.rules.judgments import RuleModelSettings, RuleScorer, rules_of_model
from align.extras.rules.rubrics import RubricSettings, load_rubrics
from align.model_registry.registry import resolve_model
from align.ppo.reward_functions import call_reward_function, load_functions
from align.reward.checkpoint import RULE, require_reward_model, scorer_folder
from align.reward.remote import RemoteRewardModel, is_url
from align.reward.text_scoring import TextAnswer, TextRewardModel
from align.runtime.distributed import computes_on_cpu
from align.runtime.progress import console
from align.sampling.settings import InferenceConfig

Row = dict[str, Any]
Scorer = Callable[[Sequence[TextAnswer]], dict[str, list[float]]]
"""Maps answers to their scores, by score name."""
ANSWER_FIELDS = ("response", "answer", "output", "completion")
"""Fields that make a row with `prompt`, without a rating or a verdict, an answer."""
CHUNK = 64
"""Number of rows between two writes to the file of finished chunks."""


@dataclass(kw_only=True)
class ScoreConfig(InferenceConfig):
    """Add scores to the answers of a file."""

    file: list[str] = option(
        [], "Answers to score: file, folder or Hub id in any supported layout. Map columns with FILE[FIELD=COLUMN, ...]."
    )
    output: str = option("", "Output file, .jsonl or .csv. Default: FILE.scored.jsonl.")
    reward_model: list[str] = option(
        [], "Reward models: local folders, Hub ids of classifiers with one label, built-in names or URLs of `align serve`."
    )
    reward_functions: list[str] = option([], "Reward functions, as module:function.")
    rules: Any = block(
        "align.extras.rules.judgments:RuleModelSettings", "Rule model. Adds the probability of each violation."
    )
    attributes: str = option("", "Folder of an attribute model.")
    toxicity: str = option("", "Toxicity scorer: minilm-l6, model:NAME or module:function.")
    rubrics: Any = block("align.extras.rules.rubrics:RubricSettings", "Rubrics, answered by a local model or an endpoint.")

    def __post_init__(self) -> None:
        super().__post_init__()
        scorers = (self.reward_model, self.reward_functions, self.rules, self.attributes, self.toxicity, self.rubrics)
        names = "reward_model, reward_functions, rules.model, attributes, toxicity or rubrics.files"
        require_setting(self, "file", len(self.file) == 1, "one source of answers")
        require_setting(self, "reward_model", any(scorers), f"given, or another scorer: {names}")
        known = not self.output or self.output.endswith((".jsonl", ".csv"))
        require_setting(self, "output", known, "a name that ends in .jsonl or .csv")


class AnsweredRow(NamedTuple):
    """A row with its answers and its location in the file."""

    where: str
    row: Row
    answers: list[TextAnswer]


# ---------------------------------------------------------------------------------------------------------------- input


def answers_of(row: object) -> list[TextAnswer]:
    """Return the answers of a row in any layout, in the order of the row.

    Raises:
        UserError: if the row's layout has no answers, or a field is invalid.
    """
    fields = check_row(row)
    name = next((name for name in ANSWER_FIELDS if fields.get(name) is not None), None)
    if fields.get("prompt") is not None and name is not None and isinstance(fields[name], str):
        return _answers(fields, [fields[name]])
    if fields.get("prompt") is not None and isinstance(fields.get("responses"), list | tuple):
        return _answers(fields, fields["responses"])
    kinds = (Ranking, Demonstration, RuleJudgment, AttributeJudgment)
    kind = next((kind for kind in kinds if find_format(fields, kind)), Ranking)
    answers = []
    for record in convert_row(fields, kind)[1]:
        if isinstance(record, Ranking):
            reasons = _reasons(record.finish_reason, len(record.responses))
            answers += [
                TextAnswer(record.prompt, text, not is_cut(reason))
                for text, reason in zip(record.responses, reasons, strict=True)
            ]
        elif isinstance(record, Demonstration):
            last = record.continuation[-1]["content"]
            answers.append(TextAnswer((*record.prompt, *record.continuation[:-1]), last, not is_cut(record.finish_reason)))
        elif isinstance(record, RatedAnswer | RuleJudgment | AttributeJudgment):
            answers.append(TextAnswer(record.prompt, record.response))
    return answers


def _answers(fields: Mapping[str, Any], texts: Sequence[object]) -> list[TextAnswer]:
    """Return the answers in `texts` to the prompt of a row, with its system turn and history."""
    (record,) = convert_row(fields, Prompt)[1]
    checked = [check_answer(text, "response", may_be_empty=True) for text in texts]
    reasons = _reasons(fields.get("finish_reason"), len(texts))
    return [TextAnswer(record.prompt, text, not is_cut(why)) for text, why in zip(checked, reasons, strict=True)]


def _reasons(given: object, count: int) -> list[str | None]:
    """Return the finish reason of each response of a row, or None if the row does not give it."""
    listed = list(given) if isinstance(given, list | tuple) else [given] * count
    if len(listed) != count:
        raise field_error("finish_reason", f"has {len(listed)} entries for {count} responses", "give one for each")
    return [reason if isinstance(reason, str) else None for reason in listed]


def read_answers(source: str, skip_bad_rows: bool = False) -> list[AnsweredRow]:
    """Read the rows of a source with their answers.

    Raises:
        UserError: if a row is invalid, with file and line. If bad rows are skipped, a warning counts them instead.
    """
    found, problems = list[AnsweredRow](), list[str]()
    columns = column_names(source)
    for where, row in iter_rows(source):
        try:
            if isinstance(row, UserError):
                raise row
            kept = {columns.get(name, name): value for name, value in row.items()}
            found.append(AnsweredRow(where, kept, answers_of(row)))
        except UserError as error:
            problems.append(f"{where}: {error}")
            if not skip_bad_rows:
                raise UserError(f"{problems[0]}; correct the row, or set skip_bad_rows") from error
    if problems:
        warn_of_bad_rows(f"{source}: skipped", problems, len(found) + len(problems))
    if not found:
        raise UserError(f"{source}: no row with an answer")
    return found


# -------------------------------------------------------------------------------------------------------------- scorers


def _reward_scorer(name: str, config: ScoreConfig, accelerator: Accelerator) -> tuple[Scorer, str]:
    """Return the scorer of a reward model, and the version of its weights."""
    if is_url(name):
        remote = RemoteRewardModel(name)
        remote.check()
        return lambda answers: {"": remote.score(answers)}, name
    folder = scorer_folder(name)
    require_reward_model(folder)
    how = (config.dtype, config.batch_tokens, config.chat_template, config.quantization)
    model = TextRewardModel(folder, *how, accelerator=accelerator)
    return lambda answers: {"": model(answers)}, weights_version(str(resolve_model(folder)))


def open_scorers(config: ScoreConfig, accelerator: Accelerator) -> tuple[dict[str, Scorer], dict[str, str]]:
    """Load all scorers. Return the scorers and their versions by name.

    Raises:
        UserError: if one cannot be loaded.
    """
    scorers: dict[str, Scorer] = {}
    versions: dict[str, str] = {}
    for name in config.reward_model:
        short = f"reward/{_short(name)}" if len(config.reward_model) > 1 else "reward"
        short = next(each for each in (short, *(f"{short}-{n}" for n in range(2, 99))) if each not in scorers)
        scorers[short], versions[short] = _reward_scorer(name, config, accelerator)
    for function in load_functions(config.reward_functions):

        def call(answers: Sequence[TextAnswer], function: Any = function) -> dict[str, list[float]]:
            prompts, texts = [answer.prompt for answer in answers], [answer.text for answer in answers]
            return {"": call_reward_function(function, prompts, texts)}

        scorers[function.name], versions[function.name] = call, source_version(function.function)
    if config.rules:
        scorers["violates"], versions["violates"] = _rule_scorer(config.rules, config, accelerator)
    if config.attributes:
        attributes = AttributeScorer(config.attributes, config.dtype, None, accelerator, config.batch_tokens)

        def describe(answers: Sequence[TextAnswer]) -> dict[str, list[float]]:
            rows = attributes([answer.as_sampled() for answer in answers])
            return {name: [row[name] for row in rows] for name in rows[0]}

        scorers["attributes"], versions["attributes"] = describe, fingerprint(config.attributes)
    if config.toxicity:
        from align.eval.toxicity_scorers import open_scorer

        scorer = open_scorer(config.toxicity, device=accelerator.device)
        scorers["toxicity"] = lambda answers: {"": scorer([answer.text for answer in answers])}
        versions["toxicity"] = scorer.version
    if config.rubrics:
        scorers["rubric"], versions["rubric"] = _rubric_scorer(config.rubrics, config, accelerator)
    return scorers, versions


def _rule_scorer(settings: RuleModelSettings, config: ScoreConfig, accelerator: Accelerator) -> tuple[Scorer, str]:
    rules = rules_of_model(settings.model, settings.rules)
    how = (config.dtype, config.batch_tokens, config.chat_template, config.quantization)
    model = TextRewardModel(settings.model, *how, kind=RULE, accelerator=accelerator)
    judge = RuleScorer(model.scorer, rules, model.tokenization)

    def score(answers: Sequence[TextAnswer]) -> dict[str, list[float]]:
        found = judge([answer.as_sampled() for answer in answers])
        return dict(zip(rules, found.tolist(), strict=True))

    return score, f"{fingerprint(settings.model)} {json.dumps(rules)}"


def _rubric_scorer(settings: RubricSettings, config: ScoreConfig, accelerator: Accelerator) -> tuple[Scorer, str]:
    rubrics, judge = load_rubrics(settings, accelerator, config.dtype, config.batch_tokens)

    def score(answers: Sequence[TextAnswer]) -> dict[str, list[float]]:
        prompts, texts = [answer.prompt for answer in answers], [answer.text for answer in answers]
        none: list[str | None] = [None] * len(answers)
        return {rubric.name: rubric.rewards(judge, prompts, texts, none) for rubric in rubrics}

    return score, f"{settings.model or settings.endpoint_model} {fingerprint(settings.model)} {rubrics}"


def _short(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".", "..", "model")]
    return parts[-1] if parts else name


# -------------------------------------------------------------------------------------------------------------- scoring


def score_rows(
    rows: Sequence[AnsweredRow], scorers: Mapping[str, Scorer], finished: Path, versions: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the scores of each row, by name: a number, or a list for a row of several answers.

    Args:
        finished: file of finished chunks.
        versions: versions of the scorers. Stored scores of other versions are ignored.

    Raises:
        UserError: if a scorer fails, or returns a number that is not finite. Finished chunks are saved.
    """

    def compute(chunk: list[AnsweredRow]) -> list[Row]:
        answers = [answer for row in chunk for answer in row.answers]
        places = [row.where for row in chunk for _ in row.answers]
        columns: dict[str, list[float]] = {}
        for name, scorer in scorers.items():
            for part, scores in _with_places(name, scorer, answers, places).items():
                columns[f"{name}/{part}" if part else name] = scores
        found, start = list[Row](), 0
        for row in chunk:
            end = start + len(row.answers)
            single = end - start == 1
            values = {name: scores[start] if single else scores[start:end] for name, scores in columns.items()}
            found.append({"scores": {name: _rounded(value) for name, value in values.items()}})
            start = end
        return found

    items = {str(number): row for number, row in enumerate(rows, 1)}
    accelerator = Accelerator(cpu=computes_on_cpu())
    content: Callable[[AnsweredRow], object] = lambda row: [  # noqa: E731
        [to_json(answer.prompt), answer.text, answer.ended] for answer in row.answers
    ]
    try:
        results = compute_once(finished, {"scorers": dict(versions)}, items, compute, accelerator, CHUNK, content)
    except UserError as error:
        raise UserError(f"{error}; finished rows are in {finished}: run the same command again to continue") from error
    return [result["scores"] for result in results]


def _rounded(value: float | list[float]) -> float | list[float]:
    return [round(each, 6) for each in value] if isinstance(value, list) else round(value, 6)


def _with_places(name: str, scorer: Scorer, answers: Sequence[TextAnswer], places: Sequence[str]) -> dict[str, list[float]]:
    """Call a scorer, and name the row in an error about one answer."""
    if not answers:
        return {}
    try:
        found = scorer(answers)
    except UserError as error:
        text = str(error)
        for number in range(len(answers), 0, -1):
            text = text.replace(f"answer {number}:", f"{places[number - 1]}:") if f"answer {number}:" in text else text
            text = text.replace(f"for answer {number},", f"for {places[number - 1]},")
        raise UserError(text) from error
    who = f"scorer {name}"
    return {
        part: checked_scores(scores, len(answers), who, items="answers", describe=places.__getitem__)
        for part, scores in found.items()
    }


def score_file(config: ScoreConfig) -> Path:
    """Score the answers of a file, write it with the scores, and return its path.

    Raises:
        UserError: if a row or setting is invalid, or a scorer fails. Finished rows are kept.
    """
    (source,) = config.file
    target = Path(config.output or _beside(source))
    if target.exists():
        raise UserError(f"{target} already exists; set another output, or remove it")
    rows = read_answers(source, config.skip_bad_rows)
    accelerator = Accelerator(cpu=computes_on_cpu())
    scorers, versions = open_scorers(config, accelerator)
    finished = target.with_name(f"{target.stem}.partial.jsonl")
    scores = score_rows(rows, scorers, finished, versions)
    _write(target, rows, scores)
    with suppress(FileNotFoundError):
        finished.unlink()
    count = sum(len(row.answers) for row in rows)
    names = ", ".join(scores[0])
    console.print(f"{target}: {counted(len(rows), 'row')}, {counted(count, 'answer')} scored by {names}")
    for line in summary(scores):
        console.print(line)
    return target


def _beside(source: str) -> str:
    name = source.partition("[")[0].rstrip("/")
    if not Path(name).exists():
        name = name.rpartition("/")[2]
    return f"{name}.scored.jsonl"


def summary(scores: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line per score with its mean, standard deviation, minimum and maximum over all answers."""
    for name in scores[0]:
        values = [v for row in scores for v in (row[name] if isinstance(row[name], list) else [row[name]])]
        mean = sum(values) / len(values)
        deviation = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
        yield f"  {name}: mean {mean:.4g}, std {deviation:.4g}, min {min(values):.4g}, max {max(values):.4g}"


def _write(target: Path, rows: Sequence[AnsweredRow], scores: Sequence[Mapping[str, Any]]) -> None:
    with new_file(target) as file:
        if target.suffix == ".csv":
            file.write(_as_csv(rows, scores).encode())
            return
        for row, found in zip(rows, scores, strict=True):
            merged = {**row.row, "scores": {**_earlier(row.row), **found}}
            file.write((json.dumps(merged, ensure_ascii=False, default=_plain) + "\n").encode())


def _earlier(row: Row) -> Row:
    """Return the scores that an earlier command added."""
    scores = row.get("scores")
    return dict(scores) if isinstance(scores, Mapping) else {}


def _plain(value: Any) -> Any:
    """Convert a value of a data set, such as a numpy array or a date, to JSON."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _as_csv(rows: Sequence[AnsweredRow], scores: Sequence[Mapping[str, Any]]) -> str:
    """Format the rows as CSV with a column `score/NAME`, or `score/NAME/1` and so on for rows with several answers."""
    table = []
    for row, found in zip(rows, scores, strict=True):
        cells = {
            key: value
            if isinstance(value, str | int | float | None)
            else json.dumps(value, ensure_ascii=False, default=_plain)
            for key, value in row.row.items()
        }
        for name, value in found.items():
            if isinstance(value, list):
                cells |= {f"score/{name}/{number}": each for number, each in enumerate(value, 1)}
            else:
                cells[f"score/{name}"] = value
        table.append(cells)
    columns = list(dict.fromkeys(name for cells in table for name in cells))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def run_score(config: ScoreConfig) -> None:
    """Run `align score`."""
    score_file(config)
