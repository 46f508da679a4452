"""Mark errors: select spans of a response and assign each span a type. Offsets count Unicode code points."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, ClassVar

from align.data.conversation import segment_ends
from annotation_ui.rendering.markdown import text_view
from annotation_ui.tasks.base import BadInputError, Json, Setting, Task, Value, require
from annotation_ui.tasks.fields import prompt_view, response_fields, text_field

DEFAULT_TYPES = "incorrect, unverifiable, irrelevant, redundant, incoherent"
MOST_TYPES = 9  # each type has a number key
MAX_SPANS = 500
_TYPE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")  # also used as an attribute name


def segment_attributes(rows: Sequence[Json]) -> Iterator[Json]:
    """Yield a row for the response up to the end of each sentence.

    The attribute of an error type is 1 if the last sentence contains an error of this type, and 0 otherwise.
    """
    for row in rows:
        start = 0
        for end in segment_ends(row["response"]):
            found = {span["type"] for span in row["spans"] if span["start"] < end and span["end"] > start}
            attributes = {name: int(name in found) for name in row["types"]}
            yield {"prompt": row["prompt"], "response": row["response"][:end], "attributes": attributes}
            start = end


class Spans(Task):
    """Collects errors in a response as typed spans. Spans may overlap."""

    name = "spans"
    title = "Mark errors"
    comparable = True
    settings = (
        Setting("error_types", str, f"Error types, separated by commas (empty: {DEFAULT_TYPES})", "types of errors"),
    )
    records: ClassVar = {"spans": list, "attributes": segment_attributes}

    def contents(self, row: Json, settings: Json, rules: list[Json]) -> list[Json]:
        """Return one item per response. The row's `spans` are marked in advance."""
        types = error_types(settings.get("error_types") or DEFAULT_TYPES)
        contents = [{**fields, "types": types} for fields in response_fields(row)]
        if row.get("spans") is None:
            return contents
        require(len(contents) == 1, "spans: the row must have one response")
        return [{**contents[0], "spans": check_spans(row["spans"], contents[0])}]

    def known_answers(self, gold: Json, contents: list[Json]) -> list[Json | None]:
        require(len(contents) == 1, "gold: the row must have one response")
        return [{"spans": check_spans(gold.get("spans"), contents[0])}]

    def view(self, content: Json, order: list[int], settings: Json, rules: list[Json]) -> Json:
        return {
            "prompt": prompt_view(content["prompt"]),
            "response": text_view(content["response"]),
            "types": content["types"],
            "spans": content.get("spans", []),
        }

    def check(self, answer: Json, content: Json, rules: list[Json]) -> Json:
        return {"spans": check_spans(answer.get("spans"), content)}

    def draft(self, answer: Json) -> Json:
        return {"spans": answer["spans"], "none": not answer["spans"]}

    def summary(self, answer: Json, rules: Sequence[Json] = ()) -> str:
        """Return the type and position of up to three spans, or else the count of each type."""
        counts = Counter(span["type"] for span in answer["spans"])
        places = ", ".join(f"{span['type']} {span['start']}–{span['end']}" for span in answer["spans"])
        if not counts:
            return "no errors"
        return places if len(answer["spans"]) <= 3 else ", ".join(f"{count} {name}" for name, count in counts.items())

    def gold_agreement(self, answer: Json, gold: Json) -> float | None:
        return self.similarity(answer, gold) if "spans" in gold else None

    def rows(self, content: Json, answer: Json) -> list[Json]:
        row: Json = {field: content[field] for field in ("prompt", "response", "model") if field in content}
        return [{**row, "types": content["types"], "spans": answer["spans"]}]

    def combine(self, answers: list[Json]) -> Json:
        """Return the spans that a majority of labelers marked with the same type, without notes."""
        counts: Counter[tuple[str, int]] = Counter()
        for answer in answers:
            counts.update(marked_characters(answer))
        agreed: dict[str, list[int]] = {}
        for (name, place), count in sorted(counts.items()):
            if 2 * count > len(answers):
                agreed.setdefault(name, []).append(place)
        spans = [span for name, places in agreed.items() for span in _stretches(name, places)]
        return {"spans": sorted(spans, key=lambda span: (span["start"], span["end"], span["type"]))}

    def similarity(self, one: Json, two: Json) -> float:
        """Return the F1 score of (type, character) pairs, or 1 if neither labeler marked any character."""
        first, second = marked_characters(one), marked_characters(two)
        return 2 * len(first & second) / (len(first) + len(second)) if first or second else 1.0

    def values(self, answer: Json) -> Iterable[Value]:
        """Return whether the response has any error."""
        return [Value("any error", "nominal", None, "yes" if answer["spans"] else "no")]

    def marks(self, answer: Json) -> set[str]:
        return {span["type"] for span in answer["spans"]}


def error_types(text: Any) -> list[str]:
    """Parse a comma-separated list of error types."""
    types = [name.strip() for name in str(text).split(",")]
    for name in types:
        require(
            _TYPE.fullmatch(name) is not None,
            f"error_types: {name!r} must start with a letter and contain only letters, digits, - and _",
        )
    require(len(set(types)) == len(types) <= MOST_TYPES, f"error_types: must be up to {MOST_TYPES} distinct names")
    return types


def check_spans(spans: Any, content: Json) -> list[Json]:
    """Return the spans with known fields only, in order."""
    if not isinstance(spans, list) or len(spans) > MAX_SPANS:
        raise BadInputError(f"spans: must be a list of at most {MAX_SPANS}")
    checked, size = [], len(content["response"])
    for number, span in enumerate(spans):
        where = f"spans[{number}]"
        require(isinstance(span, dict), f"{where}: must be an object with start, end and type")
        start, end = span.get("start"), span.get("end")
        require(type(start) is int and type(end) is int, f"{where}: start and end must be integers")
        require(
            0 <= start < end <= size, f"{where}: must be a nonempty span within 0 and {size}, the length of the response"
        )
        require(span.get("type") in content["types"], f"{where}.type: must be one of {', '.join(content['types'])}")
        note = text_field(span, "note", empty=True).strip()
        require(len(note) <= 2000, f"{where}.note: longer than 2000 characters")
        checked.append({"start": start, "end": end, "type": span["type"], **({"note": note} if note else {})})
    places = [(span["start"], span["end"], span["type"]) for span in checked]
    require(len(set(places)) == len(places), "spans: contains duplicates")
    return checked


def marked_characters(answer: Json) -> set[tuple[str, int]]:
    """Return (type, offset) of every marked character."""
    marked: set[tuple[str, int]] = set()
    reached: dict[str, int] = {}  # by type; visits each character once, even if many spans overlap
    for span in sorted(answer["spans"], key=lambda span: span["start"]):
        name, done = span["type"], reached.get(span["type"], 0)
        marked.update((name, place) for place in range(max(span["start"], done), span["end"]))
        reached[name] = max(done, span["end"])
    return marked


def _stretches(name: str, places: list[int]) -> Iterator[Json]:
    """Merge consecutive offsets into spans."""
    for _, group in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0]):
        run = [place for _, place in group]
        yield {"start": run[0], "end": run[-1] + 1, "type": name}
