"""Settings of rubrics, which several commands share."""

import math
from dataclasses import dataclass

from align.core.settings import Settings, option, require_setting


@dataclass(kw_only=True)
class RubricSettings(Settings):
    """Rubrics, and the frozen model that answers their questions."""

    rubrics: list[str] = option(
        [], "rubrics that a frozen model judges by: files as in forms/rubrics, or FILE=WEIGHT; empty: none"
    )
    rubric_model: str = option(
        "", "the model that answers the rubrics: a folder, hub name or built-in model; with rubric_service its name there"
    )
    rubric_service: str = option(
        "", "URL of an OpenAI-compatible service, the part before /chat/completions; empty: rubric_model is local"
    )
    rubric_timeout: float = option(60.0, "with a service: seconds per request")
    rubric_retries: int = option(3, "with a service: retries per request")
    rubric_parallel: int = option(4, "with a service: requests at the same time")

    def __post_init__(self) -> None:
        named = bool(self.rubric_model) or not self.rubrics
        require_setting(self, "rubric_model", named, "given: the rubrics need a judge")
        positive = 0 < self.rubric_timeout < math.inf
        require_setting(self, "rubric_timeout", positive, "above 0")
        require_setting(self, "rubric_retries", self.rubric_retries >= 0, "0 or more")
        require_setting(self, "rubric_parallel", self.rubric_parallel > 0, "above 0")
        next_check = getattr(super(), "__post_init__", None)
        if next_check is not None:
            next_check()
