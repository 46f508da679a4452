"""A reward model with an adapter, drawn with another seed on each rank: writes its trainable weights before training.

Usage: same_start.py FOLDER: writes `drawn-RANK.safetensors` (before) and `RANK.safetensors` (under the engine).
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from align.models.heads import RewardModel, ScalarHead
from align.models.loading import load
from align.reward import RewardConfig
from align.training.run import Run
from align.training.start import build_engine

folder = Path(sys.argv[1])
config = RewardConfig(model="tiny-llama", lora_r=4, dtype="float32", report_to=["none"], output_dir=str(folder / "run"))
run = Run(config, "reward")
rank = run.accelerator.process_index
torch.manual_seed(rank)
loaded = load(config, torch.float32, adapter="reward")
model = RewardModel(loaded.backbone, ScalarHead(loaded.backbone.hidden_size), loaded.adapter)
drawn = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
save_file(drawn, folder / f"drawn-{rank}.safetensors")
trained = build_engine(run, model, total_steps=1).trainable
if run.accelerator.state.deepspeed_plugin is not None:
    from deepspeed.utils import safe_get_full_fp32_param

    trained = {name: safe_get_full_fp32_param(weight) for name, weight in trained.items()}  # gathered from both shards
save_file({name: weight.detach() for name, weight in trained.items()}, folder / f"{rank}.safetensors")
torch.distributed.destroy_process_group()
