"""TruthfulQA by ours and by lm-eval 0.4.13 in turn: `make bench-eval`, or `python -m benchmarks.eval_parity --help`.

lm-eval runs its own task files in an environment of its own (`lm_eval_side.py`), on the same questions from a local file,
the same model in float32 and the same number of threads. Its clock counts log-likelihoods alone; ours counts tokenization
and the figures too. Ours finds MC1, MC2 and MC3 in one pass; lm-eval has no MC3.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from align.eval.answers import EvaluatedModel, open_accelerator, open_models
from align.eval.settings import subsample
from align.eval.truthfulness import (
    Question,
    QuestionFormat,
    TruthfulnessConfig,
    multiple_choice,
    read_questions,
    score_choices,
)
from align.model_registry.registry import resolve_model

SIDE = Path(__file__).with_name("lm_eval_side.py")
Json = dict[str, Any]


def write_questions(path: Path, questions: list[Question]) -> None:
    """Questions in the form of the hub's data set, which lm-eval's task files read."""
    lines = []
    for question in questions:
        row: Json = {"question": question.text}
        for name, right in (("mc1", (question.best,)), ("mc2", question.correct)):
            labels = [1] * len(right) + [0] * len(question.incorrect)
            row[f"{name}_targets"] = {"choices": [*right, *question.incorrect], "labels": labels}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def lm_eval(python: str, model: str, questions: list[Question], batch_size: int, threads: int) -> Json:
    """One run of lm-eval: the line of its side."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_questions(folder / "questions.json", questions)
        job = {"folder": name, "questions": str(folder / "questions.json"), "output": str(folder / "result.json")}
        job |= {"model": str(resolve_model(model)), "device": "cuda" if torch.cuda.is_available() else "cpu"}
        job |= {"batch_size": batch_size, "threads": threads}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        offline.pop("PYTHONPATH", None)
        done = subprocess.run([python, str(SIDE), str(folder / "job.json")], env=offline, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"lm-eval failed:\n{done.stderr[-3000:]}")
        result: Json = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return result


def ours(config: TruthfulnessConfig, evaluated: EvaluatedModel, questions: list[Question]) -> Json:
    """The same by ours, in lm-eval's form."""
    question_format = QuestionFormat.from_settings(config.prompt, config.few_shot, config.chat)
    begun = time.perf_counter()
    rows = score_choices(config, evaluated, questions, question_format)
    scores = [multiple_choice(row["best"], row["correct"], row["incorrect"]) for row in rows]
    seconds = time.perf_counter() - begun
    return {
        "seconds": seconds,
        "mc1": {"log_likelihoods": [[r["best"], *r["incorrect"]] for r in rows], "acc": [s.mc1 for s in scores]},
        "mc2": {"log_likelihoods": [[*r["correct"], *r["incorrect"]] for r in rows], "acc": [s.mc2 for s in scores]},
    }


def differences(left: Json, right: Json) -> dict[str, float]:
    """The largest differences: of an answer's log-likelihood, of a question's figure, and of each mean."""
    found = {}
    for name in ("mc1", "mc2"):
        rows = zip(left[name]["log_likelihoods"], right[name]["log_likelihoods"], strict=True)
        found[f"{name} log-likelihood"] = max(abs(a - b) for row in rows for a, b in zip(*row, strict=True))
        pairs = list(zip(left[name]["acc"], right[name]["acc"], strict=True))
        found[f"{name} of a question"] = max(abs(a - b) for a, b in pairs)
        found[f"{name} mean"] = abs(sum(a - b for a, b in pairs)) / len(pairs)
    return found


def fixture(model: str, questions: list[Question], result: Json) -> str:
    """What the tests compare with: numbers alone, questions by their row in the file."""
    kept = {"lm_eval": result["version"], "model": model, "questions": [question.id for question in questions]}
    for name in ("mc1", "mc2"):
        sums = [[round(value, 5) for value in row] for row in result[name]["log_likelihoods"]]
        kept[name] = {"log_likelihoods": sums, "acc": [round(value, 7) for value in result[name]["acc"]]}
    return json.dumps(kept) + "\n"


def main() -> None:
    """Run both sides in turn and print how far apart they are, and how fast."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the Python of the environment that lm-eval is in")
    parser.add_argument("--csv", default="../shared/data/TruthfulQA.csv", help="TruthfulQA.csv, or the project's own form")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--questions", type=int, default=50, help="evenly spread over the file; 0: all")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each side; the median ratio is printed")
    parser.add_argument("--batch_size", type=int, default=8, help="lm-eval's")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each side")
    parser.add_argument("--fixture", type=Path, help="write lm-eval's numbers here, for the tests")
    words = parser.parse_args()
    torch.set_num_threads(words.threads)
    questions = subsample(read_questions(words.csv), words.questions)
    config = TruthfulnessConfig(models=[words.model], questions=words.csv, dtype="float32")
    evaluated = next(open_models(config, open_accelerator(config)))
    ratios = []
    for pair in range(1, words.pairs + 1):
        theirs = lm_eval(words.python, words.model, questions, words.batch_size, words.threads)
        mine = ours(config, evaluated, questions)
        ratios.append(theirs["seconds"] / mine["seconds"])
        seconds = f"lm-eval {theirs['seconds']:.1f} s, ours {mine['seconds']:.1f} s"
        print(f"pair {pair}: {seconds}, {ratios[-1]:.1f} times as fast")
    print(f"{len(questions)} questions, lm-eval {theirs['version']}, {words.model} in float32, {words.threads} threads")
    for name, value in differences(mine, theirs).items():
        print(f"largest difference, {name}: {value:.2e}")
    print(f"speed: {statistics.median(ratios):.1f} times (median of {len(ratios)}, {min(ratios):.1f} to {max(ratios):.1f})")
    if words.fixture:
        words.fixture.write_text(fixture(words.model, questions, theirs), encoding="utf-8")


if __name__ == "__main__":
    main()
