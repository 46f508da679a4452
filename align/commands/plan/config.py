"""Settings of `align plan`."""

import math
from dataclasses import dataclass, fields

from align.commands.plan.hardware import DEVICES
from align.settings import Settings, option, require_setting


@dataclass(kw_only=True)
class PlanConfig(Settings):
    """What training will need, before it starts: model size for a compute budget, hours, energy, cost and memory."""

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
    update_tokens: float = option(
        0.0,
        "tokens of an update, over all devices: prints communication of 8 to 1,024 devices relative to their "
        "computation, training all weights of model or parameters; 0: none",
    )
    micro_batch_tokens: int = option(16384, "for update_tokens: tokens per micro-batch and device")
    gbits: float = option(
        0.0, "for update_tokens: Gbit/s between machines for each device; 0: NVIDIA's DGX, and 12.5 for devices on PCIe"
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
    price: float = option(0.0, "price of a device for an hour; 0: no cost is shown")
    watts: float = option(0.0, "power of a device; 0: the maximum in its datasheet")
    pue: float = option(1.1, "power of the data center for each watt of its devices (LLaMA, section 6: 1.1)")
    carbon: float = option(0.385, "kg of CO2 for a kWh (LLaMA, section 6: 0.385, the mean of the US)")

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float):
                require_setting(self, item.name, 0 <= value < math.inf, "0 or more, and finite")
        require_setting(self, "gpu", self.gpu in (*DEVICES, "cpu"), f"one of {', '.join(DEVICES)}, cpu")
        require_setting(self, "gpus", self.gpus > 0, "above 0")
        require_setting(self, "mfu", 0 < self.mfu <= 1, "above 0 and at most 1")
        require_setting(self, "pue", self.pue >= 1, "1 or more")
        for name in ("tokens", "update_tokens"):
            known = bool(getattr(self, name)) <= bool(self.model or self.parameters)
            require_setting(self, name, known, "0 unless model or parameters is given")
        require_setting(self, "micro_batch_tokens", self.micro_batch_tokens > 0, "above 0")
        on_gpus = not self.update_tokens or self.gpu != "cpu"
        require_setting(self, "update_tokens", on_gpus, "0 with gpu cpu: its network speed is not known")
