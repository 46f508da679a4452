"""An update of every architecture of docs/models.md, in the processes that a launcher started: test_every_stage.py.

Usage: one_step.py FOLDER [NAME...]: of each, `NAME.RANK.safetensors` has what a frozen copy says of the rows that a process
reads, and on the main process all weights after the update; or `NAME.txt` the error. Language models learn responses,
encoders a reward.
"""

import copy
import gc
import sys
import time
import traceback
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from align.batches.micro_batches import MicroBatch
from align.model_registry.tiny import byte_tokenizer
from align.models.heads import LanguageModel, RewardModel, ScalarHead
from align.models.loading import from_objects
from align.ppo.actor_critic import copy_backbone
from align.reward import RewardConfig
from align.reward.loss import pairs_of, ranking_loss
from align.reward.rankings import pack_rankings
from align.runtime.sharding import place_frozen_model
from align.tokenization.encoded import EncodedRanking
from align.training.run import Run
from align.training.setup import build_engine
from tests.models.architectures import ARCHITECTURES, make_model
from tests.models.encoders import CONFIGS, make_classifier, pair_tokenizer
from tests.settings import run_settings
from tests.training.toy_modules import accumulate

# Two processes read two each. Tokens differ, so that processes send theirs to other experts.
ROWS = [
    EncodedRanking([2, *range(9 + 20 * row, 15 + 20 * row), 1], [[30 + row, 40, 7 * row + 9, 1], [50, 60 + row, 1]], [1, 2])
    for row in range(4)
]


def role_of(name: str, config: RewardConfig) -> nn.Module:
    """What is trained of an architecture."""
    if name in CONFIGS:
        backbone = from_objects(make_classifier(name), pair_tokenizer(name), config, "reward").backbone
        return RewardModel(backbone, ScalarHead(backbone.hidden_size, bias=False))
    model = make_model(name)
    return LanguageModel(from_objects(model, byte_tokenizer(model.config.is_encoder_decoder), config).backbone)


def copy_of(role: nn.Module) -> nn.Module:
    """A frozen role, as the reference or a reward model are."""
    copied = copy_backbone(role.backbone)
    return RewardModel(copied, copy.deepcopy(role.head)) if isinstance(role, RewardModel) else LanguageModel(copied)


def one_step(name: str, folder: Path) -> tuple[dict[str, Tensor], int]:
    """What is written of an architecture, and the process's rank."""
    # A large epsilon: without it Adam's first step is the gradient's sign, also of what rounding alone moved.
    settings = run_settings(lr_scheduler_type="constant", warmup_ratio=0.0, adam_epsilon=1e-2)
    config = RewardConfig(**settings, learning_rate=1e-2, output_dir=str(folder / "runs" / name), model=name)
    run = Run(config, "reward")
    torch.manual_seed(3)
    role = role_of(name, config)
    names, is_judge, frozen = [name for name, _ in role.named_parameters()], isinstance(role, RewardModel), copy_of(role)
    engine = build_engine(run, role, 1)
    frozen = place_frozen_model(frozen, run.accelerator)

    def outputs(module: nn.Module, rows: list[int]) -> Tensor:
        inputs = pack_rankings([ROWS[row] for row in rows], run.accelerator.device)
        of_policy = () if is_judge else (None, 1.0)
        return module(inputs.prompt, inputs.response, *of_policy, inputs.prompt_of_response)

    def loss(rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        predicted = outputs(engine.module, rows)
        pairs = pairs_of([ROWS[row].ranks for row in rows])
        return (ranking_loss(predicted, pairs) if is_judge else -predicted.sum()) / len(ROWS), {}

    own = range(run.accelerator.process_index, len(ROWS), run.accelerator.num_processes)
    with torch.no_grad():
        found = {f"output {row}": outputs(frozen, [row]).float().clone() for row in own}
    accumulate(engine, [MicroBatch([[row]]) for row in own], loss)
    engine.step(1)
    state = engine.model_state()
    found |= {name: state[name].detach().float().clone() for name in names if name in state}
    return found, run.accelerator.process_index


def main(folder: Path, names: list[str]) -> None:
    """All architectures, one after another."""
    for name in names:
        begun, error = time.monotonic(), ""
        try:
            found, rank = one_step(name, folder)
            save_file(found, folder / f"{name}.{rank}.safetensors")
        except Exception:
            error = traceback.format_exc()
            (folder / f"{name}.txt").write_text(error)
        gc.collect()
        print(f"{name}: {time.monotonic() - begun:.1f} s {error[-300:]}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or [*ARCHITECTURES, *CONFIGS])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
