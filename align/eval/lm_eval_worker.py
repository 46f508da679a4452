"""Runs lm-eval for `align eval tax`, in the environment that has lm-eval: imports nothing from this project.

Reads a job from the JSON file named on the command line, runs lm-eval's own tasks on one model, and writes a JSON file with
lm-eval's metrics and each sample's values.
"""

import json
import sys
from pathlib import Path
from typing import Any

INVALID_JOB = 3
"""Exit code for a mistake in the settings; the reason is on stderr."""


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run lm-eval; returns each task's `metrics` (name, value, if higher is better) and `samples` (numbers by metric)."""
    import datasets
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    folder = job["task_folder"] or None
    manager = TaskManager(include_path=folder, include_defaults=folder is None)
    unknown = [name for name in job["tasks"] if name not in manager.all_tasks]
    if unknown:
        where = f"in {folder}" if folder else "of lm-eval"
        print(f"tasks: no task {unknown[0]} {where}", file=sys.stderr)
        raise SystemExit(INVALID_JOB)
    adapter = {"peft": job["peft"]} if job["peft"] else {}
    model = HFLM(
        pretrained=job["model"],
        tokenizer=job["tokenizer"],
        dtype=job["dtype"],
        device=job["device"],
        batch_size=job["batch_size"],
        **adapter,
    )
    found = lm_eval.simple_evaluate(
        model,
        tasks=job["tasks"],
        num_fewshot=job["shots"],
        limit=job["limit"] or None,
        task_manager=manager,
        log_samples=True,
        bootstrap_iters=0,
        apply_chat_template=job["apply_chat_template"],
        random_seed=job["seed"],
        numpy_random_seed=job["seed"],
        torch_random_seed=job["seed"],
        fewshot_random_seed=job["seed"],
    )
    return {"version": lm_eval.__version__, "tasks": {name: _task(found, name) for name in found["samples"]}}


def _task(found: dict[str, Any], name: str) -> dict[str, Any]:
    """A task's metrics, and each sample's values of them in the order of the documents."""
    better = found["higher_is_better"].get(name, {})
    metrics = []
    for key, value in found["results"][name].items():
        metric, _, filtered = key.partition(",")
        if filtered and not metric.endswith("_stderr") and isinstance(value, int | float):
            metrics.append({"metric": metric, "filter": filtered, "value": value, "higher": better.get(metric) is not False})
    samples: dict[str, list[Any]] = {}
    for sample in sorted(found["samples"][name], key=lambda sample: sample["doc_id"]):
        for metric in sample.get("metrics", better):
            value = sample.get(metric)
            key = f"{metric},{sample.get('filter', 'none')}"
            samples.setdefault(key, []).append(float(value) if isinstance(value, int | float | bool) else None)
    return {"metrics": metrics, "samples": samples}


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose names are those of other packages
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(job["output"]).write_text(json.dumps(run(job)), encoding="utf-8")
