"""Who ranks the answers of a round: people in the labeling app, a file from elsewhere, or a simulated labeler."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from align.commands.loop.config import LoopConfig
from align.commands.loop.rows import read_rows, write_rows
from align.core.errors import UserError
from align.data.records import Prompt, ranks_from_scores
from align.ppo.rewards import WeightedFunction, call_reward_function, load_functions
from align.reward.checkpoint import is_reward_model, load_reward_model
from align.reward.scoring import RewardService

BATCH_TOKENS = 8192


class Labeler(Protocol):
    """Ranks answers. Both methods may be called again after a kill, at any point."""

    def publish(self, name: str, samples: Path) -> None:
        """Make a round's answers (rows of `align sample`) available for ranking, under the round's name."""

    def collect(self, name: str, samples: Path, target: Path) -> str:
        """Write the rankings as rows to `target` if all are there; returns what is still missing, or ""."""


class AnswerScorer(Protocol):
    """Scores of a simulated labeler: one number for each response, higher is better."""

    def __call__(self, prompts: Sequence[Any], responses: Sequence[str]) -> list[float]: ...


class FileLabeler:
    """Waits for a file in the round's folder."""

    def publish(self, name: str, samples: Path) -> None:
        """Nothing to do: the samples are in the round's folder."""

    def collect(self, name: str, samples: Path, target: Path) -> str:
        return "" if target.exists() else f"rank the answers in {samples} and write the rankings to {target}"


class SimulatedLabeler:
    """Ranks by scores; equal scores tie."""

    def __init__(self, score: AnswerScorer) -> None:
        self.score = score

    def publish(self, name: str, samples: Path) -> None:
        """Nothing to do: `collect` reads the samples."""

    def collect(self, name: str, samples: Path, target: Path) -> str:
        ranked = []
        for row in read_rows(samples):
            scores = self.score([row["prompt"]] * len(row["responses"]), row["responses"])
            ranked.append({**row, "ranks": list(ranks_from_scores(scores)), "labeler": "simulated"})
        write_rows(target, ranked)
        return ""


class AppLabeler:
    """Imports each round into the labeling app as a batch, and exports the rankings when every item has been judged.

    If a lead closes the batch earlier, the judgments made so far are exported.
    """

    def __init__(self, config: LoopConfig) -> None:
        try:
            from annotation_ui.database import DATA_DIR, Database, sqlite_url
        except ModuleNotFoundError as error:
            extra = "pip install 'align-rlhf[ui]'"
            raise UserError(f"labeler app: {error.name} is not installed; install the extra: {extra}") from error
        if not config.database:
            DATA_DIR.mkdir(parents=True, exist_ok=True)
        self.database = Database(config.database or sqlite_url(DATA_DIR))
        self.database.upgrade()
        self.overlap = config.overlap

    def publish(self, name: str, samples: Path) -> None:
        from annotation_ui.importing import NewBatch, import_file

        if self._progress(name) is None:  # an import is all or nothing
            import_file(self.database, NewBatch(name, "rank", overlap=self.overlap), samples)

    def collect(self, name: str, samples: Path, target: Path) -> str:
        from annotation_ui.export import Selection, export

        progress = self._progress(name)
        if progress is None:
            raise UserError(f"labeler app: the batch {name!r} is no longer in the database")
        if progress["open"] and progress["done"] < progress["slots"]:
            done = f"{progress['done']} of {progress['slots']} judgments of the batch {name!r} are there"
            return f"{done}; closing the batch in the app ends the wait"
        export(self.database, Selection("rankings", aggregated=self.overlap > 1, batches=(name,)), target)
        return ""

    def _progress(self, name: str) -> Mapping[str, Any] | None:
        from annotation_ui.overview import progress

        with self.database.read() as session:
            return next((row for row in progress(session) if row["batch"] == name), None)


def make_labeler(config: LoopConfig) -> Labeler:
    """The labeler that the settings name.

    Raises:
        UserError: if there is none of that name.
    """
    if config.labeler == "app":
        return AppLabeler(config)
    return FileLabeler() if config.labeler == "file" else SimulatedLabeler(make_scorer(config.labeler))


def make_scorer(name: str) -> AnswerScorer:
    """The scorer of a simulated labeler: a reward function (module:function) or a reward model.

    Raises:
        UserError: if it is neither.
    """
    if is_reward_model(name):
        return ModelScorer(name)
    if ":" not in name:
        raise UserError(f"labeler '{name}': must be app, file, module:function or the folder of a reward model")
    (function,) = load_functions([name])
    return FunctionScorer(function)


class FunctionScorer:
    """Scores by a reward function."""

    def __init__(self, function: WeightedFunction) -> None:
        self.function = function

    def __call__(self, prompts: Sequence[Any], responses: Sequence[str]) -> list[float]:
        conversations = [Prompt.from_row({"prompt": prompt}).prompt for prompt in prompts]
        return call_reward_function(self.function, conversations, responses)


class ModelScorer:
    """Scores by a reward model, whatever its tokenizer."""

    def __init__(self, folder: str) -> None:
        self.service = RewardService(load_reward_model(folder), BATCH_TOKENS)

    def __call__(self, prompts: Sequence[Any], responses: Sequence[str]) -> list[float]:
        return self.service.rewards([self.service.encode(*row) for row in zip(prompts, responses, strict=True)])

    def close(self) -> None:
        """Free the model."""
        self.service.close()
