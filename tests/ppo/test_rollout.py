import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.core.errors import UserError
from align.ppo import PPOTrainer
from align.ppo.rollout import prompts_of_update, sample_rollout, shuffled_minibatches
from align.tokenization.encoded import EncodedPrompt
from tests.files import metrics_of
from tests.ppo.rewards import long

QUICK = settings(deadline=None, max_examples=40)


def prompts(count):
    return [EncodedPrompt(({"role": "user", "content": str(i)},), [i]) for i in range(count)]


def numbers(found):
    return [prompt.ids[0] for prompt in found]


@QUICK
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
def test_each_pass_over_the_prompts_is_complete(count, per_update, repeats, seed):
    seen = []
    for update in range(1, 3 * count + 1):
        found = numbers(prompts_of_update(prompts(count), update, count=per_update, samples=repeats, seed=seed))
        assert len(found) == per_update * repeats
        groups = [found[i : i + repeats] for i in range(0, len(found), repeats)]
        assert all(len(set(group)) == 1 for group in groups), "samples of one prompt stand side by side"
        seen += [group[0] for group in groups]
    for start in range(0, len(seen) - count + 1, count):
        assert sorted(seen[start : start + count]) == list(range(count))


def test_each_pass_is_shuffled_anew_and_by_the_seed():
    first, second = (numbers(prompts_of_update(prompts(50), update, count=50, samples=1, seed=1)) for update in (1, 2))
    assert first != second
    assert first != list(range(50))
    assert first != numbers(prompts_of_update(prompts(50), 1, count=50, samples=1, seed=2))
    assert first == numbers(prompts_of_update(prompts(50), 1, count=50, samples=1, seed=1)), (
        "an update depends on nothing that came before it"
    )


@QUICK
@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 20), st.integers(0, 3), st.integers(0, 3))
def test_minibatches_are_a_partition_of_nearly_equal_parts_that_part_no_prompt(prompts, each, parts, update, epoch):
    parts = min(parts, prompts)
    found = shuffled_minibatches(prompts * each, samples=each, num_mini_batches=parts, update=update, epoch=epoch, seed=0)
    assert len(found) == parts
    assert sorted(row for part in found for row in part) == list(range(prompts * each))
    assert max(map(len, found)) - min(map(len, found)) <= each
    for part in found:
        groups = [part[i : i + each] for i in range(0, len(part), each)]
        assert groups == [list(range(first, first + each)) for first in part[::each]]


def test_minibatches_are_reshuffled_each_epoch_and_update():
    def order(update, epoch):
        return shuffled_minibatches(64, samples=1, num_mini_batches=2, update=update, epoch=epoch, seed=0)

    orders = [order(update, epoch) for update in (1, 2) for epoch in (0, 1)]
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))
    assert order(1, 0) == orders[0]


PROMPTS = ["red", "green, blue", "one", "two"]
STOPS = list(range(3, 264, 12))
"""A tenth of the vocabulary: some responses of 12 tokens end early, some do not."""


@pytest.fixture
def trainer(sharp_folders, tmp_path, make_config):
    def made(name, **settings):
        given = {"folder": f"run{len(list(tmp_path.iterdir()))}", "rollout_batch_size": 16, "max_new_tokens": 12}
        return PPOTrainer(sharp_folders[name], [long], PROMPTS, make_config(**(given | settings)))

    return made


def sampled(setup):
    prompts = setup.prompts * 4
    return sample_rollout(setup.sampler, setup.policy.tokenization, prompts, setup.sampling, (3, 1))


def cut(ids, stops):
    """A response up to its first stop token, and whether it has one."""
    place = next((place for place, id in enumerate(ids) if id in stops), None)
    return (ids, False) if place is None else (ids[: place + 1], True)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-t5"])
def test_a_response_ends_at_the_stop_tokens_that_are_set(name, trainer):
    whole = sampled(trainer(name, ignore_eos=True).setup)
    assert {len(ids) for ids in whole.responses} == {12}
    setup = trainer(name, stop_token_ids=STOPS).setup
    found = sampled(setup)
    assert list(zip(found.responses, found.ended, strict=True)) == [cut(ids, STOPS) for ids in whole.responses]
    assert set(found.ended) == {True, False}
    ends = setup.policy.tokenization.end_ids
    assert whole.ended == [any(id in ends for id in ids) for ids in whole.responses]
    plain = sampled(trainer(name).setup)
    assert plain.responses == [cut(ids, ends)[0] for ids in whole.responses]


def test_a_response_past_an_end_token_counts_as_ended(trainer, monkeypatch):
    """Its score is not replaced, and all of its tokens are trained on."""
    given = trainer("tiny-gpt2", ignore_eos=True)
    given.setup.policy.tokenization.end_ids = frozenset(STOPS)
    ended = sampled(given.setup).ended
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
