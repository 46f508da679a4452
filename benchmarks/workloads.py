"""Shapes and models of each work to measure. Plain Python, because both sides import this."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Stage = Literal["ppo", "learning", "reward", "sft", "sampling", "race"]

PPO_EPOCHS = 4
LEARNING_RATE = 3e-6
LORA_RANK = 16
# Learning rates that each side tries in the race.
RACE_RATES = ("3e-3", "1e-2", "3e-2")
RACE_UPDATES = 100
RACE_TARGET = 0.8
# At 0.05, the KL penalty would outweigh the reward long before the target, which requires at least 22 nats.
RACE_KL_BETA = 0.01


@dataclass(frozen=True)
class Work:
    """A work that both sides do.

    Attributes:
        stage: stage to run. `learning` is PPO on the examples' responses, without sampling. Its time is that of `train_on`.
        rows: number of rows per step: responses of a rollout, rankings, demonstrations, or rows sampled at once.
        prompt: minimum and maximum prompt length in tokens.
        response: minimum and maximum response length in tokens, including the end token.
        responses: number of responses per prompt, K of a ranking.
        warmup: number of steps before the measurement.
        measured: number of measured steps.
        settings: our settings in addition to the shape.
        ours: our variants. The first pair tries all of them, and later pairs repeat the best. In PPO, a number is the value
            of `micro_batch_tokens`.
        peer: variants of the peer. If empty, only ours is measured.
        compared_with: name of the work whose peer runs are used for comparison. Default: this work.
        pairs_read: number of pairs of a ranking in the peer's measured steps. The time is scaled to all pairs. Default: all.
        gpu_models: models for works that run only on a GPU, whose sizes are not scaled: the model and, in PPO, the model of
            reward and values.
        peer_rows: rows per micro-batch in the peer's PPO or SFT. Default: the fastest number on a CPU.
    """

    name: str
    title: str
    stage: Stage
    rows: int
    prompt: tuple[int, int]
    response: tuple[int, int]
    responses: int = 1
    warmup: int = 1
    measured: int = 2
    settings: dict[str, Any] = field(default_factory=dict)
    ours: tuple[str, ...] = ("auto",)
    peer: tuple[str, ...] = ("float32", "bfloat16")
    compared_with: str = ""
    pairs_read: int = 0
    gpu_models: tuple[str, ...] = ()
    peer_rows: int = 0

    @property
    def model_folder(self) -> str:
        """Name of the model's folder in the data folder."""
        return self.gpu_models[0] if self.gpu_models else "race" if self.stage == "race" else "model"

    @property
    def reward_folder(self) -> str:
        """Name of the folder of PPO's reward model."""
        if self.gpu_models:
            return f"reward-{self.gpu_models[1]}"
        return "reward_lora" if self.settings.get("lora_r") else "reward"

    @property
    def peer_environment(self) -> str:
        """Name of the peer's environment."""
        return "ppo" if self.stage in ("ppo", "race") else "supervised"

    @property
    def pairs(self) -> int:
        """Number of pairs of a ranking without ties."""
        return self.responses * (self.responses - 1) // 2

    @property
    def unit(self) -> str:
        """Unit of the values in the table."""
        units = {"ppo": "s an update", "reward": "s a ranking", "race": "s to the target"}
        return units.get(self.stage, "tokens/s")


@dataclass(frozen=True)
class Scale:
    """A model, and factors by which the shapes are scaled.

    Attributes:
        model: built-in model, or shape of `benchmarks.data` with random weights.
        rows: factor of `Work.rows`.
        tokens: factor of all lengths.
        settings: our training settings, which override those of a work.
        peer: number formats that the peer tries.
    """

    model: str
    rows: float = 1.0
    tokens: float = 1.0
    settings: dict[str, Any] = field(default_factory=dict)
    peer: tuple[str, ...] = ("float32", "bfloat16")


SCALES = {
    "cpu": Scale("smollm2-135m"),
    # Micro-batches for tens of GB of memory.
    "gpu": Scale("llama-1b", 4.0, 4.0, {"micro_batch_tokens": 8192}, peer=("bfloat16",)),
    "tiny": Scale("tiny-llama", rows=1 / 8, tokens=1 / 8),
}

_PPO = Work(
    "ppo",
    "PPO update: 32 prompts of 32 tokens, 32 new tokens each, 4 epochs, all weights",
    "ppo",
    rows=32,
    prompt=(32, 32),
    response=(32, 32),
    warmup=0,  # an update of the peer takes minutes on a CPU; the same for both sides
    measured=1,
)
_LEARNING = Work(
    "rl_16k",
    "RL update of Qwen3-0.6B from two given responses, rows of 16,384 tokens: learning",
    "learning",
    rows=2,
    prompt=(64, 64),
    response=(16320, 16320),
    settings={"advantage_estimator": "rloo", "samples_per_prompt": 2, "num_ppo_epochs": 1, "micro_batch_tokens": 16384},
    peer=(),
    gpu_models=("qwen3-0.6b",),
)
_RANKING = Work("reward_k4", "ranking of K=4, prompt and responses of 64 tokens", "reward", 1, (64, 64), (64, 64), 4)

WORKS = (
    _PPO,
    replace(
        _PPO,
        name="ppo_separate",
        title="the same, the critic a model of its own",
        settings={"critic": "separate"},
        compared_with="ppo",
    ),
    replace(
        _PPO,
        name="ppo_lora",
        title="the same with LoRA, micro-batches of 512 tokens",
        settings={"lora_r": LORA_RANK, "micro_batch_tokens": 512},
        compared_with="ppo",
    ),
    replace(
        _PPO,
        name="ppo_opt",
        title="PPO as DeepSpeed-Chat's: OPT-1.3B, rewards and values by OPT-350M, 128 prompts of 256 tokens, 256 new",
        rows=128,
        prompt=(256, 256),
        response=(256, 256),
        warmup=1,
        settings={"critic": "separate", "num_ppo_epochs": 1, "num_mini_batches": 1, "micro_batch_tokens": 16384},
        peer=("bfloat16",),
        gpu_models=("opt-1.3b", "opt-350m"),
        peer_rows=8,
    ),
    replace(_RANKING, rows=2),
    replace(
        _RANKING,
        name="reward_k9",
        title="ranking of K=9, prompt and responses of 64 tokens",
        responses=9,
        measured=1,
        pairs_read=12,
    ),
    replace(
        _RANKING,
        name="reward_long",
        title="ranking of K=9, prompt of 512 tokens, responses of 64",
        prompt=(512, 512),
        responses=9,
        measured=1,
        pairs_read=3,
    ),
    Work("sft", "SFT, prompts of 8-64 tokens, completions of 8-192", "sft", 16, (8, 64), (8, 192)),
    Work(
        "sft_8k",
        "SFT of Qwen3-0.6B, rows of 8,192 tokens",
        "sft",
        8,
        (64, 64),
        (8128, 8128),
        warmup=2,
        settings={"micro_batch_tokens": 8192},
        peer=("bfloat16",),
        gpu_models=("qwen3-0.6b",),
        peer_rows=1,
    ),
    _LEARNING,
    replace(
        _LEARNING,
        name="rl_lora_4b",
        title="the same of Qwen3-4B with LoRA, activations recomputed",
        settings=_LEARNING.settings | {"lora_r": LORA_RANK, "gradient_checkpointing": True},
        gpu_models=("qwen3-4b",),
    ),
    Work("sampling_32", "sampling, 32 rows, 32 new tokens", "sampling", 32, (32, 32), (32, 32)),
    Work("sampling_128", "sampling, 128 rows, 32 new tokens", "sampling", 128, (32, 32), (32, 32)),
    Work(
        "time_to_reward",
        f"time to {RACE_TARGET:.0%} of a known optimum, tiny model",
        "race",
        64,
        (8, 8),
        (16, 16),
        ours=RACE_RATES,
        peer=RACE_RATES,
    ),
)

ALL = {work.name: work for work in WORKS}


def works_of(scale: str) -> list[str]:
    """Return the names of the works at a scale."""
    return [work.name for work in WORKS if scale == "gpu" or not work.gpu_models]


def scaled(work: Work, scale: Scale) -> Work:
    """Scale the rows and tokens of a work. The race and GPU-only works are not scaled."""
    if work.stage == "race" or work.gpu_models:
        return work

    def tokens(span: tuple[int, int]) -> tuple[int, int]:
        return max(2, round(span[0] * scale.tokens)), max(2, round(span[1] * scale.tokens))

    rows = max(1, round(work.rows * scale.rows))
    settings = work.settings | scale.settings
    spans = {"prompt": tokens(work.prompt), "response": tokens(work.response)}
    formats = tuple(each for each in work.peer if each in scale.peer)
    return replace(work, rows=rows, settings=settings, peer=formats, **spans)
