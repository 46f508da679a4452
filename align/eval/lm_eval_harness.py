"""`align eval lm-eval`: alignment tax on lm-eval tasks, before and after alignment.

lm-eval (EleutherAI's Language Model Evaluation Harness) runs in this Python environment if it is installed here,
else in the one that `lm_eval_python` names. InstructGPT calls such a loss the alignment tax (Ouyang et al. 2022, section
3.5), and PPO with a pretraining loss its remedy.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator

from align.core.errors import UserError
from align.core.files import read_json_lines
from align.core.launch import run_stage
from align.core.settings import option, require_setting
from align.core.statistics import difference_interval
from align.eval.answers import open_accelerator, short_names, weights_version
from align.eval.results import Better, EvalConfig, Evaluation, Measurement, mean_measurement, publish
from align.eval.store import Json, compute_once, fingerprint
from align.model_registry.registry import resolve_model
from align.models.folders import base_of
from align.runtime.distributed import compute_dtype, run_on_main
from align.sampling.settings import InferenceConfig

TASK = "lm-eval"
Samples = Sequence[float | None]
"""Metric of each document, in order, or None if it is not a number."""


@dataclass(kw_only=True)
class LMEvalConfig(EvalConfig, InferenceConfig):
    """lm-eval tasks on several models. The first is the model before alignment."""

    tasks: list[str] = option([], "lm-eval tasks, such as hellaswag. `lm_eval ls tasks` lists them.")
    task_folder: str = option("", "Folder with additional lm-eval task files.")
    limit: int = option(0, "Maximum number of documents per task. 0 for all.", ge=0)
    apply_chat_template: bool = option(False, "Apply the chat template in lm-eval.")
    lm_eval_python: str = option("", "Python executable of an environment with lm-eval. Default: the current one.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "tasks", bool(self.tasks), "a list of lm-eval tasks, such as hellaswag")
        require_setting(self, "models", len(self.models) >= 2, "the model before alignment and at least one after")
        folder = not self.task_folder or Path(self.task_folder).is_dir()
        require_setting(self, "task_folder", folder, "an existing folder or empty")

    def command(self, source: str, tasks: Sequence[str]) -> list[str]:
        """Return the lm-eval command for a model."""
        base, is_adapter = base_of(source)
        dtype = str(compute_dtype(self.dtype)).removeprefix("torch.")
        model = {"pretrained": base, "tokenizer": source, "dtype": dtype} | ({"peft": source} if is_adapter else {})
        command = [self.lm_eval_python or sys.executable, "-m", "lm_eval", "run", "--model", "hf"]
        command += ["--model_args", json.dumps(model), "--tasks", *tasks, "--batch_size", "8"]
        command += ["--device", "cuda" if torch.cuda.is_available() else "cpu", "--seed", str(self.seed)]
        command += ["--include_path", self.task_folder] if self.task_folder else []
        command += ["--limit", str(self.limit)] if self.limit else []
        return command + (["--apply_chat_template"] if self.apply_chat_template else [])


def run_lm_eval_tasks(config: LMEvalConfig) -> list[Evaluation]:
    """Run the tasks on every model and write `lm-eval.json`. Return an evaluation per model."""
    require_lm_eval(config.lm_eval_python)
    accelerator = open_accelerator(config.dtype)
    names, results = short_names(config.models), dict[str, Json]()
    for name, model in zip(names, config.models, strict=True):
        source = str(resolve_model(model))
        settings = config.result_settings("lm_eval_python", "tasks") | {"model": model, "weights": weights_version(source)}
        settings["task_files"] = fingerprint(config.task_folder)
        path = Path(config.output) / f"{TASK}-{name}.jsonl"
        run = partial(run_tasks, partial(config.command, source), accelerator)
        rows = compute_once(path, settings, {task: task for task in config.tasks}, run, accelerator, len(config.tasks))
        results[name] = dict(zip(config.tasks, rows, strict=True))
    evaluations = [
        Evaluation(TASK, name, asdict(config), measurements_of(results, name, names[0], config.tasks)) for name in names
    ]
    return publish(config, evaluations, accelerator)


def require_lm_eval(python: str) -> None:
    """Raise a `UserError` if the Python executable does not run or lacks lm-eval."""
    command = [python or sys.executable, "-c", "import importlib.util as u; raise SystemExit(not u.find_spec('lm_eval'))"]
    try:
        missing = subprocess.run(command, capture_output=True, check=False).returncode != 0
    except OSError as error:
        raise UserError(f"lm_eval_python {python}: cannot be run ({error.strerror or error})") from error
    if missing:
        other = "here, or set lm_eval_python to the Python of an environment with it"
        where = f"in the environment of {python}" if python else other
        raise UserError(f"align eval lm-eval needs lm-eval: pip install 'lm_eval[hf]==0.4.13' {where}")


def run_tasks(command: Callable[[Sequence[str]], list[str]], accelerator: Accelerator, tasks: Sequence[str]) -> list[Json]:
    """Return lm-eval's results on every process. `command` builds the command line."""
    results: dict[str, Json] = run_on_main(lambda: run_lm_eval(command(tasks)), accelerator)
    missing = [task for task in tasks if task not in results]
    if missing:
        raise UserError(f"tasks: {missing[0]} is a group; list its tasks instead")
    return [results[task] for task in tasks]


def run_lm_eval(command: Sequence[str]) -> dict[str, Json]:
    """Run lm-eval once and read its output."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*command, "--log_samples", "--output_path", folder]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise UserError(f"lm-eval failed: {lines[-1]}")
        return read_lm_eval(Path(folder))


def read_lm_eval(folder: Path) -> dict[str, Json]:
    """Read lm-eval's output folder by task: `version`, and `result` with `metrics` and `samples`."""
    (path,) = folder.rglob("results_*.json")
    written = json.loads(path.read_text(encoding="utf-8"))
    results = {}
    for samples_path in sorted(path.parent.glob("samples_*.jsonl")):
        task = max((name for name in written["results"] if samples_path.name.startswith(f"samples_{name}_2")), key=len)
        better = written["higher_is_better"].get(task, {})
        metrics = []
        for key, value in written["results"][task].items():
            metric, _, filtered = key.partition(",")
            if filtered and not metric.endswith("_stderr") and isinstance(value, int | float):
                higher = better.get(metric) is not False
                metrics.append({"metric": metric, "filter": filtered, "value": value, "higher": higher})
        samples: dict[str, list[float | None]] = {}
        rows = read_json_lines(samples_path)
        for row in sorted(rows, key=lambda row: row["doc_id"]):
            for metric in row["metrics"]:
                value = row.get(metric)
                number = float(value) if isinstance(value, int | float | bool) else None
                samples.setdefault(f"{metric},{row['filter']}", []).append(number)
        results[task] = {"version": written["lm_eval_version"], "result": {"metrics": metrics, "samples": samples}}
    return results


def measurements_of(found: dict[str, Json], name: str, before: str, tasks: Sequence[str]) -> list[Measurement]:
    """Return a model's metrics and, except for the first model, its loss in each."""
    measurements = []
    for task in tasks:
        row, scorer = found[name][task]["result"], f"lm-eval {found[name][task]['version']}"
        for metric in row["metrics"]:
            key = f"{metric['metric']},{metric['filter']}"
            label = f"{task}: {metric['metric']}" + (f" ({metric['filter']})" if metric["filter"] != "none" else "")
            after, first = row["samples"].get(key, []), found[before][task]["result"]["samples"].get(key, [])
            better: Better = "higher" if metric["higher"] else "lower"
            measurements.append(metric_measurement(label, metric["value"], after, scorer, better))
            if name != before:
                measurements.append(lost_measurement(f"{label} lost", first, after, metric["higher"], before, scorer))
    return measurements


def metric_measurement(label: str, value: float, samples: Samples, scorer: str, better: Better = "") -> Measurement:
    """Return lm-eval's value, with an interval if it is a mean over documents."""
    numbers = [number for number in samples if number is not None]
    if len(numbers) < 2 or len(numbers) < len(samples) or abs(sum(numbers) / len(numbers) - value) > 1e-6:
        return Measurement(label, value, None, None, len(samples), scorer, "", better)
    measurement = mean_measurement(label, numbers, scorer, better=better, is_share=set(numbers) <= {0.0, 1.0})
    return replace(measurement, value=value)


def lost_measurement(
    label: str, before: Samples, after: Samples, higher_is_better: bool, first: str, scorer: str
) -> Measurement:
    """Return the paired loss relative to the first model over common documents. Positive means worse."""
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if a is not None and b is not None]
    if len(before) != len(after) or len(pairs) < 2:
        note = "not averaged over the same documents"
        return Measurement(label, None, None, None, len(pairs), scorer, note)
    differences = [a - b if higher_is_better else b - a for a, b in pairs]
    note = f"paired difference to {first}; an interval that contains 0 shows no loss"
    measurement = mean_measurement(label, differences, scorer, note, better="lower")
    if {number for pair in pairs for number in pair} <= {0.0, 1.0}:
        low, high = difference_interval(differences)
        return replace(measurement, low=low, high=high)
    return measurement


if __name__ == "__main__":
    run_stage(LMEvalConfig, run_lm_eval_tasks)
