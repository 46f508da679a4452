"""The report of a run: one HTML file, and a table for the terminal."""

from collections.abc import Sequence
from pathlib import Path

from align.errors import UserError
from align.eval.core.results import Evaluation, markdown_table
from align.eval.report.loading import EVALUATIONS_FOLDER, load_evaluations, load_run
from align.eval.report.model_card import add_results_to_card
from align.eval.report.run_page import render_run_page
from align.eval.report.side_by_side import render_side_by_side
from align.eval.report.terminal_table import summary_table
from align.files import write_text

__all__ = ["load_results", "results_as_markdown", "summary_table", "write_model_card", "write_report", "write_reports"]


def write_report(run: Path, target: Path | None = None) -> Path:
    """Write the report of a folder with subfolders sft, reward and ppo (any may be missing), or of one stage's folder.

    The page names what is missing or cut off. The file holds its styles, plots and script itself and requests nothing
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
    write_text(path, render_run_page(load_run(Path(run))))
    return path


def write_reports(folders: Sequence[Path], target: Path | None = None) -> Path:
    """Write the report of one run, or one page of several side by side.

    Args:
        folders: see `write_report`.
        target: the file to write; None: `report.html`, in the folder of a single run, or in the folder that holds the
            first of several.

    Raises:
        UserError: see `write_report`.
    """
    if len(folders) == 1:
        return write_report(folders[0], target)
    path = target or folders[0].resolve().parent / "report.html"
    write_text(path, render_side_by_side([load_run(folder) for folder in folders]))
    return path


def load_results(folder: Path) -> list[Evaluation]:
    """What `align eval` wrote into a folder, or into `eval` in a run.

    Raises:
        UserError: if there is nothing.
    """
    problems: list[str] = []
    for place in (folder / EVALUATIONS_FOLDER, folder):
        evaluations = load_evaluations(place, problems) if place.is_dir() else []
        if evaluations:
            return evaluations
    raise UserError(f"{folder}: no results of align eval in it or in its {EVALUATIONS_FOLDER}/")


def results_as_markdown(folders: Sequence[Path]) -> str:
    """The results of several folders as Markdown tables."""
    return markdown_table([evaluation for folder in folders for evaluation in load_results(folder)])


def write_model_card(folder: Path) -> Path:
    """Put a run's results into the card of its last stage's model; returns the file.

    Raises:
        UserError: if there is no model, or no result of it.
    """
    stages = [folder / stage for stage in ("ppo", "dpo", "sft") if (folder / stage / "model").is_dir()] or [folder]
    return add_results_to_card(stages[0] / "model", load_results(folder), stages[0].name)
