"""Log-probs and entropy of logits: numbers worked out by hand, extreme and forbidden tokens, chunks of rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.core.tensor_ops import entropy_of, log_probs_of

INF = float("inf")

# exp gives 1, 2, 5 with sum 8: probabilities 1/8, 1/4, 5/8.
LOGITS = torch.log(torch.tensor([1.0, 2.0, 5.0]))


@pytest.mark.parametrize(
    ("temperature", "token", "expected"),
    [
        (1.0, 0, math.log(1 / 8)),
        (1.0, 1, math.log(1 / 4)),
        (1.0, 2, math.log(5 / 8)),
        # Temperature 1/2 squares the weights: 1, 4, 25 with sum 30.
        (0.5, 0, math.log(1 / 30)),
        (0.5, 1, math.log(4 / 30)),
        (0.5, 2, math.log(25 / 30)),
    ],
)
def test_log_probs_of_by_hand(temperature, token, expected):
    found = log_probs_of(LOGITS[None], torch.tensor([token]), temperature)
    assert found.item() == pytest.approx(expected, abs=2e-7)


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        # d log p(1) / d logit = (1 at the token, minus the probabilities): 0 - 1/8, 1 - 1/4, 0 - 5/8.
        (1.0, [-1 / 8, 3 / 4, -5 / 8]),
        # With probabilities 1/30, 4/30, 25/30, and 1 / temperature = 2 from the chain rule.
        (0.5, [-2 / 30, 52 / 30, -50 / 30]),
    ],
)
def test_gradient_of_log_probs_by_hand(temperature, expected):
    logits = LOGITS.clone().requires_grad_()
    log_probs_of(logits[None], torch.tensor([1]), temperature).sum().backward()
    assert logits.grad.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        # 1/8 ln 8 + 1/4 ln 4 + 5/8 ln 8/5 = 0.2599302 + 0.3465736 + 0.2937523
        (1.0, 0.9002561),
        # 1/30 ln 30 + 4/30 ln 7.5 + 25/30 ln 1.2 = 0.1133732 + 0.2686537 + 0.1519346
        (0.5, 0.5339616),
    ],
)
def test_entropy_by_hand(temperature, expected):
    assert entropy_of(LOGITS[None], temperature).item() == pytest.approx(expected, abs=3e-7)


def test_extreme_logits_neither_overflow_nor_become_nan():
    logits = torch.tensor([[1e4, -1e4, 0.0]])
    assert log_probs_of(logits.expand(3, 3), torch.arange(3)).tolist() == [0.0, -2e4, -1e4]
    assert entropy_of(logits).item() == 0.0


def test_log_probs_of_a_forbidden_token():
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


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([0.3, 0.7, 1.0, 2.0]))
def test_log_probs_and_entropy_against_softmax_in_float64(seed, temperature):
    logits = 5 * torch.randn(3, 4, 20, generator=torch.Generator().manual_seed(seed))
    exact = torch.log_softmax(logits.double() / temperature, -1)
    every = log_probs_of(logits[:, :, None].expand(3, 4, 20, 20), torch.arange(20).expand(3, 4, 20), temperature)
    torch.testing.assert_close(every.double(), exact, rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(
        entropy_of(logits, temperature).double(), -(exact.exp() * exact).sum(-1), rtol=1e-5, atol=2e-5
    )


def test_log_probs_and_entropy_over_several_chunks_are_those_of_one_row_each(chunks_of_two_rows):
    rows, vocabulary = 5, 700
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(2), requires_grad=True)
    tokens = torch.tensor([0, 5, 699, 17, 99])
    found = log_probs_of(logits, tokens, 0.5)
    # In float64, for log_softmax in float32 is off by 2.6e-5 on processors without AVX-512.
    plain = torch.log_softmax(logits.detach().double() / 0.5, -1)
    expected, entropy = plain.gather(1, tokens[:, None])[:, 0], -(plain.exp() * plain).sum(1)
    torch.testing.assert_close(found.detach(), expected.float(), atol=3e-6, rtol=0)
    torch.testing.assert_close(entropy_of(logits, 0.5), entropy.float(), atol=3e-6, rtol=0)
    found.sum().backward()
    # (one-hot - softmax) / temperature: each row's gradient sums to 0, its largest entry is the token's own.
    torch.testing.assert_close(logits.grad.sum(1), torch.zeros(rows), atol=1e-4, rtol=0)
    assert logits.grad.argmax(1).tolist() == tokens.tolist()
    own = 2 * (1 - math.exp(found[1].item()))
    assert float(logits.grad[1, 5]) == pytest.approx(own, abs=1e-5)


def test_logits_are_left_as_they_were():
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(3))
    kept = logits.clone()
    log_probs_of(logits, torch.tensor([1, 2, 3]), 0.5)
    entropy_of(logits, 0.5)
    assert torch.equal(logits, kept)
