"""Drawing tokens: exactly from the softmax, reproducibly, and independently of the rows beside."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.core.seeds import Stream, generator
from align.sampling.generation import Sampling, _warpers, draw, row_uniforms

QUICK = settings(deadline=None, max_examples=40)

INF = float("inf")
BELOW_ONE = math.nextafter(1.0, 0.0)


def drawn(logits, uniforms):
    """Draws of one distribution at many uniform numbers."""
    uniforms = torch.as_tensor(uniforms, dtype=torch.float64)
    return draw(torch.as_tensor(logits, dtype=torch.float32).expand(len(uniforms), -1), uniforms)


# ---------------------------------------------------------------------------------------------------- draw


def test_draw_inverts_the_cumulative_distribution():
    # Weights 1, 2, 5 of 8: token 0 below 1/8, token 1 below 3/8, token 2 from there on.
    logits = torch.log(torch.tensor([1.0, 2.0, 5.0]))
    uniforms = [0.0, 0.1249, 0.1251, 0.3749, 0.3751, BELOW_ONE]
    assert drawn(logits, uniforms).tolist() == [0, 0, 1, 1, 2, 2]


def test_each_row_has_its_own_distribution():
    logits = torch.tensor([[0.0, -INF], [-INF, 0.0], [0.0, 0.0], [0.0, 0.0]])
    assert draw(logits, torch.tensor([0.9, 0.1, 0.4, 0.6], dtype=torch.float64)).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, BELOW_ONE])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    assert drawn([-INF, 0.0, -INF, 0.0, -INF], [uniform]).item() in (1, 3)


def test_evenly_spaced_uniforms_give_each_token_its_share():
    logits = torch.tensor([2.0, -1.0, 0.5, -7.0, 1.0, 0.0])
    count = 100_000
    found = torch.bincount(drawn(logits, (torch.arange(count) + 0.5) / count), minlength=6)
    expected = torch.softmax(logits.double(), -1) * count
    assert (found - expected).abs().max().item() <= 1.0 + 1e-2  # a border may fall on either side of a point


def test_random_draws_pass_a_chi_square_test():
    logits = torch.tensor([2.0, -1.0, 0.5, -4.0, 1.0, 0.0])
    count = 200_000
    uniforms = row_uniforms(count, Sampling(max_new_tokens=1), 11, Stream.ROLLOUT)[:, 0]
    found = torch.bincount(drawn(logits, uniforms), minlength=6).double()
    expected = torch.softmax(logits.double(), -1) * count
    statistic = ((found - expected) ** 2 / expected).sum().item()
    assert statistic < 20.515  # the 99.9 % point of chi-square with 6 - 1 = 5 degrees of freedom


def test_the_chi_square_test_above_would_notice_a_wrong_temperature():
    logits = torch.tensor([2.0, -1.0, 0.5, -4.0, 1.0, 0.0])
    count = 200_000
    found = torch.bincount(
        drawn(logits / 1.05, row_uniforms(count, Sampling(max_new_tokens=1), 11, Stream.ROLLOUT)[:, 0]), minlength=6
    ).double()
    expected = torch.softmax(logits.double(), -1) * count
    assert ((found - expected) ** 2 / expected).sum().item() > 100


def test_a_large_vocabulary_is_not_rounded_away_at_its_end():
    size = 200_000  # each token has 1/size; float32 sums would be off by whole tokens here
    tokens = [0, 1, 1234, 100_000, 199_998, 199_999]
    assert drawn(torch.zeros(size), [(token + 0.5) / size for token in tokens]).tolist() == tokens


def test_draw_leaves_its_input_alone_and_is_indifferent_to_the_level_of_logits():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    kept = logits.clone()
    uniforms = torch.tensor([0.3], dtype=torch.float64)
    assert draw(logits, uniforms).item() == draw(logits + 1000, uniforms).item() == draw(logits - 1000, uniforms).item()
    assert torch.equal(logits, kept)


@QUICK
@given(st.integers(0, 10**6), st.lists(st.floats(0, BELOW_ONE), min_size=1, max_size=8))
def test_a_row_is_drawn_alike_alone_and_in_a_batch(seed, uniforms):
    logits = 3 * torch.randn(len(uniforms), 30, generator=torch.Generator().manual_seed(seed))
    numbers = torch.tensor(uniforms, dtype=torch.float64)
    together = draw(logits, numbers).tolist()
    assert together == [draw(logits[i : i + 1], numbers[i : i + 1]).item() for i in range(len(uniforms))]
    for row, token, uniform in zip(logits, together, uniforms, strict=True):
        cumulative = torch.cumsum(torch.softmax(row.double(), -1), 0)
        assert cumulative[token].item() >= uniform - 1e-6
        assert token == 0 or cumulative[token - 1].item() <= uniform + 1e-6


def test_truncation_leaves_only_what_top_k_and_top_p_allow():
    # Probabilities .5, .3, .15, .05: top-k 2 keeps the first two; top-p .9 keeps three (.5 + .3 < .9 <= .95).
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    for sampling, allowed in [
        (Sampling(1, top_k=2), 2),
        (Sampling(1, top_p=0.9), 3),
        (Sampling(1, top_k=3, top_p=0.6), 2),
        (Sampling(1), 4),
    ]:
        kept = _warpers(sampling)(torch.zeros(1, 0, dtype=torch.long), logits.clone())
        found = set(drawn(kept[0], torch.linspace(0, BELOW_ONE, 1000, dtype=torch.float64)).tolist())
        assert found == set(range(allowed))


# ---------------------------------------------------------------------------------------------------- noise


def test_noise_is_uniform_float64_below_1():
    found = row_uniforms(2000, Sampling(max_new_tokens=50), 1, 2, 3)
    assert found.shape == (2000, 50)
    assert found.dtype == torch.float64
    assert found.min().item() >= 0.0
    assert found.max().item() < 1.0
    # The mean of 100,000 uniforms has standard deviation sqrt(1/12 / 100,000) = 0.00091; five of them are 0.0046.
    assert found.mean().item() == pytest.approx(0.5, abs=0.0046)
    assert found.var().item() == pytest.approx(1 / 12, rel=0.02)


def test_noise_is_the_same_for_the_same_seed_whatever_else_was_drawn():
    torch.manual_seed(0)
    first = row_uniforms(3, Sampling(max_new_tokens=4), 7, 1, 2)
    torch.manual_seed(99)
    torch.rand(5)
    before = torch.get_rng_state()
    assert torch.equal(row_uniforms(3, Sampling(max_new_tokens=4), 7, 1, 2), first)
    assert torch.equal(torch.get_rng_state(), before), "the global generator must not move"


@QUICK
@given(st.lists(st.integers(0, 2**32 - 1001), min_size=2, max_size=4), st.integers(0, 3), st.integers(1, 1000))
def test_every_part_of_a_seed_matters(seed, place, step):
    place %= len(seed)
    other = [*seed[:place], seed[place] + step, *seed[place + 1 :]]
    assert tuple(generator(*seed).random(4)) != tuple(generator(*other).random(4))


def test_order_and_number_of_parts_matter():
    seeds = [(0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1), (1, 0), (1, 1), (2**32 - 1, 3)]
    assert len({tuple(generator(*seed).random(4)) for seed in seeds}) == len(seeds)


def test_streams_of_neighboring_seeds_are_uncorrelated():
    draws = torch.stack([torch.from_numpy(generator(0, 2, update).random(4000)) for update in range(20)])
    correlations = torch.corrcoef(draws) - torch.eye(20)
    # The correlation of 4,000 independent pairs has standard deviation 1 / sqrt(4000) = 0.0158; five of them are 0.079.
    assert correlations.abs().max().item() < 0.079
    first = torch.tensor([generator(0, 2, update).random() for update in range(4000)])
    assert torch.corrcoef(torch.stack([first[:-1], first[1:]]))[0, 1].abs().item() < 0.079
    assert first.mean().item() == pytest.approx(0.5, abs=5 * math.sqrt(1 / 12 / 4000))


def test_a_thousand_updates_of_ten_seeds_have_different_streams():
    streams = {
        tuple(generator(seed, purpose, update).random(2))
        for seed in range(10)
        for purpose in range(1, 3)
        for update in range(1000)
    }
    assert len(streams) == 20_000
    assert len(streams) == 20_000


def test_every_stream_has_a_number_of_its_own():
    """`IntEnum` makes a second name for an equal value an alias, silently: then two purposes would share their numbers."""
    assert list(Stream.__members__) == [stream.name for stream in Stream]
    firsts = {float(generator(0, stream).random()) for stream in Stream}
    assert len(firsts) == len(Stream) > 10
