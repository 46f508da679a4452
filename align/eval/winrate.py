"""`align eval winrate`: win rates from blind human comparisons, a reward model or a judge.

A judge is a function, or a chat model at an endpoint. Each pair of answers is judged in both orders.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from align.core.errors import UserError
from align.core.launch import run_stage
from align.core.plugins import call_own_code, checked_scores, import_function, source_version
from align.core.settings import option, require_setting
from align.data.conversation import Conversation, as_paragraphs
from align.data.fields import check_list, check_text, check_texts, check_whole_numbers
from align.data.readers import parse_rows
from align.eval.alpaca_eval import (
    PromptDifficulty,
    difficulty_controlled_measurement,
    read_difficulty,
    read_number,
)
from align.eval.answers import (
    EvaluatedModel,
    EvaluationContext,
    NamedRewardModel,
    open_context,
    open_models,
    open_reward_models,
    reward_answers,
    sample_answers,
    short_names,
    weights_version,
)
from align.eval.pairwise import (
    PairwiseComparison,
    length_controlled_measurement,
    outcome_of_rewards,
    pair_table,
    win_rate,
)
from align.eval.results import EvalConfig, EvalPromptsConfig, Evaluation, Measurement, publish
from align.eval.store import CHUNK, Json, compute_once, content_hash, fingerprint
from align.runtime.distributed import map_across_processes
from align.runtime.endpoint import RESUME_HINT, EndpointConfig, question_version, request_verdicts
from align.runtime.progress import console
from align.sampling.settings import AnsweringConfig, FewShotConfig, InferenceConfig
from align.tokenization.encoded import SampledResponse
from align.training.run_folder import read_settings

TASK = "winrate"
PreferenceJudge = Callable[[Sequence[Conversation], Sequence[str], Sequence[str]], list[float]]
"""Maps prompts, first answers and second answers to the probability that the first is better."""
AnswerPair = tuple[Conversation, str, str]
"""A prompt, the first answer, the second answer."""
AnswersByModel = dict[str, dict[str, SampledResponse]]
"""Maps a model name and prompt number to the answer."""
QUESTION = """Two assistants answered the same user. Say which answer is better: more helpful, more truthful, less harmful.
A longer answer is not better for its length, and the order of the answers means nothing.

<conversation>
{conversation}
</conversation>

<answer_A>
{first}
</answer_A>

<answer_B>
{second}
</answer_B>

End with a line that holds one of these and nothing else:
VERDICT: A
VERDICT: B
VERDICT: TIE"""
PROBABILITIES = {"A": 1.0, "B": 0.0, "TIE": 0.5}
"""Probability that the first answer is better, by verdict."""


@dataclass(kw_only=True)
class WinrateConfig(FewShotConfig, EndpointConfig, EvalPromptsConfig, AnsweringConfig, EvalConfig, InferenceConfig):
    """Win rates between models, decided by one of `comparisons`, `reward_model`, `judge` or `endpoint`."""

    comparisons: list[str] = option([], "Blind comparisons exported by the labeling app. No model is loaded.")
    reward_model: str = option("", "Reward model as judge. None of the policies may have been trained on it.")
    judge: str = option(
        "",
        "Judge function, module:function. Takes prompts, first answers and second answers; returns the probability "
        "that the first wins.",
    )
    baseline: str = option(
        "", "Baseline model of length-controlled win rates. Default: the model in every comparison, or the first of two."
    )
    difficulty: str = option(
        "", "File with rows of index and instruction_difficulty for the baseline. Enables AlpacaEval 2's length control."
    )
    anchors: str = option(
        "",
        "File with rows of preference, std_delta_len and instruction_difficulty: the baseline's longer and shorter answers.",
    )
    difficulty_by: Literal["index", "position"] = option(
        "index", "Field that selects a row's difficulty. position is the order in the file, as published by AlpacaEval 2."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "anchors", bool(self.difficulty or not self.anchors), "set together with difficulty")
        sources = [bool(way) for way in (self.comparisons, self.reward_model, self.judge, self.endpoint)]
        if sum(sources) != 1:
            raise UserError("set exactly one of comparisons, reward_model, judge and endpoint")


def run_winrate(config: WinrateConfig) -> list[Evaluation]:
    """Compare the models and write `winrate.json`. Return an evaluation per model."""
    context = open_context(config.output, config)
    by_position = config.difficulty_by == "position"
    difficulty = read_difficulty(config.difficulty, config.anchors, by_position) if config.difficulty else None
    if config.comparisons:
        files = [f"{Path(path).name} {fingerprint(path)}".strip() for path in config.comparisons]
        comparisons, scorer = read_comparisons(config.comparisons, config.skip_bad_rows), f"people ({', '.join(files)})"
    elif len(config.models) < 2:
        raise UserError("models must list two or more models")
    else:
        reward = open_reward_models([config.reward_model], config)[0] if config.reward_model else None
        answers: AnswersByModel = {}
        rewards: dict[str, dict[str, float]] = {}
        for evaluated in open_models(config.models, context, few_shot=config):
            sampled = sample_answers(config, config, TASK, evaluated)
            answers[evaluated.name] = {number: answer for number, (answer,) in sampled.items()}
            if reward:
                rewards[evaluated.name] = rewards_by_number(evaluated, reward, sampled)
        first, *others = answers.values()
        numbers = [number for number in first if all(number in by_number for by_number in others)]
        pairs = [(number, *pair) for number in numbers for pair in combinations(answers, 2)]
        if reward:
            scorer = reward.scorer
            outcomes = [(outcome_of_rewards(rewards[a][number], rewards[b][number]), False) for number, a, b in pairs]
        else:
            judge = FunctionJudge(config.judge) if config.judge else EndpointJudge(config)
            outcomes, scorer = judge_pairs(judge, pairs, answers, context), f"judge {judge.name} ({judge.version})"
        comparisons = []
        for (number, one, other), outcome in zip(pairs, outcomes, strict=True):
            lengths = len(answers[one][number].text), len(answers[other][number].text)
            comparisons.append(PairwiseComparison(number, one, other, outcome[0], lengths, outcome[1], int(number) - 1))
    models = list(dict.fromkeys(name for comparison in comparisons for name in (comparison.first, comparison.second)))
    tables = {"pairs": pair_table(comparisons, models)}
    baseline = find_baseline(comparisons, short_name_of(config.baseline, config.models))
    if difficulty and not baseline:
        raise UserError(
            "difficulty: no model is in every comparison; set baseline to the model that the difficulty refers to"
        )
    evaluations = []
    for model in models:
        measurements = model_measurements(comparisons, model, scorer, baseline, difficulty)
        evaluations.append(Evaluation(TASK, model, asdict(config), measurements, tables))
    return publish(config, evaluations, context.accelerator)


def find_baseline(comparisons: Sequence[PairwiseComparison], name: str = "") -> str:
    """Return the model `name`, or the first model in all comparisons, or "".

    Raises:
        UserError: if `name` is in no comparison.
    """
    models = list(dict.fromkeys(name for comparison in comparisons for name in (comparison.first, comparison.second)))
    if name and name not in models:
        raise UserError(f"baseline is '{name}', which is in no comparison; the models are {', '.join(models)}")
    in_all = [model for model in models if all(model in (comparison.first, comparison.second) for comparison in comparisons)]
    return name or next(iter(in_all), "")


def short_name_of(model: str, models: Sequence[str]) -> str:
    """Return the short name of one of `models`. Other names are returned unchanged."""
    return dict(zip(models, short_names(models), strict=True)).get(model, model)


def model_measurements(
    comparisons: Sequence[PairwiseComparison],
    model: str,
    scorer: str,
    baseline: str = "",
    difficulty: PromptDifficulty | None = None,
) -> list[Measurement]:
    """Measure one model against all others. With `difficulty`, add length control against the baseline."""
    model_comparisons = [comparison for comparison in comparisons if model in (comparison.first, comparison.second)]
    count, flips = len(model_comparisons), sum(comparison.flipped for comparison in model_comparisons)
    ties = sum(comparison.outcome == 0.5 for comparison in model_comparisons) / count
    if difficulty is None:
        length_controlled = length_controlled_measurement(model_comparisons, model, scorer, baseline)
    else:
        length_controlled = difficulty_controlled_measurement(model_comparisons, model, baseline, scorer, difficulty)
    measurements = [
        Measurement("win rate", *win_rate(model_comparisons, model), count, scorer, "ties count as half", "higher"),
        length_controlled,
        Measurement("ties", ties, None, None, count, scorer),
    ]
    if flips:
        note = "verdicts that changed with the order of the answers, counted as ties"
        measurements.append(Measurement("position flips", flips / count, None, None, count, scorer, note))
    return measurements


# -------------------------------------------------------------------------------------------------------------- who decides


def read_comparisons(files: Sequence[str], skip_bad_rows: bool) -> list[PairwiseComparison]:
    """Read comparisons exported by the labeling app (including ties) or annotations in AlpacaEval's format.

    A lead's decision counts instead of the labelers' answers. A response written by several models counts for each of them.

    Raises:
        UserError: if a row does not name the models it compares, or is otherwise invalid.
    """
    decisions: dict[str, str] = {}  # row number by shown pair; the last lead's decision applies

    def parse(row: Mapping[str, Any], number: str) -> list[tuple[str, str, PairwiseComparison]]:
        compared, shown = _comparisons_of_row(row), content_hash([row.get(name) for name in ("id", "prompt", "responses")])
        if row.get("decision"):
            decisions[shown] = number
        return [(shown, number, each) for each in compared]

    parsed = parse_rows(files, parse, "no comparisons of two models", skip_bad_rows=skip_bad_rows)
    return [each for shown, number, each in parsed if decisions.get(shown, number) == number]


BASELINE = "baseline"
"""Name of the baseline in rows that do not name it."""


def _comparisons_of_row(row: Mapping[str, Any]) -> list[PairwiseComparison]:
    if "output_1" in row or "baseline_length" in row:
        return _alpaca_eval_comparison(row)
    texts = check_texts(row.get("responses"), "responses", may_be_empty=True)
    ranks = check_whole_numbers(row.get("ranks"), "ranks", len(texts), 1, None)
    if row.get("model") is None:
        raise UserError("field 'model': is missing; import answers with the name of the model that wrote them")
    models = check_texts(row["model"], "model", len(texts))
    also = check_list(row.get("also_by") or [[]] * len(models), "also_by", len(models))
    authors = [(model, *check_texts(others, "also_by")) for model, others in zip(models, also, strict=True)]
    item = str(row.get("prompt") or row.get("id"))  # ids are unique within a file; a prompt may occur in several
    index = None if row.get("index") is None else int(read_number(row, "index", low=0, whole=True))
    comparisons = []
    for i, j in combinations(range(len(texts)), 2):
        outcome, lengths = outcome_of_rewards(-ranks[i], -ranks[j]), (len(texts[i]), len(texts[j]))  # rank 1 is best
        pairs = [pair for pair in product(authors[i], authors[j]) if pair[0] != pair[1]]
        comparisons += [PairwiseComparison(item, first, second, outcome, lengths, index=index) for first, second in pairs]
    return comparisons


def _alpaca_eval_comparison(row: Mapping[str, Any]) -> list[PairwiseComparison]:
    """Convert a row of AlpacaEval's annotations, or of its length table. Failed annotations are skipped.

    `preference` is from 1 (the baseline is better) to 2, or 0 for a tie. Annotations have `instruction`, `generator_1`,
    `output_1` (the baseline's), `generator_2` and `output_2`. A table has the number of the `instruction`, `model`, `length`
    and `baseline_length`.
    """
    if row.get("preference") is None:
        return []
    preference = read_number(row, "preference", low=0, high=2)
    preference = 1.5 if preference == 0 else preference  # AlpacaEval 1's tie
    if preference < 1:
        raise UserError(f"field 'preference': is {preference:g}; use a number from 1 (baseline is better) to 2, or 0")
    if "output_1" in row:
        texts = [check_text(row.get(name), name, may_be_empty=True) for name in ("output_1", "output_2")]
        first, second = (check_text(row.get(name), name) for name in ("generator_1", "generator_2"))
        item, lengths = check_text(row.get("instruction"), "instruction"), (len(texts[0]), len(texts[1]))
        index = None if row.get("index") is None else int(read_number(row, "index", low=0, whole=True))
    else:
        first, second = BASELINE, check_text(row.get("model"), "model")
        lengths = int(read_number(row, "baseline_length", low=0)), int(read_number(row, "length", low=0))
        index = int(read_number(row, "instruction", low=0, whole=True))
        item = str(index)
    return [PairwiseComparison(item, first, second, 2 - preference, lengths, index=index)]


def rewards_by_number(
    evaluated: EvaluatedModel, reward: NamedRewardModel, sampled: Mapping[str, list[SampledResponse]]
) -> dict[str, float]:
    """Return the stored reward of a model's answer to each prompt."""
    name, policy = f"{TASK}-{evaluated.name}", evaluated.loaded.tokenization
    rewards = reward_answers(evaluated.context, name, reward, sampled, policy, evaluated.settings)
    if reward.fingerprint in training_reward_fingerprints(evaluated.source):
        optimized = "so its win rate is biased"
        console.print(f"{evaluated.name} was trained on this reward model, {optimized}")
    return {number: reward for number, (reward,) in zip(sampled, rewards, strict=True)}


def training_reward_fingerprints(model: str) -> set[str]:
    """Return the fingerprints of the reward models that a policy was trained on, empty if unknown."""
    for folder in (Path(model), Path(model).parent):
        try:
            settings = read_settings(folder / "config.yaml")
        except UserError:
            continue
        if settings is None:
            continue
        named = settings.get("reward_model") or []
        sources = [named] if isinstance(named, str) else named
        models = [f"{source}/model" if (Path(source) / "model").is_dir() else source for source in sources]
        versions = set()
        for model in filter(os.path.isdir, models):
            with suppress(UserError):  # the base model may be missing
                versions.add(weights_version(model))
        return versions
    return set()


class FunctionJudge:
    """A judge function `module:function`. Must return a number from 0 to 1 per row."""

    parallel = CHUNK

    def __init__(self, path: str) -> None:
        self.name, self.function = path, import_function(path, "judge")
        self.version = source_version(self.function)

    def __call__(self, prompts: Sequence[Conversation], firsts: Sequence[str], seconds: Sequence[str]) -> list[float]:
        who, rule = f"judge '{self.name}'", "a verdict must be a number from 0 (the second is better) to 1"
        verdicts = call_own_code(who, self.function, prompts, firsts, seconds, advice=RESUME_HINT)
        return checked_scores(verdicts, len(prompts), who, low=0, high=1, items="comparisons", rule=rule, advice=RESUME_HINT)


class EndpointJudge:
    """A judge that queries a chat model; see `request_verdicts`."""

    version = question_version(QUESTION)

    def __init__(self, endpoint: EndpointConfig) -> None:
        self.endpoint, self.name = endpoint, f"{endpoint.endpoint_model} at {endpoint.endpoint}"
        self.parallel = endpoint.endpoint_parallel

    def __call__(self, prompts: Sequence[Conversation], firsts: Sequence[str], seconds: Sequence[str]) -> list[float]:
        questions = []
        for prompt, first, second in zip(prompts, firsts, seconds, strict=True):
            questions.append(QUESTION.format(conversation=as_paragraphs(prompt), first=first, second=second))
        return request_verdicts(self.endpoint, questions, PROBABILITIES)


def judge_pairs(
    judge: FunctionJudge | EndpointJudge,
    pairs: Sequence[tuple[str, str, str]],
    answers: AnswersByModel,
    context: EvaluationContext,
) -> list[tuple[float, bool]]:
    """Return the stored outcome of each pair (prompt number and two models), and whether it depends on the order."""
    questions = {}
    for number, first, second in pairs:
        one, other = answers[first][number], answers[second][number]
        questions[f"{first} {second} {number}"] = (one.conversation, one.text, other.text)

    def judge_part(part: list[AnswerPair]) -> list[Json]:
        return [{"outcome": outcome, "flipped": flipped} for outcome, flipped in judge_both_orders(judge, part)]

    rows = compute_once(
        context.output / f"{TASK}-judged.jsonl",
        {"judge": judge.name, "judge_version": judge.version},
        questions,
        lambda chunk: map_across_processes(chunk, judge_part, context.accelerator),
        context.accelerator,
        # Process in chunks, so that a failing endpoint loses no finished verdicts.
        judge.parallel * context.accelerator.num_processes,
        content=list,
    )
    return [(row["outcome"], row["flipped"]) for row in rows]


def judge_both_orders(judge: PreferenceJudge, questions: Sequence[AnswerPair]) -> list[tuple[float, bool]]:
    """Judge each pair in both orders, which cancels position bias.

    Two identical answers are a tie, without asking the judge.

    Returns:
        For each question the outcome for its first answer, and whether the verdict changed with the order.
    """
    distinct = [question for question in questions if question[1] != question[2]]
    both_orders = [
        order for prompt, first, second in distinct for order in ((prompt, first, second), (prompt, second, first))
    ]
    probabilities = judge(*map(list, zip(*both_orders, strict=True))) if both_orders else []
    verdict_pairs = iter(zip(probabilities[::2], probabilities[1::2], strict=True))
    outcomes = []
    for _, first, second in questions:
        shown_first, shown_second = (0.5, 0.5) if first == second else next(verdict_pairs)
        preferences = np.sign(shown_first - 0.5), np.sign(0.5 - shown_second)  # 1: prefers the question's first answer
        flipped = bool(preferences[0] * preferences[1] < 0)
        outcomes.append((0.5 + 0.5 * float(np.sign(sum(preferences))), flipped))
    return outcomes


if __name__ == "__main__":
    run_stage(WinrateConfig, run_winrate)
