"""The settings of `align eval winrate`."""

from dataclasses import dataclass

from align.core.errors import UserError
from align.core.settings import option
from align.eval.core.settings import AnsweringTaskConfig
from align.runtime.endpoint import EndpointConfig
from align.sampling.settings import BestOfSettings, PrimerSettings


@dataclass(kw_only=True)
class WinrateConfig(BestOfSettings, PrimerSettings, EndpointConfig, AnsweringTaskConfig):
    """Win rates between models. One of `comparisons`, `reward_model`, `judge` and `endpoint` decides."""

    comparisons: list[str] = option([], "files of blind comparisons that the labeling app exported: no model is opened")
    reward_model: str = option("", "a reward model decides; take one that no policy here was trained on")
    judge: str = option("", "module:function decides: prompts, first and second answers to the chance that the first wins")

    @property
    def data_sources(self) -> dict[str, str]:
        if self.comparisons:
            return {"comparisons": ", ".join(self.comparisons)}
        return super().data_sources

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [bool(way) for way in (self.comparisons, self.reward_model, self.judge, self.endpoint)]
        if sum(given) != 1:
            raise UserError("give one of comparisons, reward_model, judge and endpoint: it decides which answer is better")
