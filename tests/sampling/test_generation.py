import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BloomConfig, MistralConfig, MixtralConfig, Qwen3Config

from align.core.seeds import RngStream, generator
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.models.backbone import static_decoding, wrap
from align.models.backbone.static_decoding import StaticDecodingState
from align.models.loading import load
from align.sampling import generation
from align.sampling.engines import sampling_tokens
from align.sampling.generation import SamplingParams, draw, row_uniforms, sample

PROMPTS = [[30, 31, 32, 33, 34, 35, 36], [40], [50, 51, 52], [60, 61], [70, 71, 72, 73], [80, 81, 82]]
# A tenth of the vocabulary ends a response: rows end early, late and not at all.
ENDS = frozenset(range(1, 264, 10))


def draws(backbone, sampling, prompts=PROMPTS, ends=ENDS, seed=3, **more):
    return sample(backbone, prompts, row_uniforms(len(prompts), sampling, seed, RngStream.ROLLOUT), sampling, ends, **more)


@torch.no_grad()
def distributions(backbone, prompt, response, temperature=1.0):
    """[T, V] log-probabilities from which each token of a response was drawn, computed in one pass."""
    hidden = backbone.hidden(Padded.from_lists([prompt]), Padded.from_lists([response]))
    return torch.log_softmax(backbone.logits(hidden[0, :-1]).float() / temperature, -1)


@pytest.mark.parametrize("every", [2, 5, 100])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_how_often_ended_rows_leave_the_batch_changes_nothing(backbone, monkeypatch, every, temperature):
    """On a GPU they stay for some tokens more, so that nothing waits for it at each token."""
    sampling = SamplingParams(max_new_tokens=12, temperature=temperature)
    expected = draws(backbone, sampling)
    assert len({len(ids) for ids in expected.ids}) > 1 or temperature == 0, "rows end at different times"
    monkeypatch.setitem(generation.STEPS_BETWEEN_CHECKS, "cpu", every)
    assert draws(backbone, sampling) == expected


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("settings", [{}, {"lora_r": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_a_cache_of_fixed_size_gives_the_same_responses(load_sharp, monkeypatch, name, settings, every):
    loaded, sampling, ends = load_sharp(name, **settings), SamplingParams(max_new_tokens=12), frozenset(range(1, 264, 4))
    monkeypatch.setitem(generation.STEPS_BETWEEN_CHECKS, "cpu", every)
    steps = []
    monkeypatch.setattr(
        StaticDecodingState, "step", lambda *call, step=StaticDecodingState.step: steps.append(0) or step(*call)
    )
    with loaded.backbone.adapter(loaded.adapter):
        expected = draws(loaded.backbone, sampling, ends=ends)
        assert not steps
        monkeypatch.setattr(static_decoding, "DEVICES", {"cpu"})
        found = draws(loaded.backbone, sampling, ends=ends)
    assert steps
    assert found == expected
    # Half of the rows end before the last token: they leave the batch in the middle.
    assert sorted(len(ids) for ids in found.ids)[len(PROMPTS) // 2 - 1] < 12


@pytest.mark.parametrize(
    ("kind", "sizes", "is_static"),
    [
        (Qwen3Config, {}, True),
        (Qwen3Config, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, False),
        (MistralConfig, {"sliding_window": 4}, False),
        (MixtralConfig, {"num_local_experts": 2, "num_experts_per_tok": 1}, False),
        (BloomConfig, {}, False),
    ],
    ids=["plain", "dynamic RoPE", "window", "experts", "ALiBi"],
)
def test_a_step_is_recorded_only_where_nothing_in_it_is_decided_by_value(monkeypatch, kind, sizes, is_static):
    heads = {"num_key_value_heads": 2, "head_dim": 8} if kind is not BloomConfig else {}
    config = kind(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **heads, **sizes)
    torch.manual_seed(0)
    backbone = wrap(AutoModelForCausalLM.from_config(config))
    monkeypatch.setattr(static_decoding, "DEVICES", {"cpu"})
    state, _ = backbone.prefill(Padded.from_lists([[5, 6, 7], [8]]))
    assert isinstance(backbone.reserve(state, 4), StaticDecodingState) is is_static
    assert backbone.reserve(state, 0) is state  # a response of one token


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_every_token_is_what_its_noise_draws_from_the_scored_distribution(backbone, temperature):
    sampling = SamplingParams(max_new_tokens=12, temperature=temperature)
    found, uniforms = draws(backbone, sampling), row_uniforms(len(PROMPTS), sampling, 3, RngStream.ROLLOUT)
    log_likelihood = 0.0
    for row, (prompt, ids) in enumerate(zip(PROMPTS, found.ids, strict=True)):
        for step, (token, scored) in enumerate(zip(ids, distributions(backbone, prompt, ids, temperature), strict=True)):
            # The drawn token's interval of the cumulative distribution holds the noise, up to float32's error.
            upper = scored.double().exp().cumsum(0)
            lower = upper[token] - scored[token].double().exp()
            assert lower - 1e-5 < uniforms[row, step] < upper[token] + 1e-5
            log_likelihood += float(scored[token])
    assert log_likelihood < -20.0  # nothing was certain


@pytest.mark.parametrize("ends", [frozenset({1}), ENDS], ids=["one end", "many ends"])
def test_temperature_0_is_transformers_greedy_generation(tiny_name, backbone, sharp_folders, ends):
    auto = AutoModelForSeq2SeqLM if tiny_name == "tiny-t5" else AutoModelForCausalLM
    theirs = auto.from_pretrained(sharp_folders[tiny_name]).eval()
    found = draws(backbone, SamplingParams(max_new_tokens=9, temperature=0.0), ends=ends)
    for prompt, ids in zip(PROMPTS, found.ids, strict=True):
        rows = theirs.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=9, eos_token_id=sorted(ends), pad_token_id=0
        )
        # A decoder repeats the prompt, an encoder-decoder the start token.
        assert ids == rows[0, 1 if tiny_name == "tiny-t5" else len(prompt) :].tolist()


def test_a_rows_text_does_not_depend_on_its_batch(backbone):
    sampling = SamplingParams(max_new_tokens=12)
    together, uniforms = draws(backbone, sampling), row_uniforms(len(PROMPTS), sampling, 3, RngStream.ROLLOUT)
    for budget in (1, 40, 10**6):
        again = draws(backbone, SamplingParams(max_new_tokens=12, batch_tokens=budget))
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
    sampling = SamplingParams(max_new_tokens=12)
    found, uniforms = draws(backbone, sampling, prompts), row_uniforms(6, sampling, 3, RngStream.ROLLOUT)
    assert sorted(read) == sorted(PROMPTS[:2])
    alone = [sample(backbone, prompts[row : row + 1], uniforms[row : row + 1], sampling, ENDS) for row in range(6)]
    assert found.ids == [row.ids[0] for row in alone]
    assert len({tuple(ids) for ids in found.ids}) > 3  # each row has noise of its own


def test_an_end_token_is_kept_also_at_the_last_place_and_nothing_comes_after_it(backbone):
    prompts = [PROMPTS[row % 6] + [row % 200 + 20] for row in range(40)]
    found = draws(backbone, SamplingParams(max_new_tokens=8), prompts)
    for ids, ended in zip(found.ids, found.ended, strict=True):
        assert 1 <= len(ids) <= 8
        assert (ids[-1] in ENDS) == ended
        assert not ENDS & set(ids[:-1])
        assert ended or len(ids) == 8
    assert 0 < sum(found.ended) < 40
    free = draws(backbone, SamplingParams(max_new_tokens=5), ends=frozenset({-1}))
    assert free.ended == [False] * 6
    assert [len(ids) for ids in free.ids] == [5] * 6
    row = next(row for row, ids in enumerate(free.ids) if ids[-1] not in ids[:-1])
    found = draws(backbone, SamplingParams(max_new_tokens=5), ends=frozenset({free.ids[row][-1]}))
    assert (found.ids[row], found.ended[row]) == (free.ids[row], True)


def test_finished_rows_are_counted_for_a_progress_bar(backbone):
    counted = []
    draws(backbone, SamplingParams(max_new_tokens=3, batch_tokens=30), on_rows=counted.append)
    assert sum(counted) == 6
    assert len(counted) > 1


def test_top_k_keeps_the_likeliest_tokens(backbone):
    found = draws(backbone, SamplingParams(max_new_tokens=10, top_k=3))
    used = set()
    for prompt, ids in zip(PROMPTS, found.ids, strict=True):
        for token, scored in zip(ids, distributions(backbone, prompt, ids), strict=True):
            rank = int((scored > scored[token]).sum())
            assert rank < 3
            used.add(rank)
    assert used == {0, 1, 2}
    untruncated = draws(backbone, SamplingParams(max_new_tokens=10))
    assert found != untruncated


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_top_p_keeps_the_smallest_set_of_that_mass_after_the_temperature(backbone, temperature):
    found = draws(backbone, SamplingParams(max_new_tokens=10, top_p=0.6, temperature=temperature))
    beyond_first = 0
    for prompt, ids in zip(PROMPTS, found.ids, strict=True):
        for token, scored in zip(ids, distributions(backbone, prompt, ids, temperature), strict=True):
            before = float(scored[scored > scored[token]].exp().sum())  # mass of the tokens that are likelier
            assert before < 0.6 + 1e-5
            beyond_first += before > 0
    assert beyond_first > 5


def test_a_model_in_training_mode_samples_the_same(tiny_name, backbone, sharp_folders):
    """transformers drops the cache while it recomputes blocks: sampling must not notice."""
    training = load(ModelConfig(model=sharp_folders[tiny_name]), torch.float32).backbone
    training.model.train()
    training.model.activation_checkpointing_enable()
    sampling = SamplingParams(max_new_tokens=8)
    assert draws(training, sampling) == draws(backbone, sampling)
    assert training.model.training


QUICK = settings(deadline=None, max_examples=40)

INF = float("inf")
BELOW_ONE = math.nextafter(1.0, 0.0)


def drawn(logits, uniforms):
    """Draws of one distribution at many uniform numbers."""
    uniforms = torch.as_tensor(uniforms, dtype=torch.float64)
    return draw(torch.as_tensor(logits, dtype=torch.float32).expand(len(uniforms), -1), uniforms)


def test_draw_inverts_the_cumulative_distribution():
    # Weights 1, 2, 5 of 8: token 0 below 1/8, token 1 below 3/8, token 2 from there on.
    logits = torch.log(torch.tensor([1.0, 2.0, 5.0]))
    uniforms = [0.0, 0.1249, 0.1251, 0.3749, 0.3751, BELOW_ONE]
    assert drawn(logits, uniforms).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, BELOW_ONE])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    assert drawn([-INF, 0.0, -INF, 0.0, -INF], [uniform]).item() in (1, 3)


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


def test_every_stream_has_a_number_of_its_own():
    """`IntEnum` makes a second name for an equal value an alias, silently: then two purposes would share their numbers."""
    assert list(RngStream.__members__) == [stream.name for stream in RngStream]
    firsts = {float(generator(0, stream).random()) for stream in RngStream}
    assert len(firsts) == len(RngStream) > 10


@pytest.mark.parametrize(
    ("device", "free", "resident", "expected"),
    [
        ("cpu", 2**40, 0, SamplingParams.batch_tokens),  # the default
        # A token takes 512 bytes of cache (2 layers, 2 heads of 16, keys and values in float32), a row of 64 tokens
        # 264 x 24 of logits: 611 a token. Half of 2^30 holds 878,000 of them, and 2^19 is the power of two below.
        *(("cuda", *sizes, 2**19) for sizes in ((2**30, 0), (2**31, 2**30), (2**30 + 2**26, 0))),
        ("cuda", 2**20, 2**30, 64),  # no room: one row is sampled anyway
    ],
)
def test_a_gpu_takes_half_of_what_weights_leave(sharp_backbones, device, free, resident, expected):
    memory = SimpleNamespace(device=torch.device(device), free=lambda: free, resident_bytes=resident)
    assert sampling_tokens(memory, sharp_backbones["tiny-llama"], 64) == expected


def test_noise_depends_on_the_seed_and_the_parts_of_its_key_alone():
    torch.manual_seed(0)
    first = row_uniforms(3, SamplingParams(max_new_tokens=4), 7, 1, 2)
    torch.manual_seed(99)
    torch.rand(5)
    before = torch.get_rng_state()
    assert torch.equal(row_uniforms(3, SamplingParams(max_new_tokens=4), 7, 1, 2), first)
    assert torch.equal(torch.get_rng_state(), before), "the global generator must not move"
    seeds = [(0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1), (1, 0), (1, 1), (2**32 - 1, 3)]
    assert len({tuple(generator(*seed).random(4)) for seed in seeds}) == len(seeds)
    few, many = (row_uniforms(rows, SamplingParams(max_new_tokens=5), 7, RngStream.ROLLOUT) for rows in (2, 4))
    assert torch.equal(few, many[:2])


def test_random_draws_pass_a_chi_square_test():
    logits = torch.tensor([2.0, -1.0, 0.5, -4.0, 1.0, 0.0])
    count = 50_000
    uniforms = row_uniforms(count // 100, SamplingParams(max_new_tokens=100), 11, RngStream.ROLLOUT).flatten()
    found = torch.bincount(drawn(logits, uniforms), minlength=6).double()
    expected = torch.softmax(logits.double(), -1) * count
    statistic = ((found - expected) ** 2 / expected).sum().item()
    assert statistic < 20.515  # the 99.9 % point of chi-square with 6 - 1 = 5 degrees of freedom
