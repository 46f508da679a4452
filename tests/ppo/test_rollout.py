"""Which prompts an update samples from: reproducible, complete, shuffled."""

from hypothesis import given, settings
from hypothesis import strategies as st

from align.ppo.rollout import prompts_of_update
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
