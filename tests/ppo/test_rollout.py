from hypothesis import given, settings
from hypothesis import strategies as st

from align.ppo.rollout import prompts_of_update, shuffled_minibatches
from align.tokenization.encoded import EncodedPrompt

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
        found = numbers(prompts_of_update(prompts(count), update, per_update, repeats, seed))
        assert len(found) == per_update * repeats
        groups = [found[i : i + repeats] for i in range(0, len(found), repeats)]
        assert all(len(set(group)) == 1 for group in groups), "samples of one prompt stand side by side"
        seen += [group[0] for group in groups]
    for start in range(0, len(seen) - count + 1, count):
        assert sorted(seen[start : start + count]) == list(range(count))


def test_each_pass_is_shuffled_anew_and_by_the_seed():
    first, second = (numbers(prompts_of_update(prompts(50), update, 50, 1, seed=1)) for update in (1, 2))
    assert first != second
    assert first != list(range(50))
    assert first != numbers(prompts_of_update(prompts(50), 1, 50, 1, seed=2))
    assert first == numbers(prompts_of_update(prompts(50), 1, 50, 1, seed=1)), (
        "an update depends on nothing that came before it"
    )


@QUICK
@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 20), st.integers(0, 3), st.integers(0, 3))
def test_minibatches_are_a_partition_of_nearly_equal_parts_that_part_no_prompt(prompts, each, parts, update, epoch):
    parts = min(parts, prompts)
    found = shuffled_minibatches(prompts * each, each, parts, update, epoch, seed=0)
    assert len(found) == parts
    assert sorted(row for part in found for row in part) == list(range(prompts * each))
    assert max(map(len, found)) - min(map(len, found)) <= each
    for part in found:
        groups = [part[i : i + each] for i in range(0, len(part), each)]
        assert groups == [list(range(first, first + each)) for first in part[::each]]


def test_minibatches_are_reshuffled_each_epoch_and_update():
    found = [shuffled_minibatches(64, 1, 2, update, epoch, seed=0) for update in (1, 2) for epoch in (0, 1)]
    assert all(found[i] != found[j] for i in range(4) for j in range(i))
    assert shuffled_minibatches(64, 1, 2, 1, 0, seed=0) == found[0]
