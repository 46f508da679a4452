"""Distillation: a student learns a teacher's distribution over the tokens of responses, and its hidden states.

Launch it by `accelerate launch align/extras/distill/train.py --config configs/distill/x.yaml`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from align.batches.encoding import Data, encode_demonstrations, encode_prompts
from align.batches.micro_batches import micro_batches
from align.batches.mixtures import TrainingData, encode_mixture
from align.core.errors import UserError
from align.core.launch import run_stage
from align.core.tensor_ops import Padded, entropy_of, log_probs_of
from align.extras.distill.config import DistillConfig
from align.extras.distill.loss import LossWeights, cosine_distance, distillation_loss, soft_cross_entropy
from align.extras.distill.students import Predictor, WrittenBatches, make_student, parameter_count
from align.models.backbone import flops_profile
from align.models.checkpoint import require_savable, save_model, weights_of
from align.models.loading import LoadedModel
from align.runtime.distributed import run_on_main, sum_across_processes
from align.runtime.flops import forward_flops, sampling_flops, training_flops
from align.runtime.sharding import place_frozen_model
from align.tokenization.encoded import EncodedDemonstration, ExampleLengths
from align.training.engine import Sums
from align.training.loop import EpochTrainer, ExampleTask
from align.training.start import Model, with_data_names


class DistillTrainer(EpochTrainer):
    """Distillation of a teacher into a student.

        config = DistillConfig(output_dir="runs/student", max_response_tokens=64)
        folder = DistillTrainer("runs/ppo/model", [{"prompt": "Hi", "completion": "Hello!"}], config).train()

    Arguments are those of `EpochTrainer`; the teacher has no adapter. DeepSpeed is refused.
    """

    task: "DistillTask"

    def __init__(
        self,
        teacher: Model,
        train_data: TrainingData,
        config: DistillConfig,
        validation_data: Data = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        config = with_data_names(config, train_data=train_data, validation_data=validation_data)
        super().__init__(config, "distill", teacher, tokenizer)
        if self.run.accelerator.state.deepspeed_plugin is not None:
            raise UserError("align distill runs without DeepSpeed: launch it with configs/accelerate/ddp.yaml")
        if self.loaded.adapter:
            raise UserError("a teacher in memory must have no adapter: merge it, or give its folder")
        self.teacher, self.loaded = self.loaded, make_student(config, self.loaded)
        run_on_main(lambda: require_savable(self.loaded), self.run.accelerator)
        mixed = encode_mixture(train_data, partial(encode, config, self.teacher, config.all_written), config.task_prefixes)
        held_out = encode(config, self.teacher, False, validation_data) if validation_data else []
        self._report(len(mixed.examples), len(held_out))
        place_frozen_model(self.teacher.backbone, self.run.accelerator)
        frozen = [self.teacher.backbone]
        engine = self.build_engine(Predictor(self.loaded.backbone), mixed, frozen=frozen)
        models = (self.teacher, self.loaded, self.run.accelerator)
        responses = WrittenBatches(config, self.epochs, mixed.examples, *models)
        responses.current |= {row: longest(config, example) for row, example in enumerate(mixed.examples)}
        self.batches = responses
        parts = (self.run, config, self.loaded, engine, responses.current, held_out)
        self.task = DistillTask(*parts, teacher=self.teacher, responses=responses)

    def _report(self, examples: int, held_out: int) -> None:
        small, large = parameter_count(self.loaded.backbone) / 1e6, parameter_count(self.teacher.backbone) / 1e6
        self.run.say(
            f"distill: {examples} examples to learn from, {held_out} held out; teacher {self.run.config.model}\n"
            f"student of {small:.1f} million parameters, {small / large:.0%} of the teacher's {large:.1f}"
        )


def run_distill(config: DistillConfig) -> Path:
    """Distill `config.model` into a student on `config.train_data`; returns the folder of the best student."""
    return DistillTrainer(config.model, config.train_data, config, config.validation_data).train()


def encode(config: DistillConfig, loaded: LoadedModel, prompts_only: bool, data: Data) -> list[EncodedDemonstration]:
    """Demonstrations as token ids; prompts alone have empty responses. Raises: see `encode_demonstrations`."""
    if not prompts_only:
        return encode_demonstrations(data, loaded, config.limits, config.skip_bad_rows)
    prompts = encode_prompts(data, loaded, config.limits, config.skip_bad_rows)
    return [EncodedDemonstration(prompt.ids, [], []) for prompt in prompts]


def longest(config: DistillConfig, example: EncodedDemonstration) -> EncodedDemonstration:
    """The example with the longest response that may be written for it."""
    length = config.max_response_tokens
    if len(example.response) >= length or not (config.all_written or config.student_share):
        return example
    return EncodedDemonstration(example.prompt, [0] * length, [True] * length)


class DistillTask(ExampleTask):
    """Loss and evaluation of distillation; `loaded` is the student."""

    config: DistillConfig
    evaluate_before_training = True

    def __init__(self, *arguments: Any, teacher: LoadedModel, responses: WrittenBatches) -> None:
        super().__init__(*arguments)
        self.teacher, self.responses = teacher, responses
        self.predictor = Predictor(teacher.backbone)
        self.teacher_shape = flops_profile(teacher.backbone, None)
        self.lengths = ExampleLengths(self.examples)

    def loss(self, rows: list[int]) -> Callable[[list[int]], tuple[Tensor, Sums]]:
        examples, by_student = self.examples, self.responses.by_student
        tokens = sum(sum(examples[row].loss_mask) for row in rows)
        learned = sum(sum(examples[row].loss_mask) for row in rows if row not in by_student)

        def loss_of_rows(part: list[int]) -> tuple[Tensor, Sums]:
            batch = [examples[row] for row in part]
            loss, sums = self._loss(batch, [row not in by_student for row in part], (tokens, learned))
            read = sum(len(example.prompt) + len(example.response) for example in batch)
            more = {"read": float(read), "flops": sum(self._flops(row) for row in part)}
            return loss, sums | {
                name: torch.tensor(value, dtype=torch.float64, device=loss.device) for name, value in more.items()
            }

        return loss_of_rows

    def _loss(
        self, batch: list[EncodedDemonstration], in_data: Sequence[bool], counts: tuple[int, int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's share of the loss over `counts` tokens, and sums over its own tokens.

        Args:
            in_data: whether the language-model loss counts each example; it leaves out a student's own samples.
        """
        device, config = self.run.accelerator.device, self.config
        prompt = Padded.from_lists([example.prompt for example in batch]).to(device)
        response = Padded.from_lists([example.response for example in batch]).to(device)
        mask = Padded.from_lists([list(map(int, example.loss_mask)) for example in batch]).ids.to(device) > 0
        is_from_data = torch.tensor(in_data, device=device)[:, None].expand_as(mask)[mask]
        with torch.no_grad():
            teacher_logits, teacher_states = self.predictor(prompt, response, mask)
        logits, states = self.engine.module(prompt, response, mask)
        ce = soft_cross_entropy(logits, teacher_logits, config.temperature)
        nll = -log_probs_of(logits, response.ids[mask])[is_from_data]
        distances = cosine_distance(states, teacher_states) if config.cosine_weight else ce.new_zeros(0)
        weights = LossWeights(config.ce_weight, config.lm_weight, config.cosine_weight, config.temperature)
        sums = {
            "ce": ce.detach().sum(),
            "entropy": entropy_of(teacher_logits, config.temperature).sum(),
            "lm": nll.detach().sum(),
            "cosine": distances.detach().sum(),
            "tokens": mask.sum(),
            "learned": is_from_data.sum(),
        }
        return distillation_loss(ce, nll, distances, counts, weights), sums

    def _flops(self, row: int) -> float:
        """FLOPs of sampling an example, of the teacher's pass and of the student's update."""
        example, responses = self.examples[row], self.responses
        lengths = len(example.prompt), [len(example.response)], sum(example.loss_mask)
        total = training_flops(self.shape, *lengths) + forward_flops(self.teacher_shape, *lengths)
        if row in responses.written:
            total += sampling_flops(self.shape if row in responses.by_student else self.teacher_shape, *lengths[:2])
        return total

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        found = loss_parts(sums) | {"loss": sums["loss"], "tokens/learned": sums["tokens"], "tokens/read": sums["read"]}
        rows = len(self.examples)
        return found | {
            "written/student": len(self.responses.by_student) / rows,
            "written": len(self.responses.written) / rows,
        }

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        if not self.held_out:
            return {}
        total: dict[str, Tensor] = {}
        lengths = [len(example.prompt) + len(example.response) for example in self.held_out]
        rows = list(range(len(lengths)))
        for batch in micro_batches(rows, lengths, self.config.micro_batch_tokens, self.run.accelerator):
            examples = [self.held_out[row] for row in batch.rows]
            for name, value in self._loss(examples, [True] * len(examples), (1, 1))[1].items():
                total[name] = total.get(name, torch.zeros((), dtype=torch.float64)) + batch.weight * value.double().cpu()
        stacked = torch.stack(list(total.values())).to(self.run.accelerator.device)
        summed = sum_across_processes(stacked, self.run.accelerator).tolist()
        parts = loss_parts(dict(zip(total, summed, strict=True)))
        config = self.config
        loss = config.ce_weight * config.temperature**2 * parts["loss/ce"] + config.lm_weight * parts["loss/lm"]
        parts["loss"] = loss + config.cosine_weight * parts["loss/cosine"]
        return {f"validation/{name}": value for name, value in parts.items()}

    def save(self, metrics: dict[str, float]) -> None:
        state = weights_of(self.loaded.backbone, self.engine.model_state(), "backbone.model.")
        sizes = [parameter_count(each.backbone) for each in (self.loaded, self.teacher)]
        made = {"teacher": self.run.config.model, "parameters": f"{sizes[0]:,} of {sizes[1]:,}"}
        card = self.card("Distilled model", metrics, **made)
        run_on_main(lambda: save_model(self.folder, self.loaded, state, card), self.run.accelerator)


def loss_parts(sums: Mapping[str, float]) -> dict[str, float]:
    """The three losses as means over their tokens, and KL(teacher || student), from sums over the global batch."""
    tokens = max(1.0, sums["tokens"])
    return {
        "loss/ce": sums["ce"] / tokens,
        "loss/lm": sums["lm"] / max(1.0, sums["learned"]),
        "loss/cosine": sums["cosine"] / tokens,
        "kl": (sums["ce"] - sums["entropy"]) / tokens,
    }


if __name__ == "__main__":
    run_stage(DistillConfig, run_distill)
