"""Judge rules: does a response violate or follow each rule of a set, or is the labeler unsure?"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, ClassVar

from align.core.statistics import majority
from align.data.records import VERDICTS
from annotation_ui.rendering.markdown import text_view
from annotation_ui.tasks.base import BadInputError, Json, Setting, Task, Value, require
from annotation_ui.tasks.fields import prompt_view, response_fields, text_field


def check_verdict(judged: Any) -> Json:
    """{verdict, note} with known fields only."""
    if not isinstance(judged, dict) or judged.get("verdict") not in VERDICTS:
        raise BadInputError(f"verdict: must be one of {', '.join(VERDICTS)}")
    return {"verdict": judged["verdict"], "note": text_field(judged, "note", empty=True)}


def verdict_row(prompt: Any, response: str, rule: str, judged: Json) -> Json:
    """One rule judgment as a row (docs/data.md)."""
    row = {"prompt": prompt, "response": response, "rule": rule, "verdict": judged["verdict"]}
    return {**row, "note": judged["note"]} if judged["note"] else row


def verdict_attributes(rows: Sequence[Json], rules: Sequence[Json] = ()) -> Iterable[Json]:
    """The attributes that one judgment gives its response, as one row; no row if all verdicts are unsure.

    The attribute of a rule has the rule's name. It is 1 for the rule's positive verdict, 0 for the opposite, and absent for
    `unsure`. An attribute that rules name in `any` is 1 if one of them is 1, 0 if all of them are 0, and otherwise absent.
    """
    verdicts = {row["rule"]: row["verdict"] for row in rows if row["verdict"] != "unsure"}
    by_id = {rule["id"]: rule for rule in rules}
    attributes = {rule: int(verdict == positive_verdict(by_id.get(rule, {}))) for rule, verdict in verdicts.items()}
    for name in dict.fromkeys(rule["any"] for rule in rules if "any" in rule):
        parts = [attributes.get(rule["id"]) for rule in rules if rule.get("any") == name]
        if 1 in parts or None not in parts:
            attributes[name] = int(1 in parts)
    return [{"prompt": rows[0]["prompt"], "response": rows[0]["response"], "attributes": attributes}] if attributes else []


def positive_verdict(rule: Json) -> str:
    """The verdict for which a rule's attribute is 1: by default the one that its form labels "Yes", else `follows`."""
    labels = {name.casefold(): verdict for verdict, name in rule.get("answers", ())}
    return str(rule.get("positive") or labels.get("yes", "follows"))


def records_of_verdicts(task: Task, record: str, content: Json, answer: Json, rules: Sequence[Json]) -> Iterable[Json]:
    """The records of a task whose rows are verdicts: attributes depend on the rules, other records do not."""
    rows = task.rows(content, answer)
    return verdict_attributes(rows, rules) if record == "attributes" else task.records[record](rows)


SHOWN_FIELDS = ("id", "text", "help", "examples", "answers", "gate", "step", "preselect", "reasons")
_ADDRESS = re.compile(r"https?://[^\s<>()\[\]\"']+")


class JudgeRules(Task):
    """A verdict on each rule for one response. Where a gate is violated, the rules behind it are not asked."""

    name = "rules"
    title = "Judge rules"
    needs_rules = True
    comparable = True
    settings = (Setting("one_rule_each", bool, "One item for each rule", "one item for each rule of each response"),)
    records: ClassVar = {"rule_judgments": list, "attributes": verdict_attributes}
    answer_filters: ClassVar = {verdict: verdict for verdict in VERDICTS}

    def contents(self, row: Json, settings: Json, rules: list[Json]) -> list[Json]:
        """One item per response; with `one_rule_each`, one item per rule of each response."""
        judged = response_fields(row)
        ids = [rule["id"] for rule in rules]
        wanted = row.get("rules", ids)
        if not isinstance(wanted, list) or not wanted or not all(rule in ids for rule in wanted):
            raise BadInputError("rules: not all in the rule set")
        require(len(set(wanted)) == len(wanted), "rules: the same one twice")
        one_each = bool(settings.get("one_rule_each"))
        together = next((field for field in ("gate", "any") if any(field in rule for rule in rules)), None)
        require(not (one_each and together), f"one_rule_each: not possible with rules that have `{together}`")
        groups = [[rule] for rule in wanted] if one_each else [wanted]
        return [{**text, "rules": group} for text in judged for group in groups]

    def known_answers(self, gold: Json, contents: list[Json]) -> list[Json | None]:
        """For each item, the known verdicts on the rules that it asks about."""
        verdicts = gold.get("verdicts")
        if not isinstance(verdicts, dict) or not verdicts:
            raise BadInputError("gold: needs `verdicts`, an object with a verdict for each rule whose answer is known")
        asked = {rule for content in contents for rule in content["rules"]}
        for rule, verdict in verdicts.items():
            require(rule in asked, f"gold: no item of this row asks about the rule {rule!r}")
            require(verdict in VERDICTS, f"gold: the verdict on {rule} must be one of {', '.join(VERDICTS)}")
        known = [{rule: verdicts[rule] for rule in verdicts if rule in content["rules"]} for content in contents]
        return [{"verdicts": of_item} if of_item else None for of_item in known]

    def view(self, content: Json, order: list[int], settings: Json, rules: list[Json]) -> Json:
        return {
            "prompt": prompt_view(content["prompt"]),
            "response": text_view(content["response"]),
            "rules": [rule_view(rule, content["response"]) for rule in rules if rule["id"] in content["rules"]],
        }

    def check(self, answer: Json, content: Json, rules: list[Json]) -> Json:
        verdicts = answer.get("verdicts")
        if not isinstance(verdicts, dict):
            raise BadInputError("verdicts: must be given for each rule")
        asked = asked_rules(content["rules"], verdicts, rules)
        missing = [rule for rule in asked if rule not in verdicts]
        if missing:
            raise BadInputError(f"verdicts: {', '.join(missing)} not judged yet")
        checked = {rule: check_verdict(verdicts[rule]) for rule in asked}
        for rule in rules:
            judged = checked.get(rule["id"])
            if judged and judged["verdict"] == "violates" and "reasons" in rule:
                require(judged["note"] in rule["reasons"], f"verdicts.{rule['id']}.note: must be one of the reasons")
        return {"verdicts": checked}

    def summary(self, answer: Json, rules: Sequence[Json] = ()) -> str:
        """The count of each verdict; a single verdict without a count."""
        names = [verdict_name(rules, rule, judged["verdict"]) for rule, judged in answer["verdicts"].items()]
        counts = Counter(names)
        in_order = sorted(counts, key=lambda name: VERDICTS.index(name) if name in VERDICTS else -1)
        return names[0] if len(names) == 1 else ", ".join(f"{counts[name]} {name}" for name in in_order)

    def known(self, gold: Json, rules: Sequence[Json] = ()) -> str:
        return ", ".join(f"{rule}: {verdict_name(rules, rule, verdict)}" for rule, verdict in gold["verdicts"].items())

    def rows(self, content: Json, answer: Json) -> list[Json]:
        author = {"model": content["model"]} if "model" in content else {}
        return [
            {**verdict_row(content["prompt"], content["response"], rule, judged), **author}
            for rule, judged in answer["verdicts"].items()
        ]

    def records_of(self, record: str, content: Json, answer: Json, rules: Sequence[Json] = ()) -> Iterable[Json]:
        return records_of_verdicts(self, record, content, answer, rules)

    def gold_agreement(self, answer: Json, gold: Json) -> float | None:
        known = {rule: verdict for rule, verdict in gold.get("verdicts", {}).items() if rule in answer["verdicts"]}
        if not known:
            return None
        return float(sum(answer["verdicts"][rule]["verdict"] == verdict for rule, verdict in known.items()) / len(known))

    def combine(self, answers: list[Json]) -> Json:
        """The most frequent verdict of each rule among those who were asked; `unsure` on a tie."""
        verdicts = {}
        for rule in dict.fromkeys(rule for answer in answers for rule in answer["verdicts"]):
            judged = [answer["verdicts"][rule] for answer in answers if rule in answer["verdicts"]]
            notes = [verdict["note"] for verdict in judged if verdict["note"]]
            winner = majority([verdict["verdict"] for verdict in judged], tie="unsure")
            verdicts[rule] = {"verdict": winner, "note": "; ".join(notes)}
        return {"verdicts": verdicts}

    def similarity(self, one: Json, two: Json) -> float:
        """Share of the rules with the same verdict; a rule that only one was asked, because of a gate, is a difference."""
        first, second = self.questions(one), self.questions(two)
        return fmean(first.get(rule) == second.get(rule) for rule in first | second)

    def values(self, answer: Json) -> Iterable[Value]:
        return [Value(str(rule), "nominal", None, verdict) for rule, verdict in self.questions(answer).items()]

    def questions(self, answer: Json) -> dict[Any, str]:
        return {rule: judged["verdict"] for rule, judged in answer["verdicts"].items()}

    def marks(self, answer: Json) -> set[str]:
        """The rules that were not judged as followed, with their verdicts."""
        return {f"{rule}: {given['verdict']}" for rule, given in answer["verdicts"].items() if given["verdict"] != "follows"}


def verdict_name(rules: Sequence[Json], rule: str, verdict: str) -> str:
    """A form's label of a verdict on one of its rules; by default, the stored verdict."""
    names = next((dict(each["answers"]) for each in rules if each["id"] == rule and "answers" in each), {})
    return str(names.get(verdict, verdict))


def rule_view(rule: Json, response: str) -> Json:
    """A rule as the browser shows it: its id, text, help and examples, and the fields of a form."""
    shown: Json = {key: rule[key] for key in SHOWN_FIELDS if key in rule}
    if "fill" in rule:
        shown["note"] = " ".join(dict.fromkeys(address.rstrip(".,;:!?") for address in _ADDRESS.findall(response)))
    return shown


def asked_rules(ids: list[str], verdicts: Json, rules: list[Json]) -> list[str]:
    """The rules that need a verdict: the gates alone if one of them is violated."""
    gates = [rule["id"] for rule in rules if rule.get("gate") and rule["id"] in ids]
    closed = any(isinstance(verdicts.get(gate), dict) and verdicts[gate].get("verdict") == "violates" for gate in gates)
    return gates if closed else ids
