"""The report of a run: one HTML file for people who were not there, and a table for the terminal."""

from collections.abc import Sequence
from pathlib import Path

from align.errors import UserError
from align.eval.report.card import write_card
from align.eval.report.page import render
from align.eval.report.runs import EVALUATIONS, load_evaluations, load_runs
from align.eval.report.several import render_several
from align.eval.report.table import summary_table
from align.eval.results import Evaluation, markdown_table
from align.files import write_text

__all__ = ["results_as_markdown", "results_of", "summary_table", "write_model_card", "write_report", "write_reports"]


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


def write_reports(folders: Sequence[Path], target: Path | None = None) -> Path:
    """Write the report of one run, or of several side by side: then beside the first of them, as `report.html`.

    Raises:
        UserError: see `write_report`.
    """
    if len(folders) == 1:
        return write_report(folders[0], target)
    path = target or folders[0].resolve().parent / "report.html"
    write_text(path, render_several([load_runs(folder) for folder in folders]))
    return path


def results_of(folder: Path) -> list[Evaluation]:
    """What `align eval` wrote into a folder, or into `eval` in a run.

    Raises:
        UserError: if there is nothing.
    """
    problems: list[str] = []
    for place in (folder / EVALUATIONS, folder):
        found = load_evaluations(place, problems) if place.is_dir() else []
        if found:
            return found
    raise UserError(f"{folder}: no results of align eval in it or in its {EVALUATIONS}/")


def results_as_markdown(folders: Sequence[Path]) -> str:
    """The results of several folders as Markdown tables."""
    return markdown_table([evaluation for folder in folders for evaluation in results_of(folder)])


def write_model_card(folder: Path) -> Path:
    """Put a run's results into the card of its last stage's model; gives the file.

    Raises:
        UserError: if there is no model, or no result of it.
    """
    places = [folder / stage for stage in ("ppo", "sft") if (folder / stage / "model").is_dir()] or [folder]
    return write_card(places[0] / "model", results_of(folder), places[0].name)
