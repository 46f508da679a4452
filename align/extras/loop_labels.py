"""Components of `align loop`: settings, state, merged answers, labelers, choice of prompts."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from align.commands.sample import scorer_of
from align.core.errors import UserError
from align.core.files import read_json_lines, write_json, write_json_lines
from align.core.plugins import require_extra
from align.core.settings import Settings, option, require_setting
from align.data.conversation import to_json
from align.data.readers import read_records
from align.data.records import MAX_RESPONSES, Prompt, ranks_from_scores
from align.ppo.reward_functions import call_reward_function, load_functions
from align.reward.checkpoint import is_reward_model, load_reward_model
from align.runtime.progress import console
from align.tokenization.encoded import SampledResponse

BATCH_TOKENS = 8192
CHANGEABLE_SETTINGS = ("rounds", "poll_seconds")
"""Settings that may change when a loop is resumed."""
Row = dict[str, Any]


@dataclass(kw_only=True)
class LoopConfig(Settings):
    """Rounds of sampling, labeling, reward modeling and PPO (InstructGPT, section 3.1; Bai et al. 2022, section 4.5)."""

    model: str = option("", "Fine-tuned model, the initial policy of every round.", required=True)
    output_dir: str = option("runs/loop", "Output folder for the rounds, their runs and loop.json.")
    seed: int = option(0, "Random seed. The same seed and labels give the same results.", ge=0, lt=2**31)
    rounds: int = option(2, "Number of rounds. Raise it to continue a finished loop.", gt=0)
    reward_config: str = option("", "YAML config of `align reward` for every round.", required=True)
    ppo_config: str = option("", "YAML config of `align ppo` for every round.", required=True)

    prompts: str = option("data/prompts.jsonl", "Prompts to collect labels on. Each is used in at most one round.")
    prompts_per_round: int = option(200, "Number of prompts per round.", gt=0)
    temperatures: list[float] = option(
        [0.7, 1.0], "Sampling temperatures. Each model answers each prompt at each of them.", ge=0, required=True
    )
    samples: int = option(2, "Responses per prompt, model and temperature.", gt=0)
    max_new_tokens: int = option(64, "Maximum response length, in tokens.", gt=0)

    labeler: str = option(
        "app",
        "Source of rankings. app: the labeling app. file: you put rankings into the round's folder. Or a simulated "
        "labeler: a reward function (module:function) or a reward model (folder or name).",
    )
    database: str = option(
        "",
        "Database URL of the labeling app, or https://HOST of its server, with a token in the environment variable "
        "ALIGN_ANNOTATION_TOKEN. Default: the database of `align annotate`.",
    )
    labelers_per_item: int = option(1, "Number of labelers who rank each item in the app.", gt=0)
    poll_seconds: float = option(
        0.0, "Seconds between checks for new labels. 0 checks once and exits if labels are missing.", ge=0
    )

    validation_split: float = option(0.125, "Fraction of each round's rankings to hold out for validation.", ge=0, lt=1)
    earlier_weight: float = option(1.0, "Weight of each round's rankings relative to the next round's.", gt=0)
    more_rankings: str = option("", "Additional rankings to train every reward model on, in the format of train_data.")
    reward_models: int = option(
        1, "Reward models per round, trained with different seeds. PPO uses them as an ensemble.", gt=0
    )
    evaluation_prompts: str = option(
        "data/prompts_heldout.jsonl", "Prompts on which each policy is compared with the fine-tuned model."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("reward_config", "ppo_config"):
            require_setting(self, name, Path(getattr(self, name)).suffix in (".yaml", ".yml"), "a YAML file")
        different = len(set(self.temperatures)) == len(self.temperatures)
        require_setting(self, "temperatures", different, "different numbers")
        first, later = (self.samples * len(self.temperatures) * models for models in (1, 2))
        fits = first >= 2 and (later if self.rounds > 1 else first) <= MAX_RESPONSES
        now = f"with these temperatures, there are {first} to {later}"
        require_setting(self, "samples", fits, f"chosen for 2 to {MAX_RESPONSES} answers per prompt; {now}")


class LoopState:
    """The file `loop.json`: settings, and finished steps with their results."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.steps: dict[str, dict[str, Any]] = {}
        self.settings = {name: value for name, value in settings.items() if name not in CHANGEABLE_SETTINGS}
        if not self.path.exists():
            return
        try:
            read = json.loads(self.path.read_text(encoding="utf-8"))
            before, self.steps = dict(read["settings"]), dict(read["steps"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path}: cannot be read; choose another output_dir or remove the folder") from error
        changed = [name for name, value in self.settings.items() if before.get(name) != value]
        if changed:
            name, advice = changed[0], "use the same settings or another output_dir"
            began = f"this loop was started with {name} {before.get(name)!r}, not {self.settings[name]!r}"
            raise UserError(f"{self.path}: {began}; {advice}")

    def run_once(self, name: str, step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run a step unless it is finished, and return its result. Steps must be safe to rerun after a kill."""
        if name not in self.steps:
            started = time.monotonic()
            results = step()
            self.steps[name] = {**results, "seconds": round(time.monotonic() - started, 1)}
            write_json(self.path, {"settings": self.settings, "steps": self.steps})
            console.print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in self.steps[name].items()))
        return self.steps[name]


class FileLabeler:
    """Waits for a file in the round's folder."""

    def collect(self, name: str, samples: Path, target: Path) -> str:
        """See `AppLabeler.collect`."""
        return "" if target.exists() else f"rank the answers in {samples} and write the rankings to {target}"


class AnswerScorer:
    """Scores responses with a reward function (module:function) or a reward model."""

    def __init__(self, name: str) -> None:
        self.reward = load_reward_model(name) if is_reward_model(name) else None
        if self.reward is None and ":" not in name:
            raise UserError(f"labeler '{name}': must be app, file, module:function or a reward model folder")
        self.functions = [] if self.reward else load_functions([name])

    def __call__(self, prompts: Sequence[Any], responses: Sequence[str]) -> list[float]:
        """Score each response, higher is better. Prompts are strings or turns."""
        conversations = [Prompt.from_row({"prompt": prompt}).prompt for prompt in prompts]
        if self.reward is None:
            return call_reward_function(self.functions[0], conversations, responses)
        loaded, pairs = self.reward.loaded, zip(conversations, responses, strict=True)
        encode, scorer = partial(loaded.tokenization.answer_ids, whole=False), scorer_of(loaded, self.reward, BATCH_TOKENS)
        return scorer([SampledResponse(conversation, *encode(conversation, text), text) for conversation, text in pairs])


class SimulatedLabeler:
    """Ranks by score. Equal scores are ties."""

    def __init__(self, score: AnswerScorer) -> None:
        self.score = score

    def collect(self, name: str, samples: Path, target: Path) -> str:
        """See `AppLabeler.collect`."""
        ranked = []
        for row in read_json_lines(samples):
            scores = self.score([row["prompt"]] * len(row["responses"]), row["responses"])
            ranked.append({**row, "ranks": list(ranks_from_scores(scores)), "labeler": "simulated"})
        write_json_lines(target, ranked)
        return ""


class AppLabeler:
    """Imports each round into the labeling app as a batch, and exports the rankings when it is complete.

    If a lead closes the batch earlier, the judgments made so far are exported. The app's database is on this machine or on
    a PostgreSQL server.
    """

    def __init__(self, address: str, labelers_per_item: int) -> None:
        with require_extra("ui"):
            from annotation_ui.store.database import DATA_DIR, Database, sqlite_url
        if not address:
            DATA_DIR.mkdir(parents=True, exist_ok=True)
        self.database, self.labelers_per_item = Database(address or sqlite_url(DATA_DIR)), labelers_per_item
        self.database.upgrade()

    def collect(self, name: str, samples: Path, target: Path) -> str:
        """Write the rankings of a round to `target` if complete. Return a description of missing ones, or "".

        It may be called again after a kill, at any point.
        """
        name = batch_name(name, samples)
        if self.progress(name) is None:  # imports are atomic
            self.import_file(name, samples)
            console.print(f"labeler app: imported batch {name!r}")
        progress = self.progress(name)
        assert progress is not None
        if not progress["complete"]:
            return f"batch {name!r} is only partly imported; if the import was killed, delete the batch in the app"
        if progress["open"] and progress["done"] < progress["slots"]:
            done = f"batch {name!r} has {progress['done']} of {progress['slots']} judgments"
            return f"{done}; close the batch in the app to continue without the rest"
        self.export_rankings(name, target)
        return ""

    def progress(self, batch: str) -> Mapping[str, Any] | None:
        """Return the progress of a batch, or None if it does not exist."""
        from annotation_ui.reports.overview import progress

        with self.database.read() as session:
            return next((row for row in progress(session) if row["batch"] == batch), None)

    def import_file(self, batch: str, samples: Path) -> None:
        """Create a ranking batch."""
        from annotation_ui.store.importing import NewBatch, import_file

        import_file(self.database, NewBatch(batch, "rank", labelers_per_item=self.labelers_per_item), samples)

    def export_rankings(self, batch: str, target: Path) -> None:
        """Export the rankings of a batch."""
        from annotation_ui.reports.export import Selection, export

        export(self.database, Selection("rankings", aggregated=True, batches=(batch,)), target)


class ServerLabeler(AppLabeler):
    """Like `AppLabeler`, on a remote server. ALIGN_ANNOTATION_TOKEN needs the scopes import, read and export."""

    def __init__(self, url: str, labelers_per_item: int) -> None:
        from annotation_ui.client import Client

        self.client, self.labelers_per_item = Client(url), labelers_per_item

    def progress(self, batch: str) -> Mapping[str, Any] | None:
        return self.client.progress(batch)

    def import_file(self, batch: str, samples: Path) -> None:
        self.client.import_rows(batch, "rank", read_json_lines(samples), labelers_per_item=self.labelers_per_item)

    def export_rankings(self, batch: str, target: Path) -> None:
        self.client.export("rankings", target, batches=[batch], aggregated=True)


def batch_name(name: str, samples: Path) -> str:
    """Return the batch name of a round: the round's name and a digest of its samples.

    The digest separates loops that use the same server.
    """
    return f"{name}-{hashlib.sha256(samples.read_bytes()).hexdigest()[:8]}"


def make_labeler(name: str, database: str, labelers_per_item: int) -> FileLabeler | SimulatedLabeler | AppLabeler:
    """Create a labeler. The arguments are settings of the loop. Raise a UserError if the name is unknown."""
    if name == "app":
        remote = database.startswith(("http://", "https://"))
        return (ServerLabeler if remote else AppLabeler)(database, labelers_per_item)
    return FileLabeler() if name == "file" else SimulatedLabeler(AnswerScorer(name))


def choose_prompts(source: str, used: set[str], count: int, random: numpy.random.Generator) -> list[Row]:
    """Draw `count` random prompts whose ids are not in `used`, or all remaining ones if fewer.

    Raises:
        UserError: if two prompts have the same id, or no prompt is left.
    """
    rows = []
    for number, prompt in enumerate(read_records(source, Prompt), start=1):
        row: Row = {"id": prompt.id or str(number), "prompt": to_json(prompt.prompt)}
        rows.append(row | ({"category": prompt.category} if prompt.category else {}))
    for name, times in Counter(row["id"] for row in rows).items():
        if times > 1:
            raise UserError(f"{source}: duplicate prompt id '{name}'; use unique ids")
    left = [row for row in rows if row["id"] not in used]
    if not left:
        raise UserError(f"{source}: all {len(rows)} prompts have been labeled; add prompts or lower rounds")
    return [left[index] for index in random.permutation(len(left))[:count]]


def merge_answers(parts: Sequence[Sequence[Row]], prefix: str) -> list[Row]:
    """Merge several models' answers to the same prompts into one row per prompt. `prefix` is prepended to the ids.

    Blank and duplicate answers are dropped, and then prompts with fewer than two answers.
    """
    merged = []
    for rows in zip(*parts, strict=True):
        answers: dict[str, tuple[str, str]] = {}
        for row in rows:
            reasons = row.get("finish_reason") or ["stop"] * len(row["responses"])
            for text, model, reason in zip(row["responses"], row["model"], reasons, strict=True):
                if text.strip():
                    answers.setdefault(text, (model, reason))
        if len(answers) > 1:
            first = {**rows[0], "id": f"{prefix}{rows[0]['id']}"}
            first.pop("rewards", None)
            merged.append({**first, "responses": list(answers), "model": [model for model, _ in answers.values()]})
            if "finish_reason" in first:
                merged[-1]["finish_reason"] = [reason for _, reason in answers.values()]
    return merged
