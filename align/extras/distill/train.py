"""Distillation: a student learns a teacher's distribution over the tokens of responses, and its hidden states.

Launch it by `accelerate launch align/extras/distill/train.py --config configs/distill/x.yaml`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from align.batches.encoding import Data, Limits, encode_demonstrations, encode_prompts
from align.batches.micro_batches import micro_batches
from align.batches.mixtures import TrainingData, encode_mixture, is_given
from align.core.errors import UserError, counted
from align.core.launch import run_stage
from align.core.settings import MixtureConfig, ModelConfig, OptimizationConfig, RunConfig, option, require_setting
from align.core.tensor_ops import Padded, entropy_of, log_probs_of
from align.extras.distill.loss import LossWeights, cosine_distance, distillation_loss, soft_cross_entropy
from align.extras.distill.students import Predictor, WrittenBatches, WrittenExample, make_student, parameter_count
from align.models.backbone import flops_profile
from align.models.checkpoint import require_savable, save_model, weights_of
from align.models.loading import LoadedModel
from align.runtime.distributed import run_on_main, sum_across_processes
from align.runtime.flops import FlopsProfile, forward_flops, sampling_flops, training_flops
from align.runtime.sharding import place_frozen_model
from align.sampling.generation import SamplingParams
from align.tokenization.encoded import EncodedDemonstration
from align.training.data_order import DataOrder, EpochConfig
from align.training.engine import TrainEngine
from align.training.epoch_loop import EpochLoop
from align.training.model_source import Model, ModelSource
from align.training.run import Run
from align.training.start import build_engine, with_data_names


@dataclass(kw_only=True)
class DistillConfig(MixtureConfig, EpochConfig, ModelConfig, RunConfig, OptimizationConfig):
    """A student that learns from a teacher's predictions, by default as DistilBERT did (Sanh et al. 2019)."""

    model: str = option("smollm2-135m", "the teacher: a folder, a LoRA adapter, a hub name or a built-in model")
    student: str = option("", "initial student, with the teacher's tokenizer; empty: layers of the teacher")
    keep_every_nth_layer: int = option(
        2,
        "without student: keep the teacher's first layer and every n-th after it (DistilBERT: 2)",
        ge=2,
    )
    learning_rate: float = option(1e-4, "peak learning rate")
    train_data: str = option(
        "data/demonstrations.jsonl",
        "demonstrations; prompts are enough where all responses are sampled: file, folder or hub name; several are "
        "separated by commas, each as NAME or NAME=WEIGHT",
    )
    validation_data: str = option("", "held-out demonstrations, which select the best student; empty: none")
    responses: Literal["data", "teacher"] = option(
        "data",
        "source of responses: the data, or samples from the teacher in each update",
    )
    on_policy_fraction: float = option(
        0.0,
        "share of examples with a response sampled from the student in each update (lambda of GKD, Agarwal et al. 2023)",
        ge=0,
        le=1,
    )
    batch_size: int = option(32, "examples in one update, over all processes")
    max_response_tokens: int = option(256, "longest response, in tokens, also of sampled ones")
    temperature: float = option(2.0, "divides the logits of teacher and student in the cross-entropy (DistilBERT: 2)", gt=0)
    ce_weight: float = option(
        5.0, "weight of the cross-entropy with the teacher's distribution, times temperature squared (DistilBERT: 5)", ge=0
    )
    lm_weight: float = option(
        2.0, "weight of the language-model loss on responses that were not sampled from the student (DistilBERT: 2)", ge=0
    )
    cosine_weight: float = option(
        1.0, "weight of 1 - the cosine between the last hidden states of student and teacher (DistilBERT: 1)", ge=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "lora_r", self.lora_r == 0, "0: all weights of a student are trained")
        weights = ("ce_weight", "lm_weight", "cosine_weight")
        require_setting(self, "ce_weight", any(getattr(self, name) for name in weights), "above 0 unless another weight is")

    @property
    def all_written(self) -> bool:
        """Whether every response is written in training; prompts are enough then."""
        return self.responses == "teacher" or self.on_policy_fraction == 1


def train(
    config: DistillConfig,
    teacher: LoadedModel,
    student: LoadedModel,
    engine: TrainEngine,
    order: DataOrder[EncodedDemonstration],
    held_out: list[WrittenExample],
) -> Path:
    """Train a student from the last checkpoint on; return the folder of the best one on `held_out`, which may be empty."""
    run, budget = engine.run, config.micro_batch_tokens
    accelerator = run.accelerator
    weights = LossWeights(config.ce_weight, config.lm_weight, config.cosine_weight, config.temperature)
    predictor = Predictor(teacher.backbone)
    loss_of = partial(batch_loss, engine.module, predictor, weights=weights, device=accelerator.device)
    profile, teacher_profile = (flops_profile(model.backbone, None) for model in (student, teacher))
    sampling = SamplingParams(config.max_response_tokens, batch_tokens=max(budget, config.max_response_tokens))
    writers = (config.on_policy_fraction, config.responses == "teacher")
    batches = WrittenBatches(order, teacher, student, *writers, sampling, accelerator)
    loop = EpochLoop(engine, order, config.eval_steps)
    planned = ([longest(config, example) for example in batch] for batch in order.first_batches())
    loop.measure_largest_micro_batch(((batch, token_counts(batch)) for batch in planned), loss_of)
    if not loop.done:
        run.log(0, evaluate(engine, predictor, held_out, weights, budget))

    for update in loop.updates():
        batch = batches.batch(update)
        lengths = token_counts(batch)
        plan = micro_batches(range(len(batch)), lengths, budget, accelerator)
        with loop.learning(update, [item.example for item in batch], student.tokenization):
            for rows in engine.micro_batches(plan):
                engine.backward(*loss_of([batch[row] for row in rows], batch))
            step = engine.step(update)
        writers_of_batch = [item.writer for item in batch]
        metrics = loss_parts(engine.sums) | {
            "loss": engine.sums["loss"],
            "tokens/trained": engine.sums["tokens"],
            "on_policy_fraction": writers_of_batch.count("student") / len(batch),
            "sampled_fraction": (len(batch) - writers_of_batch.count("data")) / len(batch),
        }
        flops = sum(example_flops(profile, teacher_profile, item) for item in batch)
        metrics |= step | loop.costs(sum(lengths), flops)
        if loop.evaluates(update):
            metrics |= evaluate(engine, predictor, held_out, weights, budget)
            if loop.is_best(metrics):
                save(student, teacher, engine, config.train_data, metrics)
        loop.log(update, metrics)

    if loop.needs_evaluation():
        metrics = evaluate(engine, predictor, held_out, weights, budget)
        if loop.is_best(metrics):
            save(student, teacher, engine, config.train_data, metrics)
    run.close()
    return run.folder / "model"


def batch_loss(
    model: nn.Module,
    teacher: nn.Module,
    examples: Sequence[WrittenExample],
    batch: Sequence[WrittenExample],
    weights: LossWeights,
    device: torch.device,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a micro-batch's share of the loss, and sums over its own tokens; both models are `Predictor`s.

    The losses are means over the tokens of the global batch. The language-model loss excludes text of the student.
    """
    prompt = Padded.from_lists([item.example.prompt for item in examples]).to(device)
    response = Padded.from_lists([item.example.response for item in examples]).to(device)
    mask = Padded.from_lists([list(map(int, item.example.loss_mask)) for item in examples]).ids.to(device) > 0
    in_data = torch.tensor([item.writer != "student" for item in examples], device=device)[:, None].expand_as(mask)[mask]
    with torch.no_grad():
        teacher_logits, teacher_states = teacher(prompt, response, mask)
    logits, states = model(prompt, response, mask)
    ce = soft_cross_entropy(logits, teacher_logits, weights.temperature)
    nll = -log_probs_of(logits, response.ids[mask])[in_data]
    distances = cosine_distance(states, teacher_states) if weights.cosine else ce.new_zeros(0)
    tokens = sum(sum(item.example.loss_mask) for item in batch)
    learned = sum(sum(item.example.loss_mask) for item in batch if item.writer != "student")
    return distillation_loss(ce, nll, distances, (tokens, learned), weights), {
        "ce": ce.detach().sum(),
        "entropy": entropy_of(teacher_logits, weights.temperature).sum(),
        "lm": nll.detach().sum(),
        "cosine": distances.detach().sum(),
        "tokens": mask.sum(),
        "learned": in_data.sum(),
    }


def loss_parts(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the three losses as means over their tokens, and KL(teacher || student), from sums over the global batch."""
    tokens = max(1.0, sums["tokens"])
    return {
        "loss/ce": sums["ce"] / tokens,
        "loss/lm": sums["lm"] / max(1.0, sums["learned"]),
        "loss/cosine": sums["cosine"] / tokens,
        "kl": (sums["ce"] - sums["entropy"]) / tokens,
    }


def token_counts(batch: Sequence[WrittenExample]) -> list[int]:
    """Return the tokens of prompt and response of each example."""
    return [len(item.example.prompt) + len(item.example.response) for item in batch]


def example_flops(student: FlopsProfile, teacher: FlopsProfile, item: WrittenExample) -> float:
    """Return the FLOPs of sampling an example, of the teacher's pass and of the student's update."""
    example = item.example
    lengths = len(example.prompt), [len(example.response)], sum(example.loss_mask)
    total = training_flops(student, *lengths) + forward_flops(teacher, *lengths)
    if item.writer == "data":
        return total
    return total + sampling_flops(student if item.writer == "student" else teacher, *lengths[:2])


@torch.no_grad()
def evaluate(
    engine: TrainEngine, teacher: nn.Module, held_out: list[WrittenExample], weights: LossWeights, budget: int
) -> dict[str, float]:
    """Return the losses on held-out demonstrations, equal on every process; nothing without any."""
    if not held_out:
        return {}
    accelerator, sums = engine.accelerator, dict[str, Tensor]()
    total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    for part in micro_batches(range(len(held_out)), token_counts(held_out), budget, accelerator):
        examples = [held_out[row] for row in part.rows]
        _, sums = batch_loss(engine.module, teacher, examples, examples, weights, accelerator.device)
        total = total + part.loss_weight * torch.stack(list(sums.values())).double()
    parts = loss_parts(dict(zip(sums, sum_across_processes(total, accelerator).tolist(), strict=True)))
    loss = weights.ce * weights.temperature**2 * parts["loss/ce"] + weights.lm * parts["loss/lm"]
    parts["loss"] = loss + weights.cosine * parts["loss/cosine"]
    return {f"validation/{name}": value for name, value in parts.items()}


def save(student: LoadedModel, teacher: LoadedModel, engine: TrainEngine, data: str, metrics: dict[str, float]) -> None:
    """Save the student as the run's result."""
    run = engine.run
    state = weights_of(student.backbone, engine.model_state())
    sizes = [parameter_count(each.backbone) for each in (student, teacher)]
    made = {"teacher": run.model_config.model, "parameters": f"{sizes[0]:,} of {sizes[1]:,}"}
    card = run.card("Distilled model", data, metrics, **made)
    run_on_main(lambda: save_model(run.folder / "model", student, state, card), run.accelerator)


def encode(
    data: Data, loaded: LoadedModel, limits: Limits, skip_bad_rows: bool, prompts_only: bool
) -> list[EncodedDemonstration]:
    """Return demonstrations as token ids; prompts alone have empty responses. Raises: see `encode_demonstrations`."""
    if not prompts_only:
        return encode_demonstrations(data, loaded, limits, skip_bad_rows)
    return [EncodedDemonstration(prompt.ids, [], []) for prompt in encode_prompts(data, loaded, limits, skip_bad_rows)]


def longest(config: DistillConfig, example: EncodedDemonstration) -> WrittenExample:
    """Return the example with the longest response that may be written for it."""
    length = config.max_response_tokens
    if len(example.response) < length and (config.all_written or config.on_policy_fraction):
        example = EncodedDemonstration(example.prompt, [0] * length, [True] * length)
    return WrittenExample(example, "data")


class DistillTrainer:
    """Distillation of a teacher into a student.

        config = DistillConfig(output_dir="runs/student", max_response_tokens=64)
        folder = DistillTrainer("runs/ppo/model", [{"prompt": "Hi", "completion": "Hello!"}], config).train()

    Arguments are those of `SFTTrainer`; the teacher has no adapter. DeepSpeed is refused.
    """

    def __init__(
        self,
        teacher: Model,
        train_data: TrainingData,
        config: DistillConfig,
        validation_data: Data = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.config = config = with_data_names(config, train_data=train_data, validation_data=validation_data)
        source = ModelSource(teacher, tokenizer)
        self.run = run = Run(source.settings(config), "distill")
        self.teacher = loaded = source.load(run, is_trained=False)
        if run.accelerator.state.deepspeed_plugin is not None:
            raise UserError("align distill runs without DeepSpeed: launch it with configs/accelerate/ddp.yaml")
        if loaded.adapter:
            raise UserError("a teacher in memory must have no adapter: merge it, or give its folder")
        self.loaded = make_student(loaded, config.student, config.keep_every_nth_layer, config.cosine_weight > 0, config)
        run_on_main(lambda: require_savable(self.loaded), run.accelerator)
        read = partial(encode, loaded=loaded, limits=config.limits, skip_bad_rows=config.skip_bad_rows)
        mixed = encode_mixture(train_data, partial(read, prompts_only=config.all_written), config.task_prefixes)
        held_out = read(validation_data, prompts_only=False) if is_given(validation_data) else []
        self.held_out = [WrittenExample(example, "data") for example in held_out]
        small, large = (parameter_count(each.backbone) / 1e6 for each in (self.loaded, loaded))
        run.print(
            f"distill: {counted(len(mixed.examples), 'example')} to learn from, {len(held_out)} held out; "
            f"teacher {run.model_config.model}\n"
            f"student of {small:.1f} million parameters, {small / large:.0%} of the teacher's {large:.1f}"
        )
        place_frozen_model(loaded.backbone, run.accelerator)
        module = Predictor(self.loaded.backbone)
        self.order = DataOrder(mixed, config.seed, config.batch_size, config.mixing_cap, config.mixing_temperature)
        run.print(run.memory.check(module, [loaded.backbone]))
        self.engine = build_engine(run, module, self.order.updates(config.num_train_epochs))

    def train(self) -> Path:
        """Train from the last checkpoint on; return the folder of the best student."""
        if self.config.dry_run:
            return EpochLoop(self.engine, self.order, self.config.eval_steps).end_dry_run()
        return train(self.config, self.teacher, self.loaded, self.engine, self.order, self.held_out)


def run_distill(config: DistillConfig) -> Path:
    """Distill `config.model` into a student on `config.train_data`; return the folder of the best student."""
    return DistillTrainer(config.model, config.train_data, config, config.validation_data).train()


if __name__ == "__main__":
    run_stage(DistillConfig, run_distill)
