"""Settings of `align plan`."""

import math
from dataclasses import dataclass, fields

from align.commands.plan.devices import DEVICES
from align.core.settings import Settings, option, require_setting


@dataclass(kw_only=True)
class PlanConfig(Settings):
    """What training needs, before it starts: model size for a compute budget, hours and memory of each stage."""

    flops: float = option(0.0, "compute budget in FLOPs: prints the best model size and number of tokens for it; 0: none")
    fit: str = option(
        "",
        "file of runs (rows of parameters, tokens, loss) to fit a scaling law to, which then allocates flops; empty: none",
    )
    model: str = option(
        "", "model of every stage, instead of the one in its settings; only its config and tokenizer are read"
    )
    parameters: float = option(0.0, "for tokens: number of parameters, if there is no model to read; 0: those of model")
    tokens: float = option(0.0, "tokens of a training that has no settings file, such as pretraining; 0: none")
    sft: str = option("", "settings of fine-tuning to plan (configs/sft/x.yaml, or config.yaml of a run); empty: none")
    reward: str = option("", "settings of a reward model to plan; empty: none")
    ppo: str = option("", "settings of PPO to plan; empty: none")
    response_tokens: int = option(
        0,
        "tokens of a sampled response, on average; 0: max_new_tokens, or the share of it that a run of PPO in measured had",
    )
    gpu: str = option("A100-80", f"device: {', '.join(DEVICES)}, or cpu (this machine's processor, whose peak is measured)")
    gpus: int = option(1, "number of devices")
    mfu: float = option(
        0.4,
        "share of the devices' peak that is reached (PaLM: 0.462, table 3 there); small models and batches reach less",
    )
    tokens_per_second: float = option(0.0, "for tokens: measured speed of one device, instead of mfu; 0: by mfu")
    measured: list[str] = option(
        [],
        "runs on the same devices: their FLOP/s is used instead of mfu; a stage's own run if there is one",
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float):
                require_setting(self, item.name, 0 <= value < math.inf, "0 or more, and finite")
        require_setting(self, "gpu", self.gpu in (*DEVICES, "cpu"), f"one of {', '.join(DEVICES)}, cpu")
        require_setting(self, "gpus", self.gpus > 0, "above 0")
        require_setting(self, "mfu", 0 < self.mfu <= 1, "above 0 and at most 1")
        known = bool(self.tokens) <= bool(self.model or self.parameters)
        require_setting(self, "tokens", known, "0 unless model or parameters is given")
