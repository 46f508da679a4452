"""Models that read in both directions, or read padding, are refused with one line instead of being read wrongly."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    Gemma3Config,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    M2M100Config,
    MiniMaxM2Config,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    OPTConfig,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from align.core.errors import UserError
from align.core.seeds import Stream
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.models.backbone import wrap
from align.models.checkpoint import weights_of
from align.models.loading import from_objects, load
from align.models.roles import REFERENCE_ADAPTER, LanguageModel, ScalarHead
from align.ppo.scoring_models import RULE_ADAPTER, load_reward_adapter
from align.ppo.setup import build_actor_critic, copy_backbone
from align.reward.checkpoint import RULE, save_reward_model
from align.sampling.generation import Sampling, row_uniforms, sample
from tests.models.adapters import CARD, PROMPT, RESPONSE, states
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


HALVES = {f"{half}_{part}": 2 for half in ("encoder", "decoder") for part in ("layers", "attention_heads")}
HALVES |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32, "vocab_size": 384}
WIDTH = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
# Rates as large as this make every kind of dropout visible.
RANDOM = {
    "t5": T5Config(vocab_size=384, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0),
    "bart": BartConfig(**HALVES, attention_dropout=0.3, activation_dropout=0.3),
    "m2m_100": M2M100Config(**HALVES, dropout=0.0, attention_dropout=0.0, encoder_layerdrop=0.7, decoder_layerdrop=0.7),
    "opt": OPTConfig(vocab_size=384, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, layerdrop=0.7),
    "llama": LlamaConfig(**WIDTH, attention_dropout=0.3),
}


def make(sharpen, config):
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return sharpen(auto.from_config(config))


@torch.no_grad()
@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize("in_memory", [True, False], ids=["object", "folder"])
def test_in_training_mode_a_model_reads_as_in_evaluation_mode(kind, in_memory, sharpen, sharp_folders, tmp_path):
    model, tokenizer = make(sharpen, RANDOM[kind]), AutoTokenizer.from_pretrained(sharp_folders["tiny-t5"])
    expected = states(from_objects(model, tokenizer, ModelConfig()).backbone)
    model = make(sharpen, RANDOM[kind])
    config = ModelConfig(model=str(tmp_path / "model"), gradient_checkpointing=True)
    if in_memory:
        loaded = from_objects(model, tokenizer, config)
    else:
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        loaded = load(config, torch.float32)
    assert loaded.backbone.model.training
    for _ in range(4):
        for backbone in (loaded.backbone, copy_backbone(loaded.backbone)):
            torch.testing.assert_close(states(backbone), expected, atol=1e-5, rtol=0)


def test_what_is_random_in_training_mode_whatever_its_rates_is_refused(sharpen, sharp_folders):
    tokenizer = AutoTokenizer.from_pretrained(sharp_folders["tiny-llama"])
    model = make(sharpen, RANDOM["llama"])
    model.model.norm.register_forward_hook(
        lambda module, _, states: states + torch.randn_like(states) if module.training else states
    )
    assert not from_objects(model, tokenizer, ModelConfig()).backbone.model.training
    with pytest.raises(UserError, match=r"'llama' is random in training mode .*; set gradient_checkpointing to false"):
        from_objects(model, tokenizer, ModelConfig(gradient_checkpointing=True))


@pytest.fixture
def with_dropout(sharp_folders, tmp_path):
    """The settings of an adapter that was trained elsewhere with dropout."""
    base = AutoModelForCausalLM.from_pretrained(sharp_folders["tiny-llama"])
    lora = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(tmp_path / "sft")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(sharp_folders["tiny-llama"]) / name, tmp_path / "sft")
    return ModelConfig(
        model=str(tmp_path / "sft"), lora_rank=2, lora_alpha=8, lora_targets="q_proj", gradient_checkpointing=True
    )


@torch.no_grad()
def test_adapters_that_are_copied_later_have_no_dropout_either(with_dropout):
    """The critic's and a moving reference's: before the first update the policy is its reference."""
    loaded = load(with_dropout, torch.float32)
    module = build_actor_critic(loaded, "separate", reference_moves=True)
    assert module.training
    for adapter in (module.critic_adapter, REFERENCE_ADAPTER, "start"):
        assert torch.equal(states(loaded.backbone, adapter), states(loaded.backbone, "policy"))


@pytest.mark.parametrize("kind", ["reward", "rules"])
def test_a_mounted_adapter_leaves_gradient_checkpointing_on(load_sharp, with_dropout, tmp_path, kind):
    """PEFT's `load_adapter` puts the whole model into evaluation mode, where transformers recomputes nothing."""
    reward = load_sharp("tiny-llama", adapter="reward", lora_rank=2)
    reward.backbone.peft.peft_config["reward"].lora_dropout = 0.5
    facts = {"mean": 0.0, "mean_over": 1, "base": reward.base}
    head = ScalarHead(reward.backbone.hidden_size, bias=False).linear.weight.detach()
    more = {"kind": RULE} if kind == "rules" else {}
    save_reward_model(tmp_path / kind, reward, weights_of(reward.backbone), head, facts, CARD | {"stage": kind}, **more)
    loaded = load(with_dropout, torch.float32)
    if kind == "rules":
        load_reward_adapter(str(tmp_path / kind), loaded, RULE_ADAPTER, RULE)
    else:
        load_reward_adapter(str(tmp_path / kind), loaded)
    calls = []
    block = next(m for m in loaded.backbone.model.modules() if isinstance(m, GradientCheckpointingLayer))
    block.input_layernorm.register_forward_pre_hook(lambda *_: calls.append(1))
    LanguageModel(loaded.backbone, loaded.adapter)(PROMPT, RESPONSE).sum().backward()
    assert len(calls) == 2  # once more for the gradient
    assert torch.equal(states(loaded.backbone, kind), states(loaded.backbone, kind))


PROMPTS = [[70, 71, 72], [80, 81]]


@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-llama", "tiny-t5"])
@pytest.mark.parametrize("rank", [0, 4])
def test_gradients_are_the_same_and_layers_are_read_twice(model: str, rank: int) -> None:
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        loaded = load(ModelConfig(model=model, lora_rank=rank, gradient_checkpointing=checkpointing), torch.float32)
        policy = LanguageModel(loaded.backbone, loaded.adapter)
        calls = [0]
        layer = next(
            m for n, m in loaded.backbone.model.named_modules() if n.endswith((".h.0", ".layers.0", "decoder.block.0"))
        )
        # A layer under checkpointing is called through `torch.utils.checkpoint`: hooks of what is inside it count.
        inner = next(module for module in layer.modules() if module is not layer and not list(module.children()))
        inner.register_forward_hook(lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1))
        response = Padded.from_lists([[90, 91, 92, 1], [93, 1]])
        policy(Padded.from_lists(PROMPTS), response, response.mask()).sum().backward()
        gradients = {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}
        found.append((calls[0], gradients))
    (once, plain), (twice, recomputed) = found
    assert (once, twice) == (1, 2)
    assert plain.keys() == recomputed.keys()
    assert all(torch.allclose(plain[name], recomputed[name], atol=1e-6) for name in plain)


@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-llama", "tiny-t5"])
def test_sampling_is_the_same(model: str) -> None:
    texts = []
    for checkpointing in (False, True):
        loaded = load(ModelConfig(model=model, gradient_checkpointing=checkpointing), torch.float32)
        sampling = Sampling(8)
        texts.append(
            sample(loaded.backbone, PROMPTS, row_uniforms(2, sampling, 7, Stream.ROLLOUT), sampling, frozenset({1})).ids
        )
        assert loaded.backbone.model.training == checkpointing
    assert texts[0] == texts[1]


class MaskBlindGPT2(GPT2LMHeadModel):
    """Gives what a mask forbids of earlier columns a small weight instead of none."""

    def __init__(self, config):
        super().__init__(config)
        self.transformer.register_forward_pre_hook(self.weaken, with_kwargs=True)

    @staticmethod
    def weaken(module, args, given):
        mask = given.get("attention_mask")
        if mask is None or mask.dim() < 4:
            return args, given
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
        earlier = torch.ones(mask.shape[-2:]).tril(mask.shape[-1] - mask.shape[-2]).bool()
        return args, given | {"attention_mask": torch.where(earlier, mask.clamp(min=-4), mask).to(module.dtype)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_responses_that_read_each_other_never_share_a_row(dtype):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)
    assert not wrap(MaskBlindGPT2(config).eval().to(dtype)).shares_prompts
    assert wrap(GPT2LMHeadModel(config).eval().to(dtype)).shares_prompts
