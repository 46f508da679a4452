"""Supervised fine-tuning: a model learns to say what the assistant said in the demonstrations."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from align.batching import micro_batches
from align.distributed import all_sum
from align.encoding import Limits, encode_turns
from align.errors import UserError
from align.flops import learning
from align.models.checkpoint import save_model, weights_of
from align.models.loading import Loaded, load
from align.models.roles import Policy
from align.rehearsal import Reading, Rows, pass_bytes
from align.run import Run
from align.sft.config import SFTConfig
from align.sft.loss import demonstration_loss
from align.supervised import LOOKED_AHEAD, largest_batch, rows_of, train
from align.tensor_ops import Padded
from align.tokenization import Turn
from align.training import Optimisation, Sums, make_optimisation


def run_sft(config: SFTConfig) -> Path:
    """Fine-tune a model on demonstrations; gives the folder of the best model.

    Raises:
        UserError: for anything that the settings or the data have wrong.
    """
    run = Run(config, "sft")
    run.memory.foresee(config)
    loaded = load(config, run.dtype)
    turns = encode(config, loaded, config.train_data)
    held_out = encode(config, loaded, config.validation_data) if config.validation_data else []
    run.say(f"sft: {len(turns)} examples to learn from, {len(held_out)} held out; model {config.model}")
    updates_an_epoch = math.ceil(len(turns) / config.batch_size)
    policy = Policy(loaded.backbone, loaded.adapter)
    check_memory(run, config, loaded, policy, turns, held_out)
    optimisation = make_optimisation(run, policy, config.epochs * updates_an_epoch)
    task = SFTTask(run, config, loaded, optimisation, turns, held_out)
    train(run, optimisation, task, config.batch_size, updates_an_epoch, config.evaluate_every)
    run.close()
    return task.folder


def encode(config: SFTConfig, loaded: Loaded, source: str) -> list[Turn]:
    """Read demonstrations and turn them into token ids.

    Raises:
        UserError: if a record is beyond the limits (see `overlong`) or beyond what the model can read.
    """
    if config.prompt_loss_weight and not loaded.backbone.one_row_per_conversation:
        raise UserError("prompt_loss_weight: this model's prompt is read by an encoder, which predicts nothing; set it to 0")
    limits = Limits(config.max_prompt_tokens, config.max_response_tokens, config.overlong)
    return encode_turns(source, loaded, limits, config.skip_bad_rows)


def check_memory(
    run: Run, config: SFTConfig, loaded: Loaded, policy: Policy, turns: list[Turn], held_out: list[Turn]
) -> None:
    """Tell how much memory the run will need.

    Raises:
        UserError: if that is more than there is.
    """
    readings = [Reading(loaded.backbone, loaded.adapter, predicts=True)]

    def tokens(some: list[Turn], rows: list[int]) -> list[int]:
        return [len(some[row].prompt) + len(some[row].response) for row in rows]

    def size(some: list[Turn], rows: list[int]) -> Rows:
        learned = None if config.prompt_loss_weight else sum(sum(some[row].learn) for row in rows)
        return Rows.of([(len(some[row].prompt), [len(some[row].response)]) for row in rows], learned)

    updates = range(1, min(LOOKED_AHEAD, math.ceil(len(turns) / config.batch_size)) + 1)
    batches = (rows_of(run, len(turns), config.batch_size, update) for update in updates)
    rows, several = largest_batch(run, ((rows, tokens(turns, rows)) for rows in batches))
    phases = {"learning": lambda: pass_bytes(readings, size(turns, rows), learn=True)}
    if held_out:
        every = list(range(len(held_out)))
        most, _ = largest_batch(run, [(every, tokens(held_out, every))])
        phases["validation"] = lambda: pass_bytes(readings, size(held_out, most), learn=False)
    run.say(run.memory.check(config, policy, [], phases, several))


class SFTTask:
    """Examples, loss and evaluation of supervised fine-tuning, as `align.supervised.train` asks for them."""

    evaluates_start = True

    def __init__(
        self,
        run: Run,
        config: SFTConfig,
        loaded: Loaded,
        optimisation: Optimisation,
        turns: list[Turn],
        held_out: list[Turn],
    ) -> None:
        self.run, self.config, self.loaded, self.optimisation = run, config, loaded, optimisation
        self.turns, self.held_out = turns, held_out
        self.lengths = [len(turn.prompt) + len(turn.response) for turn in turns]
        self.shape = loaded.backbone.shape(loaded.adapter)
        self.folder = run.folder / "model"

    def loss(self, rows: list[int]) -> Callable[[list[int]], tuple[Tensor, Sums]]:
        batch = [self.turns[row] for row in rows]
        learn_count = sum(sum(turn.learn) for turn in batch)
        context_count = sum(len(turn.prompt) - 1 for turn in batch)

        def of(part: list[int]) -> tuple[Tensor, Sums]:
            turns = [self.turns[row] for row in part]
            log_probs, learn, context = self._log_probs(turns, bool(self.config.prompt_loss_weight))
            loss = demonstration_loss(log_probs, learn, context, learn_count, context_count, self.config.prompt_loss_weight)
            sums = {
                "tokens": learn.sum(),
                "read": torch.tensor(float(sum(len(t.prompt) + len(t.response) for t in turns))),
                "flops": torch.tensor(sum(self._flops(turn) for turn in turns), dtype=torch.float64),
            }
            return loss, {name: value.to(loss.device) for name, value in sums.items()}

        return of

    def _flops(self, turn: Turn) -> float:
        predicted = sum(turn.learn) + (len(turn.prompt) - 1 if self.config.prompt_loss_weight else 0)
        return learning(self.shape, len(turn.prompt), [len(turn.response)], predicted)

    def _log_probs(self, turns: list[Turn], with_context: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs [B, T], and which of them the assistant said and which are the prompt's.

        With the prompt in the loss, all of it but its first token is read as if it were response.
        """
        cut = [1 if with_context else len(turn.prompt) for turn in turns]
        prompt = Padded.from_lists([turn.prompt[:at] for turn, at in zip(turns, cut, strict=True)])
        tails = [turn.prompt[at:] for turn, at in zip(turns, cut, strict=True)]
        response = Padded.from_lists([tail + turn.response for turn, tail in zip(turns, tails, strict=True)])
        kinds = Padded.from_lists(
            [[2] * len(tail) + [int(flag) for flag in turn.learn] for turn, tail in zip(turns, tails, strict=True)]
        ).ids.to(self.run.accelerator.device)
        device = self.run.accelerator.device
        log_probs = self.optimisation.module(prompt.to(device), response.to(device), kinds > 0)
        return log_probs, kinds == 1, kinds == 2

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"], "tokens/learned": sums["tokens"], "tokens/read": sums["read"]}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        if not self.held_out:
            return {}
        total = torch.zeros(2, dtype=torch.float64, device=self.run.accelerator.device)
        lengths = [len(turn.prompt) + len(turn.response) for turn in self.held_out]
        rows = list(range(len(lengths)))
        for batch in micro_batches(rows, lengths, self.config.micro_batch_tokens, self.run.accelerator):
            log_probs, learn, _ = self._log_probs([self.held_out[row] for row in batch.rows], False)
            total += batch.weight * torch.stack([-(log_probs * learn).sum(), learn.sum()]).double()
        loss, count = all_sum(total, self.run.accelerator).tolist()
        return {"validation/loss": loss / count, "validation/perplexity": math.exp(min(loss / count, 50.0))}

    def save(self, figures: dict[str, float]) -> None:
        state = weights_of(self.loaded.backbone, self.optimisation.model_state(), "backbone.model.")
        card = {"title": "Supervised fine-tuned model", "stage": "sft", "data": self.config.train_data}
        if self.run.is_main:
            save_model(self.folder, self.loaded, state, card | {k: f"{v:.4g}" for k, v in figures.items()})
        self.run.accelerator.wait_for_everyone()

    def describe(self, rows: list[int]) -> list[dict[str, object]]:
        text = self.loaded.tokenization.text
        return [{"prompt": text(self.turns[row].prompt), "response": text(self.turns[row].response)} for row in rows]
