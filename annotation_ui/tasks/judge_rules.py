"""Judge rules: give a verdict (violates, unsure or follows) on a response for each rule of a set."""

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
    """Return {verdict, note} with known fields only."""
    if not isinstance(judged, dict) or judged.get("verdict") not in VERDICTS:
        raise BadInputError(f"verdict: must be one of {', '.join(VERDICTS)}")
    return {"verdict": judged["verdict"], "note": text_field(judged, "note", empty=True)}


def verdict_row(prompt: Any, response: str, rule: str, judged: Json) -> Json:
    """Return a rule judgment as a row (docs/data.md)."""
    row = {"prompt": prompt, "response": response, "rule": rule, "verdict": judged["verdict"]}
    return {**row, "note": judged["note"]} if judged["note"] else row


def verdict_attributes(rows: Sequence[Json], rules: Sequence[Json] = ()) -> Iterable[Json]:
    """Convert one judgment's verdicts to an attribute row, or to no row if all verdicts are unsure.

    Each rule gives an attribute named after its id: 1 for the rule's positive verdict, 0 for the opposite one, and absent
    for `unsure`. Rules with the same `any` also give an attribute of that name: 1 if an attribute of these rules is 1, 0 if
    all are 0, and absent otherwise.
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
    """Return the verdict for which a rule's attribute is 1. Default: the verdict labeled "Yes", or else `follows`."""
    labels = {name.casefold(): verdict for verdict, name in rule.get("answers", ())}
    return str(rule.get("positive") or labels.get("yes", "follows"))


def records_of_verdicts(task: Task, record: str, content: Json, answer: Json, rules: Sequence[Json]) -> Iterable[Json]:
    """Return the records of an answer to a task whose rows are verdicts. Attributes depend on the rules."""
    rows = task.rows(content, answer)
    return verdict_attributes(rows, rules) if record == "attributes" else task.records[record](rows)


SHOWN_FIELDS = ("id", "text", "help", "examples", "answers", "gate", "step", "preselect", "reasons")
_ADDRESS = re.compile(r"https?://[^\s<>()\[\]\"']+")


class JudgeRules(Task):
    """Collects a verdict on a response for each rule. A violated gate hides the remaining rules."""

    name = "rules"
    title = "Judge rules"
    needs_rules = True
    comparable = True
    settings = (Setting("one_rule_each", bool, "One item for each rule", "one item for each rule of each response"),)
    records: ClassVar = {"rule_judgments": list, "attributes": verdict_attributes}
    answer_filters: ClassVar = {verdict: verdict for verdict in VERDICTS}

    def contents(self, row: Json, settings: Json, rules: list[Json]) -> list[Json]:
        """Return one item per response, or with `one_rule_each` one item per response and rule."""
        judged = response_fields(row)
        ids = [rule["id"] for rule in rules]
        wanted = row.get("rules", ids)
        if not isinstance(wanted, list) or not wanted or not all(rule in ids for rule in wanted):
            raise BadInputError("rules: must be ids of the rule set")
        require(len(set(wanted)) == len(wanted), "rules: contains duplicates")
        one_each = bool(settings.get("one_rule_each"))
        together = next((field for field in ("gate", "any") if any(field in rule for rule in rules)), None)
        require(not (one_each and together), f"one_rule_each: not supported for rules with `{together}`")
        groups = [[rule] for rule in wanted] if one_each else [wanted]
        return [{**text, "rules": group} for text in judged for group in groups]

    def known_answers(self, gold: Json, contents: list[Json]) -> list[Json | None]:
        """Return the known verdicts on the rules of each item."""
        verdicts = gold.get("verdicts")
        if not isinstance(verdicts, dict) or not verdicts:
            raise BadInputError("gold: needs `verdicts`, an object that maps rule ids to verdicts")
        asked = {rule for content in contents for rule in content["rules"]}
        for rule, verdict in verdicts.items():
            require(rule in asked, f"gold: rule {rule!r} is not judged in this row")
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
            raise BadInputError("verdicts: must have a verdict for each rule")
        asked = asked_rules(content["rules"], verdicts, rules)
        missing = [rule for rule in asked if rule not in verdicts]
        if missing:
            raise BadInputError(f"verdicts: missing {', '.join(missing)}")
        checked = {rule: check_verdict(verdicts[rule]) for rule in asked}
        for rule in rules:
            judged = checked.get(rule["id"])
            if judged and judged["verdict"] == "violates" and "reasons" in rule:
                require(judged["note"] in rule["reasons"], f"verdicts.{rule['id']}.note: must be one of the reasons")
        return {"verdicts": checked}

    def summary(self, answer: Json, rules: Sequence[Json] = ()) -> str:
        """Return the count of each verdict, or a single verdict without its count."""
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
        """Return the most frequent verdict on each rule among labelers who judged it, or `unsure` on a tie."""
        verdicts = {}
        for rule in dict.fromkeys(rule for answer in answers for rule in answer["verdicts"]):
            judged = [answer["verdicts"][rule] for answer in answers if rule in answer["verdicts"]]
            notes = [verdict["note"] for verdict in judged if verdict["note"]]
            winner = majority([verdict["verdict"] for verdict in judged], tie="unsure")
            verdicts[rule] = {"verdict": winner, "note": "; ".join(notes)}
        return {"verdicts": verdicts}

    def similarity(self, one: Json, two: Json) -> float:
        """Return the fraction of rules with the same verdict. A rule judged by only one labeler counts as different."""
        first, second = self.questions(one), self.questions(two)
        return fmean(first.get(rule) == second.get(rule) for rule in first | second)

    def values(self, answer: Json) -> Iterable[Value]:
        return [Value(str(rule), "nominal", None, verdict) for rule, verdict in self.questions(answer).items()]

    def questions(self, answer: Json) -> dict[Any, str]:
        return {rule: judged["verdict"] for rule, judged in answer["verdicts"].items()}

    def marks(self, answer: Json) -> set[str]:
        """Return "rule: verdict" for each verdict other than `follows`."""
        return {f"{rule}: {given['verdict']}" for rule, given in answer["verdicts"].items() if given["verdict"] != "follows"}


def verdict_name(rules: Sequence[Json], rule: str, verdict: str) -> str:
    """Return the form's label of a verdict. Default: the stored verdict."""
    names = next((dict(each["answers"]) for each in rules if each["id"] == rule and "answers" in each), {})
    return str(names.get(verdict, verdict))


def rule_view(rule: Json, response: str) -> Json:
    """Return the fields of a rule that the browser shows."""
    shown: Json = {key: rule[key] for key in SHOWN_FIELDS if key in rule}
    if "fill" in rule:
        shown["note"] = " ".join(dict.fromkeys(address.rstrip(".,;:!?") for address in _ADDRESS.findall(response)))
    return shown


def asked_rules(ids: list[str], verdicts: Json, rules: list[Json]) -> list[str]:
    """Return the rules that need a verdict. If a gate is violated, only the gates do."""
    gates = [rule["id"] for rule in rules if rule.get("gate") and rule["id"] in ids]
    closed = any(isinstance(verdicts.get(gate), dict) and verdicts[gate].get("verdict") == "violates" for gate in gates)
    return gates if closed else ids
