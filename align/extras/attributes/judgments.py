"""From labelers' judgments of responses to the examples that an attribute model learns from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from align.batches.encoding import Data, Limits, encode_rankings, records_of
from align.core.errors import UserError, nearest_name_hint
from align.data.records import AttributeJudgment
from align.extras.attributes.model import PREFERENCE, SCALE, Head
from align.extras.rules.judgments import JudgedResponse, encoded_responses, mean_judgments
from align.models.loading import LoadedModel
from align.tokenization.encoded import TokenIds

JUDGMENTS = "attribute judgments"


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


def read_ratings(data: Data, skip_bad_rows: bool) -> list[JudgedResponse]:
    """Responses with the means of their attributes, from a file or from records in memory.

    Raises:
        UserError: for a bad row.
    """
    records = records_of(data, AttributeJudgment, skip_bad_rows)
    return mean_judgments(
        (record.prompt, record.response, name, value) for record in records for name, value in record.attributes.items()
    )


def choose_heads(wanted: Sequence[str], rated: Sequence[JudgedResponse], has_rankings: bool) -> list[Head]:
    """The heads of a model, in a fixed order.

    Args:
        wanted: NAME, NAME=binary or NAME=scale; empty: every attribute.
        rated: the responses, whose values decide the kind where none is given.
        has_rankings: whether there is a head for the preference too.

    Raises:
        UserError: for an attribute without judgments, an unknown kind, a value outside of its kind, or no head at all.
    """
    highest: dict[str, float] = {}
    lowest: dict[str, float] = {}
    for item in rated:
        for name, value in item.targets.items():
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


def judged_by(rated: Sequence[JudgedResponse], heads: Sequence[Head]) -> list[JudgedResponse]:
    """The responses that have an attribute of one of the heads, with these attributes alone."""
    names = {head.name for head in heads if head.kind != "ranking"}
    known = [(item, {name: value for name, value in item.targets.items() if name in names}) for item in rated]
    return [JudgedResponse(item.prompt, item.response, targets) for item, targets in known if targets]


def encode_ratings(
    rated: Sequence[JudgedResponse], heads: Sequence[Head], loaded: LoadedModel, limits: Limits
) -> list[EncodedTask]:
    """Rated responses as examples of heads.

    Raises:
        UserError: if a text exceeds the limits or the model's context length.
    """
    found = []
    for where, encoded, item in encoded_responses(judged_by(rated, heads), loaded, limits, JUDGMENTS):
        loaded.backbone.require_fit(len(encoded.prompt), len(encoded.response), where)
        found.append(EncodedTask(encoded.prompt, [encoded.response], item.targets))
    return found


def encode_preferences(data: Data, loaded: LoadedModel, limits: Limits, skip_bad_rows: bool) -> list[EncodedTask]:
    """Rankings as examples of the preference's head. Raises: see `encode_rankings`."""
    found = encode_rankings(data, loaded, limits, skip_bad_rows)
    return [EncodedTask(item.prompt, item.responses, ranks=item.ranks) for item in found]
