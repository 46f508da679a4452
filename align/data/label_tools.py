"""Exports of labeling tools: Argilla (JSON records, `datasets` columns) and Label Studio (JSON).

A row becomes one ranking for each labeler, or one rated answer. The names of fields are those that the tools' templates for
preference data have.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from align.data.conversation import check_prompt
from align.data.fields import Row, check_list, check_score, check_text, field_error, id_or_none, short_repr
from align.data.layouts import Fields, RatedAnswer
from align.data.records import Ranking, Record

PROMPTS = ("prompt", "instruction", "question", "input", "text")
"""Possible names of the prompt field, in order of priority."""
PAIRS = (
    *(("response_1", "response_2"), ("response-1", "response-2"), ("response_a", "response_b"), ("response1", "response2")),
    *(("answer1", "answer2"), ("answer_1", "answer_2"), ("answer_a", "answer_b"), ("text1", "text2")),
)
"""Pairs of fields with two responses, left first."""
SINGLE = ("response", "completion", "answer", "output")
TIES = ("tie", "same", "equal", "both", "neither")
DISCARDED = ("discarded", "draft")
"""Argilla response states that are not judgments."""


class ToolAnswer(NamedTuple):
    """A labeler's answer to a question of a labeling tool."""

    question: str
    value: Any
    labeler: str | None


def prompt_of(fields: Row) -> Fields:
    """Return the prompt among an item's fields."""
    name = next((name for name in PROMPTS if fields.get(name) is not None), None)
    if name is None:
        raise field_error("fields", f"have no prompt: {', '.join(map(str, fields))}", f"name it {PROMPTS[0]}")
    return {"prompt": check_prompt(fields[name], name)}


def _records(fields: Row, answers: Sequence[ToolAnswer], id: str | None) -> list[Record]:
    """Convert the answers of labelers to rankings and ratings."""
    if not answers:
        raise field_error("responses", "contain no submitted answer", "export only labeled items, or set skip_bad_rows")
    common = {**prompt_of(fields), "id": id}
    found = (_record(fields, answer, common) for answer in answers)
    records = [record for record in found if record is not None]
    if not records:
        names = ", ".join(dict.fromkeys(answer.question for answer in answers))
        wrong = f"contain no ranking, choice or rating of responses in {names}"
        raise field_error("responses", wrong, "convert them to responses and ranks")
    return records


def _record(fields: Row, answer: ToolAnswer, common: Fields) -> Record | None:
    value, labeler = answer.value, answer.labeler
    if isinstance(value, Mapping) and {"rank", "value"} <= value.keys():  # `datasets` stores a list of objects as columns
        names = check_list(value["value"], answer.question)
        ranks = check_list(value["rank"], answer.question, len(names))
        value = [{"value": name, "rank": rank} for name, rank in zip(names, ranks, strict=True)]
    if isinstance(value, list | tuple) and value and all(isinstance(e, Mapping) and "rank" in e for e in value):
        names = [str(entry.get("value")) for entry in value]
        texts = [check_text(fields.get(name), name, may_be_empty=True) for name in names]
        ranks = [entry["rank"] for entry in value]
        return Ranking(responses=tuple(texts), ranks=tuple(ranks), labeler=labeler, **common)
    pair = next((pair for pair in PAIRS if all(fields.get(name) is not None for name in pair)), None)
    if pair is not None:
        ranks_of_pair = _ranks_of_choice(value, pair)
        if ranks_of_pair is None:
            return None
        texts = [check_text(fields[name], name, may_be_empty=True) for name in pair]
        return Ranking(responses=tuple(texts), ranks=ranks_of_pair, labeler=labeler, **common)
    single = next((name for name in SINGLE if fields.get(name) is not None), None)
    if single is not None and isinstance(value, int | float) and not isinstance(value, bool):
        return RatedAnswer(response=fields[single], rating=check_score(value, answer.question), **common)
    return None


def _ranks_of_choice(value: object, pair: Sequence[str]) -> tuple[int, int] | None:
    """Return the ranks of two responses from the name or number of the better one, or None if the value is not a choice."""
    word = str(value).strip().lower()
    first, second = (
        {name.lower(), number, side} for name, number, side in zip(pair, ("1", "2"), ("left", "right"), strict=True)
    )
    if word in first | {"a"}:
        return 1, 2
    if word in second | {"b"}:
        return 2, 1
    return (1, 1) if word in TIES else None


# --- Argilla ---


def is_argilla(row: Row) -> bool:
    """Return whether a row is an Argilla record: JSON, or `datasets` columns."""
    if isinstance(row.get("fields"), Mapping) and isinstance(row.get("responses"), Mapping):
        return True
    return any(str(name).endswith(".responses") for name in row) or any(map(_is_first_version, row.values()))


def _is_first_version(column: object) -> bool:
    """Return whether a column contains answers to a question in the format of Argilla 1."""
    return isinstance(column, list | tuple) and bool(column) and all(
        isinstance(entry, Mapping) and {"user_id", "value", "status"} <= entry.keys() for entry in column
    )  # fmt: skip


def argilla_fields(row: Row) -> Row:
    """Return the text fields of a record by name."""
    return row["fields"] if isinstance(row.get("fields"), Mapping) else row


def argilla(row: Row) -> list[Record]:
    """Convert a record to rankings or ratings."""
    return _records(argilla_fields(row), list(_argilla_answers(row)), id_or_none(row.get("id")))


def _argilla_answers(row: Row) -> Iterator[ToolAnswer]:
    if isinstance(row.get("responses"), Mapping):
        for question, answers in row["responses"].items():
            for entry in check_list(answers, f"responses.{question}"):
                if not isinstance(entry, Mapping):
                    raise field_error(f"responses.{question}", f"has {short_repr(entry)}", "write {value, user_id}")
                if entry.get("status") not in DISCARDED:
                    yield ToolAnswer(question, entry.get("value"), id_or_none(entry.get("user_id")))
        return
    for name in list(row):
        if str(name).endswith(".responses") and row[name] is not None:
            values = check_list(row[name], name)
            missing = [None] * len(values)
            users = check_list(row.get(f"{name}.users") or missing, f"{name}.users", len(values))
            states = check_list(row.get(f"{name}.status") or missing, f"{name}.status", len(values))
            for value, user, state in zip(values, users, states, strict=True):
                if state not in DISCARDED:
                    yield ToolAnswer(str(name).removesuffix(".responses"), value, id_or_none(user))
        elif _is_first_version(row.get(name)):
            for entry in row[name]:
                if entry["status"] not in DISCARDED:
                    yield ToolAnswer(str(name), entry["value"], id_or_none(entry["user_id"]))


# --- Label Studio ---


def is_label_studio(row: Row) -> bool:
    """Return whether a row is a Label Studio task with annotations."""
    return isinstance(row.get("data"), Mapping) and row.get("annotations") is not None


def label_studio_fields(row: Row) -> Row:
    """Return the text fields of a task by name. Items of a list to rank are keyed by id."""
    data: Row = row["data"]
    items = next((value for value in data.values() if _are_items(value)), ())
    return {**data, **{str(item["id"]): item.get("body") or item.get("title") for item in items}}


def _are_items(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) and "id" in item for item in value)


def label_studio(row: Row) -> list[Record]:
    """Convert a task with `Pairwise`, `Ranker` or `Rating` tags to rankings or ratings."""
    return _records(label_studio_fields(row), list(_label_studio_answers(row)), id_or_none(row.get("id")))


def _label_studio_answers(row: Row) -> Iterator[ToolAnswer]:
    for number, annotation in enumerate(check_list(row["annotations"], "annotations")):
        if not isinstance(annotation, Mapping):
            raise field_error(f"annotations[{number}]", f"is {short_repr(annotation)}", "export the tasks as JSON")
        if annotation.get("was_cancelled"):
            continue
        by = annotation.get("completed_by")
        labeler = id_or_none(by.get("email") or by.get("id") if isinstance(by, Mapping) else by)
        for result in check_list(annotation.get("result") or [], f"annotations[{number}].result"):
            value = result.get("value") if isinstance(result, Mapping) else None
            if not isinstance(value, Mapping):
                continue
            question = str(result.get("from_name"))
            if "selected" in value:
                yield ToolAnswer(question, value["selected"], labeler)
            elif "rating" in value:
                yield ToolAnswer(question, value["rating"], labeler)
            elif isinstance(value.get("ranker"), Mapping):
                order = [names for names in value["ranker"].values() if names]
                if len(order) == 1 and isinstance(order[0], list):  # several lists are unordered buckets
                    ranked = [{"value": str(name), "rank": rank} for rank, name in enumerate(order[0], start=1)]
                    yield ToolAnswer(question, ranked, labeler)
