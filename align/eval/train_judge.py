"""`align eval train-judge`: a judge of answers learns from labelled ones, and is measured on questions it has not seen.

From a launcher: `accelerate launch align/eval/train_judge.py --data FILE --asks truth`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from align.batching import over_rows
from align.cli import run_stage
from align.config import ModelConfig, RunConfig, option, require
from align.eval.intervals import statistic_interval
from align.eval.judged_answers import SPLIT, Asks, Judged, auc, calibration_error, read_judged, split_by_question
from align.eval.truth_judge import (
    ADAPTER,
    JudgeModel,
    Read,
    WordBags,
    binary_loss,
    padded,
    read_answer,
    save_judge,
    states_of,
)
from align.generation import generator
from align.models.loading import Loaded, load
from align.run import Run
from align.supervised import train
from align.training import Optimisation, Sums, make_optimisation


@dataclass(kw_only=True)
class JudgeConfig(ModelConfig, RunConfig):
    """A judge of answers. With lora_rank 0 the backbone stays frozen, is read once, and the head alone learns."""

    model: str = option("none", "backbone that reads question and answer; none: the words of the answer alone")
    chat_template: str = option("raw", "of no use here: a judge reads plain text")
    output_dir: str = option("runs/judge", "folder of the run; the judge is in its folder model")
    learning_rate: float = option(0.01, "peak learning rate; 0.01 for a head alone, 1e-4 to 3e-4 with LoRA")
    weight_decay: float = option(0.1, "decoupled weight decay of matrices")
    log_to: list[str] = option(["none"], "trackers beside metrics.jsonl: tensorboard, wandb, trackio, none")
    data: str = option("", "labelled answers: rows with question, answer, label, or TruthfulQA's own judge data")
    asks: Asks = option("truth", "what the labels say: truth (is it true) or info (is it informative)")
    words: bool = option(True, "let the words of the answer and their pairs count beside the backbone's states")
    layers: int = option(0, "read only the first layers of the backbone; 0: all")
    held_out: float = option(0.2, "share of the questions that the judge is measured on and never learns from")
    limit: int = option(0, "learn from and measure on so many rows, drawn at random; 0: all")
    epochs: int = option(5, "passes over the answers")
    batch_size: int = option(64, "answers in one update, over all processes")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "data", bool(self.data), "given")
        require(self, "held_out", 0 < self.held_out < 1, "above 0 and below 1")
        require(self, "words", self.words or self.model != "none", "true where model is none")
        require(self, "lora_rank", not self.lora_rank or self.model != "none", "0 where model is none")
        for name in ("epochs", "batch_size"):
            require(self, name, getattr(self, name) > 0, "above 0")
        for name in ("layers", "limit"):
            require(self, name, getattr(self, name) >= 0, "0 or more")


def run_train_judge(config: JudgeConfig) -> Path:
    """Train a judge; gives its folder. Prints AUC and calibration on questions that were held out.

    Raises:
        UserError: for anything that the settings or the data have wrong.
    """
    run = Run(config, "judge")
    rows = read_judged(config.data, config.asks, config.skip_bad_rows)
    if config.limit:
        rows = [rows[number] for number in generator(config.seed, SPLIT).permutation(len(rows))[: config.limit]]
    learn, held_out = split_by_question(rows, config.held_out, config.seed)
    loaded = load(config, run.dtype, adapter=ADAPTER, layers=config.layers) if config.model != "none" else None
    model = JudgeModel(loaded.backbone if loaded else None, loaded.adapter if loaded else None, config.words)
    if loaded is not None and loaded.adapter is None:
        loaded.backbone.requires_grad_(False)
    updates_an_epoch = math.ceil(len(learn) / config.batch_size)
    optimisation = make_optimisation(run, model, config.epochs * updates_an_epoch)
    run.say(f"judge of {config.asks}: {len(learn)} answers to learn from, {len(held_out)} to other questions held out")
    task = JudgeTask(run, config, loaded, optimisation, model, learn, held_out)
    train(run, optimisation, task, config.batch_size, updates_an_epoch, 0)
    run.say(
        "held out: "
        + ", ".join(f"{name} {value:.3f}" for name, value in task.best.items())
        + f"; the judge is in {task.folder}"
    )
    run.close()
    return task.folder


class JudgeTask:
    """Examples, loss and evaluation of a judge, as `align.supervised.train` asks for them."""

    evaluates_start = False

    def __init__(
        self,
        run: Run,
        config: JudgeConfig,
        loaded: Loaded | None,
        optimisation: Optimisation,
        model: JudgeModel,
        learn: list[Judged],
        held_out: list[Judged],
    ) -> None:
        self.run, self.config, self.loaded, self.optimisation, self.model = run, config, loaded, optimisation, model
        self.learn, self.held_out, self.rows = learn, held_out, [*learn, *held_out]
        self.labels = torch.tensor([row.label for row in self.rows])
        self.folder = run.folder / "model"
        self.best: dict[str, float] = {}
        self.reads: list[Read] = []
        self.states: Tensor | None = None
        if loaded is not None:
            asked = [(row.question, row.answer, config.asks) for row in self.rows]
            self.reads = [read_answer(loaded.tokenization, *each) for each in asked]
            longest = max(self.reads, key=lambda read: len(read.prompt) + len(read.response))
            loaded.backbone.require_fit(len(longest.prompt), len(longest.response), config.data)
            if loaded.adapter is None:
                self._read_once()
        # Rows whose states are known cost nothing to speak of: all of a batch go in one piece.
        self.costs = [1 if self.states is not None or not self.reads else sum(map(len, r)) for r in self._costed()]
        self.lengths = self.costs[: len(learn)]

    def _costed(self) -> Sequence[Read]:
        return self.reads or [Read([], [])] * len(self.rows)

    def _read_once(self) -> None:
        """The frozen backbone's states of every answer, and the scale of each dimension over those to learn from."""
        self.states = states_of(self.model, self.reads, self.config.micro_batch_tokens, self.run.accelerator)
        learnt = self.states[: len(self.learn)]
        with torch.no_grad():
            self.model.centre.copy_(learnt.mean(0))
            self.model.scale.copy_(learnt.std(0).clamp(min=1e-6))

    def _logits(self, rows: list[int]) -> Tensor:
        device = self.run.accelerator.device
        states = None if not self.reads else padded([self.reads[row] for row in rows], device)
        if self.states is not None:
            states = self.states[rows].to(device)  # type: ignore[assignment]
        words = WordBags.of([self.rows[row].answer for row in rows]) if self.config.words else None
        moved = WordBags(*(column.to(device) for column in words)) if words else None
        return self.optimisation.module(states, moved)

    def loss(self, rows: list[int]) -> Callable[[list[int]], tuple[Tensor, Sums]]:
        def of(part: list[int]) -> tuple[Tensor, Sums]:
            logits, labels = self._logits(part), self.labels[part].to(self.run.accelerator.device)
            right = ((logits > 0) == labels).float().sum() / len(rows)
            return binary_loss(logits, labels) / len(rows), {"accuracy": right}

        return of

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"], "accuracy": sums["accuracy"]}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        numbers = range(len(self.learn), len(self.rows))
        costs = [self.costs[number] for number in numbers]

        def work(part: list[int]) -> list[float]:
            found: list[float] = self._logits([numbers[row] for row in part]).tolist()
            return found

        logits = over_rows(costs, self.config.micro_batch_tokens, self.run.accelerator, work)
        return {f"validation/{name}": value for name, value in held_out_figures(logits, self.held_out).items()}

    def save(self, figures: dict[str, float]) -> None:
        kept = {name.removeprefix("validation/"): value for name, value in figures.items() if name.startswith("validation/")}
        self.best = kept
        if self.run.is_main:
            config = self.config
            facts = {"asks": config.asks, "model": config.model, "layers": config.layers, "words": config.words}
            facts |= {"dtype": config.dtype, "lora_rank": config.lora_rank, "data": config.data, "seed": config.seed}
            facts |= {"learnt_from": len(self.learn), "held_out": len(self.held_out), "figures": kept}
            save_judge(self.folder, self.model, self.loaded, facts)
        self.run.accelerator.wait_for_everyone()

    def describe(self, rows: list[int]) -> list[dict[str, object]]:
        return [
            {"question": self.rows[r].question, "answer": self.rows[r].answer, "label": self.rows[r].label} for r in rows
        ]


def held_out_figures(logits: Sequence[float], rows: Sequence[Judged]) -> dict[str, float]:
    """How good verdicts are: loss (nats), AUC with its interval over questions, accuracy at one half, calibration error."""
    labels = [row.label for row in rows]
    values = torch.tensor(logits, dtype=torch.float64)
    names = {question: number for number, question in enumerate(dict.fromkeys(row.question for row in rows))}
    members: list[list[int]] = [[] for _ in names]
    for number, row in enumerate(rows):
        members[names[row.question]].append(number)

    def of(drawn: Sequence[Sequence[int]]) -> list[float]:
        picked = [[number for question in sample for number in members[question]] for sample in drawn]
        return [auc([logits[i] for i in each], [labels[i] for i in each]) for each in picked]

    low, high = statistic_interval(of, len(names), 200)  # type: ignore[arg-type]
    return {
        "loss": float(binary_loss(values, torch.tensor(labels))) / len(rows),
        "auc": auc(logits, labels),
        "auc/low": low,
        "auc/high": high,
        "accuracy": sum((value > 0) == label for value, label in zip(logits, labels, strict=True)) / len(rows),
        "calibration_error": calibration_error(torch.sigmoid(values).tolist(), labels),
        "share_of_yes": sum(labels) / len(rows),
    }


if __name__ == "__main__":
    run_stage(JudgeConfig, run_train_judge)
