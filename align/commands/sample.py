"""`align sample`: a model's responses to a file of prompts, as rows that the labeling app imports."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from rich.progress import Progress

from align.attributes.expressions import Condition, Expression
from align.attributes.model import heads_of
from align.batches.encoding import Limits, encode_prompts
from align.commands.sample_config import SampleConfig
from align.commands.sample_scoring import Scored, inference_device, score_candidates
from align.core.errors import UserError
from align.core.files import write_text
from align.core.seeds import Stream
from align.core.settings import ModelConfig
from align.data.conversation import to_json
from align.models.loading import LoadedModel, load
from align.reward.checkpoint import require_reward_model
from align.rules.scoring import rules_of_model
from align.runtime.distributed import compute_dtype
from align.runtime.environment import console
from align.sampling.generation import row_uniforms, sample
from align.tokenization.encoded import EncodedPrompt


def run_sample(config: SampleConfig) -> Path:
    """Sample responses and write them.

    A row holds `prompt`, `responses` [n], `model` [n] (which model wrote each), `id`, `category` where the prompt has
    one, `rewards` [n] with a reward model, `violates` (by rule, [n]) with a rule model, and `rubrics` (by name, [n], without
    their weights) with rubrics, and `attributes` (by name, [n]) with an attribute model. Responses come in the order in
    which they were drawn; where `filter` left no candidate, `fallback` takes its place, or the prompt is left out.

    Args:
        config: the settings.

    Returns:
        The written file.

    Raises:
        UserError: for a mistake in the settings or the data; the output is written completely or not at all.
    """
    target = Path(config.output)
    if target.exists():
        raise UserError(f"{target} already exists; give another output, or remove it")
    if config.reward_model:
        require_reward_model(config.reward_model)
    rules = rules_of_model(config.rule_model, config.rules) if config.rule_model else {}
    _check_expressions(config)
    device = inference_device()
    settings = ModelConfig(model=config.model, chat_template=config.chat_template, dtype=config.dtype)
    loaded = load(settings, compute_dtype(config.dtype))
    loaded.backbone.to(device).eval().requires_grad_(False)
    limits = Limits(config.max_prompt_tokens, config.max_new_tokens, config.overlong)
    prompts = encode_prompts(config.prompts, loaded, limits, config.skip_bad_rows)
    copies = config.samples_per_prompt * config.best_of
    drawn = [prompt for prompt in prompts for _ in range(copies)]
    responses = _draw_responses(config, loaded, primed(config, loaded, drawn))
    scored = score_candidates(config, loaded, rules, drawn, responses)
    found = [
        _row(config, prompt, number, scored, range(number * copies, (number + 1) * copies))
        for number, prompt in enumerate(prompts)
    ]
    rows = [row for row in found if row is not None]
    write_text(target, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    written = sum(len(cast(list[str], row["responses"])) for row in rows)
    left_out = f"; {len(found) - len(rows)} prompts left out by the filter" if len(rows) < len(found) else ""
    console.print(f"{target}: {len(rows)} prompts, {written} responses{left_out}", highlight=False)
    return target


def _check_expressions(config: SampleConfig) -> None:
    """Refuse a filter or a rank that the attribute model cannot answer, before anything is sampled."""
    if config.attribute_model:
        names = [head.name for head in heads_of(config.attribute_model)]
        for kind, text, where in ((Condition, config.filter, "filter"), (Expression, config.rank, "rank")):
            if text:
                kind(text, names, where)


def _draw_responses(config: SampleConfig, loaded: LoadedModel, drawn: Sequence[EncodedPrompt]) -> list[list[int]]:
    """A response to each prompt, with a progress bar."""
    uniforms = row_uniforms(len(drawn), config.sampling, config.seed, Stream.SAMPLE_COMMAND)
    with Progress(console=console) as progress:
        task = progress.add_task("sample", total=len(drawn))
        responses = sample(
            loaded.backbone,
            [prompt.ids for prompt in drawn],
            uniforms,
            config.sampling,
            loaded.tokenization.end_ids,
            lambda rows: progress.advance(task, rows),
        )
    return responses.ids


def primed(config: SampleConfig, loaded: LoadedModel, prompts: Sequence[EncodedPrompt]) -> list[EncodedPrompt]:
    """The prompts as the model reads them, after examples and instruction; what is written and scored has neither.

    Raises:
        UserError: if the examples cannot be read, or a prompt with them does not fit the model.
    """
    if not config.primes:
        return list(prompts)
    primer, found = config.primer(), []
    for prompt in prompts:
        if prompt.given_as_ids:
            remedy = "give prompts as text"
            raise UserError(f"{config.prompts}: holds token ids (input_ids), which cannot follow examples; {remedy}")
        ids = loaded.tokenization.prompt_ids(primer.before(prompt.conversation))
        loaded.backbone.require_fit(
            len(ids), config.max_new_tokens, f"{config.prompts}: a prompt after {config.shots} shots"
        )
        found.append(replace(prompt, ids=ids))
    return found


def _row(config: SampleConfig, prompt: EncodedPrompt, number: int, scored: Scored, drawn: range) -> dict[str, object] | None:
    """One line of the output: of each `best_of` responses in `drawn`, the best; None if the filter left none.

    A response that `fallback` replaces has `fallback` as its model, and no figures.
    """
    groups = [drawn[start : start + config.best_of] for start in range(0, len(drawn), config.best_of)]
    kept = [i for i in (scored.best(config, group) for group in groups) if i is not None]
    texts, models, columns = [scored.texts[i] for i in kept], [config.model] * len(kept), scored.columns(kept)
    if not kept:
        if not config.fallback:
            return None
        texts, models, columns = [config.fallback], ["fallback"], {}
    row: dict[str, object] = {"id": prompt.id or str(number + 1), "prompt": to_json(prompt.conversation)}
    row |= {"responses": texts, "model": models}
    if prompt.category is not None:
        row["category"] = prompt.category
    return row | columns
