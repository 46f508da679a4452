"""`align eval bias`: which gender a model expects in an occupation, and how it speaks of groups of people.

From a launcher: `accelerate launch align/eval/bias/task.py --config FILE`.

After GPT-3's pages on fairness (Brown et al. 2020, arXiv 2005.14165, section 6.2), with this project's lists of words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from align.core.launch import run_stage
from align.core.seeds import Stream
from align.core.settings import option
from align.eval.bias.lists import CONTEXTS, DESCRIPTIONS, GENDERS, OCCUPATIONS
from align.eval.bias.measures import LogProbScorer, favored_words, group_log_odds, paired_sentiment, sentiment
from align.eval.core.evaluated_models import EvaluatedModel, open_accelerator, open_models, respond
from align.eval.core.result_store import ResultStore
from align.eval.core.results import Evaluation, Figure, Json, mean_figure, publish, share_figure
from align.eval.core.settings import EvalConfig
from align.eval.truthfulness.multiple_choice import answer_log_likelihoods
from align.sampling.generation import Sampling, row_uniforms
from align.tokenization.encoded import PromptResponses

TASK = "bias"
OCCUPATION = "occupation"
KINDS = (OCCUPATION, *DESCRIPTIONS)
SAMPLES_AT_ONCE = 200
"""Completions sampled between two writes to the file."""
MIN_SHARE, MIN_COUNT, MAX_FAVORED = 0.02, 5, 10
"""A favored word is in at least this share and this number of a group's completions; at most `MAX_FAVORED` are listed."""


@dataclass(kw_only=True)
class BiasConfig(EvalConfig):
    """Bias by log-probabilities of occupations, and by completions about groups; sampling defaults are GPT-3's."""

    kinds: list[str] = option(list(KINDS), "what is measured", choices=KINDS, required=True)
    samples: int = option(800, "completions of each beginning with each group; on a CPU, try 50", gt=0)
    max_new_tokens: int = option(50, "longest completion, in tokens", gt=0)
    temperature: float = option(1.0, "divides the logits", gt=0)
    top_p: float = option(
        0.9, "draw from the likeliest tokens that hold this share of the probability; 1: from all", gt=0, le=1
    )


def run_bias(config: BiasConfig) -> list[Evaluation]:
    """Measure each model, and the change from the first model to each other; writes `bias.json` and files of results.

    Raises:
        UserError: for a mistake in the settings or a model; what was computed before is kept.
    """
    accelerator = open_accelerator(config)
    evaluations: list[Evaluation] = []
    first: dict[str, Any] = {}  # the first model's results by kind, to compare the others with
    for evaluated in open_models(config, accelerator):
        figures: list[Figure] = []
        tables: dict[str, list[Json]] = {}
        for kind in config.kinds:
            before = (evaluations[0].model, first[kind]) if evaluations else None
            if kind == OCCUPATION:
                found: Any = _occupation_odds(config, evaluated, accelerator)
                own, tables["Occupations"] = occupation_figures(found, config.resamples)
                changes = change_figures(found, *before, config.resamples) if before else []
            else:
                found = _completions(config, evaluated, kind, accelerator)
                own, tables[f"Favored words by {kind}"] = (
                    description_figures(kind, found, config.resamples),
                    _favored_word_rows(found),
                )
                changes = sentiment_changes(kind, found, *before, config.resamples) if before else []
            figures += [*own, *changes]
            first.setdefault(kind, found)
        settings = {**config.result_settings(), "model": evaluated.fingerprint or evaluated.source}
        evaluations.append(Evaluation(TASK, evaluated.name, settings, figures, tables))
    return publish(config, evaluations, accelerator)


# ----------------------------------------------------------------------------------------------------------- occupations


def occupation_odds(
    score: LogProbScorer, occupations: Sequence[str] = OCCUPATIONS, genders: Mapping[str, Sequence[str]] = GENDERS
) -> dict[str, list[float]]:
    """By context, log P(second gender) - log P(first gender) after each occupation, in nats."""
    return {
        name: group_log_odds([context.format(occupation=occupation) for occupation in occupations], genders, score)
        for name, context in CONTEXTS.items()
    }


def _occupation_odds(config: BiasConfig, evaluated: EvaluatedModel, accelerator: Accelerator) -> dict[str, list[float]]:
    """The stored log-odds of a model, by context."""

    def score(cases: Sequence[tuple[str, Sequence[str]]]) -> list[list[float]]:
        tokenization = evaluated.loaded.tokenization
        choices = [PromptResponses(*tokenization.continuations(text, list(following))) for text, following in cases]
        return answer_log_likelihoods(evaluated.loaded.backbone, choices, config.batch_tokens, accelerator)

    words = {"contexts": CONTEXTS, "genders": GENDERS}
    settings = {"dtype": config.dtype, **words, "model": evaluated.fingerprint or evaluated.source}
    store = ResultStore(Path(config.output) / f"{TASK}-occupations-{evaluated.name}.jsonl", settings, accelerator)

    def score_occupations(chunk: Sequence[str]) -> list[Json]:
        found = occupation_odds(score, chunk)
        return [{context: values[row] for context, values in found.items()} for row in range(len(chunk))]

    items = {occupation: occupation for occupation in OCCUPATIONS}
    rows = store.fill(items, score_occupations, label=f"{evaluated.name}: occupations")
    return {context: [row[context] for row in rows] for context in CONTEXTS}


def occupation_figures(odds: Mapping[str, Sequence[float]], resamples: int) -> tuple[list[Figure], list[Json]]:
    """The mean log-odds and the share of occupations that lean male in each context, and a table of all occupations."""
    figures = []
    for context, values in odds.items():
        figures.append(mean_figure(f"{context}: log P(female) / P(male)", values, resamples, "log-likelihood"))
        leaning = [float(value < 0) for value in values]
        figures.append(share_figure(f"{context}: occupations leaning male", leaning, "log-likelihood"))
    rows = [
        {"occupation": occupation, **{context: round(values[row], 3) for context, values in odds.items()}}
        for row, occupation in enumerate(OCCUPATIONS)
    ]
    return figures, sorted(rows, key=lambda row: float(str(row["plain"])))


def change_figures(
    odds: Mapping[str, Sequence[float]], before_name: str, before: Mapping[str, Sequence[float]], resamples: int
) -> list[Figure]:
    """How much the log-odds differ from another model's; a paired bootstrap over occupations."""
    figures = []
    for context, values in odds.items():
        moved = [value - old for value, old in zip(values, before[context], strict=True)]
        nearer = [abs(old) - abs(value) for value, old in zip(values, before[context], strict=True)]
        figures.append(mean_figure(f"{context}: change of the log-odds", moved, resamples, f"against {before_name}"))
        against = f"against {before_name}"
        figures.append(mean_figure(f"{context}: nearer to even odds", nearer, resamples, against, better="higher"))
    return figures


# ----------------------------------------------------------------------------------------------------------- completions


def _completions(config: BiasConfig, evaluated: EvaluatedModel, kind: str, accelerator: Accelerator) -> dict[str, list[str]]:
    """The stored completions of a kind's beginnings, by group; all groups draw with the same noise."""
    beginnings, groups = DESCRIPTIONS[kind]
    sampling = Sampling(config.max_new_tokens, config.temperature, 0, config.top_p, config.batch_tokens)
    settings = {**config.result_settings("kinds", "samples"), "model": evaluated.fingerprint or evaluated.source}
    store = ResultStore(Path(config.output) / f"{TASK}-{kind}-{evaluated.name}.jsonl", settings, accelerator)
    items = {
        f"{beginning.format(group)} {number}": (beginning.format(group), place, number)
        for place, beginning in enumerate(beginnings)
        for number in range(config.samples)
        for group in groups
    }

    def complete(chunk: Sequence[tuple[str, int, int]]) -> list[Json]:
        rows, noise = [], []
        for text, place, number in chunk:
            tokens = evaluated.loaded.tokenization.continuations(text, [])[0]
            evaluated.loaded.backbone.require_fit(len(tokens), config.max_new_tokens, repr(text))
            rows.append(tokens)
            noise.append(row_uniforms(1, sampling, config.seed, Stream.BIAS_COMPLETIONS, KINDS.index(kind), place, number))
        ids = respond(evaluated, rows, torch.cat(noise), sampling, accelerator).ids
        return [{"text": evaluated.loaded.tokenization.text(row)} for row in ids]

    found = store.fill(items, complete, chunk=SAMPLES_AT_ONCE, label=f"{evaluated.name}: {kind}")
    texts: dict[str, list[str]] = {group: [] for group in groups}
    for place, row in enumerate(found):
        texts[groups[place % len(groups)]].append(row["text"])
    return texts


def description_figures(kind: str, texts: Mapping[str, Sequence[str]], resamples: int) -> list[Figure]:
    """The mean sentiment of each group's completions; for two groups, also their difference in counterfactual pairs."""
    figures = []
    for group, of_group in texts.items():
        found = [value for value in map(sentiment, of_group) if value is not None]
        note = f"of {len(of_group)} completions, those with a word of judgment"
        name = f"{kind}: sentiment, {group}"
        figures.append(mean_figure(name, found, resamples, "word lists", note, "no word of judgment"))
    if len(texts) == 2:
        first, second = texts
        moved = paired_sentiment(texts[first], texts[second])
        note = "pairs of completions with the same noise, both with a word of judgment"
        figures.append(mean_figure(f"{kind}: {second} minus {first}", moved, resamples, "word lists", note, "no such pair"))
    return figures


def sentiment_changes(
    kind: str, texts: Mapping[str, Sequence[str]], before_name: str, before: Mapping[str, Sequence[str]], resamples: int
) -> list[Figure]:
    """How much each group's sentiment differs from another model's on the same noise; a paired bootstrap."""
    return [
        mean_figure(
            f"{kind}: change of sentiment, {group}",
            paired_sentiment(before[group], of_group),
            resamples,
            f"word lists, against {before_name}",
            nothing="no pair with words of judgment",
        )
        for group, of_group in texts.items()
    ]


def _favored_word_rows(texts: Mapping[str, Sequence[str]]) -> list[Json]:
    min_texts = max(MIN_COUNT, round(MIN_SHARE * max(map(len, texts.values()))))
    return [
        {"group": group, "words": ", ".join(f"{word} ({ratio:.1f}x, {number})" for word, ratio, number in rows)}
        for group, rows in favored_words(texts, min_texts, MAX_FAVORED).items()
    ]


if __name__ == "__main__":
    run_stage(BiasConfig, run_bias)
