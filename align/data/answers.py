"""Convert answers and preferences of published data sets to native fields."""

from collections.abc import Callable, Mapping, Sequence

from align.data.fields import check_list, check_score, check_text, field_error, required_field, short_repr, text_or_none
from align.data.layouts import Fields, Reader, Row
from align.data.records import evenly_spaced, ranks_from_scores


def completion_of(field: str) -> Reader:
    """Read the completion from a field."""
    return lambda row: {"completion": check_text(row[field], field)}


def pair_of(chosen: str, rejected: str) -> Reader:
    """Read a chosen and a rejected response from two fields."""

    def answers(row: Row) -> Fields:
        texts = [check_text(row.get(name), name) for name in (chosen, rejected)]
        if texts[0] == texts[1]:
            raise field_error(rejected, f"is identical to '{chosen}'", "remove the row")
        return {"chosen": texts[0], "rejected": texts[1], "margin": row.get("margin"), "labeler": row.get("labeler")}

    return answers


def ranks_of_two(preference: float) -> tuple[int, int]:
    """Return the ranks of two responses from the sign of the preference for the first."""
    return (1, 1) if preference == 0 else (1, 2) if preference > 0 else (2, 1)


def compared_answers(first: str, second: str, preference: Callable[[Row], float], labeler: str = "", id: str = "") -> Reader:
    """Rank the responses in two fields by the preference for the first. `labeler` and `id` are field names."""

    def answers(row: Row) -> Fields:
        ranks = ranks_of_two(preference(row))
        texts = [check_text(row.get(name), name) for name in (first, second)]
        extra_fields = {"labeler": row.get(labeler)} if labeler else {"id": text_or_none(row.get(id))} if id else {}
        return {"responses": texts, "ranks": ranks, **extra_fields}

    return answers


PREFERENCES = {
    **dict.fromkeys(("a", "1", "first", "response_a", "answer_a", "model_a"), 1),
    **dict.fromkeys(("b", "2", "second", "response_b", "answer_b", "model_b"), -1),
    **dict.fromkeys(("tie", "tie_(bothbad)", "both_bad", "both", "neither", "same", "equal"), 0),
}
"""Preference for the first of two answers by word; positive if the first is better."""


def preference_in_words(row: Row, field: str) -> int:
    """Return 1 for a, -1 for b and 0 for a tie, as a field says in words."""
    word = str(required_field(row, field, "use a, b or tie")).strip().lower().replace(" ", "_").removesuffix(".0")
    if word == "0":  # 0 and 1 may be an index, or whether the first answer is better
        raise field_error(field, f"is {short_repr(row[field])}, which is ambiguous", "use a, b or tie")
    if word not in PREFERENCES:
        raise field_error(field, f"is {short_repr(row[field])}", "use a, b or tie")
    return PREFERENCES[word]


def preference_by_number(row: Row, field: str, remedy: str = "use 0 or 1") -> int:
    """Parse the number of the better response (0 is the first)."""
    value = row.get(field)
    if value not in (0, 1) or isinstance(value, bool):
        raise field_error(field, f"is {short_repr(value)}", remedy)
    return 1 if value == 0 else -1


def score_of(row: Row, field: str) -> float:
    """Return the score in a field."""
    return check_score(row.get(field), field)


def named_models(row: Row, first: str, second: str) -> list[str] | None:
    """Return the models named in two fields, or None if either is missing."""
    models = [row.get(first), row.get(second)]
    return [str(model) for model in models] if all(isinstance(model, str) for model in models) else None


def check_objects(value: object, field: str, wanted: str = "{text, ...}") -> Sequence[Row]:
    """Check that a field is a list of objects."""
    entries = check_list(value, field)
    for i, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise field_error(f"{field}[{i}]", f"is {short_repr(entry)}", f"write {wanted}")
    return entries


def texts_of(entries: Sequence[Row], field: str, name: str) -> list[str]:
    """Return one text field of each entry of a list."""
    return [check_text(entry.get(name), f"{field}[{i}].{name}") for i, entry in enumerate(entries)]


def scores_of(entries: Sequence[Row], field: str, *names: str) -> list[float]:
    """Return the score of each entry from the first field that it has."""
    fields_with_score = (next((name for name in names if entry.get(name) is not None), names[0]) for entry in entries)
    return [check_score(entries[i].get(name), f"{field}[{i}].{name}") for i, name in enumerate(fields_with_score)]


def ranked_answers(entries: Sequence[Row], texts: Sequence[str], scores: Sequence[float]) -> Fields:
    """Rank responses by score, with the models named in the entries. Keeps at most nine, evenly spaced by rank."""
    order = sorted(range(len(texts)), key=lambda i: -scores[i])
    kept = sorted(order[i] for i in evenly_spaced(len(order)))
    models = [text_or_none(entry.get("model")) for entry in entries]
    named = [models[i] for i in kept] if models and all(models) else None
    return {"responses": [texts[i] for i in kept], "ranks": ranks_from_scores([scores[i] for i in kept]), "model": named}


def alternating_turns(texts: Sequence[object], field: str) -> list[Fields]:
    """Convert strings to alternating user and assistant turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": check_text(text, f"{field}[{i}]")} for i, text in enumerate(texts)]
