"""The reward models under evaluation: the one that chooses, called the proxy, and where there is one, the gold model."""

from dataclasses import dataclass

from align.builtin.zoo import resolve_model
from align.eval.core.evaluated_models import short_names
from align.eval.core.fingerprints import fingerprint
from align.eval.reward.settings import RewardEvalConfig
from align.reward.checkpoint import LoadedReward, load_reward_model


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
