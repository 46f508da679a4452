import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.core.tensor_ops import Padded, cut_by_tokens, entropy_of, log_probs_of, masked_mean, masked_sum, whiten

QUICK = settings(deadline=None, max_examples=40)

NAN, INF = float("nan"), float("inf")
ROWS = st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=6)


def doubles(rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_padded_from_lists_pads_on_the_right():
    padded = Padded.from_lists([[7, 8, 9], [], [5]], pad_id=4)
    assert padded.ids.tolist() == [[7, 8, 9], [4, 4, 4], [5, 4, 4]]
    assert padded.lengths.tolist() == [3, 0, 1]
    assert padded.mask().tolist() == [[True, True, True], [False, False, False], [True, False, False]]


@QUICK
@given(ROWS, st.integers(0, 5))
def test_padded_round_trip_even_if_the_pad_id_is_a_real_token(rows, pad_id):
    padded = Padded.from_lists(rows, pad_id)
    assert padded.tolists() == rows
    assert int(padded.mask().sum()) == sum(len(row) for row in rows)


@QUICK
@given(ROWS, st.data())
def test_padded_rows_cuts_the_columns_that_nobody_uses(rows, data):
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5))
    part = Padded.from_lists(rows).rows(chosen)
    assert part.tolists() == [rows[index] for index in chosen]
    assert part.ids.shape[1] == max(len(rows[index]) for index in chosen)
    assert torch.equal(part.ids, Padded.from_lists(rows).rows(torch.tensor(chosen)).ids)


VALUES = [[1.0, 2.0, NAN], [6.0, INF, -INF]]
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_masked_sum_mean_and_gradient_by_hand():
    assert masked_sum(doubles(VALUES), MASK).item() == 9.0  # 1 + 2 + 6
    # (1 + 2 + 6) / 3 = 3; a mean of the rows' means would be (1.5 + 6) / 2 = 3.75
    assert masked_mean(doubles(VALUES), MASK).item() == 3.0
    assert masked_mean(doubles(VALUES), torch.zeros_like(MASK)).item() == 0.0
    values = doubles(VALUES).requires_grad_()
    masked_mean(values, MASK).backward()
    third = 1 / 3
    assert values.grad.tolist() == [[third, third, 0.0], [third, 0.0, 0.0]]


# The masked values are 1, 3, 5: mean 3, biased variance (4 + 0 + 4) / 3 = 8/3, so 5 becomes 2 / sqrt(8/3) = sqrt(3/2).
SPREAD = [[1.0, 3.0, NAN], [5.0, 77.0, INF]]
SCALED = math.sqrt(1.5)


@pytest.mark.parametrize(("shift", "mean"), [(True, 0.0), (False, 3.0)])
def test_whiten_removes_or_keeps_the_mean(shift, mean):
    found = whiten(doubles(SPREAD), MASK, shift_mean=shift)
    expected = doubles([[mean - SCALED, mean, 0.0], [mean + SCALED, 0.0, 0.0]])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)


def test_whiten_by_hand():
    values, everywhere = doubles([[0.0, 2.0], [10.0, 14.0]]), torch.ones(2, 2, dtype=torch.bool)
    by_row = torch.cat([whiten(row[None], everywhere[:1]) for row in values])
    assert by_row.tolist()[0] == pytest.approx([-1.0, 1.0])  # mean 1, standard deviation 1
    # The whole: mean 6.5, squares 42.25 + 20.25 + 12.25 + 56.25 = 131, variance 32.75.
    expected = [-6.5 / math.sqrt(32.75), -4.5 / math.sqrt(32.75)]
    assert whiten(values, everywhere).tolist()[0] == pytest.approx(expected, rel=1e-8)
    for count in (1, 4):
        same = torch.full((1, count), 0.3, dtype=torch.float64)
        assert whiten(same, torch.ones(1, count, dtype=torch.bool)).abs().max().item() < 1e-11
    # Values -1e-4 and 1e-4: variance 1e-8, as large as epsilon, so the result is 1e-4 / sqrt(2e-8) = 1 / sqrt(2).
    found = whiten(doubles([[-1e-4, 1e-4]]), torch.ones(1, 2, dtype=torch.bool))
    assert found[0, 1].item() == pytest.approx(1 / math.sqrt(2), rel=1e-9)


def test_cut_by_tokens_by_hand():
    # Sorted: 10, 5, 4, 3. The 10 fills the budget; 5 and 4 make 2 x 5 = 10; a third would make 3 x 5 = 15.
    assert list(cut_by_tokens([3, 10, 5, 4], budget=10)) == [[1], [2, 3], [0]]


@QUICK
@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 100))
def test_cut_by_tokens_properties(lengths, budget):
    batches = list(cut_by_tokens(lengths, budget))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= budget
    in_order = [lengths[row] for batch in batches for row in batch]
    assert in_order == sorted(lengths, reverse=True)
    for before, after in pairwise(batches):  # no batch was closed early
        assert (len(before) + 1) * lengths[before[0]] > budget, (before, after)


def test_a_batch_ends_where_padding_would_cost_more_than_a_batch():
    # Rows of 10 9 8 | 5 5 4 | 1: the fourth would bring the padding of the first batch from 3 to 8, above 5.
    lengths = [5, 10, 1, 9, 5, 8, 4]
    assert list(cut_by_tokens(lengths, 1000, padding=5)) == [[1, 3, 5], [0, 4, 6, 2]]
    assert list(cut_by_tokens(lengths, 1000, padding=4)) == [[1, 3, 5], [0, 4, 6], [2]]
    assert list(cut_by_tokens(lengths, 1000, padding=0)) == [[1], [3], [5], [0, 4], [6], [2]]
    assert list(cut_by_tokens(lengths, 1000)) == [[1, 3, 5, 0, 4, 6, 2]]


# exp gives 1, 2, 5 with sum 8: probabilities 1/8, 1/4, 5/8.
LOGITS = torch.log(torch.tensor([1.0, 2.0, 5.0]))


@pytest.mark.parametrize(
    ("temperature", "probabilities", "gradient", "entropy"),
    [
        # d log p(1) / d logit = (1 at the token, minus the probabilities): 0 - 1/8, 1 - 1/4, 0 - 5/8.
        # 1/8 ln 8 + 1/4 ln 4 + 5/8 ln 8/5 = 0.2599302 + 0.3465736 + 0.2937523
        (1.0, [1 / 8, 1 / 4, 5 / 8], [-1 / 8, 3 / 4, -5 / 8], 0.9002561),
        # Temperature 1/2 squares the weights: 1, 4, 25 with sum 30; 1 / temperature = 2 comes from the chain rule.
        # 1/30 ln 30 + 4/30 ln 7.5 + 25/30 ln 1.2 = 0.1133732 + 0.2686537 + 0.1519346
        (0.5, [1 / 30, 4 / 30, 25 / 30], [-2 / 30, 52 / 30, -50 / 30], 0.5339616),
    ],
)
@pytest.mark.parametrize("chunk", [3, 6, 1500])  # one row, two rows, or all of them
def test_log_probs_their_gradient_and_entropy_by_hand(temperature, probabilities, gradient, entropy, chunk, monkeypatch):
    monkeypatch.setattr("align.core.tensor_ops.CPU_CHUNK", chunk)
    logits = LOGITS.clone().requires_grad_()
    found = log_probs_of(logits.expand(3, 3), torch.arange(3), temperature)
    assert found.tolist() == pytest.approx([math.log(value) for value in probabilities], abs=2e-7)
    found[1].backward()
    assert logits.grad.tolist() == pytest.approx(gradient, abs=1e-6)
    assert entropy_of(LOGITS.expand(3, 3), temperature).tolist() == pytest.approx([entropy] * 3, abs=3e-7)


def test_extreme_logits_and_forbidden_tokens():
    logits = torch.tensor([[1e4, -1e4, 0.0]])
    assert log_probs_of(logits.expand(3, 3), torch.arange(3)).tolist() == [0.0, -2e4, -1e4]
    assert entropy_of(logits).item() == 0.0
    logits = torch.tensor([[0.0, -INF, 0.0]])
    found = log_probs_of(logits.expand(2, 3), torch.tensor([0, 1]))
    assert found[0].item() == pytest.approx(-math.log(2))
    assert found[1].item() == -INF


@pytest.fixture
def chunks_of_two_rows(monkeypatch):
    """Rows of 700 logits; a chunk holds 2 of 5."""
    monkeypatch.setattr("align.core.tensor_ops.CPU_CHUNK", 1500)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_of_entropy_is_that_of_its_definition(temperature, chunks_of_two_rows):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(5, 700, generator=generator, dtype=torch.float64)).requires_grad_()
    weights = torch.randn(5, generator=generator, dtype=torch.float64)
    (found,) = torch.autograd.grad((entropy_of(logits, temperature) * weights).sum(), logits)
    exact = torch.log_softmax(logits / temperature, -1)
    (expected,) = torch.autograd.grad((-(exact.exp() * exact).sum(-1) * weights).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-15)


def test_entropy_and_its_gradient_where_a_token_is_forbidden():
    logits = torch.tensor([[0.0, -INF, 1.0]], requires_grad=True)
    entropy_of(logits).sum().backward()
    # p = 1 / (1 + e) and e / (1 + e); H = -sum p log p; dH/dx = -p (log p + H).
    p = torch.tensor([1.0, math.e]) / (1 + math.e)
    expected = -p * (p.log() - (p * p.log()).sum())
    assert logits.grad[0, [0, 2]].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert logits.grad[0, 1].item() == 0.0


def test_bfloat16_logits_are_computed_in_float32():
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = torch.tensor([0, 5, 50, 99])
    assert log_probs_of(logits, tokens).dtype == entropy_of(logits).dtype == torch.float32
    assert torch.equal(log_probs_of(logits, tokens), log_probs_of(logits.float(), tokens))
    assert torch.equal(entropy_of(logits), entropy_of(logits.float()))


@QUICK
@given(st.integers(0, 10**6), st.sampled_from([0.3, 0.7, 1.0, 2.0]))
def test_log_probs_and_entropy_against_softmax_in_float64(seed, temperature):
    logits = 5 * torch.randn(3, 4, 20, generator=torch.Generator().manual_seed(seed))
    exact, kept = torch.log_softmax(logits.double() / temperature, -1), logits.clone()
    every = log_probs_of(logits[:, :, None].expand(3, 4, 20, 20), torch.arange(20).expand(3, 4, 20), temperature)
    torch.testing.assert_close(every.double(), exact, rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(
        entropy_of(logits, temperature).double(), -(exact.exp() * exact).sum(-1), rtol=1e-5, atol=2e-5
    )
    assert torch.equal(logits, kept), "they are left as they were"
