"""Rule sets in YAML files. Errors name the line.

name: my-rules
title: What our assistant must not do
source: where the rules come from
rules:
  - id: no-threats
    text: Do not threaten anybody.
    source: optional, for one rule

A rule can have a `help` text (scope and exceptions) and `examples`. Labelers see them below the rule.

A set can also be a form with questions, using the fields below. Fields marked * can also be set for the set, as defaults of
all rules except gates (`answers`: of all rules).

answers*    labels of the three verdicts, in the order of the buttons: {violates: "Yes", unsure: "Unsure", follows: "No"}
positive*   verdict for which the rule's attribute is 1. Default: the verdict labeled "Yes", or else `follows`
any*        attribute, such as `unsafe`, that is 1 if any rule with the same `any` has its positive verdict
preselect*  verdict that is selected when an item opens
step*       heading above the rules with the same `step`
gate        if true, the rule comes first, and violating it hides the other rules
reasons     labels of buttons that replace the button for `violates`. The selected label becomes the note
fill        if `url`, the note initially contains the addresses in the response
"""

import hashlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from sqlalchemy import select
from sqlalchemy.orm import Session

from align.core.errors import UserError
from align.core.files import package_data_root
from align.data.records import VERDICTS
from annotation_ui.store.schema import RuleSet
from annotation_ui.tasks.base import Json

PACKAGE_RULE_SETS = package_data_root() / "forms" / "rules"
MAX_BYTES = 2**20
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


def parse(text: str, file: str) -> Json:
    """Parse a rule set: {name, title, source, rules: [{id, text, source}]}. Errors name the file and line."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{file}:{line}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{file}: not YAML: {error}") from None
    if root is None:
        raise UserError(f"{file}:1: empty")
    fields = _fields(root, file, required=("name", "rules"), optional=("title", "source", *_DEFAULTS))
    name = _text(fields["name"], "name", file)
    if not _ID.fullmatch(name):
        raise _error_at(fields["name"], file, "name: small letters, digits and hyphens only")
    defaults = {key: _READERS[key](fields[key], key, file) for key in _DEFAULTS if key in fields}
    return {
        "name": name,
        "title": _text(fields["title"], "title", file) if "title" in fields else name,
        "source": _text(fields["source"], "source", file) if "source" in fields else "",
        "rules": _rules(fields["rules"], file, defaults),
    }


def store(session: Session, rule_set: Json, again: bool = True) -> RuleSet:
    """Return the row of this version of a rule set. Store the version if it is new.

    With `again`, an existing version becomes the newest.
    """
    digest = hashlib.sha256(json.dumps(rule_set, sort_keys=True).encode()).hexdigest()
    same = select(RuleSet).where(RuleSet.name == rule_set["name"], RuleSet.digest == digest)
    row = session.scalar(same)
    if row is None:
        row = RuleSet(name=rule_set["name"], digest=digest, content=rule_set)
        session.add(row)
        session.flush()
    elif again:
        row.created_at = time.time()
    return row


def read(path: Path, name: str = "") -> Json:
    """Read a rule file. Errors name it `name` (default: its path)."""
    name = name or str(path)
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise UserError(f"{name}: not a .yaml file")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{name}: larger than {MAX_BYTES // 2**20} MiB")
        return parse(path.read_text(encoding="utf-8"), name)
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{name}: not UTF-8 text") from None


def newest(session: Session, name: str) -> RuleSet | None:
    """Return the latest stored version of a rule set."""
    return session.scalar(select(RuleSet).where(RuleSet.name == name).order_by(RuleSet.created_at.desc()).limit(1))


def store_shipped(session: Session) -> None:
    """Store the rule sets in forms/rules/."""
    for path in sorted(PACKAGE_RULE_SETS.glob("*.yaml")):
        store(session, read(path), again=False)


def _rules(node: yaml.Node, file: str, defaults: Json) -> list[Json]:
    if not isinstance(node, yaml.SequenceNode) or not node.value:
        raise _error_at(node, file, "rules: must be a list with at least one rule")
    rules: list[Json] = []
    for entry in node.value:
        fields = _fields(entry, file, required=("id", "text"), optional=("source", *_READERS))
        rule: Json = {key: _READERS.get(key, _text)(value, key, file) for key, value in fields.items()}
        if not _ID.fullmatch(rule["id"]):
            raise _error_at(fields["id"], file, f"id: {rule['id']!r}: small letters, digits and hyphens only")
        if any(rule["id"] == other["id"] for other in rules):
            raise _error_at(fields["id"], file, f"id: {rule['id']!r} is there twice")
        if rule.get("gate") and any(not other.get("gate") for other in rules):
            raise _error_at(fields["gate"], file, "gate: must stand before the rules that it leads to")
        inherited = {key: value for key, value in defaults.items() if key == "answers" or not rule.get("gate")}
        rules.append({"source": "", **inherited, **rule})
    shared = {rule["any"] for rule in rules if "any" in rule} & {rule["id"] for rule in rules}
    if shared:
        raise _error_at(node, file, f"any: {min(shared)!r} is the id of a rule: choose another name")
    return rules


def _answers(node: yaml.Node, field: str, file: str) -> list[list[str]]:
    """Parse [verdict, label] pairs in the order of the buttons."""
    fields = _fields(node, file, required=VERDICTS, optional=())
    return [[verdict, _text(value, verdict, file)] for verdict, value in fields.items()]


def _texts(node: yaml.Node, field: str, file: str) -> list[str]:
    """Parse a list of distinct strings."""
    if not isinstance(node, yaml.SequenceNode) or not node.value:
        raise _error_at(node, file, f"{field}: must be a list of texts")
    texts = [_text(entry, field, file) for entry in node.value]
    if len(set(texts)) < len(texts):
        raise _error_at(node, file, f"{field}: the same text twice")
    return texts


def _verdict(node: yaml.Node, field: str, file: str) -> str:
    verdict = _text(node, field, file)
    if verdict not in VERDICTS or (field == "positive" and verdict == "unsure"):
        known = [each for each in VERDICTS if field != "positive" or each != "unsure"]
        raise _error_at(node, file, f"{field}: must be one of {', '.join(known)}")
    return verdict


def _attribute(node: yaml.Node, field: str, file: str) -> str:
    name = _text(node, field, file)
    if not _ID.fullmatch(name):
        raise _error_at(node, file, f"{field}: {name!r}: small letters, digits and hyphens only")
    return name


def _gate(node: yaml.Node, field: str, file: str) -> bool:
    if not isinstance(node, yaml.ScalarNode) or node.value not in ("true", "false"):
        raise _error_at(node, file, "gate: must be true or false")
    return bool(node.value == "true")


def _fill(node: yaml.Node, field: str, file: str) -> str:
    if _text(node, field, file) != "url":
        raise _error_at(node, file, "fill: must be url")
    return "url"


def _fields(node: yaml.Node, file: str, required: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, yaml.Node]:
    if not isinstance(node, yaml.MappingNode):
        raise _error_at(node, file, f"must be a mapping with {', '.join(required)}")
    fields: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if key.value not in (*required, *optional):
            raise _error_at(key, file, f"unknown field {key.value!r} (known: {', '.join((*required, *optional))})")
        if key.value in fields:
            raise _error_at(key, file, f"{key.value} is there twice")
        fields[key.value] = value
    missing = [field for field in required if field not in fields]
    if missing:
        raise _error_at(node, file, f"{missing[0]} is missing")
    return fields


def _text(node: yaml.Node, field: str, file: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or not str(node.value).strip():
        raise _error_at(node, file, f"{field}: must be text")
    return " ".join(str(node.value).split())


def _error_at(node: yaml.Node, file: str, message: str) -> UserError:
    return UserError(f"{file}:{node.start_mark.line + 1}: {message}")


_READERS: dict[str, Callable[[yaml.Node, str, str], Any]] = {
    "answers": _answers,
    "positive": _verdict,
    "any": _attribute,
    "preselect": _verdict,
    "step": _text,
    "help": _text,
    "examples": _texts,
    "reasons": _texts,
    "gate": _gate,
    "fill": _fill,
}
_DEFAULTS = ("answers", "positive", "any", "preselect", "step")
