"""The settings of `align eval reward`, and the reward models that they name."""

from dataclasses import dataclass

from align.builtin.zoo import resolve_model
from align.core.settings import option, require_setting
from align.eval.core.evaluated_models import short_names
from align.eval.core.fingerprints import fingerprint
from align.eval.core.settings import AnsweringTaskConfig
from align.reward.checkpoint import LoadedReward, load_reward_model


@dataclass(kw_only=True)
class RewardEvalConfig(AnsweringTaskConfig):
    """A reward model on preferences or a benchmark; with `models` best-of-n curves; with `frontier` reward against KL."""

    reward_model: str = option(
        "", "reward model to evaluate, which also chooses among answers: a folder or a run", required=True
    )
    gold_model: str = option("", "a second reward model, which is evaluated too but chooses nothing; empty: none")
    preferences: str = option("data/rankings_heldout.jsonl", "rankings or pairs that neither was trained on; empty: none")
    max_response_tokens: int = option(1024, "longest response among the preferences, in tokens", gt=0)
    benchmark: str = option("", "RewardBench or RewardBench 2, scored as they are: file, folder or hub name; empty: neither")
    benchmark_split: str = option("test", "split of a folder or hub name: RewardBench calls it filtered, RewardBench 2 test")
    samples: int = option(64, "answers sampled from each model per prompt; the largest n of the best-of-n curves", gt=1)
    frontier: str = option("", "folder of a PPO run with keep_policies: reward against KL over its policies; empty: none")

    @property
    def data_sources(self) -> dict[str, str]:
        prompts = self.prompts if self.models or self.frontier else ""
        sources = {"preferences": self.preferences, "benchmark": self.benchmark, "prompts": prompts}
        return {kind: source for kind, source in sources.items() if source}

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "gold_model", self.gold_model != self.reward_model, "another model than reward_model")
        given = bool(self.preferences or self.models or self.frontier or self.benchmark)
        require_setting(self, "preferences", given, "given, unless models, frontier or benchmark are")


@dataclass(frozen=True)
class NamedRewardModel:
    """A reward model with its short name and its fingerprint.

    Attributes:
        role: `reward` for the proxy, `gold` for the gold model; the name of its figures on curves.
    """

    name: str
    fingerprint: str
    role: str
    reward: LoadedReward

    @property
    def scorer(self) -> str:
        """The scorer's name in results."""
        return f"reward model {self.name} {self.fingerprint}"


def open_reward_models(config: RewardEvalConfig) -> list[NamedRewardModel]:
    """The proxy and, where there is one, the gold model.

    Raises:
        UserError: if one of them cannot be loaded.
    """
    models = [config.reward_model, *([config.gold_model] if config.gold_model else [])]
    folders = [str(resolve_model(model)) for model in models]
    return [
        NamedRewardModel(name, fingerprint(folder), role, load_reward_model(folder, config.dtype, config.chat_template))
        for name, folder, role in zip(short_names(models), folders, ("reward", "gold"), strict=False)
    ]
