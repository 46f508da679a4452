"""`align sample`: sample responses to prompts, printed or written as rows that the labeling app imports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from align.batches.encoding import Limits, encode_prompts
from align.core.errors import UserError, counted
from align.core.files import write_json_lines
from align.core.plugins import import_object
from align.core.seeds import RngStream
from align.core.settings import block, option, require_setting
from align.data.conversation import to_json
from align.eval.answers import ids_after, sampled_responses
from align.models.loading import LoadedModel, load_frozen
from align.reward.checkpoint import LoadedReward, load_reward_model, require_reward_model
from align.reward.scoring import RewardModelScorer
from align.runtime.distributed import computes_on_cpu
from align.runtime.progress import ProgressDisplay, console
from align.sampling.generation import row_uniforms, sample
from align.sampling.settings import AnsweringConfig, FewShotConfig, InferenceConfig
from align.tokenization import Tokenization
from align.tokenization.encoded import EncodedPrompt, SampledResponse

SCORERS = {
    "attributes": "align.extras.candidates:AttributeCandidates",
    "rules": "align.extras.candidates:RuleCandidates",
}
"""Settings block -> `CandidateScorer`, in order of selection."""
PROMPTS = "data/prompts.jsonl"
Row = dict[str, Any]


@dataclass(kw_only=True)
class SampleConfig(FewShotConfig, AnsweringConfig, InferenceConfig):
    """Sample responses to prompts, optionally the best of n."""

    model: list[str] = option(
        [], "Model to sample from: local folder, Hub id or built-in model. Several are allowed with prompt.", required=True
    )
    prompt: list[str] = option([], "Prompts given as text. Responses are printed unless output is set.")
    prompts: str = option(PROMPTS, "Prompts: file, folder or Hub id.")
    output: str = option("", "Output file (JSON Lines). Must not exist.")
    samples_per_prompt: int = option(1, "Responses to save per prompt.", gt=0)
    best_of: int = option(
        1,
        "Candidates per saved response. The best by reward_model, rules and attributes is saved.",
        gt=0,
    )
    reward_model: str = option("", "Reward model folder. Its rewards are saved with the responses.")
    rules: Any = block(
        "align.extras.candidates:RuleChoiceSettings", "Rule model whose verdicts are saved and select among candidates."
    )
    attributes: Any = block(
        "align.extras.candidates:AttributeChoiceSettings",
        "Attribute model whose attributes are saved and select among candidates.",
    )
    fallback: str = option(
        "", "Response to save if attributes.filter rejects every candidate. Default: omit and count the prompt."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        chooses = bool(self.reward_model or self.rules or self.attributes)
        by = "unless reward_model, rules or attributes is set"
        require_setting(self, "best_of", self.best_of == 1 or chooses, f"1, {by}")
        require_setting(self, "prompts", not self.prompt or self.prompts == PROMPTS, "unset with prompt")
        require_setting(self, "output", bool(self.output or self.prompt), "set, unless prompt is")
        require_setting(self, "output", not self.output or self.output.endswith(".jsonl"), "a file name ending in .jsonl")
        require_setting(self, "model", len(self.model) == 1 or not self.output, "one model with output")


class CandidateScorer:
    """Scores candidates in addition to the reward model, `budget` padded tokens at a time, and takes part in selection."""

    def __init__(self, settings: Any, dtype: str, budget: int) -> None:
        self.settings, self.dtype, self.budget = settings, dtype, budget

    def score(self, policy: LoadedModel, prompts: Sequence[EncodedPrompt], rows: Sequence[SampledResponse]) -> None:
        """Score and store all candidates `rows`."""

    def choose(self, candidates: Mapping[int, float]) -> dict[int, float]:
        """Filter the candidates, given their rewards by number. There is at least one."""
        return dict(candidates)

    def columns(self, kept: Sequence[int]) -> dict[str, object]:
        """Return row fields that describe the selected candidates."""
        return {}


def sample_command(config: SampleConfig) -> None:
    """Run `align sample`: print the responses, or write them if `output` is set."""
    if config.output:
        run_sample(config)
        return
    several = len(config.model) > 1
    for place, name in enumerate(config.model):
        rows = sample_rows(replace(config, model=[name]))
        print("\n" * bool(place) + _printed(rows, name if several else ""))


def run_sample(config: SampleConfig) -> Path:
    """Sample responses and write them. Return the output path.

    A row contains `prompt`, `responses` [n], `model` [n] (the model of each response) and `finish_reason` [n] (`stop`, or
    `length` for a response truncated at `max_new_tokens`). `id` is the prompt's id, or else its row number. `category` is
    copied from the prompt if present. Scoring models add fields: a reward model `rewards` [n], a rule model `violates` (by
    rule, [n]), and an attribute model `attributes` (by name, [n]). Responses are in the order of sampling. If
    `attributes.filter` rejects all responses, the row contains `fallback`, or the prompt is omitted.
    """
    target = Path(config.output)
    if target.exists():
        raise UserError(f"{target} already exists; choose another output or remove it")
    sampled = sample_rows(config)
    rows = [row for row in sampled if row is not None]
    write_json_lines(target, rows)
    written = sum(len(row["responses"]) for row in rows)
    left_out = f"; {counted(len(sampled) - len(rows), 'prompt')} removed by the filter" if len(rows) < len(sampled) else ""
    console.print(f"{target}: {counted(len(rows), 'prompt')}, {counted(written, 'response')}{left_out}")
    return target


def sample_rows(config: SampleConfig) -> list[Row | None]:
    """Return a row per prompt, see `run_sample`. The row is None if `attributes.filter` rejects every response."""
    if not config.prompt and any(map(str.isspace, config.prompts)) and not Path(config.prompts).exists():
        raise UserError(f"prompts is {config.prompts!r}, which does not exist; pass text with --prompt")
    if config.reward_model:
        require_reward_model(config.reward_model)
    options = (config.dtype, config.batch_tokens)
    scorers = [
        import_object(path)(settings, *options) for name, path in SCORERS.items() if (settings := getattr(config, name))
    ]
    loaded = load_frozen(config.model[0], config.dtype, config.chat_template, quantization=config.quantization)
    limits = Limits(config.max_prompt_tokens, config.max_new_tokens, config.overlong)
    prompts = encode_prompts(config.prompt or config.prompts, loaded, limits, config.skip_bad_rows)
    copies = config.samples_per_prompt * config.best_of
    drawn = [prompt for prompt in prompts for _ in range(copies)]
    few_shot = config.few_shot_prompt()  # not written or scored
    read = [ids_after(few_shot, prompt, loaded.tokenization, config.prompts) for prompt in drawn]
    longest, what = max(map(len, read)), f"{config.prompts}: a prompt after {config.num_few_shot} few-shot examples"
    loaded.backbone.require_fit(longest, config.max_new_tokens, what)
    sampling = config.sampling(config.batch_tokens)
    uniforms = row_uniforms(len(drawn), sampling, config.seed, RngStream.SAMPLE_COMMAND)
    with ProgressDisplay("sample", len(drawn), enabled=bool(config.output)) as progress:
        end_ids = loaded.tokenization.end_ids
        responses = sample(loaded.backbone, read, uniforms, sampling, end_ids, progress.advance)
    candidates = sampled_responses(drawn, responses.ids, loaded.tokenization)
    rewards = [0.0] * len(candidates)
    if config.reward_model:
        reward = load_reward_model(
            config.reward_model, config.dtype, chat_template=config.chat_template, quantization=config.quantization
        )
        rewards = scorer_of(loaded, reward, config.batch_tokens)(candidates)
    for scorer in scorers:
        scorer.score(loaded, drawn, candidates)
    rows: list[Row | None] = []
    saved: list[SampledResponse] = []
    for place, prompt in enumerate(prompts):
        starts = range(place * copies, (place + 1) * copies, config.best_of)
        kept = _best([range(start, start + config.best_of) for start in starts], rewards, scorers)
        if not kept and not config.fallback:
            rows.append(None)
            continue
        saved += [candidates[number] for number in kept]
        row: Row = {"id": prompt.id, "prompt": to_json(prompt.conversation)}
        row["responses"] = [candidates[number].text for number in kept] or [config.fallback]
        row["model"] = config.model * len(kept) or ["fallback"]  # without scores
        row["finish_reason"] = ["stop" if candidates[number].ended else "length" for number in kept] or ["stop"]
        if prompt.category is not None:
            row["category"] = prompt.category
        if kept and config.reward_model:
            row["rewards"] = [round(rewards[number], 6) for number in kept]
        for scorer in reversed(scorers if kept else []):
            row |= scorer.columns(kept)
        rows.append(row)
    if config.output:
        _warn_of_lost_tokens(saved, loaded.tokenization)
    return rows


def _warn_of_lost_tokens(saved: Sequence[SampledResponse], tokenization: Tokenization) -> None:
    """Warn about responses that are tokenized differently when their text is read for training."""
    changed = sum(not tokenization.reads_back(response) for response in saved)
    if changed:
        console.print(
            f"warning: {changed} of {counted(len(saved), 'response')} will be tokenized differently than sampled: text "
            "loses special tokens, outer spaces and unusual token boundaries, and some chat templates drop thoughts"
        )


def _best(parts: Sequence[range], rewards: Sequence[float], scorers: Sequence[CandidateScorer]) -> list[int]:
    """Return the best candidate of each group, skipping groups in which the scorers reject all."""
    kept = []
    for part in parts:
        left = {number: rewards[number] for number in part}
        for scorer in scorers:
            left = scorer.choose(left) if left else {}
        kept += [max(left, key=left.__getitem__)] if left else []
    return kept


def _printed(rows: Sequence[Row | None], model: str) -> str:
    """Format the responses with headings if there are several models, prompts, responses or rewards."""
    parts = []
    for row in rows:
        if row is None:
            parts.append("--- attributes.filter rejected every response")
            continue
        for number, response in enumerate(row["responses"]):
            prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
            titles = [model, prompt if len(rows) > 1 else ""]
            titles.append(f"response {number + 1}" if len(row["responses"]) > 1 else "")
            titles.append(f"reward {row['rewards'][number]:.3f}" if "rewards" in row else "")
            heading = " | ".join(filter(None, titles))
            parts.append(f"--- {heading}\n{response}" if heading else response)
    return "\n\n".join(parts)


def scorer_of(loaded: LoadedModel, reward: LoadedReward, batch_tokens: int) -> RewardModelScorer:
    """Return a reward function for responses of `loaded`, with the mean over demonstrations subtracted."""
    reward.model.to("cuda" if torch.cuda.is_available() else "cpu")
    return RewardModelScorer.from_loaded(reward, loaded.tokenization, Accelerator(cpu=computes_on_cpu()), batch_tokens)
