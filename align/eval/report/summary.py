"""The summary of a report: sentences, and lines of a table, with numbers as people read them."""

from dataclasses import dataclass, field
from typing import Literal

from align.eval.report.compare import Pair
from align.eval.report.runs import SummaryRow

Mood = Literal["good", "bad", "note"]


@dataclass(frozen=True)
class Finding:
    """One sentence; `good` and `bad` sort it under what improved and what got worse, `note` under neither."""

    mood: Mood
    text: str


@dataclass(frozen=True)
class Line:
    """A line of the table of numbers, ready to be shown; `mood` is good, bad or empty."""

    name: str
    before: str
    after: str
    change: str = ""
    interval: str = ""
    note: str = ""
    mood: str = ""


@dataclass
class Digest:
    """A report's summary.

    Attributes:
        headline: the outcome in one sentence.
        lines: the numbers.
        first, kept: the updates of the first evaluation and of the one whose policy was kept.
        pairs: samples of two evaluations, largest gains and losses in turn.
        compared: the updates of those two; the first is None if there is one alone.
    """

    headline: str = ""
    findings: list[Finding] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    first: int | None = None
    kept: int | None = None
    pairs: list[Pair] = field(default_factory=list)
    compared: tuple[int | None, int | None] = (None, None)

    def say(self, mood: Mood, text: str) -> None:
        """Add a sentence."""
        self.findings.append(Finding(mood, text))

    def texts(self, mood: Mood) -> list[str]:
        """The sentences of one kind."""
        return [finding.text for finding in self.findings if finding.mood == mood]

    def compare(self, name: str, before: float | None, after: float, **rest: str) -> None:
        """Add a line with its change; no `before`, no change."""
        change = "" if before is None else number(after - before, sign=True)
        self.lines.append(Line(name, number(before), number(after), change, **rest))


def number(value: float | str | None, sign: bool = False) -> str:
    """Three significant digits, thousands in groups; text stays as it is, None becomes a dash."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if not abs(value) < float("inf"):
        return "not a number"
    text = f"{value:{'+' if sign else ''},.0f}" if abs(value) >= 1000 else f"{value:{'+' if sign else ''}.3g}"
    return text if "e" in text else text.replace("-", "−")


def percent(value: float, sign: bool = False) -> str:
    """A share as a percentage with one digit; with a sign it is a difference, in percentage points."""
    return (f"{100 * value:+.1f} points" if sign else f"{100 * value:.1f} %").replace("-", "−")


def mood_of(change: float, rising_is_good: bool) -> str:
    """`good`, `bad`, or empty for no change."""
    return "" if change == 0 else "good" if (change > 0) == rising_is_good else "bad"


def line_of(row: SummaryRow) -> Line:
    """A row of summary.json as the table shows it; the change is there where both ends are numbers."""
    both = not isinstance(row.before, str) and not isinstance(row.after, str)
    change = number(float(row.after) - float(row.before), sign=True) if both else ""
    return Line(row.name, number(row.before), number(row.after), change, row.interval, row.note)
