"""PPO reward from an expression over the attributes of a response or of its sentences."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from accelerate import Accelerator
from torch import Tensor

from align.core.settings import Settings, option
from align.data.conversation import segment_ends
from align.extras.attributes.expressions import Expression
from align.extras.attributes.generative import GenerativeModel, Questions
from align.extras.attributes.model import AttributeModel, form_of, heads_of, in_label_units, load_attribute_model
from align.models.backbone import flops_profile
from align.models.loading import load_whole
from align.ppo.extensions import Extension, TrainingContext
from align.ppo.records import RoleOutputs, Rollout, TrainingSignal
from align.ppo.scoring_models import require_readable
from align.reward.scoring import RewardModelScorer, knows_tokens_of
from align.runtime.distributed import compute_dtype
from align.runtime.flops import forward_flops
from align.runtime.sharding import place_frozen_model
from align.tokenization import Tokenization
from align.tokenization.encoded import PromptResponse, SampledResponse


class AttributeScorer:
    """An attribute model of either form. Encodes each response once for all attributes.

    Args:
        policy: tokenization of the model that writes the responses. None for responses of unknown origin.
        budget: maximum padded tokens per forward pass.
    """

    def __init__(self, folder: str, dtype: str, policy: Tokenization | None, accelerator: Accelerator, budget: int) -> None:
        model: AttributeModel | GenerativeModel
        self.heads, self.questions = heads_of(folder), None
        if form_of(folder) == "generative":
            loaded = load_whole(folder, compute_dtype(dtype))
            self.questions = Questions(self.heads, loaded.tokenization)
            model = GenerativeModel(loaded.backbone, self.questions).eval().requires_grad_(False)
        else:
            model, loaded = load_attribute_model(folder, dtype)
        tokenization = loaded.tokenization
        known = policy is not None and knows_tokens_of(tokenization, policy)
        profile = flops_profile(loaded.backbone, loaded.adapter)
        self.module = place_frozen_model(model, accelerator)
        reads = None if policy is not None and tokenization.reads_alike(policy) else tokenization
        place = (loaded.backbone, accelerator, budget, profile)
        self.scorer = RewardModelScorer(self.module, 0.0, *place, reads, reads_given_ids=known)

    @property
    def question_tokens(self) -> int:
        """Number of tokens of the longest question after a response."""
        return max(len(text.question) for text in self.questions.texts) if self.questions else 0

    def __call__(self, responses: Sequence[SampledResponse]) -> list[dict[str, float]]:
        """Return the attributes of each response by name: probabilities, ratings from 1 to 7, and preference reward."""
        names = [head.name for head in self.heads]
        if self.questions:
            ratings = self._ask(self.questions, responses)
        else:
            outputs = torch.tensor(self.scorer(responses), dtype=torch.float64).reshape(len(responses), -1)
            ratings = in_label_units(outputs, self.heads).tolist()
        return [dict(zip(names, row, strict=True)) for row in ratings]

    def _ask(self, questions: Questions, responses: Sequence[SampledResponse]) -> list[list[float]]:
        """Return ratings from next-token probabilities. All questions share one forward pass over a response."""
        encoded = [self.scorer.encode(response) for response in responses]
        rows = [PromptResponse([*row.prompt, *row.response], text.question) for row in encoded for text in questions.texts]
        answers = torch.tensor(self.scorer.score_rows(rows), dtype=torch.float64).reshape(len(rows), -1)
        count = len(self.heads)
        ratings = questions.ratings(answers, [*range(count)] * len(encoded))
        return [ratings[start : start + count] for start in range(0, len(ratings), count)]


@dataclass(kw_only=True)
class AttributeRewardSettings(Settings):
    """Attribute model and the reward computed from its attributes."""

    model: str = option("", "Attribute model folder (trained by `align attributes`).", required=True)
    reward: str = option(
        "", "Reward expression over attributes, such as 3*sensible+specific+interesting-5*unsafe.", required=True
    )
    segments: bool = option(
        False,
        "Reward each sentence at its last token. For attribute models trained on marked errors (`align annotate "
        "export attributes`).",
    )


class AttributeRewards(Extension):
    """Adds the value of an expression to the score, or with `segments` to the last token of each sentence.

    The score of an evaluation is then the sum over the sentences (Wu et al. 2023, arXiv 2306.01693, section 2).
    """

    gives_scores = True

    def __init__(self, settings: AttributeRewardSettings) -> None:
        self.folder, names = settings.model, [head.name for head in heads_of(settings.model)]
        self.expression = Expression(settings.reward, names, "attributes.reward")
        self.by_segment = settings.segments

    def load(self, context: TrainingContext) -> None:
        run, self.policy = context.run, context.policy.tokenization
        place = (self.policy, run.accelerator, run.optimization.micro_batch_tokens)
        self.scorer = AttributeScorer(self.folder, context.run.model_config.dtype, *place)
        self.modules = [self.scorer.module]
        model, after = self.scorer.scorer, self.scorer.question_tokens
        new_tokens = context.max_new_tokens + self.by_segment  # EOS after a sentence
        require_readable(self.folder, model, context.prompts, new_tokens, context.policy, after)

    def score(self, rollout: Rollout) -> dict[str, Tensor]:
        if not self.by_segment:
            return {"attributes": self._rewards(rollout.sampled_responses)}
        self.token_values = self._segment_rewards(rollout)
        return {"attributes": self.token_values.sum(1)}

    def shape(self, signal: TrainingSignal, rollout: Rollout, old: RoleOutputs) -> TrainingSignal:
        if not self.by_segment:
            return signal
        scores = signal.scores - signal.components["attributes"]  # already in the token rewards
        return replace(signal, scores=scores).add_token_rewards(self.token_values)

    def _rewards(self, responses: Sequence[SampledResponse]) -> Tensor:
        return torch.tensor([self.expression(values) for values in self.scorer(responses)])

    def _segment_rewards(self, rollout: Rollout) -> Tensor:
        """Return the rewards [B, T] of the sentences, each at its last token."""
        places: list[tuple[int, int]] = []
        prefixes: list[SampledResponse] = []
        for row, response in enumerate(rollout.sampled_responses):
            for token, text in sentences(response.ids, self.policy):
                prefixes.append(replace(response, ids=self._answer_ids(response, text), text=text, ended=True))
                places.append((row, token))
        self.segment_lengths = [(len(prefix.prompt_ids), [len(prefix.ids)]) for prefix in prefixes]
        rewards = torch.zeros(len(rollout), int(rollout.lengths.max()))
        if places:
            rows, tokens = zip(*places, strict=True)
            rewards.index_put_((torch.tensor(rows), torch.tensor(tokens)), self._rewards(prefixes), accumulate=True)
        return rewards

    def _answer_ids(self, response: SampledResponse, text: str) -> list[int]:
        """Return the ids of the beginning `text` of a response, as they follow the policy's prompt."""
        if not response.given_as_ids:
            prompt_ids, ids = self.policy.answer_ids(response.conversation, text, whole=False)
            if prompt_ids == response.prompt_ids:  # unless the prompt was truncated or opens a thought
                return ids
        return self.policy.response_ids(text)

    def flops(self, lengths: Sequence[tuple[int, Sequence[int]]]) -> float:
        profile = self.scorer.scorer.flops_profile
        lengths = self.segment_lengths if self.by_segment else lengths
        return sum(forward_flops(profile, prompt, responses) for prompt, responses in lengths) if profile else 0.0


def sentences(ids: Sequence[int], tokenization: Tokenization) -> list[tuple[int, str]]:
    """Return the last token position of each sentence of a response, and the text up to it.

    End tokens have no text. With `ignore_eos`, they also occur inside a response.
    """
    places = [place for place, token in enumerate(ids) if token not in tokenization.end_ids]
    texts = tokenization.token_texts([ids[place] for place in places])
    lengths = list(accumulate(map(len, texts)))
    text = "".join(texts)
    return [(places[bisect_left(lengths, end)], text[:end].strip()) for end in segment_ends(text)]
