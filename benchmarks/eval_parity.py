"""TruthfulQA by ours and by lm-eval 0.4.13: `make bench-eval`, or `python -m benchmarks.eval_parity --help`.

lm-eval runs its own task files in a separate environment, on the same questions from a local file and the same model in
float32. Prints the largest differences of log-likelihoods and of figures.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from align.core.files import read_json_lines, write_json_lines
from align.eval.answers import open_context, open_models
from align.eval.questions import Question, read_questions
from align.eval.results import subsample
from align.eval.truthfulness import (
    QuestionFormat,
    TruthfulnessConfig,
    multiple_choice,
    score_choices,
)
from align.model_registry.registry import resolve_model

TASKS = ("mc1", "mc2")
Json = dict[str, Any]


def write_tasks(folder: Path, installed: Path, questions: list[Question]) -> None:
    """Write task files that include lm-eval's installed ones, with a local file of questions instead of the Hub data."""
    rows = []
    for question in questions:
        row: Json = {"question": question.text}
        for name, right in (("mc1", (question.best,)), ("mc2", question.correct)):
            labels = [1] * len(right) + [0] * len(question.incorrect)
            row[f"{name}_targets"] = {"choices": [*right, *question.incorrect], "labels": labels}
        rows.append(row)
    write_json_lines(folder / "questions.json", rows)
    for name in TASKS:
        task = f"include: {installed}/tasks/truthfulqa/truthfulqa_{name}.yaml\ntask: local_{name}\ndataset_path: json\n"
        task += f"dataset_name: null\ndataset_kwargs: {{data_files: {{validation: {folder / 'questions.json'}}}}}\n"
        (folder / f"local_{name}.yaml").write_text(task, encoding="utf-8")


def by_lm_eval(python: str, model: str, questions: list[Question], batch_size: int) -> Json:
    """Return, for each task, lm-eval's log-likelihood of each answer and score of each question."""
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    offline.pop("PYTHONPATH", None)

    def run(*words: str) -> str:
        done = subprocess.run([python, *words], env=offline, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"lm-eval failed:\n{done.stderr[-3000:]}")
        return done.stdout

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, Path(run("-c", "import lm_eval; print(lm_eval.__path__[0])").strip()), questions)
        arguments = json.dumps({"pretrained": str(resolve_model(model)), "dtype": "float32"})
        words = ["-m", "lm_eval", "run", "--model", "hf", "--model_args", arguments, "--include_path", name]
        words += ["--tasks", *(f"local_{task}" for task in TASKS), "--batch_size", str(batch_size)]
        words += ["--device", "cuda" if torch.cuda.is_available() else "cpu"]
        run(*words, "--log_samples", "--output_path", f"{name}/output")
        found: Json = {}
        for task in TASKS:
            (path,) = folder.rglob(f"samples_local_{task}_*.jsonl")
            rows = sorted(read_json_lines(path), key=lambda row: row["doc_id"])
            sums = [[float(answer[0][0]) for answer in row["resps"]] for row in rows]
            found[task] = {"log_likelihoods": sums, "acc": [float(row["acc"]) for row in rows]}
        return found


def by_ours(model: str, source: str, questions: list[Question]) -> Json:
    """Return the same numbers computed by our implementation."""
    config = TruthfulnessConfig(models=[model], questions=source, dtype="float32")
    evaluated = next(open_models(config.models, open_context(config.output, config)))
    question_format = QuestionFormat.from_settings(config.prompt, config.few_shot, config.chat)
    rows = score_choices(evaluated, questions, question_format)
    scores = [multiple_choice(row["best"], row["correct"], row["incorrect"]) for row in rows]
    return {
        "mc1": {"log_likelihoods": [[r["best"], *r["incorrect"]] for r in rows], "acc": [s["mc1"] for s in scores]},
        "mc2": {"log_likelihoods": [[*r["correct"], *r["incorrect"]] for r in rows], "acc": [s["mc2"] for s in scores]},
    }


def differences(left: Json, right: Json) -> dict[str, float]:
    """Return the largest differences in log-likelihoods of answers and in scores of questions, and those of the means."""
    found = {}
    for name in TASKS:
        rows = zip(left[name]["log_likelihoods"], right[name]["log_likelihoods"], strict=True)
        found[f"{name} log-likelihood"] = max(abs(a - b) for row in rows for a, b in zip(*row, strict=True))
        pairs = list(zip(left[name]["acc"], right[name]["acc"], strict=True))
        found[f"{name} of a question"] = max(abs(a - b) for a, b in pairs)
        found[f"{name} mean"] = abs(sum(a - b for a, b in pairs)) / len(pairs)
    return found


def main() -> None:
    """Run both sides and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the Python of the environment that lm-eval is in")
    parser.add_argument("--csv", default="../shared/data/TruthfulQA.csv", help="TruthfulQA.csv, or the project's own form")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--questions", type=int, default=50, help="evenly spread over the file; 0: all")
    parser.add_argument("--batch_size", type=int, default=8, help="lm-eval's")
    parser.add_argument("--fixture", type=Path, help="write lm-eval's numbers here, for the tests")
    words = parser.parse_args()
    questions = subsample(read_questions(words.csv), words.questions)
    theirs = by_lm_eval(words.python, words.model, questions, words.batch_size)
    print(f"{len(questions)} questions, {words.model} in float32")
    for name, value in differences(by_ours(words.model, words.csv, questions), theirs).items():
        print(f"largest difference, {name}: {value:.2e}")
    if words.fixture:
        stored: Json = {"model": words.model, "questions": [question.id for question in questions]}
        for name in TASKS:
            sums = [[round(value, 5) for value in row] for row in theirs[name]["log_likelihoods"]]
            stored[name] = {"log_likelihoods": sums, "acc": [round(value, 7) for value in theirs[name]["acc"]]}
        words.fixture.write_text(json.dumps(stored) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
