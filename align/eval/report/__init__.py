"""The report of a run: one HTML file, a table for the terminal, and Markdown tables."""

from collections.abc import Sequence
from pathlib import Path

from align.core.errors import UserError
from align.core.files import write_text
from align.eval.report.data import EVALUATIONS_FOLDER, load_evaluations, load_run
from align.eval.report.page import render_run_page, summary_table
from align.eval.results import Evaluation, markdown_table

__all__ = ["results_as_markdown", "summary_table", "write_report"]


def write_report(run: Path, target: Path | None = None) -> Path:
    """Write the report of a folder with subfolders sft, reward and ppo (any may be missing), or of one stage's folder.

    The page lists missing and truncated data, and requests nothing from the network. A `summary.json` in the folder is
    shown as the table of results. Returns the file: `target`, or `report.html` in `run`.

    Raises:
        UserError: if there is no such folder or no run in it, or the file cannot be written.
    """
    path = target or Path(run) / "report.html"
    write_text(path, render_run_page(load_run(Path(run))))
    return path


def results_as_markdown(folders: Sequence[Path]) -> str:
    """Return the results of `align eval` in several folders, or in the `eval` of several runs, as Markdown tables.

    Raises:
        UserError: if a folder holds none.
    """
    evaluations: list[Evaluation] = []
    for folder in folders:
        found = load_evaluations(folder / EVALUATIONS_FOLDER, problems=[]) or load_evaluations(folder, problems=[])
        if not found:
            raise UserError(f"{folder}: no results of align eval in it or in its {EVALUATIONS_FOLDER}/")
        evaluations += found
    return markdown_table(evaluations)
