import pytest

from align.core.errors import UserError
from align.ppo import PPOTrainer
from align.ppo.rollout import sample_rollout
from tests.files import metrics_of
from tests.ppo.rewards import long

PROMPTS = ["red", "green, blue", "one", "two"]
STOPS = list(range(3, 264, 12))
"""A tenth of the vocabulary: some responses of 12 tokens end early, some do not."""


@pytest.fixture
def trainer(sharp_folders, tmp_path, make_config):
    def made(name, **settings):
        given = {"folder": f"run{len(list(tmp_path.iterdir()))}", "rollout_batch_size": 16, "max_new_tokens": 12}
        return PPOTrainer(sharp_folders[name], [long], PROMPTS, make_config(**(given | settings)))

    return made


def rollout(setup):
    prompts = setup.prompts * 4
    return sample_rollout(setup.sampler, setup.policy.tokenization, prompts, setup.sampling, (3, 1))


def cut(ids, stops):
    """A response up to its first stop token, and whether it has one."""
    place = next((place for place, id in enumerate(ids) if id in stops), None)
    return (ids, False) if place is None else (ids[: place + 1], True)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-t5"])
def test_a_response_ends_at_the_stop_tokens_that_are_set(name, trainer):
    whole = rollout(trainer(name, ignore_eos=True).setup)
    assert {len(ids) for ids in whole.responses} == {12}
    setup = trainer(name, stop_token_ids=STOPS).setup
    found = rollout(setup)
    assert list(zip(found.responses, found.ended, strict=True)) == [cut(ids, STOPS) for ids in whole.responses]
    assert set(found.ended) == {True, False}
    ends = setup.policy.tokenization.end_ids
    assert whole.ended == [any(id in ends for id in ids) for ids in whole.responses]
    plain = rollout(trainer(name).setup)
    assert plain.responses == [cut(ids, ends)[0] for ids in whole.responses]


def test_a_response_past_an_end_token_counts_as_ended(trainer, monkeypatch):
    """Its score is not replaced, and all of its tokens are trained on."""
    given = trainer("tiny-gpt2", ignore_eos=True)
    given.setup.policy.tokenization.end_ids = frozenset(STOPS)
    ended = rollout(given.setup).ended
    assert set(ended) == {True, False}
    given.train()
    row = metrics_of(given.run.folder)[-1]
    assert row["response/length"] == 12
    assert 0 < row["response/eos_rate"] < 1


def test_stop_tokens_that_cannot_be_are_refused(trainer):
    with pytest.raises(UserError, match="stop_token_ids: there is no token 999; the model has tokens 0 to 263"):
        trainer("tiny-gpt2", stop_token_ids=[999])
    with pytest.raises(UserError, match="ignore_eos is True, but must be false where stop_token_ids is given"):
        trainer("tiny-gpt2", stop_token_ids=[3], ignore_eos=True)
    with pytest.raises(UserError, match=r"stop_token_ids is \[-1\]"):
        trainer("tiny-gpt2", stop_token_ids=[-1])
