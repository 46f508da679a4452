"""A module that a user changed is called wherever a role computes, or the model is refused."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.model_registry.tiny import BOS, EOS, PAD, VOCABULARY, byte_tokenizer
from align.models.heads import LanguageModel, ScalarHead
from align.models.loading import from_objects, read_by_ids_of
from align.ppo.inputs import _value_head
from align.reward.checkpoint import reward_of_classifier, reward_that_reads_ids_of
from tests.models.encoders import pair_tokenizer

IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "vocab_size": VOCABULARY}
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
BART = {f"{half}_{size}": 1 for half in ("encoder", "decoder") for size in ("layers", "attention_heads")}
BART |= {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": EOS}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2}
PROMPT, RESPONSE = Padded.from_lists([[5, 6, 7]]), Padded.from_lists([[8, 9]])
POLICIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, **IDS)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, **IDS)),
    "bart": lambda: BartForConditionalGeneration(BartConfig(**BART, **IDS, forced_eos_token_id=None)),
}
CLASSIFIERS = {
    "llama": lambda: LlamaForSequenceClassification(LlamaConfig(**LLAMA, **IDS, num_labels=1)),
    "gpt2": lambda: GPT2ForSequenceClassification(GPT2Config(**GPT2, **IDS, num_labels=1)),
}
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "num_labels": 1}


def add_hook(module, count):
    module.register_forward_hook(lambda *_: count())


def add_pre_hook(module, count):
    module.register_forward_pre_hook(lambda *_: count())


def replace_forward(module, count):
    forward = module.forward

    def counted(*args, **named):
        count()
        return forward(*args, **named)

    module.forward = counted


def subclass(module, count):
    kind = type(module)

    def forward(self, *args, **named):
        count()
        return kind.forward(self, *args, **named)

    module.__class__ = type(f"My{kind.__name__}", (kind,), {"forward": forward})


WAYS = (add_hook, add_pre_hook, replace_forward, subclass)


def modules_called(model, *args, **named):
    """The names of the modules that the model's own forward pass calls."""
    called, hooks = [], []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: called.append(name)))
    with torch.no_grad():
        model(*args, **named)
    for hook in hooks:
        hook.remove()
    return sorted(set(called))


def as_policy(model):
    backbone = from_objects(model, byte_tokenizer(model.config.is_encoder_decoder), ModelConfig()).backbone
    return partial(LanguageModel(backbone), PROMPT, RESPONSE)


def as_reward(model):
    policy = from_objects(LlamaForCausalLM(LlamaConfig(**LLAMA, **IDS)), byte_tokenizer(), ModelConfig())
    return partial(reward_that_reads_ids_of(policy, model).model, PROMPT, RESPONSE)


def as_value(model):
    policy = from_objects(LlamaForCausalLM(LlamaConfig(**LLAMA, **IDS)), byte_tokenizer(), ModelConfig())
    backbone = read_by_ids_of(policy, model, "value_model")
    head: ScalarHead = _value_head(model, backbone)
    return lambda: head(backbone.hidden(PROMPT, RESPONSE))


def as_encoder_reward(model):
    return partial(reward_of_classifier(model, pair_tokenizer("bert")).model, PROMPT, RESPONSE)


ROLES = [
    *((as_policy, name, make) for name, make in POLICIES.items()),
    *((role, name, make) for role in (as_reward, as_value) for name, make in CLASSIFIERS.items()),
    (as_encoder_reward, "bert", lambda: BertForSequenceClassification(BertConfig(**BERT, vocab_size=VOCABULARY))),
]


@pytest.mark.parametrize(("role", "name", "make"), ROLES, ids=lambda value: getattr(value, "__name__", value))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_changed_module_is_called_or_refused(role, name, make, data):
    torch.manual_seed(0)
    model, calls = make().eval(), []
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    place = data.draw(st.sampled_from(modules_called(model, input_ids=ids)), "module")
    change = data.draw(st.sampled_from(WAYS), "change")
    module = model.get_submodule(place)
    if change is subclass:
        assume("forward" in dir(module))
    change(module, lambda: calls.append(1))
    try:
        run = role(model)
    except UserError:
        return
    calls.clear()
    with torch.no_grad():
        run()
    assert calls, f"{name}: {change.__name__} of '{place}' has no effect, and no line tells it"


@pytest.mark.parametrize("change", WAYS)
@pytest.mark.parametrize("role", [as_reward, as_value])
def test_a_changed_score_is_refused(role, change):
    model = CLASSIFIERS["llama"]()
    change(model.score, lambda: None)
    with pytest.raises(UserError, match="score"):
        role(model)


def test_models_that_nobody_changed_are_accepted():
    for role, _, make in ROLES:
        role(make())()


def test_an_architecture_of_the_users_own_is_no_change():
    class Mine(LlamaForCausalLM):
        """Overrides nothing."""

    as_policy(Mine(LlamaConfig(**LLAMA, **IDS)))()
