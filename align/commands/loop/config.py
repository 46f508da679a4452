"""Settings of `align loop`, and its file of finished steps."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from align.core.errors import UserError
from align.core.files import write_json
from align.core.settings import Settings, option, require_setting
from align.data.records import MAX_RESPONSES
from align.runtime.environment import console

CHANGEABLE_SETTINGS = ("rounds", "poll_seconds")
"""Settings that may differ when a loop is resumed."""


@dataclass(kw_only=True)
class LoopConfig(Settings):
    """Rounds of sampling, labeling, reward modeling and PPO (InstructGPT, section 3.1; Bai et al. 2022, section 4.5)."""

    model: str = option("", "fine-tuned model that every round's policy starts from", required=True)
    output_dir: str = option("runs/loop", "folder of the rounds, their runs and loop.json")
    seed: int = option(
        0, "seed of all random numbers; the same seed and the same labels give the same result", ge=0, lt=2**31
    )
    rounds: int = option(2, "number of rounds; raise it to continue a finished loop", gt=0)
    reward_config: str = option("", "settings of `align reward` for every round: a YAML file", required=True)
    ppo_config: str = option("", "settings of `align ppo` for every round: a YAML file", required=True)

    prompts: str = option("data/prompts.jsonl", "prompts to collect labels on; each is used in at most one round")
    prompts_per_round: int = option(200, "prompts that are labeled in a round", gt=0)
    disputed_share: float = option(
        0.5,
        "share of a round's prompts that is chosen because the reward models disagree on their answers (Christiano et al. "
        "2017, section 2.2.4); the others are drawn at random. Counts from round 2 on and with reward_models above 1",
        ge=0,
        lt=1,
    )
    temperatures: list[float] = option([0.7, 1.0], "each model answers each prompt at each of these", ge=0, required=True)
    samples: int = option(2, "answers to each prompt by each model at each temperature", gt=0)
    max_new_tokens: int = option(64, "longest answer, in tokens", gt=0)

    labeler: str = option(
        "app",
        "who ranks the answers: app (the labeling app), file (you put rankings into the round's folder), or a "
        "simulated labeler: module:function, a reward function as in `align ppo`, or a reward model's folder or name",
    )
    database: str = option("", "address of the labeling app's database; empty: that of `align annotate`")
    overlap: int = option(1, "labelers who rank each item in the app", gt=0)
    poll_seconds: float = option(0.0, "seconds between checks for labels; 0: check once, and exit if they are missing", ge=0)

    held_out_share: float = option(0.125, "share of a round's rankings that no reward model learns from", ge=0, lt=1)
    earlier_weight: float = option(1.0, "weight of a round's rankings relative to those of the next round", gt=0)
    more_rankings: str = option("", "more rankings for every reward model, named as in train_data; empty: none")
    reward_models: int = option(1, "reward models per round, with different seeds; PPO uses them as an ensemble", gt=0)
    evaluation_prompts: str = option(
        "data/prompts_heldout.jsonl", "prompts on which each policy is compared with the fine-tuned model"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("reward_config", "ppo_config"):
            require_setting(self, name, Path(getattr(self, name)).suffix in (".yaml", ".yml"), "a YAML file")
        different = len(set(self.temperatures)) == len(self.temperatures)
        require_setting(self, "temperatures", different, "different numbers")
        first, later = (self.samples * len(self.temperatures) * models for models in (1, 2))
        fits = first >= 2 and (later if self.rounds > 1 else first) <= MAX_RESPONSES
        now = f"with these temperatures it gets {first} to {later}"
        require_setting(self, "samples", fits, f"such that a prompt gets 2 to {MAX_RESPONSES} answers; {now}")


class LoopState:
    """The file `loop.json` in the loop's folder: the settings, and the finished steps with their results."""

    def __init__(self, config: LoopConfig) -> None:
        self.path = Path(config.output_dir) / "loop.json"
        self.steps: dict[str, dict[str, Any]] = {}
        self.settings = {name: value for name, value in asdict(config).items() if name not in CHANGEABLE_SETTINGS}
        if self.path.exists():
            self._read()

    def run_once(self, name: str, step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run a step, which must be safe to run again after a kill, unless it is finished; returns its results."""
        if name not in self.steps:
            started = time.monotonic()
            results = step()
            self.steps[name] = {**results, "seconds": round(time.monotonic() - started, 1)}
            write_json(self.path, {"settings": self.settings, "steps": self.steps})
            facts = ", ".join(f"{key} {value}" for key, value in self.steps[name].items())
            console.print(f"{name}: {facts}", highlight=False, markup=False, soft_wrap=True)
        return self.steps[name]

    def _read(self) -> None:
        try:
            read = json.loads(self.path.read_text(encoding="utf-8"))
            settings, self.steps = dict(read["settings"]), dict(read["steps"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path}: cannot be read; give another output_dir, or remove that folder") from error
        changed = [name for name, value in self.settings.items() if settings.get(name) != value]
        if changed:
            old = settings.get(changed[0])
            raise UserError(
                f"{self.path}: this loop began with {changed[0]} {old!r}, not {self.settings[changed[0]]!r}; "
                "give another output_dir, or the same settings"
            )
