"""Write the paths of an update into docs/architecture.md, from traces of real runs.

A trace records every function of align/ that runs from one optimizer step to the next, in a run of tiny-llama with default
settings (one epoch of one minibatch, no evaluation). `python docs/write_architecture.py` writes the page.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
LIMITS = "--max_prompt_tokens 64 --max_response_tokens 64 --overlong truncate --batch_size 4"
STAGES = {
    "ppo": "--prompts data/prompts.jsonl --max_prompt_tokens 128 --overlong truncate --max_new_tokens 24 --total_updates 4 "
    "--rollout_batch_size 32 --num_ppo_epochs 1 --missing_eos_score none "
    "--reward_functions align.ppo.toy_rewards:share_of_e",
    "sft": f"--train_data data/demonstrations_heldout.jsonl {LIMITS}",
    "reward": f"--train_data data/rankings_heldout.jsonl {LIMITS}",
}
"""The settings of each traced run."""


class Trace:
    """Records the functions of align/ that are called between the second and the third optimizer step, in order."""

    def __init__(self) -> None:
        self.steps, self.calls = 0, dict[tuple[str, int], str]()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(ROOT / "align") + os.sep):
            return
        if code.co_qualname == "TrainEngine.step":
            self.steps += 1
        if self.steps == 2:
            self.calls.setdefault((str(Path(code.co_filename).relative_to(ROOT)), code.co_firstlineno), code.co_qualname)


def trace(stage: str) -> list[tuple[str, int]]:
    """Train a stage; return file and first line of each function that one cycle calls, in the order of first calls."""
    from align.cli import main

    recorded = Trace()
    with tempfile.TemporaryDirectory() as folder, suppress(SystemExit):
        common = f"--model tiny-llama --save_steps 0 --save_minutes 0 --report_to none --output_dir {folder}/run"
        sys.argv = ["align", stage, *common.split(), *STAGES[stage].split()]
        sys.setprofile(recorded)
        try:
            main()
        finally:
            sys.setprofile(None)
    return list(recorded.calls)


def run_trace(stage: str) -> list[tuple[str, int]]:
    """Return `trace` of a stage, in a process of its own: a second run would not import and build what the first one did."""
    words = [sys.executable, __file__, "--trace", stage]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [(file, line) for file, line in json.loads(done.stdout.splitlines()[-1])]


def contribution(file: str) -> str:
    """Return the first sentence of a module's docstring."""
    document = ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8"))) or ""
    first = re.split(r"\.(?:\s|$)|:\n", document, maxsplit=1)[0]
    return " ".join(first.split()).replace("|", "\\|")


def executed_functions(file: str, first_lines: Iterable[int]) -> tuple[int, int]:
    """Count the functions of a file that begin, or whose decorators begin, at these lines; return also their lines."""
    starts, functions, lines = set(first_lines), 0, set[int]()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if {first, node.lineno} & starts:
                functions += 1
                lines |= set(range(first, (node.end_lineno or first) + 1))
    return functions, len(lines)


def table(calls: Iterable[tuple[str, int]]) -> str:
    """Return the files of a trace in the order of their first calls, with the number of functions and their lines."""
    files: dict[str, list[int]] = {}
    for file, line in calls:
        files.setdefault(file, []).append(line)
    counted = ((file, *executed_functions(file, lines)) for file, lines in files.items())
    rows = [row for row in counted if row[1]]  # the others only evaluate a generator expression or a class body
    head = f"{len(rows)} files, {sum(row[1] for row in rows)} functions, {sum(row[2] for row in rows):,} lines.\n\n"
    head += "| file | functions | lines | content |\n| --- | ---: | ---: | --- |\n"
    return head + "".join(f"| `{file}` | {count} | {lines} | {contribution(file)} |\n" for file, count, lines in rows)


def section(stage: str) -> re.Pattern[str]:
    """Return the pattern of the generated part of the page for a stage."""
    return re.compile(rf"(<!-- trace of {stage} -->\n)(.*?)(<!-- end of trace -->)", re.S)


def main() -> None:
    """Trace all stages and write the page."""
    text = PAGE.read_text(encoding="utf-8")
    for stage in STAGES:
        written = table(run_trace(stage))
        start, end = section(stage).search(text).span(2)
        text = f"{text[:start]}\n{written}\n{text[end:]}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trace"]:
        print(json.dumps(trace(sys.argv[2])))
    else:
        main()
