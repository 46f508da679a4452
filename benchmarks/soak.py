"""What `make soak` runs: kills and mutated input, whose tallies are printed and written to `tallies.md` in `--folder`.

    python -m benchmarks.soak --kills 30 --count 10000
    python -m benchmarks.soak --kills 4 --count 1000 --only sft ppo

Each variant and each kind of mutated input has its own file in `--folder`: a repeated command continues where the last one
stopped.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.fuzz import Tally, fuzz_rows, fuzz_settings
from benchmarks.kept import kept
from benchmarks.kill_resume import NAMES, kill_and_resume, table

ROOT = Path(__file__).resolve().parents[1]
FUZZ: dict[str, Callable[[int, int, Path], Tally]] = {"rows": fuzz_rows, "settings": fuzz_settings}


def kill_part(variant: str, kills: int, seed: int) -> dict[str, Any]:
    """The tally of one variant's kills."""
    with tempfile.TemporaryDirectory() as work:
        return kill_and_resume(variant, kills, random.Random(f"{seed} {variant}"), Path(work))


def fuzz_part(kind: str, count: int, seed: int) -> dict[str, Any]:
    """The tally of mutated inputs of one kind."""
    with tempfile.TemporaryDirectory() as work:
        return {"kind": kind, "count": count} | FUZZ[kind](count, seed, Path(work))._asdict()


def main() -> None:
    """Run what is missing, write the tables, and exit with 1 if something was found."""
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
        kept(folder / f"fuzz-{kind}-{options.count}-{seed}.json", partial(fuzz_part, kind, options.count, seed))
        for kind in (FUZZ if options.count else ())
    ]
    lines = [table(kills), "", "| mutated | tried | accepted | refused in one line that says where | findings |"]
    lines.append("| --- | --- | --- | --- | --- |")
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
