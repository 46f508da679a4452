"""The page of one run."""

from dataclasses import dataclass, field
from typing import Any

from align.eval.core.results import notes
from align.eval.report.distill_plots import distill_plots
from align.eval.report.dpo_plots import dpo_plots
from align.eval.report.drawing import Plot
from align.eval.report.evaluation_plots import evaluation_plots
from align.eval.report.findings import summarize_run
from align.eval.report.ppo_plots import ppo_plots
from align.eval.report.reproduction import rerun_commands, versions
from align.eval.report.reward_plots import reward_plots
from align.eval.report.rollouts import show_rollouts
from align.eval.report.runs import RunData, StageRun
from align.eval.report.sft_plots import sft_plots
from align.eval.report.summary import Summary, table_row
from align.eval.report.template import MAX_SAMPLES, evaluation_tables, fill_template
from align.eval.report.text import visible_text

STAGE_TITLES = {
    "sft": "Supervised fine-tuning",
    "reward": "Reward model",
    "dpo": "DPO",
    "ppo": "PPO",
    "distill": "Distillation",
}


@dataclass
class Section:
    """A stage's part of the page.

    Attributes:
        facts: a line on the model, the number of updates and the time.
        settings: name and value of each setting.
    """

    stage: str
    title: str
    facts: str
    plots: list[Plot]
    settings: list[tuple[str, str]] = field(default_factory=list)


def render_run_page(run: RunData) -> str:
    """The whole page as HTML text; everything that comes from a run is escaped."""
    summary, rollouts = summarize_run(run), show_rollouts(run.rollouts)
    sections = [_section(stage, run, summary) for stage in run.stages.values()]
    links = [("summary", "Summary")]
    links += [("evaluation", "Evaluation")] if run.evaluations else []
    links += [(section.stage, section.title) for section in sections]
    links += [("samples", "Samples")] if summary.pairs else []
    links += [("rollouts", "Rollouts")] if rollouts else []
    return fill_template(
        "run_page.html",
        title=visible_text(f"Run report: {run.folder.resolve().name}"),
        subtitle=visible_text(run.folder),
        links=[*links, ("settings", "Settings")],
        run=run,
        summary=summary,
        evaluations=evaluation_tables(run.evaluations),
        evaluation_plots=evaluation_plots(run.evaluations),
        evaluation_notes=[visible_text(note) for note in notes(run.evaluations)],
        summary_rows=[table_row(row) for row in run.summary],
        sections=sections,
        pairs=summary.pairs[:MAX_SAMPLES],
        rollouts=rollouts,
        versions=versions(list(run.stages.values())),
        commands=[visible_text(command) for command in rerun_commands(run)],
    )


def _section(stage: StageRun, run: RunData, summary: Summary) -> Section:
    if stage.stage == "sft":
        plots = sft_plots(stage)
    elif stage.stage == "reward":
        plots = reward_plots(stage, run.rankings)
    elif stage.stage == "dpo":
        plots = dpo_plots(stage)
    elif stage.stage == "distill":
        plots = distill_plots(stage)
    else:
        plots = ppo_plots(stage, summary.pairs, summary.kept)
    settings = [(visible_text(name), visible_text(_format_setting(value))) for name, value in stage.config.items()]
    return Section(stage.stage, STAGE_TITLES[stage.stage], _facts(stage), plots, settings)


def _facts(stage: StageRun) -> str:
    rank = stage.config.get("lora_rank")
    parts = []
    if "model" in stage.config:
        parts.append(f"starts from {visible_text(stage.config['model'])}")
        parts.append(f"LoRA of rank {rank}" if rank else "all weights trained")
    if stage.metrics:
        last = max(stage.metrics)
        parts.append(f"{last} update{'' if last == 1 else 's'}")
        seconds = stage.metrics[last].get("seconds")
        parts += [f"{seconds / 60:.1f} minutes"] if seconds else []
    device = stage.environment.get("device")
    if device:
        parts.append(f"on {visible_text(device)} ({visible_text(stage.environment.get('processors', '?'))} threads)")
    return ", ".join(parts)


def _format_setting(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "–"
    return "–" if value is None or value == "" else str(value)
