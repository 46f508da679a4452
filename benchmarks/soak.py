"""What `make soak` runs: kills and mutated input, whose tallies are printed and written to `tallies.md` in `--folder`.

    python -m benchmarks.soak --kills 30 --count 10000
    python -m benchmarks.soak --kills 4 --count 1000 --only sft ppo

Each variant and each thousand of mutated inputs is a part with its own file in `--folder`: a repeated command continues
where the last one stopped, and several commands may share the work.
"""

import argparse
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.fuzz import Tally, fuzz_rows, fuzz_settings
from benchmarks.kept import kept
from benchmarks.kill_resume import NAMES, kill_and_resume, table

ROOT = Path(__file__).resolve().parents[1]
FUZZ: dict[str, Callable[[int, int, Path], Tally]] = {"rows": fuzz_rows, "settings": fuzz_settings}
PART = 1000


def kill_part(variant: str, kills: int, seed: int) -> dict[str, Any]:
    """The tally of one variant's kills."""
    with tempfile.TemporaryDirectory() as work:
        return kill_and_resume(variant, kills, random.Random(f"{seed} {variant}"), Path(work))


def fuzz_part(kind: str, count: int, seed: int) -> dict[str, Any]:
    """The tally of some mutated inputs."""
    with tempfile.TemporaryDirectory() as work:
        return {"kind": kind, "count": count} | FUZZ[kind](count, seed, Path(work))._asdict()


def page(kills: list[dict[str, Any]], fuzzed: list[dict[str, Any]], command: str) -> str:
    """The tallies in Markdown."""
    date, machine = time.strftime("%Y-%m-%d"), platform.machine()
    lines = [f"Run by `{command}`, in parts, the last of which ended on {date} ({machine}):", "", table(kills), ""]
    lines += ["| mutated | tried | accepted | refused in one line that says where | findings |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for kind in FUZZ:
        parts = [part for part in fuzzed if part["kind"] == kind]
        tried, accepted, refused = (sum(part[name] for part in parts) for name in ("count", "accepted", "refused"))
        lines.append(f"| {kind} | {tried} | {accepted} | {refused} | {sum(len(part['findings']) for part in parts)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, write the tables, and exit with 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="kills of each variant")
    parser.add_argument("--count", type=int, default=10_000, help="mutated rows, and as many settings files")
    parser.add_argument("--only", nargs="*", default=[], choices=NAMES, help="variants; none given: all")
    parser.add_argument("--seed", type=int, default=0, help="decides kills and mutations")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "soak", help="where the tallies of parts are kept")
    options = parser.parse_args()
    seed, kills, fuzzed = options.seed, [], []
    for variant in options.only or NAMES:
        file = options.folder / f"kills-{variant}-{options.kills}-{seed}.json"
        kills.append(kept(file, partial(kill_part, variant, options.kills, seed)))
    for kind in FUZZ:
        for first in range(0, options.count, PART):
            count, chance = min(PART, options.count - first), seed + first // PART
            file = options.folder / f"fuzz-{kind}-{count}-{chance}.json"
            fuzzed.append(kept(file, partial(fuzz_part, kind, count, chance)))
    only = f" --only {' '.join(options.only)}" if options.only else ""
    command = f"python -m benchmarks.soak --kills {options.kills} --count {options.count}{only}"
    text = page(kills, fuzzed, command)
    (options.folder / "tallies.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    findings = [finding for part in fuzzed for finding in part["findings"]]
    print("\n".join(findings[:30]), file=sys.stderr)
    raise SystemExit(bool(findings or any(row["different"] for row in kills)))


if __name__ == "__main__":
    main()
