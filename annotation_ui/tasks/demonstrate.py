"""Write responses: a response to a prompt, or the next turn of a conversation."""

from collections.abc import Sequence
from typing import ClassVar

from annotation_ui.tasks.base import Json, Setting, Task
from annotation_ui.tasks.fields import excerpt, prompt_field, prompt_view, text_field


class Demonstrate(Task):
    """Collects responses written by labelers."""

    name = "demonstrate"
    title = "Write responses"
    settings = (
        Setting("min_words", int, "Minimum words (hint)", "length hint"),
        Setting("max_words", int, "Maximum words (hint)", "length hint"),
    )
    records: ClassVar = {"demonstrations": list}

    def contents(self, row: Json, settings: Json, rules: list[Json]) -> list[Json]:
        return [{"prompt": prompt_field(row)}]

    def view(self, content: Json, order: list[int], settings: Json, rules: list[Json]) -> Json:
        return {
            "prompt": prompt_view(content["prompt"]),
            "min_words": settings.get("min_words"),
            "max_words": settings.get("max_words"),
        }

    def check(self, answer: Json, content: Json, rules: list[Json]) -> Json:
        return {"completion": text_field(answer, "completion")}

    def summary(self, answer: Json, rules: Sequence[Json] = ()) -> str:
        return excerpt(answer["completion"])

    def written(self, answer: Json) -> Sequence[str]:
        return [answer["completion"]]

    def rows(self, content: Json, answer: Json) -> list[Json]:
        return [{"prompt": content["prompt"], "completion": answer["completion"]}]
