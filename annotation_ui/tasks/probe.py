"""Probe: try to make a model break a rule, and judge its last reply (Sparrow's adversarial probing).

The server records the conversation (see `probing`), so a browser cannot change the reply that is judged.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from annotation_ui.rendering.markdown import as_messages
from annotation_ui.tasks.base import Json, Setting, Task, require
from annotation_ui.tasks.fields import check_messages, excerpt, prompt_view
from annotation_ui.tasks.judge_rules import check_verdict, records_of_verdicts, verdict_attributes, verdict_row

MAX_NEW_TOKENS, MOST_NEW_TOKENS = 256, 8192
"""Default and upper limit of the reply length in tokens."""


class Probe(Task):
    """Collects conversations with a model, and a verdict on its last reply."""

    name = "probe"
    title = "Probe a model"
    needs_rules = True
    settings = (
        Setting("checkpoint", str, "Model to probe (empty: the one loaded on the Model tab)", "model to talk to"),
        Setting(
            "max_new_tokens",
            int,
            f"Longest reply in tokens (empty: {MAX_NEW_TOKENS})",
            "longest reply of the model, in tokens",
        ),
    )
    records: ClassVar = {"rule_judgments": list, "attributes": verdict_attributes}

    def contents(self, row: Json, settings: Json, rules: list[Json]) -> list[Json]:
        """Return one item per rule. A row's `prompt`, if present, begins the conversation."""
        limit = settings.get("max_new_tokens", MAX_NEW_TOKENS)
        require(type(limit) is int and 1 <= limit <= MOST_NEW_TOKENS, f"max_new_tokens: must be 1 to {MOST_NEW_TOKENS}")
        opening = check_messages(row.get("prompt", []), "prompt")
        require(not opening or opening[-1]["role"] != "user", "prompt: must not end with a user turn")
        wanted = [row["rule"]] if "rule" in row else [rule["id"] for rule in rules]
        ids = [rule["id"] for rule in rules]
        require(all(rule in ids for rule in wanted), "rule: must be an id of the rule set")
        return [{"prompt": opening, "rule": rule} for rule in wanted]

    def opening(self, content: Json) -> list[dict[str, str]]:
        return as_messages(content["prompt"])

    def view(self, content: Json, order: list[int], settings: Json, rules: list[Json]) -> Json:
        rule = next(rule for rule in rules if rule["id"] == content["rule"])
        shown = {key: rule[key] for key in ("id", "text", "help", "examples", "answers") if key in rule}
        return {"prompt": prompt_view(content["prompt"]), "rule": shown}

    def check(self, answer: Json, content: Json, rules: list[Json]) -> Json:
        messages = check_messages(answer.get("messages"), "messages")
        replied = len(messages) > 0 and messages[-1]["role"] == "assistant"
        require(replied, "messages: must end with a reply of the model")
        last = answer["messages"][-1]
        cut = {"cut": True} if last.get("cut") else {}
        return {"messages": messages, "model": last.get("model", ""), **cut, **check_verdict(answer)}

    def draft(self, answer: Json) -> Json:
        return {"verdict": answer["verdict"], "note": answer["note"]}  # the server stores the conversation

    def summary(self, answer: Json, rules: Sequence[Json] = ()) -> str:
        return f"{answer['verdict']}: {excerpt(answer['messages'][-1]['content'])}"

    def records_of(self, record: str, content: Json, answer: Json, rules: Sequence[Json] = ()) -> Iterable[Json]:
        return records_of_verdicts(self, record, content, answer, [rule for rule in rules if rule["id"] == content["rule"]])

    def rows(self, content: Json, answer: Json) -> list[Json]:
        prompt, reply = answer["messages"][:-1], answer["messages"][-1]
        row = verdict_row(prompt, reply["content"], content["rule"], answer)
        return [row | {field: answer[field] for field in ("model", "cut") if answer.get(field)}]
