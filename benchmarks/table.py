"""The tables in README.md, written between their markers from the lines of a file of results."""

import math
import statistics
from pathlib import Path

from benchmarks.arithmetic import report
from benchmarks.results import Line, Summary, read, runs, summarize
from benchmarks.workloads import SCALES, WORKS


def shown(value: float) -> str:
    """A number with three digits that count."""
    if not math.isfinite(value):
        return "not reached"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def row(summary: Summary) -> str:
    """A line of the table."""
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
    """A sentence about the machine, the versions and the code."""
    trl = ", ".join(f"{version} ({name})" for name, version in machine["trl"].items())
    return (
        f"{machine['device']}, {machine['cores']} cores, {machine['memory_gib']} GiB; matrix products at "
        f"{machine['bfloat16_tflops']} TFLOP/s in bfloat16 and {machine['float32_tflops']} in float32, memory read at "
        f"{machine['bandwidth_gb']} GB/s.\nPython {machine['python']}, torch {machine['torch']}, transformers "
        f"{machine['transformers']}, TRL {trl}. {machine['date']}, commit {', '.join(commits)}."
    )


def race_text(lines: list[Line]) -> list[str]:
    """What the race ended with: KL and updates of each side."""
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


def tables(lines: list[Line], scale: str, model: Path) -> str:
    """Everything that stands between the markers of a scale."""
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
    text += ["", *report(lines, model, scale)]
    return "\n".join(text)


def update_readme(readme: Path, results: Path, scale: str, model: Path) -> str:
    """Write the tables of a scale into the README, if it has a place for them.

    Args:
        model: folder of the model that was measured, for the arithmetic.

    Returns:
        The text.
    """
    lines = read(results)
    text = tables(lines, scale, model)
    begin, end = f"<!-- {scale}: begin -->", f"<!-- {scale}: end -->"
    page = readme.read_text(encoding="utf-8")
    if begin not in page or end not in page:
        return text
    before, after = page.split(begin)[0], page.split(end)[1]
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
    return text
