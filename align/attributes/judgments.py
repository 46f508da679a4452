"""From labelers' judgments of responses to the examples that an attribute model learns from."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from align.attributes.model import PREFERENCE, SCALE, Head
from align.batches.encoding import Data, Limits, encode_rankings, encode_response, records_of
from align.batches.limits import OverlongCounts
from align.core.errors import UserError, nearest_name_hint
from align.data.conversation import to_json
from align.data.records import AttributeJudgment, Conversation
from align.models.loading import LoadedModel
from align.rules.judgments import draw_conversations
from align.tokenization.encoded import PromptResponse, TokenIds


@dataclass(frozen=True)
class RatedResponse:
    """A response with the mean over labelers of each attribute that anyone judged."""

    prompt: Conversation
    response: str
    attributes: Mapping[str, float]

    @property
    def conversation(self) -> str:
        """Equal for responses to the same conversation."""
        return str(to_json(self.prompt))


@dataclass(frozen=True)
class EncodedTask:
    """One example of one task: a response with its attributes, or a ranking.

    Attributes:
        prompt: shared by all responses.
        responses: one, or those of a ranking [K].
        attributes: of the one response, by name.
        ranks: of a ranking [K], 1 is best.
    """

    prompt: TokenIds
    responses: list[TokenIds]
    attributes: Mapping[str, float] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)


def collect_ratings(records: Sequence[AttributeJudgment]) -> list[RatedResponse]:
    """Every response with the means of its attributes, in the order of the records."""
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    first: dict[tuple[str, str], AttributeJudgment] = {}
    for record in records:
        key = (str(to_json(record.prompt)), record.response)
        first.setdefault(key, record)
        for name, value in record.attributes.items():
            values.setdefault(key, {}).setdefault(name, []).append(value)
    return [
        RatedResponse(first[key].prompt, first[key].response, {name: sum(v) / len(v) for name, v in by_name.items()})
        for key, by_name in values.items()
    ]


def read_ratings(data: Data, skip_bad_rows: bool) -> list[RatedResponse]:
    """Rated responses from a file or from records in memory. Raises: UserError for a bad row."""
    return collect_ratings(list(records_of(data, AttributeJudgment, skip_bad_rows)))


def choose_heads(wanted: Sequence[str], rated: Sequence[RatedResponse], has_rankings: bool) -> list[Head]:
    """The heads of a model, in a fixed order.

    Args:
        wanted: NAME, NAME=binary or NAME=scale; empty: every attribute.
        rated: the responses, whose values decide the kind where none is given.
        has_rankings: whether there is a head for the preference too.

    Raises:
        UserError: for an attribute that nobody judged, an unknown kind, a value outside of its kind, or no head at all.
    """
    highest: dict[str, float] = {}
    lowest: dict[str, float] = {}
    for item in rated:
        for name, value in item.attributes.items():
            highest[name], lowest[name] = max(value, highest.get(name, value)), min(value, lowest.get(name, value))
    heads: list[Head] = []
    for text in wanted or sorted(highest):
        name, _, kind = text.partition("=")
        if name not in highest:
            raise UserError(f"heads: nobody judged '{name}'{nearest_name_hint(name, highest)}")
        kind = kind or ("scale" if highest[name] > 1 else "binary")
        bounds = {"binary": (0.0, 1.0), "scale": SCALE}.get(kind)
        if bounds is None:
            raise UserError(f"heads: {text!r}: the kind of a head is binary or scale")
        if not bounds[0] <= lowest[name] <= highest[name] <= bounds[1]:
            span = f"from {lowest[name]:g} to {highest[name]:g}"
            raise UserError(f"heads: '{name}' has values {span}, but {kind} means {bounds[0]:g} to {bounds[1]:g}")
        heads.append(Head(name, "scale" if kind == "scale" else "binary"))
    heads += [Head(PREFERENCE, "ranking")] if has_rankings else []
    names = [head.name for head in heads]
    if not names or len(set(names)) < len(names):
        raise UserError(f"heads: {', '.join(names) or 'none'}; give at least one, and each once")
    return heads


def split_ratings(
    rated: Sequence[RatedResponse], share: float, seed: int
) -> tuple[list[RatedResponse], list[RatedResponse]]:
    """Responses to learn from, and those of a share of the conversations, which are held out whole."""
    held_out = draw_conversations([item.conversation for item in rated], share, seed)
    parts: tuple[list[RatedResponse], list[RatedResponse]] = ([], [])
    for item in rated:
        parts[item.conversation in held_out].append(item)
    return parts


def encoded_responses(
    rated: Sequence[RatedResponse], heads: Sequence[Head], loaded: LoadedModel, limits: Limits
) -> Iterator[tuple[str, PromptResponse, dict[str, float]]]:
    """Responses within the limits that were judged by one of the heads: a name for errors, token ids, and the values.

    Raises:
        UserError: if a text exceeds the limits.
    """
    names = {head.name for head in heads if head.kind != "ranking"}
    counts = OverlongCounts(limits)
    for number, item in enumerate(rated, start=1):
        known = {name: value for name, value in item.attributes.items() if name in names}
        where = f"rated response {number} ({item.response[:40]!r})"
        encoded = encode_response(item.prompt, item.response, loaded, limits, where, counts) if known else None
        if encoded is not None:
            yield where, encoded, known
    counts.report("attribute judgments", "rated response")


def encode_ratings(
    rated: Sequence[RatedResponse], heads: Sequence[Head], loaded: LoadedModel, limits: Limits
) -> list[EncodedTask]:
    """Rated responses as examples of heads.

    Raises:
        UserError: if a text exceeds the limits or what the model can read.
    """
    found = []
    for where, encoded, known in encoded_responses(rated, heads, loaded, limits):
        loaded.backbone.require_fit(len(encoded.prompt), len(encoded.response), where)
        found.append(EncodedTask(encoded.prompt, [encoded.response], known))
    return found


def encode_preferences(data: Data, loaded: LoadedModel, limits: Limits, skip_bad_rows: bool) -> list[EncodedTask]:
    """Rankings as examples of the preference's head. Raises: see `encode_rankings`."""
    found = encode_rankings(data, loaded, limits, skip_bad_rows)
    return [EncodedTask(item.prompt, item.responses, ranks=item.ranks) for item in found]
