"""Results on disk, with a JSON line per measured run, and the tables of README.md generated from them."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from align.core.files import read_json_lines
from benchmarks.workloads import ALL, SCALES, WORKS, Work, scaled

KL_MARGIN = 1.1
"""Ratio up to which the KLs of both sides of the race count as equal."""

Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """Return all lines of a results file. Empty if the file does not exist."""
    return read_json_lines(path) if path.exists() else []


def runs(lines: Iterable[Line], work: str, side: str, pair: int | None = None) -> list[Line]:
    """Return the runs of one side of a work."""
    found = [line for line in lines if line.get("work") == work and line["side"] == side]
    return [line for line in found if pair is None or line["pair"] == pair]


def value(line: Line) -> float:
    """Return the value of a run in the table: seconds per unit of work, or tokens per second. A failed race is infinite."""
    work: Work = scaled(ALL[line["work"]], SCALES[line["scale"]])
    if not line["seconds"]:
        return math.inf
    if work.unit == "tokens/s":
        return float(sum(line["tokens"]) / sum(line["seconds"]))
    step = statistics.median(line["seconds"])
    return step / work.rows if work.stage == "reward" else step


def memory(line: Line) -> float:
    """Return the peak memory in GiB: of the GPU if there is one, or else of the process."""
    return float(line.get("peak_device_gib", line["peak_gib"]))


def best_variant(work: Work, lines: Sequence[Line], rivals: Sequence[Line]) -> str | None:
    """Return the fastest variant of the first pair, which later pairs repeat.

    In the race, a run counts only if the other side also reaches its final KL, within `KL_MARGIN`.
    """
    if not lines:
        return None
    found = list(lines)
    if work.stage == "race":
        reached = [[line["figures"]["kl"] for line in side if line["seconds"]] for side in (lines, rivals)]
        bound = max((min(side) for side in reached if side), default=math.inf) * KL_MARGIN
        found = [line for line in lines if line["seconds"] and line["figures"]["kl"] <= bound] or found
    chosen = (max if work.unit == "tokens/s" else min)(found, key=value)
    return str(chosen["variant"])


@dataclass(frozen=True)
class Summary:
    """Row of the table: medians of values and peak memory, and the speedup of ours in each pair."""

    work: Work
    ours: float
    ours_gib: float
    ours_variant: str
    pairs: int
    peer: float | None
    peer_gib: float | None
    peer_variant: str | None
    ratios: tuple[float, ...]


def summarize(work: Work, lines: Sequence[Line]) -> Summary | None:
    """Return the row of a work, or None if it was not measured."""
    rival = work.compared_with or work.name
    first = [runs(lines, work.name, "ours", 1), runs(lines, rival, "peer", 1)]
    ours_variant, peer_variant = best_variant(work, *first), best_variant(ALL[rival], *first[::-1])
    if ours_variant is None:
        return None
    ours = {line["pair"]: line for line in runs(lines, work.name, "ours") if line["variant"] == ours_variant}
    peer = {line["pair"]: line for line in runs(lines, rival, "peer") if line["variant"] == peer_variant}
    medians = [statistics.median(map(measure, ours.values())) for measure in (value, memory)]
    rivals = [statistics.median(map(measure, peer.values())) if peer else None for measure in (value, memory)]
    both = sorted(ours.keys() & peer.keys())
    ratios = (value(ours[pair]) / value(peer[pair]) for pair in both)
    faster = tuple(ratio if work.unit == "tokens/s" else 1 / ratio for ratio in ratios)
    return Summary(work, *medians, ours_variant, len(ours), *rivals, peer_variant, faster)


def shown(value: float) -> str:
    """Format a number with three significant digits."""
    if not math.isfinite(value):
        return "not reached"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def row(summary: Summary) -> str:
    """Format a row of the table."""
    work = summary.work
    cells = [f"{work.title}", work.unit, shown(summary.ours)]
    if summary.peer is None or summary.peer_gib is None:
        cells += ["-", "-", f"{summary.ours_gib:.2f}", "-", "-"]
    else:
        median = statistics.median(summary.ratios) if summary.ratios else math.nan
        spread = f" ({min(summary.ratios):.1f}-{max(summary.ratios):.1f})" if summary.ratios else ""
        cells += [f"{shown(summary.peer)} ({summary.peer_variant})", f"{median:.1f}{spread}"]
        cells += [f"{summary.ours_gib:.2f}", f"{summary.peer_gib:.2f}", f"{summary.ours_gib / summary.peer_gib:.2f}"]
    return f"| {' | '.join([*cells, str(summary.pairs)])} |"


def machine_text(machine: Line, commits: list[str]) -> str:
    """Describe the machine, the versions and the code."""
    trl = ", ".join(f"{version} ({name})" for name, version in machine["trl"].items())
    bfloat16, float32 = (machine.get(f"{name}_tflops") for name in ("bfloat16", "float32"))
    products = f"; matrix products at {bfloat16} TFLOP/s in bfloat16 and {float32} in float32" if bfloat16 else ""
    return (
        f"{machine['device']}, {machine['cores']} cores, {machine['memory_gib']} GiB{products}.\n"
        f"Python {machine['python']}, torch {machine['torch']}, transformers "
        f"{machine['transformers']}, TRL {trl}. {machine['date']}, commit {', '.join(commits)}."
    )


def race_text(lines: list[Line]) -> list[str]:
    """Describe the end of the race: KL and number of updates of each side."""
    work = next(work for work in WORKS if work.stage == "race")
    summary = summarize(work, lines)
    if summary is None:
        return []
    text = []
    for side, variant in (("ours", summary.ours_variant), ("peer", summary.peer_variant)):
        ran = [line["figures"] for line in runs(lines, work.name, side) if line["variant"] == variant and line["seconds"]]
        if ran:
            kl, updates = (statistics.median(figures[name] for figures in ran) for name in ("kl", "updates"))
            text.append(f"{side} at learning rate {variant}: {updates:.0f} updates, KL {kl:.1f} nats per response")
    return ["", f"The race: {'; '.join(text)}."] if text else []


def mfu_text(lines: list[Line]) -> list[str]:
    """Describe the model FLOPs utilization of our runs (the metric `speed/mfu`)."""
    found = []
    for work in WORKS:
        for figure, part in (("mfu", ""), ("mfu_learn", " (learning alone)")):
            values = [line["figures"][figure] for line in runs(lines, work.name, "ours") if figure in line["figures"]]
            found += [f"{work.name} {statistics.median(values):.0%}{part}"] if values else []
    return ["", f"MFU of ours: {', '.join(found)}."] if found else []


def tables(lines: list[Line], scale: str) -> str:
    """Return the text between the markers of a scale."""
    machine = next(line["machine"] for line in reversed(lines) if "machine" in line)
    commits = sorted({line["commit"] for line in lines if "commit" in line})
    size = SCALES[scale]
    factors = "" if size.rows == size.tokens == 1 else f", rows x {size.rows:g}, tokens x {size.tokens:g}"
    name = f"Model {size.model}{factors}"
    heads = "work | unit | ours | peer | times faster (each pair) | GiB ours | GiB peer | part of its memory | pairs"
    text = [f"{name}. {machine_text(machine, commits)}", "", f"| {heads} |", "|" + " --- |" * 9]
    found = [summarize(work, lines) for work in WORKS]
    text += [row(summary) for summary in found if summary is not None]
    text += race_text(lines)
    text += mfu_text(lines)
    return "\n".join(text)


def update_readme(readme: Path, results: Path, scale: str) -> str:
    """Write the tables of a scale into the README, if it has markers for them. Return the text."""
    lines = read(results)
    text = tables(lines, scale)
    begin, end = f"<!-- {scale}: begin -->", f"<!-- {scale}: end -->"
    page = readme.read_text(encoding="utf-8")
    if begin not in page or end not in page:
        return text
    before, after = page.split(begin)[0], page.split(end)[1]
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
    return text
