"""Reads mutated rows and settings: each is accepted, or refused with one line that names the place. `make soak` runs it.

A row of the shipped data, of a random kind, is changed in one to three places (a field goes, gets another name or a value
that it should not have, or bytes of the line change) and stands between two good rows of a file. A settings file is changed
in the same way. Anything but a `UserError` is a finding, and so is one that takes several lines, names no file (for a row:
and no line), or for settings neither the file nor a setting.
"""

import json
import random
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from align.core.errors import UserError
from align.core.settings_parser import parse
from align.data.readers import read_records
from align.data.records import Demonstration, Prompt, Ranking, RuleJudgment
from align.ppo.config import PPOConfig
from align.reward import RewardConfig
from align.sft import SFTConfig

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    Demonstration: "demonstrations_heldout.jsonl",
    Ranking: "rankings_round1.jsonl",
    Prompt: "prompts_validation.jsonl",
    RuleJudgment: "rule_judgments.jsonl",
}
STAGES = {SFTConfig: "sft", RewardConfig: "reward", PPOConfig: "ppo"}
JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 10**400, -(10**30), float("nan"), float("inf"), 1e-320),
    *("", " ", "\u0000", "\ud800", "\u202e", "x" * 5000, "{{ 7 * 7 }}", "!!python/object:os.system"),
    *("../../etc/passwd", "=", "-"),
    *([], [[]], [None], [1, "a"], {}, {"a": 1}, {"role": "user"}, [{"role": "user"}], [{"role": 1, "content": 2}]),
    *([{"role": "assistant", "content": None}], [{"content": "x"}], [["user", "x"]]),
    *(["a", "a"], [1, 1], [1.5, 2], [True, 2]),
]


class Tally(NamedTuple):
    """What became of the mutated inputs."""

    accepted: int
    refused: int
    findings: list[str]


def _random_bytes(text: bytes, chance: random.Random) -> bytes:
    at, length = chance.randrange(len(text) + 1), chance.randrange(1, 12)
    new = bytes(chance.randrange(256) for _ in range(length)).replace(b"\n", b" ")
    return chance.choice([text[:at] + new + text[at:], text[:at] + new + text[at + length :], text[:at], text[at:]])


def _places(value: Any) -> list[Any]:
    """The containers inside a value, itself included."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(place for item in inner for place in _places(item))] if isinstance(value, (dict, list)) else []


def _mutated(value: Any, chance: random.Random) -> Any:
    """A copy of a mapping with one to three changes anywhere inside."""
    changed = deepcopy(value)
    for _ in range(chance.randrange(1, 4)):
        place = chance.choice(_places(changed))
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            continue
        key, change = chance.choice(keys), chance.randrange(4)
        if change == 0:
            del place[key]
        elif change == 1 and isinstance(place, dict):
            place[key[: chance.randrange(1, 5)] + chance.choice(["", "_x", " ", "é"])] = place.pop(key)
        elif change == 2 and isinstance(place, list):
            place.insert(key, deepcopy(chance.choice(place)))
        else:
            place[key] = deepcopy(chance.choice(JUNK))
    return changed


def _outcome(read: Callable[[], object], expected: str) -> str:
    """`accepted`, `refused`, or what is wrong with the refusal."""
    try:
        read()
    except UserError as error:
        message = str(error)
        if len(message.splitlines()) != 1:
            return f"several lines: {message[:300]!r}"
        return "refused" if re.search(expected, message) else f"does not say where: {message[:300]!r}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return "accepted"


def _tally(outcomes: list[tuple[str, bytes]]) -> Tally:
    names = [outcome for outcome, _ in outcomes]
    findings = [f"{outcome} for {text[:300]!r}" for outcome, text in outcomes if outcome not in ("accepted", "refused")]
    return Tally(names.count("accepted"), names.count("refused"), findings)


def fuzz_rows(count: int, seed: int, folder: Path) -> Tally:
    """Read mutated rows of the shipped data from files in `folder`."""
    chance, outcomes, path = random.Random(seed), [], folder / "rows.jsonl"
    lines = {kind: (ROOT / "data" / name).read_bytes().splitlines() for kind, name in KINDS.items()}
    for _ in range(count):
        kind = chance.choice(list(KINDS))
        first, line, last = (chance.choice(lines[kind]) for _ in range(3))
        if chance.random() < 0.3:
            text = _random_bytes(line, chance)
        else:
            text = json.dumps(_mutated(json.loads(line), chance)).encode()
        path.write_bytes(b"\n".join([first, text, last]))
        read = lambda kind=kind: read_records(str(path), kind)  # noqa: E731
        outcomes.append((_outcome(read, re.escape(str(path)) + r":\d+"), text))
    return _tally(outcomes)


def fuzz_settings(count: int, seed: int, folder: Path) -> Tally:
    """Read mutated settings files of the three stages from files in `folder`."""
    chance, outcomes, path = random.Random(seed), [], folder / "settings.yaml"
    for _ in range(count):
        config_class = chance.choice(list(STAGES))
        text = chance.choice(sorted((ROOT / "configs" / STAGES[config_class]).glob("*.yaml"))).read_bytes()
        if chance.random() < 0.3:
            text = _random_bytes(text, chance)
        else:
            found = yaml.safe_load(text) | {chance.choice(fields(config_class)).name: deepcopy(chance.choice(JUNK))}
            text = yaml.safe_dump(_mutated(found, chance)).encode(errors="surrogatepass")
        path.write_bytes(text)
        names = "|".join(re.escape(item.name) for item in fields(config_class))
        read = lambda config_class=config_class: parse(config_class, ["--config", str(path)])  # noqa: E731
        outcomes.append((_outcome(read, rf"{re.escape(str(path))}|\b({names})\b"), text))
    return _tally(outcomes)
