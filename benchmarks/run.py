"""Measure both sides in turn and write the table: `python -m benchmarks.run [--only ppo sft] [--pairs 3] [--scale cpu]`.

Every measured run is a separate process. A pair is one run of each side in direct succession, in alternating order. The
first pair tries all variants of a side (the peer's number formats), the later ones repeat the fastest. A line is written
after each run: a repeated command continues there. Runs of older code are dropped before their work is measured again.
"""

import argparse
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from align.core.files import write_json_lines
from align.runtime.distributed import cpu_flags
from align.runtime.flops import measure_peak
from benchmarks.results import Line, best_variant, read, runs, update_readme
from benchmarks.workloads import ALL, SCALES, Work, scaled, works_of

ROOT = Path(__file__).parents[1]
MEASURED = ("align", *(f"benchmarks/{name}.py" for name in ("data", "measuring", "ours", "workloads")))
"""Paths on which our numbers depend."""


@dataclass(frozen=True)
class Session:
    """State shared by all runs of a call: data, results file, and interpreters of the peers.

    `commit` is the last commit of the measured code, followed by + if files differ. `deadline` is a time of
    `time.monotonic`. With `alone`, the peers are not measured in this call.
    """

    scale: str
    data: Path
    results: Path
    pythons: dict[str, str]
    commit: str
    deadline: float = math.inf
    alone: bool = False

    def add(self, line: Line) -> None:
        """Append a line to the results."""
        with open(self.results, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def drop(self, unwanted: Callable[[Line], bool]) -> None:
        """Remove lines from the results."""
        kept = [line for line in read(self.results) if not unwanted(line)]
        write_json_lines(self.results, kept)


def measured_code() -> str:
    """Return the last commit that changed the measured code or the measurement."""

    def git(*words: str) -> str:
        if shutil.which("git") is None:
            return ""
        done = subprocess.run(["git", *words, "--", *MEASURED], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    commit = git("log", "-1", "--format=%h") or "unknown"
    return commit + ("+" if git("status", "--porcelain") else "")


def environment() -> dict[str, str]:
    """Return the environment of the processes: this tree first on the path, no network, and the caller's thread limits."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def run_side(session: Session, side: str, work: Work, variant: str, pair: int) -> Line:
    """Run one measurement and store its line.

    Raises:
        ChildProcessError: If the run fails.
        TimeoutExpired: If the run is not finished by the deadline.
    """
    python = sys.executable if side == "ours" else session.pythons[work.peer_environment]
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        words = [side, work.name, "--variant", variant, "--scale", session.scale, "--folder", str(session.data)]
        words += ["--seed", str(pair), "--result", str(result)]
        command = [python, "-m", "benchmarks.measuring", *words]
        begun = time.monotonic()
        left = None if math.isinf(session.deadline) else max(0.0, session.deadline - begun)
        with log.open("w") as file:
            options: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "timeout": left}
            done = subprocess.run(command, cwd=ROOT, env=environment(), check=False, **options)
        if done.returncode or not result.exists():
            raise ChildProcessError(
                f"{log.read_text(errors='replace')[-3000:]}\n{' '.join(command)}: failed ({done.returncode})"
            )
        found = json.loads(result.read_text(encoding="utf-8"))
    head = {"work": work.name, "side": side, "variant": variant, "pair": pair, "scale": session.scale}
    wall = round(time.monotonic() - begun, 1)
    line = head | found | {"wall": wall, "commit": session.commit, "date": date.today().isoformat()}
    session.add(line)
    return line


def steps(session: Session, work: Work, pairs: int) -> Iterator[tuple[str, str, int]]:
    """Yield (side, variant, pair) of each missing run. Later runs depend on the results of earlier ones."""
    for pair in range(1, pairs + 1):
        for side in ("ours", "peer") if pair % 2 else ("peer", "ours"):
            variants = work.ours if side == "ours" else () if work.compared_with or session.alone else work.peer
            if pair > 1 and variants:
                lines = read(session.results)
                first = {each: runs(lines, work.name, each, 1) for each in ("ours", "peer")}
                best = best_variant(work, first[side], first["peer" if side == "ours" else "ours"])
                variants = (best,) if best else ()
            done = {line["variant"] for line in runs(read(session.results), work.name, side, pair)}
            yield from ((side, variant, pair) for variant in variants if variant not in done)


def measure(session: Session, work: Work, pairs: int) -> None:
    """Run all missing measurements of a work. Measurements of older code are repeated."""
    session.drop(lambda line: line.get("work") == work.name and line["commit"] != session.commit)
    for side, variant, pair in steps(session, work, pairs):
        line = run_side(session, side, work, variant, pair)
        seconds = ", ".join(f"{each:.2f}" for each in line["seconds"]) or "never"
        about = f"{work.name} pair {pair} {side} {variant}"
        print(f"{about:48} {seconds} s, peak {line['peak_gib']:.2f} GiB, {line['wall']:.0f} s in all", flush=True)


def machine() -> dict[str, Any]:
    """Return the processor or GPU, its measured limits, and the versions of the libraries."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peaks = {name: measure_peak(device, getattr(torch, name)) for name in ("bfloat16", "float32")}
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        **{f"{name}_tflops": round(peak / 1e12, 3) for name, peak in peaks.items()},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "date": date.today().isoformat(),
    }


def _processor() -> str:
    """Return the processor's name, and its bfloat16 units."""
    file = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)", file.read_text(encoding="utf-8"), re.M) if file.exists() else None
    units = [unit for unit in ("amx_bf16", "avx512_bf16") if unit in cpu_flags()]
    return f"{found[1] if found else platform.machine()} ({', '.join(units) or 'no bfloat16 unit'})"


def ask(python: str, *words: str) -> str:
    """Run `python` in the project's root and return its output."""
    done = subprocess.run([python, *words], cwd=ROOT, env=environment(), check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], choices=ALL, metavar="WORK", help=", ".join(ALL))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long; the next call goes on there")
    parser.add_argument("--alone", action="store_true", help="measure our side; a later call measures the peers")
    parser.add_argument("--scale", choices=SCALES, default="cpu")
    parser.add_argument("--ppo_python", default=".venv-trl-1.12/bin/python", help="the peer's environment with trl 1.12.0")
    parser.add_argument("--supervised_python", default=sys.executable, help="the peer's environment with trl 1.16")
    parser.add_argument("--data", type=Path, default=Path("runs/bench"), help="models and texts are made in it")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    words = parser.parse_args()
    pythons = {"ppo": words.ppo_python, "supervised": words.supervised_python}
    data = (words.data / words.scale).absolute()
    deadline = time.monotonic() + 60 * words.minutes
    results = words.results / f"{words.scale}.jsonl"
    session = Session(words.scale, data, results, pythons, measured_code(), deadline, words.alone)
    names = words.only or works_of(words.scale)
    ask(sys.executable, "-m", "benchmarks.data", str(session.data), "--scale", words.scale, "--only", *names)
    session.drop(lambda line: "machine" in line)
    code = "import importlib.metadata as m; print(m.version('trl'))"
    session.add({"machine": machine() | {"trl": {name: ask(python, "-c", code) for name, python in pythons.items()}}})
    failed = []
    try:
        for name in names:
            try:
                measure(session, scaled(ALL[name], SCALES[words.scale]), words.pairs)
            except ChildProcessError as error:
                failed.append(name)
                print(error, flush=True)
    except subprocess.TimeoutExpired:
        print(f"the {words.minutes:g} minutes are up; the same command continues there", flush=True)
    print(update_readme(ROOT / "benchmarks" / "README.md", session.results, words.scale))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
