"""However many answers to a prompt are scored, the reward model reads the prompt's tokens once: counted at its embedding."""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from align.batches.encoding import Limits
from align.commands.sample import scorer_of
from align.eval.answers import EvaluatedModel, EvaluationContext, NamedRewardModel, sample_answers, sampled_responses
from align.eval.reward import RewardEvalConfig, best_of_n, rewarded_preferences
from align.models.heads import RewardModel, ScalarHead
from align.reward.checkpoint import LoadedReward
from align.tokenization.encoded import EncodedPrompt
from tests.eval.files import stored_rows
from tests.files import write_rows

PROMPT = "How many fish are there in the sea, and who has counted them?"
ANSWERS = ["Many.", "Nobody has counted them all.", "Three", "I do not know!"]


@pytest.fixture
def reward(load_sharp, tiny_name):
    loaded = load_sharp(tiny_name)
    torch.manual_seed(1)
    model = RewardModel(loaded.backbone, ScalarHead(loaded.backbone.hidden_size, bias=False)).eval().requires_grad_(False)
    return LoadedReward(model, loaded, 0.0)


@contextmanager
def tokens_read(reward):
    """A list of how many tokens go into each pass, those of padding too; of T5, its encoder's and its decoder's apart."""
    read, model = [], reward.loaded.backbone.model
    tokens = model.get_input_embeddings().weight  # which T5's halves share
    embeddings = [each for each in model.modules() if getattr(each, "weight", None) is tokens and each is not model.lm_head]
    hooks = [each.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].numel())) for each in embeddings]
    try:
        yield read
    finally:
        for hook in hooks:
            hook.remove()


def once(reward, answers):
    """What reading the prompt once costs: the answers behind it, or each behind a decoder's start token."""
    lengths, prompt = list(map(len, answers)), len(reward.loaded.tokenization.prompt_ids(conversation()))
    assert prompt > 50
    if reward.loaded.backbone.prompt_in_row:
        return [prompt + sum(lengths)]
    return [prompt, len(answers) * (1 + max(lengths))]


def conversation():
    return ({"role": "user", "content": PROMPT},)


def answer_ids(reward):
    return [reward.loaded.tokenization.response_ids(text) for text in ANSWERS]


def settings(folder, **more):
    given = {"reward_model": "in memory", "output": str(folder / "out"), "dtype": "float32"}
    return RewardEvalConfig(**given | {"preferences": ""} | more)


def context_of(config):
    return EvaluationContext(Accelerator(cpu=True), Path(config.output), config)


def named(reward):
    return NamedRewardModel("tiny", "0", reward)


def test_of_a_ranking(reward, tmp_path):
    rankings = write_rows(tmp_path / "r.jsonl", [{"prompt": PROMPT, "responses": ANSWERS, "ranks": [1, 2, 3, 4]}])
    with tokens_read(reward) as read:
        rewarded_preferences(
            rankings, Limits(1024, 1024), named(reward), context_of(settings(tmp_path, preferences=rankings))
        )
    assert read == once(reward, answer_ids(reward))


def test_of_the_best_of_n(reward, load_sharp, tiny_name, tmp_path):
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": PROMPT}])
    config = settings(tmp_path, prompts=prompts, models=["a policy"], samples=8, max_new_tokens=5, seed=3)
    evaluated = EvaluatedModel("policy", load_sharp(tiny_name), context_of(config))
    with tokens_read(reward) as read:
        best_of_n(evaluated, sample_answers(config, config, "best-of-n", evaluated, 8), [named(reward)])
    (row,) = stored_rows(tmp_path / "out" / "best-of-n-policy.jsonl").values()
    assert len(row["ids"]) == 8
    tokenization = reward.loaded.tokenization
    answers = [ids if tokenization.has_ended(ids) else [*ids, tokenization.end_id] for ids in row["ids"]]
    assert read == once(reward, answers)


def test_of_candidates_of_align_sample(reward):
    ids, encoded = answer_ids(reward), EncodedPrompt(conversation(), reward.loaded.tokenization.prompt_ids(conversation()))
    with tokens_read(reward) as read:
        rewards = scorer_of(reward.loaded, reward, 4096)(sampled_responses([encoded] * 4, ids, reward.loaded.tokenization))
    assert read == once(reward, ids)
    assert len(set(rewards)) == 4
