"""Supervised fine-tuning: a model learns the assistant's turns of demonstrations.

Launch it by `accelerate launch align/sft/train.py --config configs/sft/x.yaml`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from align.batches.encoding import Data, encode_demonstration_row, encode_demonstrations, split_prefix
from align.batches.micro_batches import micro_batches
from align.batches.mixtures import MixedExamples, TrainingData, encode_mixture, mixture_of
from align.batches.streams import ExampleStream, StreamedBatches
from align.core.errors import UserError
from align.core.launch import run_stage
from align.core.settings import MixtureConfig, SequenceConfig, option, require_setting
from align.core.tensor_ops import Padded
from align.models.checkpoint import save_model, weights_of
from align.models.loading import LoadedModel
from align.models.roles import LanguageModel
from align.runtime.distributed import run_on_main, sum_across_processes
from align.runtime.flops import FlopsProfile, training_flops
from align.sft.loss import demonstration_loss
from align.tokenization.encoded import EncodedDemonstration, ExampleLengths
from align.training.epochs import EpochConfig
from align.training.loop import EpochTrainer, ExampleTask, with_data_names
from align.training.optimization import Sums
from align.training.start import Model, share_sequences


@dataclass(kw_only=True)
class SFTConfig(MixtureConfig, SequenceConfig, EpochConfig):
    """Supervised fine-tuning on demonstrations."""

    train_data: str = option(
        "data/demonstrations.jsonl",
        "demonstrations to learn from: file, folder or hub name; several are separated by commas, each as NAME or "
        "NAME=WEIGHT",
    )
    validation_data: str = option("", "demonstrations to choose the best model by; empty: none")
    epochs: int = option(1, "passes over the training data (InstructGPT used 16 and chose by the reward model)")
    batch_size: int = option(32, "examples in one update, over all processes")
    prompt_loss_weight: float = option(
        0.0,
        "weight of a language-model loss on the prompt, added to the loss on the response (GPT-1, section 3.2: 0.5)",
        ge=0,
    )
    max_response_tokens: int = option(1024, "longest response, in tokens; in a conversation all turns after the first")
    stream_updates: int = option(
        0,
        "updates of a run that reads train_data while it trains, for data larger than memory; 0: all is read before, for "
        "`epochs` passes",
        ge=0,
    )
    stream_block: int = option(
        2000, "with stream_updates: rows of each source in memory at once, shuffled among themselves", gt=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream_updates:
            for name, default in (("mixing_cap", 0), ("mixing_temperature", 1), ("epochs", 1)):
                wanted = f"{default} with stream_updates"
                require_setting(self, name, getattr(self, name) == default, wanted)


class SFTTrainer(EpochTrainer):
    """Supervised fine-tuning of a model on demonstrations.

        config = SFTConfig(output_dir="runs/sft")
        trainer = SFTTrainer("smollm2-135m", [{"prompt": "Hi", "completion": "Hello!"}], config)
        folder = trainer.train()

    Arguments are those of `EpochTrainer`.
    """

    def __init__(
        self,
        model: Model,
        train_data: TrainingData,
        config: SFTConfig,
        validation_data: Data = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        config = with_data_names(config, train_data=train_data, validation_data=validation_data)
        super().__init__(config, "sft", model, tokenizer)
        share_sequences(self.run, self.loaded.backbone, config.sequence_parallel)
        stream: StreamedBatches[EncodedDemonstration] | None = None
        if config.stream_updates:
            stream = stream_of(config, self.loaded, train_data, self.run.accelerator)
            # The first micro-batch that is tried is as large as one can be.
            longest = [0] * config.max_prompt_tokens, [0] * config.max_response_tokens, [True] * config.max_response_tokens
            examples = [EncodedDemonstration(*longest)] * config.batch_size
            stream.current |= dict(enumerate(examples))
            mixed = MixedExamples(examples, [config.batch_size], [1.0])
        else:
            mixed = encode_mixture(train_data, partial(encode, config, self.loaded), config.task_prefixes)
        held_out = encode(config, self.loaded, validation_data) if validation_data else []
        number = "a stream of" if stream else len(mixed.examples)
        counts = f"{number} examples to learn from, {len(held_out)} held out"
        self.run.say(f"sft: {counts}; model {self.run.config.model}")
        module = LanguageModel(self.loaded.backbone, self.loaded.adapter)
        optimization = self.make_optimization(module, mixed, stream=stream)
        learned = stream.current if stream else mixed.examples
        self.task = SFTTask(self.run, config, self.loaded, optimization, learned, held_out)


def run_sft(config: SFTConfig) -> Path:
    """Fine-tune `config.model` on `config.train_data`; returns the folder of the best model."""
    return SFTTrainer(config.model, config.train_data, config, config.validation_data).train()


def encode(config: SFTConfig, loaded: LoadedModel, data: Data) -> list[EncodedDemonstration]:
    """Demonstrations as token ids. Raises: see `encode_demonstrations`."""
    _require_prompt_in_row(config, loaded)
    return encode_demonstrations(data, loaded, config.limits, config.skip_bad_rows)


def stream_of(
    config: SFTConfig, loaded: LoadedModel, data: TrainingData, accelerator: Accelerator
) -> StreamedBatches[EncodedDemonstration]:
    """The batches of data that are read while they are learned.

    Raises:
        UserError: for data in memory, or a source that is not there.
    """
    _require_prompt_in_row(config, loaded)
    mixture, streams = mixture_of(data, config.task_prefixes), []
    for number, (source, prefix) in enumerate(map(split_prefix, mixture.sources)):
        if not isinstance(source, str):
            raise UserError("stream_updates is for data on the disk or the hub: records in memory need none")
        encode_row = partial(encode_demonstration_row, loaded, config.limits, prefix=prefix)
        key = (config.seed, number)
        block, skip = config.stream_block, config.skip_bad_rows
        streams.append(ExampleStream(source, encode_row, list, block, key, accelerator, skip, config.limits))
    return StreamedBatches(config.seed, config.batch_size, config.stream_updates, streams, mixture.weights)


def token_counts(examples: Sequence[EncodedDemonstration]) -> list[int]:
    """Tokens of prompt and response of each example."""
    return [len(example.prompt) + len(example.response) for example in examples]


def example_flops(config: SFTConfig, shape: FlopsProfile, example: EncodedDemonstration) -> float:
    """FLOPs of learning from an example."""
    predicted = sum(example.loss_mask) + (len(example.prompt) - 1 if config.prompt_loss_weight else 0)
    return training_flops(shape, len(example.prompt), [len(example.response)], predicted)


def _require_prompt_in_row(config: SFTConfig, loaded: LoadedModel) -> None:
    if config.prompt_loss_weight and not loaded.backbone.causal:
        raise UserError(
            "prompt_loss_weight: this model reads its prompt whole (by an encoder, or prefix_lm) and predicts nothing of "
            "it; set it to 0"
        )


class SFTTask(ExampleTask):
    """Loss and evaluation of supervised fine-tuning."""

    config: SFTConfig
    evaluate_before_training = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lengths = ExampleLengths(self.examples)

    def loss(self, rows: list[int]) -> Callable[[list[int]], tuple[Tensor, Sums]]:
        batch = [self.examples[row] for row in rows]
        response_count = sum(sum(example.loss_mask) for example in batch)
        prompt_count = sum(len(example.prompt) - 1 for example in batch)
        weight = self.config.prompt_loss_weight

        def loss_of_rows(part: list[int]) -> tuple[Tensor, Sums]:
            examples = [self.examples[row] for row in part]
            log_probs, response_mask, prompt_mask = self._log_probs(examples, bool(weight))
            loss = demonstration_loss(log_probs, response_mask, prompt_mask, response_count, prompt_count, weight)
            sums = {
                "tokens": response_mask.sum(),
                "read": torch.tensor(float(sum(token_counts(examples)))),
                "flops": torch.tensor(sum(map(self._flops, examples)), dtype=torch.float64),
            }
            return loss, {name: value.to(loss.device) for name, value in sums.items()}

        return loss_of_rows

    def _flops(self, example: EncodedDemonstration) -> float:
        return example_flops(self.config, self.shape, example)

    def _log_probs(self, examples: list[EncodedDemonstration], with_prompt: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs [B, T], and two masks [B, T]: the assistant's tokens that count, and the prompt's.

        With the prompt in the loss, all of it but its first token is read as if it were part of the response.
        """
        device = self.run.accelerator.device
        cuts = [1 if with_prompt else len(example.prompt) for example in examples]
        tails = [example.prompt[cut:] for example, cut in zip(examples, cuts, strict=True)]
        pairs = list(zip(examples, tails, strict=True))
        prompt = Padded.from_lists([example.prompt[:cut] for example, cut in zip(examples, cuts, strict=True)])
        response = Padded.from_lists([tail + example.response for example, tail in pairs])
        of_prompt = [[1] * len(tail) + [0] * len(example.response) for example, tail in pairs]
        counted = [[0] * len(tail) + list(map(int, example.loss_mask)) for example, tail in pairs]
        is_prompt, counts = (Padded.from_lists(mask).ids.to(device) > 0 for mask in (of_prompt, counted))
        log_probs = self.optimization.module(prompt.to(device), response.to(device), counts | is_prompt)
        return log_probs, counts, is_prompt

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"], "tokens/learned": sums["tokens"], "tokens/read": sums["read"]}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        if not self.held_out:
            return {}
        total = torch.zeros(2, dtype=torch.float64, device=self.run.accelerator.device)
        lengths = token_counts(self.held_out)
        rows = list(range(len(lengths)))
        for batch in micro_batches(rows, lengths, self.config.micro_batch_tokens, self.run.accelerator):
            log_probs, mask, _ = self._log_probs([self.held_out[row] for row in batch.rows], False)
            total += batch.weight * torch.stack([-(log_probs * mask).sum(), mask.sum()]).double()
        loss, count = sum_across_processes(total, self.run.accelerator).tolist()
        return {"validation/loss": loss / count, "validation/perplexity": math.exp(min(loss / count, 50.0))}

    def save(self, metrics: dict[str, float]) -> None:
        state = weights_of(self.loaded.backbone, self.optimization.model_state(), "backbone.model.")
        card = self.card("Supervised fine-tuned model", metrics)
        run_on_main(lambda: save_model(self.folder, self.loaded, state, card), self.run.accelerator)


if __name__ == "__main__":
    run_stage(SFTConfig, run_sft)
