"""The report of a run: one HTML file for people who were not there, and a table for the terminal."""

from pathlib import Path

from align.eval.report.page import render
from align.eval.report.runs import load_runs
from align.eval.report.table import summary_table
from align.files import write_text

__all__ = ["summary_table", "write_report"]


def write_report(run: Path, target: Path | None = None) -> Path:
    """Write the report of a folder with subfolders sft, reward and ppo (any may be missing), or of one stage's folder.

    What is missing or cut off is said on the page. The file holds its styles, plots and script itself and asks for nothing
    from the network.

    Args:
        run: the folder; a `summary.json` in it is shown as the table of results.
        target: the file to write; None: `report.html` in `run`.

    Returns:
        The file's path.

    Raises:
        UserError: if there is no such folder or no run in it, or the file cannot be written.
    """
    path = target or Path(run) / "report.html"
    write_text(path, render(load_runs(Path(run))))
    return path
