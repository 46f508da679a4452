"""Reward modelling: a scalar head learns to put responses in the order in which labelers ranked them."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from align.batching import over_rows
from align.data.records import Demonstration, Ranking
from align.encoding import Fit, Limits, encode
from align.files import write_json
from align.flops import learning
from align.models.backbone import Backbone
from align.models.checkpoint import weights_of
from align.models.heads import ScalarHead
from align.models.loading import Loaded, load
from align.models.roles import RewardModel
from align.rehearsal import Reading, Rows, pass_bytes
from align.reward.checkpoint import is_reward_model, load_head, save_reward_model
from align.reward.config import RewardConfig
from align.reward.loss import centring_loss, pairs_of, ranking_loss
from align.reward.metrics import Scored, summarize
from align.run import Run
from align.supervised import LOOKED_AHEAD, largest_batch, rows_of, train
from align.tensor_ops import Padded
from align.training import Optimisation, Sums, make_optimisation


@dataclass(frozen=True, slots=True)
class Item:
    """A ranking as token ids."""

    prompt: list[int]
    responses: list[list[int]]
    ranks: list[int]
    margin: float = 0.0
    category: str | None = None


def run_reward(config: RewardConfig) -> Path:
    """Train a reward model on rankings; gives the folder of the best model.

    Raises:
        UserError: for anything that the settings or the data have wrong.
    """
    run = Run(config, "reward")
    run.memory.foresee(config)
    loaded = load(config, run.dtype, adapter="reward", may_be_classifier=True)
    loaded.backbone.require_classifier()
    limits = Limits(config.max_prompt_tokens, config.max_response_tokens, config.overlong)
    items, held_out = (
        encode_rankings(loaded, source, limits, config.skip_bad_rows) if source else []
        for source in (config.train_data, config.validation_data)
    )
    demonstrations = encode_demonstrations(config, loaded) if config.demonstrations else []
    run.say(f"reward: {len(items)} rankings to learn from, {len(held_out)} held out; model {config.model}")
    hidden_size = loaded.backbone.hidden_size
    going_on = is_reward_model(config.model)
    head = load_head(config.model, hidden_size)[0] if going_on else ScalarHead(hidden_size, bias=False)
    _freeze_unused(loaded)
    updates_an_epoch = math.ceil(len(items) / config.batch_size)
    model = RewardModel(loaded.backbone, head, loaded.adapter)
    check_memory(run, config, model, items, held_out)
    optimisation = make_optimisation(run, model, config.epochs * updates_an_epoch)
    task = RewardTask(run, config, loaded, optimisation, items, held_out, demonstrations)
    train(run, optimisation, task, config.batch_size, updates_an_epoch, config.evaluate_every)
    run.close()
    return task.folder


def _freeze_unused(loaded: Loaded) -> None:
    """A vocabulary matrix of its own gets no gradient from a reward: leave it out of the optimiser."""
    model = loaded.backbone.model
    out, into = model.get_output_embeddings(), model.get_input_embeddings()
    if out is not None and out.weight is not into.weight:
        out.requires_grad_(False)


def encode_rankings(loaded: Loaded, source: str, limits: Limits, skip_bad_rows: bool) -> list[Item]:
    """Read rankings and turn them into token ids.

    Raises:
        UserError: if a record is beyond the limits (see `overlong`) or beyond what the model can read.
    """
    tokenization = loaded.tokenization

    def make(record: Ranking, fit: Fit) -> Iterable[Item]:
        prompt = tokenization.prompt_ids(record.prompt)
        kept = [fit(prompt, tokenization.response_ids(text)) for text in record.responses]
        whole = [pair for pair in kept if pair is not None]
        if len(whole) == len(kept):
            responses = [response for _, response in whole]
            yield Item(whole[0][0], responses, list(record.ranks), record.margin or 0.0, record.category)

    return encode(source, Ranking, loaded, limits, skip_bad_rows, make)


def encode_demonstrations(config: RewardConfig, loaded: Loaded) -> list[Item]:
    """Demonstrations as rankings of one: prompts with the response that a person wrote, for the mean reward."""

    def make(record: Demonstration, fit: Fit) -> Iterable[Item]:
        turn = loaded.tokenization.turns(record, one_row=False)[-1]
        kept = fit(turn.prompt, turn.response)
        assert kept is not None
        yield Item(kept[0], [kept[1]], [1])

    limits = Limits(config.max_prompt_tokens, config.max_response_tokens, "truncate")
    return encode(config.demonstrations, Demonstration, loaded, limits, config.skip_bad_rows, make)


def check_memory(run: Run, config: RewardConfig, model: RewardModel, items: list[Item], held_out: list[Item]) -> None:
    """Tell how much memory the run will need.

    Raises:
        UserError: if that is more than there is.
    """
    readings = [Reading(model.backbone, model.adapter_name, predicts=False)]

    def size(some: list[Item], rows: list[int]) -> Rows:
        return Rows.of([(len(some[row].prompt), [len(ids) for ids in some[row].responses]) for row in rows])

    def costs(some: list[Item], rows: list[int]) -> list[int]:
        return costs_of(model.backbone, [some[row] for row in rows])

    updates = range(1, min(LOOKED_AHEAD, math.ceil(len(items) / config.batch_size)) + 1)
    batches = (rows_of(run, len(items), config.batch_size, update) for update in updates)
    rows, several = largest_batch(run, ((rows, costs(items, rows)) for rows in batches))
    phases = {"learning": lambda: pass_bytes(readings, size(items, rows), learn=True)}
    if held_out:
        every = list(range(len(held_out)))
        most, _ = largest_batch(run, [(every, costs(held_out, every))])
        phases["validation"] = lambda: pass_bytes(readings, size(held_out, most), learn=False)
    run.say(run.memory.check(config, model, [], phases, several))


def costs_of(backbone: Backbone, items: Sequence[Item]) -> list[int]:
    """Tokens that each item holds in memory."""
    return [backbone.row_tokens(len(item.prompt), [len(response) for response in item.responses]) for item in items]


def rewards_of(module: Callable[..., Tensor], items: Sequence[Item], device: torch.device) -> Tensor:
    """Rewards [R] of the responses of several items, one after another; each prompt is read once where it can be."""
    flat = [response for item in items for response in item.responses]
    owner = torch.tensor([i for i, item in enumerate(items) for _ in item.responses], device=device)
    return module(Padded.from_lists([item.prompt for item in items]).to(device), Padded.from_lists(flat).to(device), owner)


class RewardTask:
    """Examples, loss and evaluation of the reward model, as `align.supervised.train` asks for them."""

    evaluates_start = False

    def __init__(
        self,
        run: Run,
        config: RewardConfig,
        loaded: Loaded,
        optimisation: Optimisation,
        items: list[Item],
        held_out: list[Item],
        demonstrations: list[Item],
    ) -> None:
        self.run, self.config, self.loaded, self.optimisation = run, config, loaded, optimisation
        self.items, self.held_out, self.demonstrations = items, held_out, demonstrations
        self.lengths = costs_of(loaded.backbone, items)
        self.shape = loaded.backbone.shape(loaded.adapter)
        self.folder = run.folder / "model"
        self.scored: list[Scored] = []

    def loss(self, rows: list[int]) -> Callable[[list[int]], tuple[Tensor, Sums]]:
        def of(part: list[int]) -> tuple[Tensor, Sums]:
            items = [self.items[row] for row in part]
            rewards = rewards_of(self.optimisation.module, items, self.run.accelerator.device)
            pairs = pairs_of([item.ranks for item in items], [item.margin for item in items])
            pairs = type(pairs)(*(column.to(rewards.device) for column in pairs))
            loss = ranking_loss(rewards, pairs)
            sums = {"ranking_loss": loss / len(rows)}
            if self.config.centring_weight:
                loss = loss + self.config.centring_weight * centring_loss(rewards, pairs)
            right = (rewards[pairs.better] > rewards[pairs.worse]).float()
            sums |= {"accuracy": (pairs.weight * right).sum() / len(rows), "reward_sum": rewards.sum()}
            sums |= {
                "responses": torch.full_like(loss, len(rewards)),
                "read": torch.full_like(loss, sum(costs_of(self.loaded.backbone, items))),
                "flops": torch.tensor(sum(self._flops(item) for item in items), dtype=torch.float64, device=loss.device),
            }
            return loss / len(rows), sums

        return of

    def _flops(self, item: Item) -> float:
        lengths = [len(response) for response in item.responses]
        if self.loaded.backbone.shares_prompts:
            return learning(self.shape, len(item.prompt), lengths)
        return sum(learning(self.shape, len(item.prompt), [length]) for length in lengths)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {
            "loss": sums["loss"],
            "ranking_loss": sums["ranking_loss"],
            "accuracy": sums["accuracy"],
            "reward/mean": sums["reward_sum"] / sums["responses"],
            "tokens/read": sums["read"],
        }

    @torch.no_grad()
    def _rewards(self, items: Sequence[Item]) -> list[list[float]]:
        """Rewards of each item's responses, on every process."""

        def work(rows: list[int]) -> list[list[float]]:
            part = [items[row] for row in rows]
            flat = iter(rewards_of(self.optimisation.module, part, self.run.accelerator.device).tolist())
            return [[next(flat) for _ in item.responses] for item in part]

        return over_rows(costs_of(self.loaded.backbone, items), self.config.micro_batch_tokens, self.run.accelerator, work)

    def evaluate(self) -> dict[str, float]:
        if not self.held_out:
            return {}
        self.scored = self._scored()
        figures = summarize(self.scored)
        return {f"validation/{name}": value for name, value in figures.items()}

    def _scored(self) -> list[Scored]:
        rewards = self._rewards(self.held_out)
        return [
            Scored(tuple(item.ranks), tuple(row), tuple(len(response) for response in item.responses), item.category)
            for item, row in zip(self.held_out, rewards, strict=True)
        ]

    def save(self, figures: dict[str, float]) -> None:
        mean = 0.0
        if self.demonstrations:
            rewards = self._rewards(self.demonstrations)
            mean = sum(row[0] for row in rewards) / len(rewards)
        state = self.optimisation.model_state()
        if self.run.is_main:
            weights = weights_of(self.loaded.backbone, state, "backbone.model.")
            card = {"title": "Reward model", "stage": "reward", "data": self.config.train_data, "mean": f"{mean:.4g}"}
            card |= {name: f"{value:.4g}" for name, value in figures.items()}
            rows = [
                {"ranks": s.ranks, "rewards": s.rewards, "lengths": s.lengths, "category": s.category} for s in self.scored
            ]
            write_json(self.run.folder / "validation.json", rows)
            facts = {"mean": mean, "mean_over": len(self.demonstrations), "base": self.loaded.base}
            save_reward_model(self.folder, self.loaded, weights, state["head.linear.weight"], facts, card)
        self.run.accelerator.wait_for_everyone()

    def describe(self, rows: list[int]) -> list[dict[str, object]]:
        text = self.loaded.tokenization.text
        return [
            {
                "prompt": text(self.items[r].prompt),
                "responses": [text(ids) for ids in self.items[r].responses],
                "ranks": self.items[r].ranks,
            }
            for r in rows
        ]
