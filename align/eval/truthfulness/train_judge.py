"""`align eval train-judge`: train a judge on labeled answers, and measure it on questions it has not seen.

From a launcher: `accelerate launch align/eval/truthfulness/train_judge.py --data FILE --asks truth`.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from align.batches.micro_batches import map_rows
from align.batches.mixtures import MixedExamples
from align.core.launch import run_stage
from align.core.seeds import Stream, generator
from align.core.settings import ModelConfig, RunConfig, option, require_setting
from align.core.statistics import calibration_error, roc_auc, share_interval, statistic_interval
from align.core.tensor_ops import Padded
from align.eval.truthfulness.judge import (
    ADAPTER,
    Aspect,
    JudgeModel,
    LabeledAnswer,
    WordBags,
    answer_states,
    binary_loss,
    encode_answer,
    pad_answers,
    read_labeled_answers,
    save_judge,
    split_by_question,
)
from align.models.checkpoint import require_savable
from align.models.loading import LoadedModel, load
from align.models.roles import freeze_unused_lm_head, freeze_unused_pooler
from align.runtime.distributed import run_on_main
from align.tokenization.encoded import PromptResponse
from align.training.data_order import DataOrder
from align.training.engine import Sums, TrainEngine
from align.training.loop import train
from align.training.run import Run
from align.training.start import build_engine


@dataclass(kw_only=True)
class JudgeConfig(ModelConfig, RunConfig):
    """A judge of answers. Without lora_rank the backbone stays as it is, and only the head learns."""

    model: str = option("none", "backbone that reads question and answer; none: the words of the answer alone")
    chat_template: str = option("raw", "not used: a judge reads plain text")
    output_dir: str = option("runs/judge", "folder of the run; the judge is in its folder model")
    learning_rate: float = option(0.01, "peak learning rate; 0.01 for a head alone, 1e-4 to 3e-4 with LoRA")
    weight_decay: float = option(0.1, "decoupled weight decay of matrices")
    log_to: list[str] = option(["none"], "trackers in addition to metrics.jsonl: tensorboard, wandb, trackio, none")
    data: str = option(
        "", "labeled answers: rows with question, answer, label, or TruthfulQA's own judge data", required=True
    )
    asks: Aspect = option("truth", "what the labels say: truth (is it true) or info (is it informative)")
    words: bool = option(True, "use the words of the answer and their pairs in addition to the backbone's states")
    held_out: float = option(0.2, "share of the questions that are held out: the judge is measured on them", gt=0, lt=1)
    limit: int = option(0, "train and measure on only this many rows, drawn at random; 0: all", ge=0)
    epochs: int = option(5, "passes over the answers", gt=0)
    batch_size: int = option(64, "answers in one update, over all processes", gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "words", self.words or self.model != "none", "true where model is none")
        require_setting(self, "lora_rank", not self.lora_rank or self.model != "none", "0 where model is none")


def run_train_judge(config: JudgeConfig) -> Path:
    """Train a judge and return its folder. Prints AUC and calibration on held-out questions."""
    run = Run(config, "judge")
    rows = read_labeled_answers(config.data, config.asks, config.skip_bad_rows)
    if config.limit:
        rows = [rows[number] for number in generator(config.seed, Stream.JUDGE_SPLIT).permutation(len(rows))[: config.limit]]
    training, held_out = split_by_question(rows, config.held_out, config.seed)
    loaded = None
    if config.model != "none":
        loaded = judged = load(config, run.dtype, adapter=ADAPTER, allow_reward_model=True)
        run_on_main(lambda: require_savable(judged), run.accelerator)
        if loaded.adapter is None:
            loaded.backbone.requires_grad_(False)
        freeze_unused_pooler(loaded.backbone)
        freeze_unused_lm_head(loaded.backbone)
    backbone, adapter = (loaded.backbone, loaded.adapter) if loaded else (None, None)
    model = JudgeModel(backbone, adapter, config.words)
    epochs = DataOrder(MixedExamples(training, [len(training)], [1.0]), config.seed, config.batch_size)
    engine = build_engine(run, model, epochs.updates(config.epochs))
    run.say(f"judge of {config.asks}: {len(training)} training answers, {len(held_out)} held-out ones to other questions")
    task = JudgeTask(run, config, loaded, engine, model, training, held_out)
    train(run, engine, task, epochs, 0)
    figures = ", ".join(f"{name} {value:.3f}" for name, value in task.best.items())
    run.say(f"held out: {figures}; the judge is in {task.folder}")
    run.close()
    return task.folder


class JudgeTask:
    """Examples, loss and evaluation of a judge, as `align.training.loop.train` needs them."""

    evaluate_before_training = False

    def __init__(
        self,
        run: Run,
        config: JudgeConfig,
        loaded: LoadedModel | None,
        engine: TrainEngine,
        model: JudgeModel,
        training: list[LabeledAnswer],
        held_out: list[LabeledAnswer],
    ) -> None:
        self.run, self.config, self.loaded, self.engine, self.model = run, config, loaded, engine, model
        self.training, self.held_out, self.rows = training, held_out, [*training, *held_out]
        self.labels = torch.tensor([row.label for row in self.rows])
        self.folder = run.folder / "model"
        self.best: dict[str, float] = {}
        self.encoded: list[PromptResponse] = []
        self.states: Tensor | None = None
        if loaded is not None:
            self._encode(loaded)
        # Rows with precomputed states take almost no memory, so each batch is one micro-batch.
        reads = bool(self.encoded) and self.states is None
        self.costs = [sum(map(len, answer)) for answer in self.encoded] if reads else [1] * len(self.rows)
        self.lengths = self.costs[: len(training)]

    def _encode(self, loaded: LoadedModel) -> None:
        """Encode all answers; with a frozen backbone, compute, scale and keep their states."""
        tokenization, aspect = loaded.tokenization, self.config.asks
        self.encoded = [encode_answer(tokenization, row.question, row.answer, aspect) for row in self.rows]
        longest = max(self.encoded, key=lambda answer: len(answer.prompt) + len(answer.response))
        loaded.backbone.require_fit(len(longest.prompt), len(longest.response), self.config.data)
        if loaded.adapter is None:
            budget, accelerator = self.config.micro_batch_tokens, self.run.accelerator
            self.states = answer_states(self.model, self.encoded, budget, accelerator)
            training = self.states[: len(self.training)]
            with torch.no_grad():
                self.model.center.copy_(training.mean(0))
                self.model.scale.copy_(training.std(0).clamp(min=1e-6))

    def _logits(self, rows: list[int]) -> Tensor:
        device = self.run.accelerator.device
        states: Tensor | tuple[Padded, Padded] | None = None
        if self.states is not None:
            states = self.states[rows].to(device)
        elif self.encoded:
            states = pad_answers([self.encoded[row] for row in rows], device)
        words = WordBags.from_answers([self.rows[row].answer for row in rows]).to(device) if self.config.words else None
        logits: Tensor = self.engine.module(states, words)
        return logits

    def loss(self, rows: list[int]) -> Callable[[list[int]], tuple[Tensor, Sums]]:
        def loss_of_rows(part: list[int]) -> tuple[Tensor, Sums]:
            logits, labels = self._logits(part), self.labels[part].to(self.run.accelerator.device)
            correct = ((logits > 0) == labels).float().sum() / len(rows)
            return binary_loss(logits, labels) / len(rows), {"accuracy": correct}

        return loss_of_rows

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"], "accuracy": sums["accuracy"]}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        first = len(self.training)

        def compute_logits(rows: list[int]) -> list[float]:
            logits: list[float] = self._logits([first + row for row in rows]).tolist()
            return logits

        costs, budget = self.costs[first:], self.config.micro_batch_tokens
        logits = map_rows(costs, budget, self.run.accelerator, compute_logits)
        return {f"validation/{name}": value for name, value in held_out_figures(logits, self.held_out).items()}

    def save(self, figures: dict[str, float]) -> None:
        self.best = {
            name.removeprefix("validation/"): value for name, value in figures.items() if name.startswith("validation/")
        }
        state = self.engine.model_state()

        def write() -> None:
            config = self.config
            metadata = {"asks": config.asks, "model": config.model, "words": config.words}
            metadata |= {"prefix_lm": config.prefix_lm}
            metadata |= {"dtype": config.dtype, "lora_rank": config.lora_rank, "data": config.data, "seed": config.seed}
            metadata |= {"learned_from": len(self.training), "held_out": len(self.held_out), "figures": self.best}
            save_judge(self.folder, state, self.loaded, metadata)

        run_on_main(write, self.run.accelerator)

    def describe(self, rows: list[int]) -> list[dict[str, object]]:
        return [asdict(self.rows[row]) for row in rows]


def held_out_figures(logits: Sequence[float], rows: Sequence[LabeledAnswer]) -> dict[str, float]:
    """Quality of the verdicts: loss (nats), AUC with its interval over questions, accuracy, calibration error."""
    values, labels = np.array(logits, dtype=np.float64), np.array([row.label for row in rows])
    low, high = auc_interval(values, labels, [row.question for row in rows])
    return {
        "loss": float(binary_loss(torch.from_numpy(values), torch.from_numpy(labels))) / len(rows),
        "auc": roc_auc(values, labels),
        "auc/low": low,
        "auc/high": high,
        "accuracy": float(((values > 0) == labels).mean()),
        "calibration_error": calibration_error(torch.sigmoid(torch.from_numpy(values)).numpy(), labels),
        "share_of_yes": float(labels.mean()),
    }


def auc_interval(values: np.ndarray, labels: np.ndarray, questions: Sequence[str]) -> tuple[float, float]:
    """The bootstrap interval over questions of an AUC.

    Where the values separate the labels, the bootstrap has no width. The interval is then that of a share of as many items
    as there are questions with the rarer label: the variance of an AUC is at most that (Birnbaum and Klose 1957).
    """
    question_of_row = np.unique(questions, return_inverse=True)[1]
    rarer = min(len(np.unique(question_of_row[labels == label])) for label in (False, True))
    if not rarer:
        return 0.0, 1.0
    auc = roc_auc(values, labels)
    if auc in (0.0, 1.0):
        return share_interval(np.full(rarer, auc))
    rows_of_question = [np.flatnonzero(question_of_row == number) for number in range(question_of_row.max() + 1)]

    def auc_of_rows(rows: np.ndarray) -> float:
        both = 0 < labels[rows].sum() < len(rows)
        return roc_auc(values[rows], labels[rows]) if both else np.nan

    def auc_of_resamples(drawn: np.ndarray) -> np.ndarray:
        return np.array([auc_of_rows(np.concatenate([rows_of_question[number] for number in row])) for row in drawn])

    return statistic_interval(auc_of_resamples, len(rows_of_question), resamples=200)


if __name__ == "__main__":
    run_stage(JudgeConfig, run_train_judge)
