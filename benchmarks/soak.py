"""What `make soak` runs: kills and mutated input, whose tallies are printed and written to `tallies.md` in `--folder`.

    python -m benchmarks.soak --kills 30 --count 10000
    python -m benchmarks.soak --kills 4 --count 1000 --only sft ppo

Each variant and each kind of mutated input has its own file in `--folder`: a repeated command continues where the last one
stopped.

Mutated input is a row of the shipped data between two good rows of a file, or a settings file. It is changed in one to
three places: a field goes, gets another name or a value that it should not have, or bytes change. It has to be accepted, or
refused with one line that names the place: the file and line of a row, the file or the setting. Anything else is a finding.
"""

import argparse
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from align.core.errors import UserError
from align.core.settings_parser import parse
from align.data.readers import read_records
from align.data.records import Demonstration, Prompt, Ranking, RuleJudgment
from align.ppo.config import PPOConfig
from align.reward import RewardConfig
from align.sft import SFTConfig
from benchmarks.kept import kept
from benchmarks.kill_resume import NAMES, kill_and_resume

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


def _random_bytes(text: bytes, chance: random.Random) -> bytes:
    at, length = chance.randrange(len(text) + 1), chance.randrange(1, 12)
    new = bytes(chance.randrange(256) for _ in range(length)).replace(b"\n", b" ")
    return chance.choice([text[:at] + new + text[at:], text[:at] + new + text[at + length :], text[:at], text[at:]])


def _places(value: Any) -> list[Any]:
    """Return all containers in a value, including the value itself."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(place for item in inner for place in _places(item))] if isinstance(value, (dict, list)) else []


def _mutated(value: Any, chance: random.Random) -> Any:
    """Return a copy of a mapping with one to three random changes."""
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
    """Return `accepted`, `refused`, or the defect of the refusal."""
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


@cache
def _lines(name: str) -> list[bytes]:
    return (ROOT / "data" / name).read_bytes().splitlines()


def _mutated_row(chance: random.Random, folder: Path) -> tuple[bytes, Callable[[], object], str]:
    """Return a mutated row of the shipped data, a function that reads it, and a pattern that a refusal must match."""
    kind, path = chance.choice(list(KINDS)), folder / "rows.jsonl"
    first, line, last = (chance.choice(_lines(KINDS[kind])) for _ in range(3))
    as_bytes = chance.random() < 0.3
    text = _random_bytes(line, chance) if as_bytes else json.dumps(_mutated(json.loads(line), chance)).encode()
    path.write_bytes(b"\n".join([first, text, last]))
    return text, lambda: read_records(str(path), kind), re.escape(str(path)) + r":\d+"


def _mutated_settings(chance: random.Random, folder: Path) -> tuple[bytes, Callable[[], object], str]:
    """Return the same for a settings file of one of the three stages."""
    config_class, path = chance.choice(list(STAGES)), folder / "settings.yaml"
    text = chance.choice(sorted((ROOT / "configs" / STAGES[config_class]).glob("*.yaml"))).read_bytes()
    if chance.random() < 0.3:
        text = _random_bytes(text, chance)
    else:
        found = yaml.safe_load(text) | {chance.choice(fields(config_class)).name: deepcopy(chance.choice(JUNK))}
        text = yaml.safe_dump(_mutated(found, chance)).encode(errors="surrogatepass")
    path.write_bytes(text)
    names = "|".join(re.escape(item.name) for item in fields(config_class))
    return text, lambda: parse(config_class, ["--config", str(path)]), rf"{re.escape(str(path))}|\b({names})\b"


MUTATED = {"rows": _mutated_row, "settings": _mutated_settings}


def fuzz(kind: str, count: int, seed: int) -> dict[str, Any]:
    """Read `count` mutated inputs. Return the numbers of accepted and refused ones, and the findings."""
    chance, outcomes, findings = random.Random(seed), Counter[str](), []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(count):
            text, read, expected = MUTATED[kind](chance, Path(folder))
            outcome = _outcome(read, expected)
            outcomes[outcome] += 1
            if outcome not in ("accepted", "refused"):
                findings.append(f"{outcome} for {text[:300]!r}")
    refused = {name: outcomes[name] for name in ("accepted", "refused")}
    return {"kind": kind, "count": count, **refused, "findings": findings}


def kill_part(variant: str, kills: int, seed: int) -> dict[str, Any]:
    """Return the tally of a variant's kills."""
    with tempfile.TemporaryDirectory() as work:
        return kill_and_resume(variant, kills, random.Random(f"{seed} {variant}"), Path(work))


def main() -> None:
    """Run the missing parts, write the tables, and exit with code 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="kills of each variant")
    parser.add_argument("--count", type=int, default=10_000, help="mutated rows, and as many settings files")
    parser.add_argument("--only", nargs="*", default=[], choices=NAMES, help="variants; none given: all")
    parser.add_argument("--seed", type=int, default=0, help="decides kills and mutations")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "soak", help="where the tallies of parts are kept")
    options = parser.parse_args()
    folder, seed = options.folder, options.seed
    kills = [
        kept(folder / f"kills-{name}-{options.kills}-{seed}.json", partial(kill_part, name, options.kills, seed))
        for name in options.only or NAMES
    ]
    fuzzed = [
        kept(folder / f"fuzz-{kind}-{options.count}-{seed}.json", partial(fuzz, kind, options.count, seed))
        for kind in (MUTATED if options.count else ())
    ]
    lines = ["| variant | kills | runs | equal to an unbroken run | different |", "| --- | --- | --- | --- | --- |"]
    for row in kills:
        wrong = "; ".join(row["different"]) or "none"
        lines.append(f"| `{row['variant']}` | {row['kills']} | {row['runs']} | {row['same']} | {wrong} |")
    lines += ["", "| mutated | tried | accepted | refused in one line that says where | findings |", lines[1]]
    for row in fuzzed:
        cells = (row["kind"], row["count"], row["accepted"], row["refused"], len(row["findings"]))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    text = "\n".join(lines)
    (folder / "tallies.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    findings = [finding for row in fuzzed for finding in row["findings"]]
    print("\n".join(findings[:30]), file=sys.stderr)
    raise SystemExit(bool(findings or any(row["different"] for row in kills)))


if __name__ == "__main__":
    main()
