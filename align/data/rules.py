"""Files of rules, as in forms/rules: each rule has an id, which judgments name, and a text, which models read."""

import re
from collections.abc import Mapping, Sequence

import yaml

from align.core.errors import UserError, nearest_name_hint
from align.core.shipped import resolve_path

_ONE_RULE = re.compile(r"(?P<file>.+\.ya?ml):(?P<rule>[^/\\:]+)", re.IGNORECASE)


def read_rules(paths: Sequence[str]) -> dict[str, str]:
    """Texts of rules by their ids.

    Args:
        paths: files as in forms/rules, or `FILE:ID` for one rule of a file.

    Raises:
        UserError: if a file is missing or is not a file of rules, has no rule of that id, or if an id appears twice.
    """
    texts: dict[str, str] = {}
    for path in paths:
        single = _ONE_RULE.fullmatch(path)
        file = single["file"] if single else path
        found = _read_file(file)
        if single:
            found = {single["rule"]: _text_of(single["rule"], found, file)}
        for rule_id, text in found.items():
            if rule_id in texts:
                raise UserError(f"{file}: rule '{rule_id}' is there twice")
            texts[rule_id] = text
    return texts


def choose_rules(wanted: Sequence[str], known: Mapping[str, str], where: str) -> dict[str, str]:
    """The rules that a setting names.

    Args:
        wanted: files, `FILE:ID`, or ids of `known`; empty: all of `known`.
        known: texts by id that need no file.
        where: names `known` in an error.

    Raises:
        UserError: for a file or an id that is not there.
    """
    if not wanted:
        return dict(known)
    texts: dict[str, str] = {}
    for word in wanted:
        is_file = re.search(r"\.ya?ml(:|$)", word, re.IGNORECASE)
        for rule_id, text in (read_rules([word]) if is_file else {word: _text_of(word, known, where)}).items():
            if rule_id in texts:
                raise UserError(f"{word}: rule '{rule_id}' is there twice")
            texts[rule_id] = text
    return texts


def _text_of(rule: str, known: Mapping[str, str], where: str) -> str:
    if rule not in known:
        raise UserError(f"{where}: no rule '{rule}'{nearest_name_hint(rule, known) or ''}")
    return known[rule]


def _read_file(path: str) -> dict[str, str]:
    try:
        stored = yaml.safe_load(resolve_path(path).read_text(encoding="utf-8"))
        rules = [(str(rule["id"]), str(rule["text"])) for rule in stored["rules"]]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a file of rules; it needs a list `rules` with id and text of each") from error
    twice = [rule for rule, _ in rules if [other for other, _ in rules].count(rule) > 1]
    if twice:
        raise UserError(f"{path}: rule '{twice[0]}' is there twice")
    return dict(rules)
