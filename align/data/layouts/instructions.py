"""Instructions with answers: Alpaca, Dolly and UltraFeedback."""

import math
from collections.abc import Mapping
from typing import Any

from align.data.conversation import Conversation, check_continuation, user_turn
from align.data.fields import check_list, check_text, check_texts, field_error, required_field, short_repr, text_or_none
from align.data.layouts.pairs import make_pair_ranking
from align.data.records import Demonstration, Prompt, Ranking, Record
from align.data.scores import check_score, ranks_from_scores

Row = Mapping[str, Any]


# --- Instructions: Alpaca (instruction, input, output) and Dolly (instruction, context, response) ---


def _instruction(row: Row, extra: str | None = None) -> Conversation:
    instruction = check_text(required_field(row, "instruction", "write the task"), "instruction")
    addition = check_text(row.get(extra) or "", extra, may_be_empty=True) if extra else ""
    return user_turn(f"{instruction}\n\n{addition}" if addition.strip() else instruction)


def alpaca_prompt(row: Row) -> list[Record]:
    """Taori et al. 2023: the input, if there is one, follows the instruction after an empty line."""
    return [Prompt(prompt=_instruction(row, "input"))]


def alpaca(row: Row) -> list[Record]:
    """A row of tatsu-lab/alpaca as a demonstration; its `text`, all three fields in a template, is ignored."""
    continuation = check_continuation(check_text(row.get("output"), "output"), "output")
    return [Demonstration(prompt=_instruction(row, "input"), continuation=continuation)]


def dolly_prompt(row: Row) -> list[Record]:
    """databricks-dolly-15k (Conover et al. 2023): the context follows the instruction after an empty line."""
    return [Prompt(prompt=_instruction(row, "context"), category=text_or_none(row.get("category")))]


def dolly(row: Row) -> list[Record]:
    """A Dolly row as a demonstration; `category` is kept."""
    continuation = check_continuation(check_text(row.get("response"), "response"), "response")
    category = text_or_none(row.get("category"))
    return [Demonstration(prompt=_instruction(row, "context"), continuation=continuation, category=category)]


# --- UltraFeedback (Cui et al. 2023) ---


def ultrafeedback_prompt(row: Row) -> list[Record]:
    """The instruction; `source` becomes the category."""
    return [Prompt(prompt=_instruction(row), category=text_or_none(row.get("source")))]


def ultrafeedback(row: Row) -> list[Record]:
    """The raw form (openbmb/UltraFeedback): ranked by the mean of their aspect scores, or else by `overall_score`.

    The mean comes first because `overall_score` was wrong for many rows (a 1 stored as 10; see the update in the README
    of OpenBMB/UltraFeedback and the card of argilla/ultrafeedback-binarized-preferences). The mean goes from 1 to 5 and
    `overall_score` to 10: if one completion has no mean (null, or NaN in the published files), all are ranked by the latter.
    """
    completions = check_list(row["completions"], "completions")
    for i, completion in enumerate(completions):
        if not isinstance(completion, Mapping):
            raise field_error(f"completions[{i}]", f"is {short_repr(completion)}", "write {response, overall_score, ...}")
    has_means = not any(_is_missing(completion.get("fine-grained_score")) for completion in completions)
    name = "fine-grained_score" if has_means else "overall_score"
    scores = [check_score(entry.get(name), f"completions[{i}].{name}") for i, entry in enumerate(completions)]
    responses = [check_text(entry.get("response"), f"completions[{i}].response") for i, entry in enumerate(completions)]
    models = [text_or_none(completion.get("model")) for completion in completions]
    return [
        Ranking(
            prompt=_instruction(row),
            responses=tuple(responses),
            ranks=ranks_from_scores(scores),
            model=check_texts(models, "model") if all(models) else None,
            category=text_or_none(row.get("source")),
        )
    ]


def _is_missing(score: object) -> bool:
    return score is None or (isinstance(score, float) and math.isnan(score))


def ultrafeedback_pair(row: Row) -> list[Record]:
    """The binarized form: instruction and two named responses (card of argilla/ultrafeedback-binarized-preferences)."""
    prompt = _instruction(row)
    names = ("chosen_response", "rejected_response")
    return make_pair_ranking(row, prompt, row["chosen_response"], row.get("rejected_response"), names)
