"""Files of rules, as in forms/rules: each rule has an id, which judgments name, and a text, which models read."""

import re
from collections.abc import Iterable, Mapping, Sequence

import yaml

from align.core.errors import UserError, nearest_name_hint
from align.core.files import resolve_path

_RULES_FILE = re.compile(r"(?P<file>.+\.ya?ml)(:(?P<rule>[^/\\:]+))?", re.IGNORECASE)


def read_rules(paths: Sequence[str]) -> dict[str, str]:
    """Texts of rules by their ids.

    Args:
        paths: files as in forms/rules, or `FILE:ID` for one rule of a file.
    """
    return _merge(map(_read, paths))


def choose_rules(wanted: Sequence[str], known: Mapping[str, str], where: str) -> dict[str, str]:
    """The rules that a setting names: files, `FILE:ID` or ids of `known`; without any, all of `known`.

    `where` names `known` in an error.
    """
    if not wanted:
        return dict(known)
    return _merge(
        _read(word) if _RULES_FILE.fullmatch(word) else (word, {word: _text_of(word, known, where)}) for word in wanted
    )


def _merge(parts: Iterable[tuple[str, Mapping[str, str]]]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for source, found in parts:
        for rule, text in found.items():
            if rule in texts:
                raise UserError(f"{source}: rule '{rule}' is defined twice")
            texts[rule] = text
    return texts


def _text_of(rule: str, known: Mapping[str, str], where: str) -> str:
    if rule not in known:
        raise UserError(f"{where}: no rule '{rule}'{nearest_name_hint(rule, known) or ''}")
    return known[rule]


def _read(path: str) -> tuple[str, dict[str, str]]:
    """The file's name and its rules, or its one rule."""
    single = _RULES_FILE.fullmatch(path)
    file = single["file"] if single else path
    try:
        stored = yaml.safe_load(resolve_path(file).read_text(encoding="utf-8"))
        rules = [(str(rule["id"]), str(rule["text"])) for rule in stored["rules"]]
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{file}: not a file of rules; it needs a list `rules` with id and text of each") from error
    found = _merge((file, {rule: text}) for rule, text in rules)
    if single and single["rule"]:
        found = {single["rule"]: _text_of(single["rule"], found, file)}
    return file, found
