"""Sampling: what it draws, where it ends, and that a row's text is its own."""

import copy
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from align.core.seeds import Stream, generator
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.models.loading import load
from align.models.roles import response_log_probs
from align.sampling import generation
from align.sampling.generation import Sampling, draw, row_uniforms, sample

PROMPTS = [[30, 31, 32, 33, 34, 35, 36], [40], [50, 51, 52], [60, 61], [70, 71, 72, 73], [80, 81, 82]]
# A tenth of the vocabulary ends a response: rows end early, late and not at all.
ENDS = frozenset(range(1, 264, 10))
ENDS_SOON = frozenset(range(1, 264, 3))


def draws(backbone, sampling, prompts=PROMPTS, ends=ENDS, seed=3, **more):
    return sample(backbone, prompts, row_uniforms(len(prompts), sampling, seed, Stream.ROLLOUT), sampling, ends, **more)


@torch.no_grad()
def distributions(backbone, prompt, response, temperature=1.0):
    """[T, V] log-probabilities from which each token of a response was drawn, computed in one pass."""
    hidden = backbone.hidden(Padded.from_lists([prompt]), Padded.from_lists([response]))
    return torch.log_softmax(backbone.logits(hidden[0, :-1]).float() / temperature, -1)


# ---------------------------------------------------------------------------------------------------------------- draws


def test_a_draw_inverts_the_cumulative_distribution():
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(6, 3)
    # Cumulative: 0.2, 0.7, 1. A uniform number below 0.2 gives token 0, below 0.7 token 1, else token 2.
    uniforms = torch.tensor([0.0, 0.199, 0.201, 0.699, 0.701, 0.999999], dtype=torch.float64)
    assert draw(logits, uniforms).tolist() == [0, 0, 1, 1, 2, 2]


def test_a_draw_never_takes_what_is_impossible():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(4, 5)
    uniforms = torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-40], dtype=torch.float64)
    assert draw(logits, uniforms).tolist() == [1, 1, 3, 3]


def test_draws_have_the_distribution_of_the_softmax():
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3])
    uniforms = torch.from_numpy(generator(5, Stream.ROLLOUT).random(20_000))
    counts = Counter(draw(probabilities.log().expand(20_000, 4), uniforms).tolist())
    for token, probability in enumerate(probabilities.tolist()):
        # The standard deviation of a share is sqrt(p (1 - p) / 20000), at most 0.0036: four of those.
        assert counts[token] / 20_000 == pytest.approx(probability, abs=0.0145)


def test_noise_depends_on_every_part_of_the_seed_and_rows_on_nothing_else():
    sampling = Sampling(max_new_tokens=5)
    assert torch.equal(row_uniforms(4, sampling, 0, 2, 1), row_uniforms(4, sampling, 0, 2, 1))
    for other in ((1, 2, 1), (0, 1, 1), (0, 2, 2), (0, 1, 2)):
        assert not torch.equal(row_uniforms(4, sampling, 0, 2, 1), row_uniforms(4, sampling, *other))
    assert torch.equal(row_uniforms(2, sampling, 7, Stream.ROLLOUT), row_uniforms(4, sampling, 7, Stream.ROLLOUT)[:2])


@pytest.mark.parametrize("every", [2, 5, 100])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_how_often_ended_rows_leave_the_batch_changes_nothing(backbone, monkeypatch, every, temperature):
    """On a GPU they stay for some tokens more, so that nothing waits for it at each token."""
    sampling = Sampling(max_new_tokens=12, temperature=temperature)
    expected = draws(backbone, sampling)
    assert len({len(ids) for ids in expected.ids}) > 1 or temperature == 0, "rows end at different times"
    monkeypatch.setitem(generation.STEPS_BETWEEN_CHECKS, "cpu", every)
    assert draws(backbone, sampling) == expected


# ------------------------------------------------------------------------------------------ sampled and scored are the same


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_every_token_is_what_its_noise_draws_from_the_scored_distribution(backbone, temperature):
    sampling = Sampling(max_new_tokens=12, temperature=temperature)
    found, uniforms = draws(backbone, sampling), row_uniforms(len(PROMPTS), sampling, 3, Stream.ROLLOUT)
    log_likelihood = 0.0
    for row, (prompt, ids) in enumerate(zip(PROMPTS, found.ids, strict=True)):
        for step, (token, scored) in enumerate(zip(ids, distributions(backbone, prompt, ids, temperature), strict=True)):
            # The drawn token's interval of the cumulative distribution holds the noise, up to float32's error.
            upper = scored.double().exp().cumsum(0)
            lower = upper[token] - scored[token].double().exp()
            assert lower - 1e-5 < uniforms[row, step] < upper[token] + 1e-5
            log_likelihood += float(scored[token])
    assert log_likelihood < -20.0  # nothing was certain


def test_a_sampled_log_prob_is_the_scored_one_at_the_same_temperature(backbone):
    """The log-prob at sampling, with cache, left padding and rows that leave, against `hidden` and `logits`."""
    sampling = Sampling(max_new_tokens=10, temperature=0.7)
    recorded = []
    ids = {}

    class Recording(copy.copy(backbone).__class__):
        def logits(self, hidden):
            logits = super().logits(hidden)
            recorded.append(torch.log_softmax(logits.float() / sampling.temperature, -1))
            return logits

    listening = Recording(backbone.model)
    uniforms = row_uniforms(len(PROMPTS), sampling, 3, Stream.ROLLOUT)
    found = sample(listening, PROMPTS, uniforms, sampling, frozenset(range(1, 264, 3)))
    # Rows were sampled longest prompt first, all in one batch; a row is gone in the steps after its end.
    order = sorted(range(len(PROMPTS)), key=lambda row: (-len(PROMPTS[row]), row))
    for step, step_log_probs in enumerate(recorded):
        alive = [row for row in order if len(found.ids[row]) > step]
        assert len(step_log_probs) == len(alive)  # ended rows have left the batch
        for place, row in enumerate(alive):
            ids.setdefault(row, []).append(float(step_log_probs[place, found.ids[row][step]]))
    response = Padded.from_lists(found.ids)
    with torch.no_grad():
        hidden = backbone.hidden(Padded.from_lists(PROMPTS), response)
        scored, _ = response_log_probs(backbone, hidden, response, response.mask(), sampling.temperature)
    for row, sampled in ids.items():
        torch.testing.assert_close(scored[row, : len(sampled)], torch.tensor(sampled), atol=1e-5, rtol=0)
    assert sum(map(len, ids.values())) == sum(map(len, found.ids))
    assert len({len(row) for row in found.ids}) > 2


# ---------------------------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("ends", [frozenset({1}), ENDS], ids=["one end", "many ends"])
def test_temperature_0_is_transformers_greedy_generation(tiny_name, backbone, sharp_folders, ends):
    auto = AutoModelForSeq2SeqLM if tiny_name == "tiny-t5" else AutoModelForCausalLM
    theirs = auto.from_pretrained(sharp_folders[tiny_name]).eval()
    found = draws(backbone, Sampling(max_new_tokens=9, temperature=0.0), ends=ends)
    for prompt, ids in zip(PROMPTS, found.ids, strict=True):
        rows = theirs.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=9, eos_token_id=sorted(ends), pad_token_id=0
        )
        # A decoder repeats the prompt, an encoder-decoder the start token.
        assert ids == rows[0, 1 if tiny_name == "tiny-t5" else len(prompt) :].tolist()


def test_a_low_temperature_approaches_greedy(backbone):
    greedy = draws(backbone, Sampling(max_new_tokens=6, temperature=0.0))
    assert draws(backbone, Sampling(max_new_tokens=6, temperature=1e-4)) == greedy
    assert draws(backbone, Sampling(max_new_tokens=6, temperature=1.0)) != greedy


# -------------------------------------------------------------------------------------------------------- rows and ends


def test_a_rows_text_does_not_depend_on_its_batch(backbone):
    sampling = Sampling(max_new_tokens=12)
    together, uniforms = draws(backbone, sampling), row_uniforms(len(PROMPTS), sampling, 3, Stream.ROLLOUT)
    for budget in (1, 40, 10**6):
        again = draws(backbone, Sampling(max_new_tokens=12, batch_tokens=budget))
        assert again == together
    order = [4, 2, 0, 5, 1, 3]
    shuffled = sample(backbone, [PROMPTS[row] for row in order], uniforms[order], sampling, ENDS)
    assert shuffled.ids == [together.ids[row] for row in order]
    assert shuffled.ended == [together.ended[row] for row in order]
    alone = sample(backbone, PROMPTS[2:3], uniforms[2:3], sampling, ENDS)
    assert alone.ids == together.ids[2:3]


def test_several_responses_to_a_prompt_read_it_once(backbone, monkeypatch):
    read, prefill = [], backbone.prefill
    monkeypatch.setattr(backbone, "prefill", lambda prompt: (read.extend(prompt.tolists()), prefill(prompt))[1])
    prompts = [PROMPTS[row] for row in (0, 0, 1, 1, 1, 0)]
    sampling = Sampling(max_new_tokens=12)
    found, uniforms = draws(backbone, sampling, prompts), row_uniforms(6, sampling, 3, Stream.ROLLOUT)
    assert sorted(read) == sorted(PROMPTS[:2])
    alone = [sample(backbone, prompts[row : row + 1], uniforms[row : row + 1], sampling, ENDS) for row in range(6)]
    assert found.ids == [row.ids[0] for row in alone]
    assert len({tuple(ids) for ids in found.ids}) > 3  # each row has noise of its own


def test_an_end_token_is_kept_and_nothing_comes_after_it(backbone):
    prompts = [PROMPTS[row % 6] + [row % 200 + 20] for row in range(40)]
    found = draws(backbone, Sampling(max_new_tokens=8), prompts)
    for ids, ended in zip(found.ids, found.ended, strict=True):
        assert 1 <= len(ids) <= 8
        assert (ids[-1] in ENDS) == ended
        assert not ENDS & set(ids[:-1])
        assert ended or len(ids) == 8
    assert 0 < sum(found.ended) < 40


def test_an_end_at_the_last_possible_token_still_counts(backbone):
    free = draws(backbone, Sampling(max_new_tokens=5), ends=frozenset({-1}))
    assert free.ended == [False] * 6
    assert [len(ids) for ids in free.ids] == [5] * 6
    row = next(row for row, ids in enumerate(free.ids) if ids[-1] not in ids[:-1])
    found = draws(backbone, Sampling(max_new_tokens=5), ends=frozenset({free.ids[row][-1]}))
    assert (found.ids[row], found.ended[row]) == (free.ids[row], True)


def test_one_new_token(backbone):
    found = draws(backbone, Sampling(max_new_tokens=1))
    assert [len(ids) for ids in found.ids] == [1] * 6


def test_finished_rows_are_counted_for_a_progress_bar(backbone):
    counted = []
    draws(backbone, Sampling(max_new_tokens=3, batch_tokens=30), on_rows=counted.append)
    assert sum(counted) == 6
    assert len(counted) > 1


# ------------------------------------------------------------------------------------------------------------ truncation


def test_top_k_keeps_the_likeliest_tokens(backbone):
    found = draws(backbone, Sampling(max_new_tokens=10, top_k=3))
    used = set()
    for prompt, ids in zip(PROMPTS, found.ids, strict=True):
        for token, scored in zip(ids, distributions(backbone, prompt, ids), strict=True):
            rank = int((scored > scored[token]).sum())
            assert rank < 3
            used.add(rank)
    assert used == {0, 1, 2}
    untruncated = draws(backbone, Sampling(max_new_tokens=10))
    assert found != untruncated


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_top_p_keeps_the_smallest_set_of_that_mass_after_the_temperature(backbone, temperature):
    found = draws(backbone, Sampling(max_new_tokens=10, top_p=0.6, temperature=temperature))
    beyond_first = 0
    for prompt, ids in zip(PROMPTS, found.ids, strict=True):
        for token, scored in zip(ids, distributions(backbone, prompt, ids, temperature), strict=True):
            before = float(scored[scored > scored[token]].exp().sum())  # mass of the tokens that are likelier
            assert before < 0.6 + 1e-5
            beyond_first += before > 0
    assert beyond_first > 5


# --------------------------------------------------------------------------------------------------- gradient checkpointing


def test_a_model_in_training_mode_samples_the_same(tiny_name, backbone, sharp_folders):
    """transformers drops the cache while it recomputes blocks: sampling must not notice."""
    config = ModelConfig(model=sharp_folders[tiny_name], gradient_checkpointing=True)
    training = load(config, torch.float32).backbone
    assert training.model.training
    sampling = Sampling(max_new_tokens=8)
    assert draws(training, sampling) == draws(backbone, sampling)
    assert training.model.training
