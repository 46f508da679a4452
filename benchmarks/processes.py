"""Do several processes train what one trains? Every stage and model in every way to train, for ten updates each.

    python -m benchmarks.processes
    python -m benchmarks.processes --processes 2 --settings zero3 --only ppo/tiny-llama/0

The cases are those of `tests/launch/programs/every_stage.py`. Each is compared with one process: the largest difference of
any figure in any update, and of any weight of the saved model. The runs stay in `--folder`: a repeated command continues
with the next case. The table is printed and written to `table.md` there.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import _sharpen
from tests.launch.compared import compare
from tests.launch.launcher import ROOT, launch_in_turn
from tests.launch.programs import every_stage
from tests.launch.programs.every_stage import CASES, ENDED, SETTINGS, TOLERANCE
from tests.models.encoders import write_encoder

UPDATES = 10
ALONE = "alone"
HOURS = 3 * 3600.0
TITLES = {"cpu2": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "zero3-offload": "offload"}


def train(folder: Path, shared: Path, cases: Sequence[str], settings: str, processes: int) -> None:
    """Train the cases that have not ended yet, in processes of one launch."""
    missing = [case for case in cases if not (folder / case / ENDED).exists()]
    for case in missing:
        shutil.rmtree(folder / case, ignore_errors=True)
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    words = [every_stage.__file__, str(folder), str(shared), str(UPDATES), *missing]
    try:
        launch_in_turn([words], folder, settings, processes, HOURS, real=True)
    except AssertionError as error:  # what the processes told
        print(error, file=sys.stderr)
    print(f"{folder.name}: {len(missing)} cases in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def cell(alone: Path, together: Path) -> tuple[str, bool]:
    """The larger difference of figures and weights, and whether it is too large; "-" where nothing was run."""
    if not (together / ENDED).exists():
        return "-", False
    try:
        apart = compare(alone, together)
    except ValueError as error:
        print(f"{together}: {error}", file=sys.stderr)
        return "differs", True
    if apart.largest > TOLERANCE:
        print(f"{together}: {apart}", file=sys.stderr)
    return f"{apart.largest:.0e}", apart.largest > TOLERANCE or apart.updates < UPDATES


def table(folder: Path) -> tuple[str, int]:
    """All differences in Markdown, and how many are too large."""
    ways = [(settings, processes) for settings in SETTINGS for processes in (2, 4)]
    lines = ["| | " + " | ".join(f"{TITLES[settings]} {processes}" for settings, processes in ways) + " |"]
    lines.append("| --- " * (len(ways) + 1) + "|")
    wrong = 0
    for case in CASES:
        found = [cell(folder / ALONE / case, folder / f"{settings}-{processes}" / case) for settings, processes in ways]
        wrong += sum(is_wrong for _, is_wrong in found)
        stage, model, rank = case.split("/")
        lines.append(
            f"| {stage} {model}, {'LoRA' if int(rank) else 'full'} | " + " | ".join(text for text, _ in found) + " |"
        )
    return "\n".join(lines), wrong


def main() -> None:
    """Train what is missing, write the table, and exit with 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="*", default=SETTINGS, choices=SETTINGS, help="files in configs/accelerate")
    parser.add_argument("--processes", nargs="*", type=int, default=[2, 4], help="how many train together")
    parser.add_argument("--only", nargs="*", default=CASES, choices=CASES, help="cases")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "processes", help="where the runs are kept")
    options = parser.parse_args()
    folder = options.folder.resolve()
    alone = folder / ALONE
    if not (alone / "encoder").exists():
        write_encoder("bert", alone / "encoder", _sharpen)
    needed = {f"reward/{model}/{rank}" for _, model, rank in (case.split("/") for case in options.only)}
    train(alone, alone, [case for case in CASES if case in {*options.only, *needed}], "cpu", 1)
    for processes in options.processes:
        for settings in options.settings:
            train(folder / f"{settings}-{processes}", alone, options.only, settings, processes)
    text, wrong = table(folder)
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
