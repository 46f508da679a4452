"""Rows of `align sample` as demonstrations: what a model answered, to learn from, such as the best of n answers."""

from collections.abc import Mapping
from typing import Any

from align.data.conversation import check_continuation, check_prompt
from align.data.fields import check_list, check_text, id_or_none, text_or_none
from align.data.records import Demonstration, Record


def demonstrations(row: Mapping[str, Any]) -> list[Record]:
    """A demonstration for each response, all with the row's prompt, id and category."""
    texts = [check_text(text, f"responses[{place}]") for place, text in enumerate(check_list(row["responses"], "responses"))]
    return [
        Demonstration(
            prompt=check_prompt(row["prompt"]),
            continuation=check_continuation(text, "responses"),
            id=id_or_none(row.get("id")),
            category=text_or_none(row.get("category")),
        )
        for text in texts
    ]
