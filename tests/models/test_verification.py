"""Models that read in both directions, or read padding, are refused with one line instead of being read wrongly."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    MiniMaxM2Config,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from align.core.errors import UserError
from align.models.backbone import wrap
from tests.models.architectures import make_model


class BothWaysGPT2(GPT2LMHeadModel):
    """A model of a decoder's type whose states know the next token, as they would with a wrong mask."""

    def __init__(self, config):
        super().__init__(config)
        self.transformer.ln_f.register_forward_hook(lambda _, inputs, states: states + states.roll(-1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_model_that_reads_in_both_directions_is_refused(dtype):
    torch.manual_seed(0)
    model = BothWaysGPT2(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)).eval().to(dtype)
    with pytest.raises(UserError, match=r"^model type 'gpt2' reads text in both directions: .*can be language models$"):
        wrap(model)


class LeakyGPT2(GPT2LMHeadModel):
    """Adds the mean over all columns of a batch to every state, as a model would that does not mask its padding."""

    def __init__(self, config, causal):
        super().__init__(config)
        self.transformer.ln_f.register_forward_hook(lambda _, inputs, states: states + leak(states, causal))


def leak(states, causal):
    if not causal:
        return states.mean(1, keepdim=True)
    return 0.1 * torch.full_like(states, states.shape[1])  # the width of the batch


@pytest.mark.parametrize(("causal", "words"), [(False, "reads text in both directions"), (True, "reads padding")])
def test_states_that_depend_on_later_tokens_or_on_padding_are_refused(causal, words):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)
    wrap(GPT2LMHeadModel(config).eval())
    with pytest.raises(UserError, match=words):
        wrap(LeakyGPT2(config, causal).eval())


def test_a_decoder_with_a_score_head_is_still_read():
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, num_labels=1, pad_token_id=0)
    assert wrap(GPT2ForSequenceClassification(config).eval()).shares_prompts


# ------------------------------------------------------------------------------------------------------------- sampling


class ForgetfulGPT2(GPT2LMHeadModel):
    """It adds what its cache has lost: where tokens are read one by one, states are others."""

    def __init__(self, config):
        super().__init__(config)
        self.transformer.ln_f.register_forward_hook(lambda _, inputs, states: states + 0.1 * (states.shape[1] == 1))


def test_a_model_whose_sampling_reads_otherwise_than_training_is_refused(sharpen):
    sizes = {"vocab_size": 64, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}
    recurrent = RwkvForCausalLM(RwkvConfig(**sizes, intermediate_size=48))  # it keeps a state of its own, and no cache
    forgetful = ForgetfulGPT2(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4))
    for model in (recurrent, forgetful):
        with pytest.raises(UserError, match=r"a text that is read token by token, as in sampling, has other states"):
            wrap(sharpen(model))


# --------------------------------------------------------------------------------------------- what fails in its own way


def test_an_architecture_that_fails_on_the_way_is_one_line():
    """GPT-1 of transformers keeps no cache, and adds a mask of another size instead."""
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4)).eval()
    with pytest.raises(
        UserError, match=r"^model type 'openai-gpt' cannot be read \(.*\); this architecture is not"
    ) as caught:
        wrap(model)
    assert "\n" not in str(caught.value)


def test_a_model_of_images_and_text_is_refused():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    vision = sizes | {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=sizes | {"vocab_size": 64}, vision_config=vision, mm_tokens_per_image=4)
    with pytest.raises(UserError, match=r"^model type 'gemma3' reads images or sound beside text; save the language model"):
        wrap(AutoModelForCausalLM.from_config(config).eval())


def test_a_config_that_never_names_a_start_token_is_refused():
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    with pytest.raises(UserError, match="names no decoder_start_token_id"):
        wrap(T5ForConditionalGeneration(T5Config(**sizes)).eval())


def test_a_router_that_takes_more_than_states_is_read():
    """MiniMax M2's is handed a bias of its layer, too."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    experts = {"intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(MiniMaxM2Config(**sizes, **experts))
    assert wrap(model.eval()).shares_prompts


@pytest.mark.parametrize(
    ("name", "shares"),
    [("MPT", False), ("Bloom", False), ("Falcon, ALiBi", False), ("Llama 1, 2", True), ("GPT-2", True), ("OPT", True)],
)
def test_in_bfloat16_only_models_that_read_positions_share_prompts(name, shares):
    """Random weights attend so weakly that what ALiBi changes is less than bfloat16 rounds."""
    assert wrap(make_model(name).bfloat16()).shares_prompts == shares
