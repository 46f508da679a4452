"""The backbone contract: the same numbers alone and in a batch, in one row and in several, in one pass and step by step."""

import copy

import pytest
import torch
from transformers import GPT2LMHeadModel

from align.core.errors import UserError
from align.core.tensor_ops import Padded, length_mask
from align.models.backbone import Backbone, wrap
from align.models.roles import RewardModel, ScalarHead
from align.reward.loss import pairs_of, ranking_loss
from tests.models.small_models import CONFIGS, NAMES

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15, 16]]
RESPONSES = [[20, 21, 22, 23, 24, 25, 26], [27], [28, 29, 30], [31, 32, 33, 34], [35, 36, 37, 38, 39], [40, 41]]
OWNER = [0, 0, 0, 1, 2, 2]
RANKS = [[1, 3, 2], [1], [2, 1]]
PAIRS = pairs_of(RANKS, [0.0, 0.0, 0.5])


@pytest.fixture(params=NAMES)
def any_backbone(request, backbones):
    return backbones[request.param]


@torch.no_grad()
def alone(backbone, row):
    """[length+1, H] of one response by itself."""
    return backbone.hidden(Padded.from_lists([PROMPTS[OWNER[row]]]), Padded.from_lists([RESPONSES[row]]))[0]


def assert_rows_equal(found, backbone, rows, tolerance=1e-5):
    for place, row in enumerate(rows):
        expected = alone(backbone, row)
        torch.testing.assert_close(found[place, : len(expected)], expected, atol=tolerance, rtol=0)


# ---------------------------------------------------------------------------------------------- states, whatever the batch


def test_the_models_are_far_from_uniform(any_backbone):
    # With near-uniform outputs, wrong states would pass as right ones.
    assert any_backbone.logits(alone(any_backbone, 0)).std() > 1.0


def test_a_row_is_the_same_alone_and_in_a_batch_in_any_order(any_backbone):
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 0, 2]):
        prompt = Padded.from_lists([PROMPTS[OWNER[row]] for row in order])
        with torch.no_grad():
            found = any_backbone.hidden(prompt, Padded.from_lists([RESPONSES[row] for row in order]))
        assert found.shape == (6, 8, any_backbone.hidden_size)  # T = 7, one state more than tokens
        assert_rows_equal(found, any_backbone, order)


def test_responses_that_share_a_prompt_have_the_states_of_separate_rows(any_backbone):
    with torch.no_grad():
        found = any_backbone.hidden(Padded.from_lists(PROMPTS), Padded.from_lists(RESPONSES), torch.tensor(OWNER))
    assert_rows_equal(found, any_backbone, range(6))


def test_a_prefix_in_front_of_all_prompts_gives_the_states_of_whole_prompts(any_backbone):
    prefix = [7, 3, 3, 9]
    prompt, response = Padded.from_lists(PROMPTS), Padded.from_lists([ids[:3] for ids in RESPONSES])
    whole = Padded.from_lists([[*prefix, *ids] for ids in PROMPTS])
    with torch.no_grad():
        expected = any_backbone.hidden(whole, response, torch.tensor(OWNER))
        found = any_backbone.hidden(prompt, response, torch.tensor(OWNER), prefix)
    real = length_mask(response.lengths + 1, expected.shape[1])
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=0)


def test_a_prompt_between_others_may_have_no_response():
    config = copy.deepcopy(CONFIGS["gpt2-short"])
    backbone = wrap(GPT2LMHeadModel(config).eval())
    responses = [RESPONSES[0], RESPONSES[1], RESPONSES[4]]
    with torch.no_grad():
        found = backbone.hidden(Padded.from_lists(PROMPTS), Padded.from_lists(responses), torch.tensor([0, 0, 2]))
    for place, (prompt_index, ids) in enumerate(zip((0, 0, 2), responses, strict=True)):
        with torch.no_grad():
            expected = backbone.hidden(Padded.from_lists([PROMPTS[prompt_index]]), Padded.from_lists([ids]))[0]
        torch.testing.assert_close(found[place, : len(ids) + 1], expected, atol=1e-5, rtol=0)


def test_what_stands_in_the_padding_does_not_matter(any_backbone):
    prompt, response = Padded.from_lists(PROMPTS), Padded.from_lists(RESPONSES)
    other = [Padded(batch.ids.masked_fill(~batch.mask(), 50), batch.lengths) for batch in (prompt, response)]
    with torch.no_grad():
        found = any_backbone.hidden(*other, torch.tensor(OWNER))
    assert_rows_equal(found, any_backbone, range(6))


def test_a_later_token_does_not_change_an_earlier_state(any_backbone):
    longer = [*RESPONSES[2], 44, 45]
    with torch.no_grad():
        found = any_backbone.hidden(Padded.from_lists([PROMPTS[0]]), Padded.from_lists([longer]))
    torch.testing.assert_close(found[0, :4], alone(any_backbone, 2), atol=1e-5, rtol=0)


def test_which_architectures_read_a_prompt_once(backbones):
    separate = {name for name in NAMES if not backbones[name].shares_prompts}
    assert separate == {"bloom", "gpt-neo-window"}  # ALiBi, and a window counted in columns of the row


def test_a_text_beyond_the_sliding_window_gets_a_row_of_its_own(backbones):
    # 6 + 7 tokens are beyond the window of 8, 2 + 4 and 2 + 2 are not.
    windowed, whole = backbones["mistral-window"], backbones["mistral"]
    assert windowed.tokens_in_memory(6, [7, 1]) == 2 * (6 + 7)
    assert windowed.tokens_in_memory(2, [4, 2]) == 2 + 4 + 2
    assert whole.tokens_in_memory(6, [7, 1]) == 6 + 7 + 1


# --------------------------------------------------------------------------------------- the ranking loss in a shared row


def ranking_gradients(backbone, shared):
    """Loss and gradients of the ranking loss, with prompts read once or once for every response."""
    backbone = copy.deepcopy(backbone)
    torch.manual_seed(3)
    model = RewardModel(backbone, ScalarHead(backbone.hidden_size, bias=False), None)
    if shared:
        rewards = model(Padded.from_lists(PROMPTS), Padded.from_lists(RESPONSES), torch.tensor(OWNER))
    else:
        rows = zip(OWNER, RESPONSES, strict=True)
        each = [model(Padded.from_lists([PROMPTS[prompt_index]]), Padded.from_lists([ids])) for prompt_index, ids in rows]
        rewards = torch.cat(each)
    loss = ranking_loss(rewards, PAIRS)
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def test_the_ranking_loss_of_a_shared_row_equals_separate_rows_in_loss_and_gradients(any_backbone):
    (loss, gradients), (expected, theirs) = (ranking_gradients(any_backbone, shared) for shared in (True, False))
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    assert set(gradients) == set(theirs)
    assert max(gradient.abs().max() for gradient in theirs.values()) > 1e-2
    for name, gradient in gradients.items():
        # Elements of a gradient are sums over many places: 1e-5 of the tensor's largest element, at least of 1.
        bound = 1e-5 * max(1.0, float(theirs[name].abs().max()))
        torch.testing.assert_close(gradient, theirs[name], atol=bound, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


# ------------------------------------------------------------------------------------------------------------------ logits


def own_logits(backbone, prompt, response):
    """What the transformers class itself says about the response tokens and the one after them: [T+1, V]."""
    ids = torch.tensor([response])
    if backbone.prompt_in_row:
        whole = torch.cat([torch.tensor([prompt]), ids], dim=1)
        return backbone.model(input_ids=whole).logits[0, len(prompt) - 1 :]
    start = torch.tensor([[backbone.model.config.decoder_start_token_id]])
    decoder_ids = torch.cat([start, ids], dim=1)
    return backbone.model(input_ids=torch.tensor([prompt]), decoder_input_ids=decoder_ids).logits[0]


@torch.no_grad()
def test_logits_are_the_models_own(any_backbone):
    for row in range(6):
        found = any_backbone.logits(alone(any_backbone, row))
        expected = own_logits(any_backbone, PROMPTS[OWNER[row]], RESPONSES[row])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


class ScaledGPT2(GPT2LMHeadModel):
    """A model whose logits need more than the last hidden state and the vocabulary matrix."""

    def forward(self, *arguments, **named):
        output = super().forward(*arguments, **named)
        output.logits = output.logits * 1.5
        return output


def test_an_architecture_with_logits_of_its_own_kind_is_refused(sharpen):
    model = sharpen(ScaledGPT2(CONFIGS["gpt2-short"]))
    with pytest.raises(UserError, match=r"^model type 'gpt2': its logits are not a plain function .* not supported$"):
        wrap(model)
    assert isinstance(wrap(model, check=False), Backbone)


def test_the_check_leaves_the_mode_of_the_model_as_it_was(sharpen):
    model = sharpen(GPT2LMHeadModel(CONFIGS["gpt2-short"]))
    assert not wrap(model).model.training
    assert wrap(model.train()).model.training


# ------------------------------------------------------------------------------------------------------- step after step


@torch.no_grad()
def test_prefill_and_decode_step_follow_hidden_while_rows_leave_the_batch(any_backbone):
    state, hidden = any_backbone.prefill(Padded.from_lists([PROMPTS[prompt_index] for prompt_index in OWNER]))
    expected = [alone(any_backbone, row) for row in range(6)]
    alive = list(range(6))
    for step in range(8):
        for place, row in enumerate(alive):
            torch.testing.assert_close(hidden[place], expected[row][step], atol=1e-5, rtol=0)
        keep = [place for place, row in enumerate(alive) if len(RESPONSES[row]) > step]
        if len(keep) < len(alive):
            state.select(torch.tensor(keep, dtype=torch.long))
            alive = [alive[place] for place in keep]
        if alive:
            hidden = any_backbone.decode_step(state, torch.tensor([RESPONSES[row][step] for row in alive]))
    assert alive == []  # the longest response has 7 tokens: every state was compared


@torch.no_grad()
def test_select_can_also_reorder_rows(backbone):
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[2]]
    state, _ = backbone.prefill(Padded.from_lists(prompts))
    state.select(torch.tensor([2, 0]))
    hidden = backbone.decode_step(state, torch.tensor([33, 33]))
    for place, row in enumerate((2, 0)):
        expected = backbone.hidden(Padded.from_lists([prompts[row]]), Padded.from_lists([[33]]))[0, 1]
        torch.testing.assert_close(hidden[place], expected, atol=1e-5, rtol=0)
