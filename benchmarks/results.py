"""Results on disk, a JSON line for each measured run, and the figures that are drawn from them."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.workloads import ALL, SCALES, Work, scaled

KL_MARGIN = 1.1
"""How far the KL of one side of the race may be above the other's and still count as equal."""

Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """All lines of a file of results; none if there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def runs(lines: Iterable[Line], work: str, side: str, pair: int | None = None) -> list[Line]:
    """The runs of one side of a piece of work."""
    found = [line for line in lines if line.get("work") == work and line["side"] == side]
    return [line for line in found if pair is None or line["pair"] == pair]


def value(line: Line) -> float:
    """What the table shows of a run: seconds for each unit of work, or tokens a second; the worst there is if it failed."""
    work: Work = scaled(ALL[line["work"]], SCALES[line["scale"]])
    if not line["seconds"]:
        return math.inf
    if work.unit == "tokens/s":
        return float(sum(line["tokens"]) / sum(line["seconds"]))
    step = statistics.median(line["seconds"])
    return step / work.rows if work.stage == "reward" else step


def memory(line: Line) -> float:
    """The peak that counts (GiB): what the GPU has held where there is one, else what the process has."""
    return float(line.get("peak_device_gib", line["peak_gib"]))


def speedup(work: Work, ours: float, peer: float) -> float:
    """How many times faster ours is."""
    return ours / peer if work.unit == "tokens/s" else peer / ours


def best_variant(work: Work, lines: Sequence[Line], rivals: Sequence[Line]) -> str | None:
    """The variant that the later pairs repeat: the fastest of the first pair's runs.

    In the race a run counts only if it ends at a KL that the other side reaches too, within `KL_MARGIN`: a side that
    runs further from the reference to be there sooner has not won.
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
    """A row of the table; a median is over pairs.

    Attributes:
        ours, peer: medians of the value; the peer's is None where there is no peer.
        ratios: how many times faster ours is, pair by pair.
        ours_gib, peer_gib: medians of the peak memory (see `memory`).
    """

    work: Work
    ours: float
    ours_gib: float
    ours_variant: str
    pairs: int
    peer: float | None = None
    peer_gib: float | None = None
    peer_variant: str = ""
    ratios: tuple[float, ...] = ()


def summarize(work: Work, lines: Sequence[Line]) -> Summary | None:
    """The row of a piece of work, or None if it was not measured."""
    rival = work.compared_with or work.name
    first = [runs(lines, work.name, "ours", 1), runs(lines, rival, "peer", 1)]
    ours_variant, peer_variant = best_variant(work, *first), best_variant(ALL[rival], *first[::-1])
    if ours_variant is None:
        return None
    ours = {line["pair"]: line for line in runs(lines, work.name, "ours") if line["variant"] == ours_variant}
    peer = {line["pair"]: line for line in runs(lines, rival, "peer") if line["variant"] == peer_variant}
    values, memories = ([measure(line) for line in ours.values()] for measure in (value, memory))
    known = Summary(work, statistics.median(values), statistics.median(memories), ours_variant, len(ours))
    if peer_variant is None:
        return known
    both = sorted(ours.keys() & peer.keys())
    return replace(
        known,
        peer=statistics.median(map(value, peer.values())),
        peer_gib=statistics.median(map(memory, peer.values())),
        peer_variant=peer_variant,
        ratios=tuple(speedup(work, value(ours[pair]), value(peer[pair])) for pair in both),
    )
