"""The report of a run: one HTML file, a table for the terminal, Markdown tables, and results in a model card."""

from collections.abc import Sequence
from pathlib import Path

import yaml
from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

from align.core.errors import UserError
from align.core.files import write_text
from align.eval.core.results import Evaluation, markdown_table
from align.eval.report.data import EVALUATIONS_FOLDER, load_evaluations, load_run
from align.eval.report.page import render_run_page, summary_table

__all__ = ["load_results", "results_as_markdown", "summary_table", "write_model_card", "write_report"]

BEGIN_RESULTS, END_RESULTS = "<!-- results of align eval -->", "<!-- end of results -->"


def write_report(run: Path, target: Path | None = None) -> Path:
    """Write the report of a folder with subfolders sft, reward and ppo (any may be missing), or of one stage's folder.

    The page names what is missing or cut off, and requests nothing from the network. A `summary.json` in the folder is
    shown as the table of results. Returns the file: `target`, or `report.html` in `run`.

    Raises:
        UserError: if there is no such folder or no run in it, or the file cannot be written.
    """
    path = target or Path(run) / "report.html"
    write_text(path, render_run_page(load_run(Path(run))))
    return path


def load_results(folder: Path) -> list[Evaluation]:
    """Return what `align eval` wrote into a folder, or into `eval` in a run.

    Raises:
        UserError: if there is nothing.
    """
    for place in (folder / EVALUATIONS_FOLDER, folder):
        evaluations = load_evaluations(place, problems=[])
        if evaluations:
            return evaluations
    raise UserError(f"{folder}: no results of align eval in it or in its {EVALUATIONS_FOLDER}/")


def results_as_markdown(folders: Sequence[Path]) -> str:
    """Return the results of several folders as Markdown tables."""
    return markdown_table([evaluation for folder in folders for evaluation in load_results(folder)])


def write_model_card(folder: Path) -> Path:
    """Put a run's results into the card of its last stage's model; returns the file.

    Raises:
        UserError: if there is no model, or no result of it.
    """
    stages = [folder / stage for stage in ("ppo", "dpo", "sft") if (folder / stage / "model").is_dir()] or [folder]
    return add_results_to_card(stages[0] / "model", load_results(folder), stages[0].name)


def add_results_to_card(model: Path, evaluations: Sequence[Evaluation], name: str) -> Path:
    """Put results into the card of a saved model, in place of earlier ones; returns the file.

    Evaluations of other models than `name` are shown in the table alone.

    Raises:
        UserError: if there is no card, or no result of this model.
    """
    path = model / "README.md"
    try:
        text = path.read_text(encoding="utf-8")
        _, head, body = text.split("---\n", 2)
        metadata = yaml.safe_load(head)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: no model card with metadata between two lines of ---") from error
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=evaluation.task,
            dataset_name=evaluation.task,
            metric_type=figure.name,
            metric_name=f"{figure.name}, n {figure.n}" + (f", by {figure.scorer}" if figure.scorer else ""),
            metric_value=round(figure.value, 6),
        )
        for evaluation in evaluations
        if evaluation.model == name
        for figure in evaluation.figures
        if figure.value is not None
    ]
    if not results:
        known = ", ".join(dict.fromkeys(evaluation.model for evaluation in evaluations)) or "no model"
        raise UserError(f"{path}: the evaluations hold {known}, not {name}; evaluate it with align eval all")
    metadata["model-index"] = eval_results_to_model_index(name, results)
    section = f"{BEGIN_RESULTS}\n## Results\n\n{markdown_table(evaluations)}{END_RESULTS}\n"
    before, _, rest = body.partition(BEGIN_RESULTS)
    after = rest.partition(END_RESULTS)[2].lstrip("\n")
    body = before.rstrip("\n") + "\n\n" + section + (f"\n{after}" if after else "")
    write_text(path, f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---\n{body}")
    return path
