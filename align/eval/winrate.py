"""`align eval winrate`: which model wins, by blind comparisons of people, by a reward model, or by a judge."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from align.cli import run_stage
from align.config import option, require
from align.data.fields import check_row, check_texts, check_whole_numbers
from align.data.sources import iter_rows
from align.distributed import map_shared
from align.errors import UserError
from align.eval.answers import common, draw_answers, drawing, score_answers
from align.eval.chat_judge import ChatJudgeConfig
from align.eval.judges import Judge, judge_of_endpoint, judge_of_function
from align.eval.preference import Battle, figures, judge_both_ways, pair_table, strengths
from align.eval.results import Evaluation, Figure, Json, Rows, publish
from align.eval.settings import AnswerConfig
from align.eval.subjects import fingerprint, open_accelerator, short_names, subjects
from align.models.zoo import resolve_model
from align.reward.checkpoint import load_reward_model
from align.reward.scoring import Answer, RewardModelScorer
from align.run import console


@dataclass(kw_only=True)
class WinrateConfig(ChatJudgeConfig, AnswerConfig):
    """Win rates between models. One of `comparisons`, `reward_model`, `judge` and `endpoint` decides."""

    comparisons: list[str] = option([], "files of blind comparisons that the labelling app exported: no model is opened")
    reward_model: str = option("", "a reward model decides; take one that no policy here was trained on")
    judge: str = option("", "module:function decides: prompts, first and second answers to the chance that the first wins")
    endpoint: str = option("", "base URL of an OpenAI-compatible service whose model decides, such as http://host:8000/v1")

    def __post_init__(self) -> None:
        super().__post_init__()
        ways = [bool(way) for way in (self.comparisons, self.reward_model, self.judge, self.endpoint)]
        if sum(ways) != 1:
            raise UserError("give one of comparisons, reward_model, judge and endpoint: who decides which answer is better")
        require(self, "judge_model", bool(self.judge_model) or not self.endpoint, "given with an endpoint")


def run_winrate(config: WinrateConfig) -> list[Evaluation]:
    """Compare the models and write `winrate.json`; gives an evaluation for each model.

    Raises:
        UserError: for anything that the settings, the data or a judge have wrong; what was judged is kept.
    """
    accelerator = open_accelerator(config)
    if config.comparisons:
        battles, scorer = read_comparisons(config), f"people ({', '.join(map(digest, config.comparisons))})"
        models = list(dict.fromkeys(name for battle in battles for name in (battle.first, battle.second)))
    else:
        if len(config.models) < 2:
            raise UserError("models needs two or more models to compare")
        models = short_names(config.models)
        battles, scorer = (_by_reward if config.reward_model else _by_judge)(config, accelerator)
    return publish(config, evaluate(config, battles, models, scorer), accelerator)


def digest(path: str) -> str:
    """A file's or folder's name with its fingerprint."""
    return f"{Path(path).name} {fingerprint(path)}".strip()


def evaluate(config: WinrateConfig, battles: list[Battle], models: Sequence[str], scorer: str) -> list[Evaluation]:
    """Figures and tables of every model."""
    table = pair_table(battles, models, config.resamples)
    strength = strengths(battles, models, config.resamples) if len(models) > 2 else {}
    found = []
    for model in models:
        listed = figures(battles, model, config.resamples, scorer)
        if model in strength and listed[0].n:
            note = "log-odds against the mean model; +-10 stands for more than can be told"
            listed.append(Figure("Bradley-Terry strength", *strength[model], listed[0].n, scorer, note))
        found.append(Evaluation("winrate", model, asdict(config), listed, {"pairs": table}))
    return found


# --------------------------------------------------------------------------------------------------------------- people


def read_comparisons(config: WinrateConfig) -> list[Battle]:
    """Battles from rows with `prompt`, `responses`, `ranks` and `model`, as the app exports them; ties are kept.

    Raises:
        UserError: for a row that does not say which models it compares, or that is otherwise bad.
    """
    battles, skipped = [], 0
    for path in config.comparisons:
        for row in iter_rows(path):
            try:
                if row.error is not None:
                    raise UserError(row.error)
                battles += _battles_of_row(check_row(row.row))
            except UserError as error:
                if not config.skip_bad_rows:
                    raise UserError(f"{row.where}: {error}") from error
                skipped += 1
    if skipped:
        console.print(f"{skipped} bad rows were left out", highlight=False)
    if not battles:
        raise UserError(f"{', '.join(config.comparisons)}: no comparison of two models")
    return battles


def _battles_of_row(row: Any) -> list[Battle]:
    texts = check_texts(row.get("responses"), "responses")
    ranks = check_whole_numbers(row.get("ranks"), "ranks", len(texts), 1, None)
    if row.get("model") is None:
        raise UserError("field 'model': is missing; import answers with the name of the model that wrote each")
    models = check_texts(row["model"], "model", len(texts))
    found = []
    for i, j in combinations(range(len(texts)), 2):
        if models[i] != models[j]:
            outcome = 0.5 + 0.5 * ((ranks[i] < ranks[j]) - (ranks[i] > ranks[j]))
            item = str(row.get("id") or row.get("prompt"))
            found.append(Battle(item, models[i], models[j], outcome, (len(texts[i]), len(texts[j]))))
    return found


# --------------------------------------------------------------------------------------------------------- reward model


def _by_reward(config: WinrateConfig, accelerator: Accelerator) -> tuple[list[Battle], str]:
    folder = str(resolve_model(config.reward_model))
    reward = load_reward_model(folder, config.dtype)
    said, rewards, names, mark = [], [], [], fingerprint(folder)
    for subject in subjects(config, accelerator):
        answers = draw_answers(config, "winrate", subject, accelerator)
        scorer = RewardModelScorer.of(reward, subject.loaded.tokenization, accelerator, config.batch_tokens)
        settings = drawing(config) | {"model": subject.source, "weights": subject.fingerprint, "reward_model": mark}
        path = Path(config.output) / f"winrate-{subject.name}-{mark}.jsonl"
        rewards.append(score_answers(path, settings, scorer, answers, accelerator))
        said.append(answers)
        names.append(subject.name)
        if trained_on(subject.source) == mark:
            console.print(f"{subject.name} was trained on this reward model: its win rate shows the proxy, not preference")
    battles = []
    for number in common(said):
        for i, j in combinations(range(len(names)), 2):
            ours, theirs = rewards[i][number][0], rewards[j][number][0]
            lengths = (len(said[i][number][0].text), len(said[j][number][0].text))
            battles.append(Battle(number, names[i], names[j], 0.5 + 0.5 * ((ours > theirs) - (ours < theirs)), lengths))
    return battles, f"reward model {digest(folder)}"


def trained_on(model: str) -> str:
    """The fingerprint of the reward model that a run's policy was trained on; '' where that is not known."""
    import yaml

    for folder in (Path(model), Path(model).parent):
        try:
            settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        return fingerprint(settings.get("reward_model") or "") if isinstance(settings, dict) else ""
    return ""


# ---------------------------------------------------------------------------------------------------------------- judge


def _by_judge(config: WinrateConfig, accelerator: Accelerator) -> tuple[list[Battle], str]:
    said, marks = {}, {}
    for subject in subjects(config, accelerator):
        said[subject.name] = draw_answers(config, "winrate", subject, accelerator)
        marks[subject.name] = subject.fingerprint
    name = f"{config.judge_model} at {config.endpoint}" if config.endpoint else config.judge
    settings = drawing(config) | {"models": marks, "judge": name}
    rows = Rows(Path(config.output) / "winrate-judged.jsonl", settings, accelerator)
    battles = judged(config, judge_of(config), said, rows, accelerator)
    return battles, f"judge {name}"


def judge_of(config: WinrateConfig) -> Judge:
    """The judge of the settings."""
    if config.judge:
        return judge_of_function(config.judge)
    return judge_of_endpoint(config.endpoint, config)


def judged(
    config: WinrateConfig,
    judge: Judge,
    said: dict[str, dict[str, list[Answer]]],
    rows: Rows,
    accelerator: Accelerator,
) -> list[Battle]:
    """Battles of all pairs of models on all common prompts, both orders asked; kept as they are judged."""
    items = {
        f"{first} {second} {number}": (number, first, second)
        for number in common(list(said.values()))
        for first, second in combinations(said, 2)
    }

    answers = next(iter(said.values()))

    def ask(questions: list[tuple[int, str, str]]) -> list[float]:
        if not questions:
            return []
        conversations = [answers[str(number)][0].conversation for number, _, _ in questions]
        return judge(conversations, [first for _, first, _ in questions], [second for _, _, second in questions])

    def decide(part: list[tuple[str, str, str]]) -> list[Json]:
        asked = [(int(number), said[first][number][0].text, said[second][number][0].text) for number, first, second in part]
        return [{"outcome": outcome, "flipped": flipped} for outcome, flipped in judge_both_ways(ask, asked)]

    def work(chunk: list[tuple[str, str, str]]) -> list[Json]:
        return map_shared(chunk, decide, accelerator)

    # No more at once than are under way: an endpoint that fails costs no verdict that was given.
    chunk = (config.parallel if config.endpoint else 64) * accelerator.num_processes
    found = rows.fill(items, work, chunk, "winrate: judging")
    battles = []
    for (number, first, second), row in zip(items.values(), found, strict=True):
        lengths = (len(said[first][number][0].text), len(said[second][number][0].text))
        battles.append(Battle(number, first, second, row["outcome"], lengths, row["flipped"]))
    return battles


if __name__ == "__main__":
    run_stage(WinrateConfig, run_winrate)
