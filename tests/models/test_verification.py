"""Models that read in both directions, or read padding, are refused with one line instead of being read wrongly."""

import re
from itertools import product

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    Gemma3Config,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    M2M100Config,
    MambaConfig,
    MBartConfig,
    MiniMaxM2Config,
    OpenAIGPTConfig,
    OPTConfig,
    RwkvConfig,
    T5Config,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.models.backbone import wrap
from align.models.heads import LanguageModel
from align.models.loading import from_objects, load
from align.ppo.actor_critic import build_actor_critic, copy_backbone
from align.ppo.scoring_models import load_reward_adapter
from align.reward.checkpoint import RULE
from tests.models.adapters import PROMPT, RESPONSE, save_reward, states
from tests.models.architectures import make_model
from tests.refusals import refusal


def auto(config):
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def make(sharpen, config):
    return sharpen(auto(config).from_config(config))


def gpt2(hook=None, sharpen=lambda model: model):
    """A small GPT-2 whose last states `hook` changes, as a model's faults would."""
    torch.manual_seed(0)
    model = sharpen(GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)).eval())
    if hook:
        model.transformer.ln_f.register_forward_hook(lambda _, inputs, states: hook(states))
    return model


BOTH_DIRECTIONS = "model type 'gpt2' reads text in both directions: .*can be language models$"
TOKEN_BY_TOKEN = "model type '(gpt2|rwkv)': a text that is read token by token, as in sampling, has other states"
FAULTS = {
    "the next token": (lambda states: states + states.roll(-1, 1), BOTH_DIRECTIONS),
    "the whole row": (lambda states: states + states.mean(1, keepdim=True), BOTH_DIRECTIONS),
    "the width of the batch": (lambda states: states + 0.1 * states.shape[1], "model type 'gpt2' reads padding"),
    "a row of one token": (lambda states: states + 0.1 * (states.shape[1] == 1), TOKEN_BY_TOKEN),
}


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [*product(FAULTS, [torch.float32]), ("the next token", torch.bfloat16), ("the whole row", torch.bfloat16)],
    ids=str,
)
def test_states_that_depend_on_more_than_earlier_tokens_are_refused(fault, dtype, sharpen):
    hook, message = FAULTS[fault]
    with pytest.raises(UserError, match=f"^{message}"):
        wrap(gpt2(hook, sharpen).to(dtype))


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
OF_TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
OF_IMAGES = OF_TEXT | {"image_size": 28, "patch_size": 14}
REFUSED = {
    # It keeps a state, and no cache.
    "rwkv": (RwkvConfig(**SIZES, attention_hidden_size=32, intermediate_size=48), TOKEN_BY_TOKEN),
    "mamba": (MambaConfig(**SIZES), "model type 'mamba': its cache cannot drop rows that ended"),
    # GPT-1 of transformers keeps no cache, and adds a mask of another size instead.
    "openai-gpt": (
        OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4),
        r"model type 'openai-gpt' cannot be read \(.*\); this architecture is not",
    ),
    "mbart": (
        MBartConfig(vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, decoder_start_token_id=None),
        "model type 'mbart': .* names no decoder_start_token_id, the token that a response follows",
    ),
    "gemma3": (
        Gemma3Config(text_config=OF_TEXT | {"vocab_size": 64}, vision_config=OF_IMAGES, mm_tokens_per_image=4),
        "model type 'gemma3' reads images or sound beside text; save the language model",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(name, sharpen):
    config, message = REFUSED[name]
    model = make(sharpen, config) if name == "rwkv" else auto(config).from_config(config).eval()
    assert re.match(message, refusal(wrap, model))


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
    loaded.backbone.model.train()
    for _ in range(4):
        for backbone in (loaded.backbone, copy_backbone(loaded.backbone)):
            torch.testing.assert_close(states(backbone), expected, atol=1e-5, rtol=0)


@pytest.fixture
def with_dropout(make_adapter):
    """The settings of an adapter that was trained elsewhere with dropout."""
    folder, _ = make_adapter("tiny-llama", "q_proj")
    return ModelConfig(model=folder, lora_r=2, lora_alpha=8, lora_target_modules="q_proj", gradient_checkpointing=True)


@torch.no_grad()
def test_adapters_that_are_copied_later_have_no_dropout_either(with_dropout):
    """The critic's and a moving reference's: before the first update the policy is its reference."""
    loaded = load(with_dropout, torch.float32)
    module = build_actor_critic(loaded, "separate")
    module.train()
    for adapter in (module.critic_adapter, "start"):
        assert torch.equal(states(loaded.backbone, adapter), states(loaded.backbone, "policy"))


@pytest.mark.parametrize("kind", ["reward", "rules"])
def test_a_mounted_adapter_leaves_gradient_checkpointing_on(load_sharp, with_dropout, tmp_path, kind):
    """Transformers recomputes in training mode only, and PEFT's `load_adapter` ends it."""
    reward = load_sharp("tiny-llama", adapter="reward", lora_r=2)
    reward.backbone.peft.peft_config["reward"].lora_dropout = 0.5
    save_reward(tmp_path / kind, reward, **({"kind": RULE} if kind == "rules" else {}))
    loaded = load(with_dropout, torch.float32)
    if kind == "rules":
        load_reward_adapter(str(tmp_path / kind), loaded, "rules", RULE)
    else:
        load_reward_adapter(str(tmp_path / kind), loaded)
    calls = []
    block = next(m for m in loaded.backbone.model.modules() if isinstance(m, GradientCheckpointingLayer))
    block.input_layernorm.register_forward_pre_hook(lambda *_: calls.append(1))
    LanguageModel(loaded.backbone, loaded.adapter)(PROMPT, RESPONSE).sum().backward()
    assert len(calls) == 2  # once more for the gradient
    assert torch.equal(states(loaded.backbone, kind), states(loaded.backbone, kind))


def weakened(module, args, given):
    """Give what a mask forbids of earlier columns a small weight instead of none."""
    mask = given.get("attention_mask")
    if mask is None or mask.dim() < 4:
        return args, given
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
    earlier = torch.ones(mask.shape[-2:]).tril(mask.shape[-1] - mask.shape[-2]).bool()
    return args, given | {"attention_mask": torch.where(earlier, mask.clamp(min=-4), mask).to(module.dtype)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_responses_that_read_each_other_never_share_a_row(dtype):
    assert wrap(gpt2().to(dtype)).shares_prompts
    model = gpt2().to(dtype)
    model.transformer.register_forward_pre_hook(weakened, with_kwargs=True)
    assert not wrap(model).shares_prompts
