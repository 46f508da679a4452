"""Comparisons decided by a judge, a function or a chat model; each pair is judged in both orders."""

from itertools import combinations
from pathlib import Path

from accelerate import Accelerator

from align.eval.core.answers import answer_settings, answered_by_all, sample_answers
from align.eval.core.evaluated_models import open_models
from align.eval.core.result_store import ResultStore
from align.eval.core.results import Json
from align.eval.winrate.judges import AnswerPair, PreferenceJudge, endpoint_judge, function_judge, judge_both_orders
from align.eval.winrate.pairwise import PairwiseComparison
from align.eval.winrate.settings import WinrateConfig
from align.examples import SampledResponse
from align.runtime.distributed import map_across_processes

AnswersByModel = dict[str, dict[str, SampledResponse]]
"""A model's name and a prompt's number to the answer."""
Pair = tuple[str, str, str]
"""A prompt's number and the names of two models."""
CHUNK = 64
"""Pairs that a function judges between two writes to the file."""


def compare_by_judge(config: WinrateConfig, accelerator: Accelerator) -> tuple[list[PairwiseComparison], str]:
    """Let all models answer the prompts and a judge compare the answers; returns the scorer's name too."""
    answers: AnswersByModel = {}
    fingerprints = {}
    for evaluated in open_models(config, accelerator):
        sampled = sample_answers(config, "winrate", evaluated, accelerator)
        answers[evaluated.name] = {number: samples[0] for number, samples in sampled.items()}
        fingerprints[evaluated.name] = evaluated.fingerprint
    name = f"{config.judge_model} at {config.endpoint}" if config.endpoint else config.judge
    settings = answer_settings(config) | {"models": fingerprints, "judge": name}
    store = ResultStore(Path(config.output) / "winrate-judged.jsonl", settings, accelerator)
    judge = function_judge(config.judge) if config.judge else endpoint_judge(config.endpoint, config)
    return judge_pairs(config, judge, answers, store, accelerator), f"judge {name}"


def judge_pairs(
    config: WinrateConfig, judge: PreferenceJudge, answers: AnswersByModel, store: ResultStore, accelerator: Accelerator
) -> list[PairwiseComparison]:
    """Comparisons of all pairs of models on the prompts that all answered; stored as they are judged."""
    conversations = {number: answer.conversation for number, answer in next(iter(answers.values())).items()}
    pairs: dict[str, Pair] = {
        f"{first} {second} {number}": (number, first, second)
        for number in answered_by_all(list(answers.values()))
        for first, second in combinations(answers, 2)
    }

    def ask_judge(questions: list[AnswerPair]) -> list[float]:
        if not questions:
            return []
        prompts = [conversations[str(number)] for number, _, _ in questions]
        return judge(prompts, [first for _, first, _ in questions], [second for _, _, second in questions])

    def judge_part(part: list[Pair]) -> list[Json]:
        questions = [
            (int(number), answers[first][number].text, answers[second][number].text) for number, first, second in part
        ]
        return [{"outcome": outcome, "flipped": flipped} for outcome, flipped in judge_both_orders(ask_judge, questions)]

    def judge_chunk(chunk: list[Pair]) -> list[Json]:
        return map_across_processes(chunk, judge_part, accelerator)

    def content_of_pair(pair: Pair) -> list[object]:
        number, first, second = pair
        return [conversations[number], answers[first][number].text, answers[second][number].text]

    # A chunk is what runs in parallel, so that a failing endpoint loses no verdict that was already given.
    chunk = (config.parallel if config.endpoint else CHUNK) * accelerator.num_processes
    rows = store.fill(pairs, judge_chunk, chunk, "winrate: judging", content_of_pair)
    comparisons = []
    for (number, first, second), row in zip(pairs.values(), rows, strict=True):
        lengths = (len(answers[first][number].text), len(answers[second][number].text))
        comparisons.append(PairwiseComparison(number, first, second, row["outcome"], lengths, row["flipped"]))
    return comparisons
