"""The half of `eval_parity.py` that runs in lm-eval's own environment: it imports nothing of this project.

Reads a job from the JSON file named on the command line, runs lm-eval's own TruthfulQA tasks on its questions, and writes
the log-likelihood of every answer, lm-eval's metrics, and the seconds spent on log-likelihoods.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

TASKS = ("mc1", "mc2")


def write_tasks(folder: Path, questions: str) -> None:
    """lm-eval's task files as they are installed, with a local JSON file in the place of the hub's data."""
    installed = Path(lm_eval.__file__).parent / "tasks" / "truthfulqa"
    for name in TASKS:
        lines = (
            f"include: {installed}/truthfulqa_{name}.yaml",
            f"task: local_{name}",
            "dataset_path: json",
            "dataset_name: null",
            f"dataset_kwargs: {{data_files: {{validation: {questions}}}}}",
        )
        (folder / f"local_{name}.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")


class Timed(HFLM):
    """lm-eval's model with a clock around its log-likelihoods: loading and reading task files do not count."""

    seconds = 0.0

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """As lm-eval's, timed."""
        start = time.perf_counter()
        result = super().loglikelihood(requests, disable_tqdm)
        self.seconds += time.perf_counter() - start
        return result


def run(model: Timed, folder: Path, questions: str) -> dict[str, Any]:
    """Log-likelihoods, metrics and seconds of one run over a file of questions."""
    write_tasks(folder, questions)
    manager, tasks = TaskManager(include_path=str(folder), include_defaults=False), [f"local_{name}" for name in TASKS]
    found = lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, log_samples=True, bootstrap_iters=0)
    result: dict[str, Any] = {"version": lm_eval.__version__, "seconds": model.seconds}
    for name in TASKS:
        samples = sorted(found["samples"][f"local_{name}"], key=lambda sample: sample["doc_id"])
        result[name] = {
            "log_likelihoods": [[float(answer[0][0]) for answer in sample["resps"]] for sample in samples],
            "acc": [float(sample["acc"]) for sample in samples],
        }
    return result


def main(job: dict[str, Any]) -> None:
    """Run the job and write its result."""
    torch.set_num_threads(job["threads"])
    datasets.disable_progress_bars()
    model = Timed(pretrained=job["model"], dtype="float32", device=job["device"], batch_size=job["batch_size"])
    Path(job["output"]).write_text(json.dumps(run(model, Path(job["folder"]), job["questions"])), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
