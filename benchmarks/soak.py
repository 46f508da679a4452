"""What `make soak` runs: kills and mutated input, whose tallies go into docs/reliability.md with the command.

python -m benchmarks.soak --kills 30 --count 10000
python -m benchmarks.soak --kills 4 --count 1000 --only sft ppo
python -m benchmarks.soak --kills 30 --count 10000 --collect

Each variant and each thousand of mutated inputs is a part with a file of its own in `--folder`: a broken-off command goes
on where it was, and several commands may share the work. `--collect` writes the page from the parts that are there.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.fuzz import Tally, fuzz_rows, fuzz_settings
from benchmarks.kill_resume import NAMES, table, tally_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- soak -->\n", "<!-- end -->\n"
FUZZ: dict[str, Callable[[int, int, Path], Tally]] = {"rows": fuzz_rows, "settings": fuzz_settings}
PART = 1000


def fuzz_part(kind: str, count: int, seed: int, folder: Path) -> dict[str, Any]:
    """The tally of some mutated inputs; what the folder of tallies holds already is not done again."""
    file = folder / f"fuzz-{kind}-{count}-{seed}.json"
    if not file.exists():
        with tempfile.TemporaryDirectory() as work:
            tally = FUZZ[kind](count, seed, Path(work))
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"kind": kind, "count": count} | tally._asdict()), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def parts_of(count: int, seed: int) -> list[tuple[int, int]]:
    """Count and seed of each part: thousands, and what is left."""
    sizes = [PART] * (count // PART) + ([count % PART] if count % PART else [])
    return [(size, seed + number) for number, size in enumerate(sizes)]


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
    """Run what is missing, write the page, and exit with 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="kills of each variant")
    parser.add_argument("--count", type=int, default=10_000, help="mutated rows, and as many settings files")
    parser.add_argument("--only", nargs="*", default=[], choices=NAMES, help="variants; none given: all")
    parser.add_argument("--seed", type=int, default=0, help="decides kills and mutations")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "soak", help="where the tallies of parts are kept")
    parser.add_argument("--collect", action="store_true", help="run nothing: write the page from the parts that are there")
    options = parser.parse_args()
    if options.collect:
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.folder.glob("*.json"))]
        kills, fuzzed = ([row for row in found if key in row] for key in ("variant", "kind"))
        kills.sort(key=lambda row: NAMES.index(row["variant"]))
    else:
        kills = [tally_of(variant, options.kills, options.seed, options.folder) for variant in options.only or NAMES]
        parts = parts_of(options.count, options.seed)
        fuzzed = [fuzz_part(kind, *part, options.folder) for kind in FUZZ for part in parts]
    only = f" --only {' '.join(options.only)}" if options.only else ""
    command = f"python -m benchmarks.soak --kills {options.kills} --count {options.count}{only}"
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    text = f"{before}{BEGIN}\n{page(kills, fuzzed, command)}\n\n{END}{rest.split(END)[1]}"
    PAGE.write_text(text, encoding="utf-8")
    findings = [finding for part in fuzzed for finding in part["findings"]]
    print("\n".join(findings[:30]), file=sys.stderr)
    raise SystemExit(bool(findings or any(row["different"] for row in kills)))


if __name__ == "__main__":
    main()
