import copy

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.settings_parser import parse
from align.dpo import DPOConfig, DPOTrainer
from align.models.adapters import adapter_parameters
from align.models.loading import from_objects, load
from align.ppo import PPOConfig, PPOTrainer
from align.ppo.rollout import forward_all_roles, sample_rollout
from align.reward import RewardConfig, RewardTrainer
from align.sft import SFTConfig, SFTTrainer
from tests.models.adapters import IDS, response_logits, states, trainable
from tests.ppo.rewards import letters
from tests.settings import run_settings

GPT, LLAMA, T5 = "tiny-gpt2", "tiny-llama", "tiny-t5"
KINDS = {
    "gpt": (GPT, {"target_modules": ["c_attn"]}),
    "t5": (T5, {"target_modules": ["q", "v"]}),
    "peft's own targets": (LLAMA, {}),
    "rslora": (LLAMA, {"use_rslora": True}),
    "dora": (LLAMA, {"use_dora": True}),
    "dora of gpt": (GPT, {"use_dora": True, "target_modules": ["c_attn", "c_fc"]}),
    "dora of t5": (T5, {"use_dora": True, "target_modules": ["q", "v"]}),
    "bias of B": (GPT, {"lora_bias": True, "target_modules": ["c_attn"]}),
    "patterns": (
        LLAMA,
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 5}},
    ),
    "one layer": (LLAMA, {"target_modules": ["q_proj"], "layers_to_transform": [0]}),
    "without some": (LLAMA, {"target_modules": "all-linear", "exclude_modules": ["q_proj"]}),
    "whole matrix": (LLAMA, {"modules_to_save": ["lm_head"]}),
    "whole tied matrix": (GPT, {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"]}),
    "whole embedding": (LLAMA, {"modules_to_save": ["embed_tokens"]}),
    "whole norm of t5": (T5, {"target_modules": ["q"], "modules_to_save": ["final_layer_norm"]}),
    "some tokens": (LLAMA, {"trainable_token_indices": [9, 10]}),
    "gaussian": (LLAMA, {"init_lora_weights": "gaussian"}),
    "orthogonal": (LLAMA, {"init_lora_weights": "orthogonal"}),
}
OFTEN = ("gpt", "t5", "peft's own targets", "dora", "bias of B", "patterns", "whole matrix", "some tokens")
"""Those that `make test` takes."""
RESERVED = "the PEFT adapter is called 'value_2', a name of this package's own"


@pytest.fixture
def base(sharp_folders):
    def made(name):
        auto = AutoModelForSeq2SeqLM if name == T5 else AutoModelForCausalLM
        return auto.from_pretrained(sharp_folders[name], dtype=torch.float32)

    return made


@pytest.fixture
def tokenizer(sharp_folders):
    return lambda name: AutoTokenizer.from_pretrained(sharp_folders[name])


@pytest.fixture
def trainer(sharp_folders, tokenizer, tmp_path):
    def made(name, policy, settings=(), **given):
        config = {"output_dir": str(tmp_path / "run"), "report_to": ["none"], "total_updates": 1, "learning_rate": 1e-2}
        config |= {"rollout_batch_size": 4, "max_new_tokens": 5, "dtype": "float32", "missing_eos_score": None}
        config = PPOConfig(**(config | dict(settings)))
        return PPOTrainer(policy, [letters], ["red", "green, blue"], config, tokenizer=tokenizer(name), **given)

    return made


def settings_of(kind):
    name, settings = KINDS[kind]
    return name, LoraConfig(r=2, lora_alpha=8, **settings)


@torch.no_grad()
def logits_by_peft(base, folder):
    """[3, V] as `response_logits`, by PEFT from a saved folder."""
    model = PeftModel.from_pretrained(base, folder).eval()
    if base.config.is_encoder_decoder:
        decoded = torch.tensor([[base.config.decoder_start_token_id, *IDS[0, 3:].tolist()]])
        return model(input_ids=IDS[:, :3], decoder_input_ids=decoded).logits[0]
    return model(input_ids=IDS).logits[0, 2:]


def move(weights):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in weights:
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in OFTEN)) for kind in KINDS])
def test_an_adapter_of_any_kind_is_trained_alone_and_saved_for_peft(kind, base, trainer):
    name, lora = settings_of(kind)
    theirs = get_peft_model(base(name), lora).get_nb_trainable_parameters()[0]
    given = trainer(name, base(name), peft_config=lora, value_model=None)
    policy = given.setup.policy
    weights = dict(policy.backbone.model.named_parameters())
    assert sum(weights[each].numel() for each in trainable(policy.backbone)) == theirs
    before = {each: weight.detach().clone() for each, weight in weights.items()}
    torch.testing.assert_close(states(policy.backbone, None), states(policy.backbone, policy.adapter), atol=1e-5, rtol=0)
    folder = given.train()
    moved = {each for each, weight in weights.items() if not torch.equal(weight, before[each])}
    assert moved <= trainable(policy.backbone)
    assert any("lora_B" in each for each in moved)
    if name == LLAMA and lora.modules_to_save:
        assert any("modules_to_save" in each for each in moved)
    move(weights[each] for each in sorted(trainable(policy.backbone)))
    given.save_model(folder)
    expected = logits_by_peft(base(name), folder)
    assert (expected - response_logits(policy.backbone)).abs().max() > 0.05
    torch.testing.assert_close(response_logits(policy.backbone, policy.adapter), expected, atol=1e-4, rtol=0)


def test_dropout_is_set_to_0_with_a_line(base, trainer, capsys):
    lora = LoraConfig(r=2, lora_dropout=0.05, target_modules=["c_attn"])
    given = trainer(GPT, base(GPT), peft_config=lora)
    assert "lora_dropout 0.05 is set to 0" in capsys.readouterr().err
    assert lora.lora_dropout == 0.05
    assert (given.run.model_config.lora_r, given.run.model_config.lora_target_modules) == (2, "c_attn")
    given.train()


CHANGES = (
    *({"use_rslora": True}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"layers_to_transform": 0}),
    *({"rank_pattern": {"q_proj": 3}}, {"alpha_pattern": {"v_proj": 5}}, {"lora_bias": True}),
    *({"init_lora_weights": "gaussian"}, {"init_lora_weights": False}),
)


def test_fields_of_a_lora_config_must_stay_on_resume(base, trainer):
    lora = {"r": 2, "lora_alpha": 8}
    first = trainer(LLAMA, base(LLAMA), {"save_steps": 1}, peft_config=LoraConfig(**lora))
    assert first.run.model_config.lora_target_modules == "q_proj,v_proj"  # PEFT's choice for Llama
    assert first.run.model_config.lora is None
    first.train()
    further = {"save_steps": 1, "total_updates": 2, "resume_from_checkpoint": True}
    for change in CHANGES:
        with pytest.raises(UserError, match="this run has lora None, not "):
            trainer(LLAMA, base(LLAMA), further, peft_config=LoraConfig(**lora, **change))
    with pytest.raises(UserError, match="this run has lora_target_modules 'q_proj,v_proj', not 'all-linear'"):
        trainer(LLAMA, base(LLAMA), further, peft_config=LoraConfig(**lora, target_modules="all-linear"))
    trainer(LLAMA, base(LLAMA), further, peft_config=LoraConfig(**lora, target_modules=["v_proj", "q_proj"])).train()


def test_further_fields_of_a_lora_config_are_in_the_settings_of_the_run(base, trainer):
    lora = LoraConfig(
        r=2,
        use_rslora=True,
        exclude_modules=["k_proj", "c"],
        layers_to_transform=1,
        modules_to_save={"lm_head"},
        rank_pattern={"q_proj": 3},
        alpha_pattern={"v_proj": 5},
        lora_bias=True,
        init_lora_weights=False,
    )
    found = trainer(LLAMA, base(LLAMA), peft_config=lora).run.model_config.lora
    expected = {"use_rslora": True, "use_dora": False, "modules_to_save": ["lm_head"], "layers_to_transform": [1]}
    expected |= {"exclude_modules": ["c", "k_proj"], "rank_pattern": ["q_proj=3"], "alpha_pattern": ["v_proj=5"]}
    assert vars(found) == expected | {"lora_bias": True, "init_lora_weights": "false"}


REFUSED = {
    "biases": (LoraConfig(bias="all"), "peft_config: bias all trains biases of the base"),
    "pissa": (LoraConfig(init_lora_weights="pissa"), "init_lora_weights pissa changes the base"),
    "eva": (
        LoraConfig(init_lora_weights="eva"),
        "init_lora_weights eva changes the base, which is the reference, or needs data",
    ),
    "replication": (LoraConfig(layer_replication=[(0, 2), (1, 2)]), "layer_replication is .*, which is not supported"),
    "aLoRA": (LoraConfig(alora_invocation_tokens=[5]), r"alora_invocation_tokens is \[5\], which is not supported"),
    "no LoRA": (IA3Config(), "peft_config is a IA3Config: only LoRA adapters are trained"),
    "no module": (LoraConfig(target_modules=["nothing"]), "peft_config: .*nothing"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_trained_is_refused_in_one_line(kind, base, trainer):
    lora, message = REFUSED[kind]
    with pytest.raises(UserError, match=message) as error:
        trainer(GPT, base(GPT), peft_config=lora)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["gpt", "t5", "dora", "whole matrix"])
def test_a_peft_model_is_trained_in_place_from_its_adapter(kind, base, trainer, tmp_path):
    name, lora = settings_of(kind)
    model = get_peft_model(base(name), lora)
    move(weight for weight in model.parameters() if weight.requires_grad)
    names = [each for each, _ in model.named_parameters()]
    start = {each: weight.detach().clone() for each, weight in model.named_parameters() if weight.requires_grad}
    model.save_pretrained(tmp_path / "start")
    expected = logits_by_peft(base(name), tmp_path / "start")
    given = trainer(name, model)
    policy = given.setup.policy
    assert (policy.adapter, policy.initial_adapter) == ("default", "start")
    for adapter in ("default", "start"):
        torch.testing.assert_close(response_logits(policy.backbone, adapter), expected, atol=1e-4, rtol=0)
    assert {f"base_model.model.{each}" for each in trainable(policy.backbone)} == start.keys()
    folder = given.train()
    now = dict(model.named_parameters())
    assert [each for each in now if ".start" not in each] == names
    assert any(not torch.equal(now[each], weight) for each, weight in start.items())
    torch.testing.assert_close(response_logits(policy.backbone, "start"), expected, atol=1e-4, rtol=0)
    after = logits_by_peft(base(name), folder)
    torch.testing.assert_close(response_logits(policy.backbone, "default"), after, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["gpt", "t5", "dora", "whole matrix"])
def test_the_start_of_float32_adapters_on_a_bfloat16_base_is_not_rounded(kind, base, tokenizer):
    name, lora = settings_of(kind)
    model = get_peft_model(base(name).to(torch.bfloat16), lora)  # PEFT keeps its weights in float32
    move(weight for weight in model.parameters() if weight.requires_grad)
    loaded = from_objects(model, tokenizer(name), ModelConfig())
    trained = adapter_parameters(loaded.backbone.model, "default").values()
    start = adapter_parameters(loaded.backbone.model, "start").values()
    assert any(weight.dtype == torch.float32 for weight in trained)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(trained, start, strict=True))
    assert torch.equal(*(response_logits(loaded.backbone, adapter) for adapter in ("default", "start")))


@pytest.mark.parametrize("reference", ["base", "other"])
def test_another_adapter_of_a_peft_model_is_the_reference(reference, base, trainer):
    model = get_peft_model(base(LLAMA), LoraConfig(r=2))
    model.add_adapter("other", LoraConfig(r=2, init_lora_weights=False))
    move(weight for weight in model.parameters() if weight.requires_grad)
    plain = copy.deepcopy(model).eval()
    setup = trainer(LLAMA, model, reference=reference).setup
    assert "start" not in model.peft_config
    rollout = sample_rollout(setup.sampler, setup.policy.tokenization, setup.prompts, setup.sampling, (3, 1))
    rows, place = [[0, 1]], (setup.policy.backbone, 1.0, 4096, setup.run.accelerator)
    found = forward_all_roles(setup.roles, rollout, rows, *place)
    for row, (prompt, response) in enumerate(zip(rollout.prompts, rollout.responses, strict=True)):
        ids = torch.tensor([prompt.ids + response])
        with torch.no_grad():
            if reference == "base":
                with plain.disable_adapter():
                    logits = plain(ids).logits
            else:
                plain.set_adapter("other")
                logits = plain(ids).logits
        expected = logits[0, len(prompt.ids) - 1 : -1].log_softmax(-1)[range(len(response)), response]
        torch.testing.assert_close(found.ref_log_probs[row, : len(response)], expected, atol=1e-4, rtol=0)
        assert (found.log_probs[row, : len(response)] - expected).abs().max() > 1e-3


def test_a_peft_model_in_two_trainers_starts_the_second_from_what_the_first_trained(base, trainer, tmp_path):
    """The adapters of the first are deleted, and the user's own stay, whatever they are called."""
    model = get_peft_model(base(LLAMA), LoraConfig(r=2))
    model.add_adapter("reference", LoraConfig(r=2, init_lora_weights=False))
    move(weight for weight in model.parameters() if weight.requires_grad)
    settings = {"critic": "separate", "num_ppo_epochs": 1}
    trainer(LLAMA, model, settings).train()
    assert model.peft_config.keys() == {"default", "reference", "start", "value"}
    before = {name: weight.detach().clone() for name, weight in model.named_parameters() if ".default." in name}
    assert before
    second = trainer(LLAMA, model, {"output_dir": str(tmp_path / "second")})
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name.replace(".default.", ".start.")], weight) for name, weight in before.items())
    assert model.peft_config.keys() == {"default", "reference", "start"}
    second.train()
    own = get_peft_model(base(LLAMA), LoraConfig(r=2))
    own.add_adapter("start", LoraConfig(r=2))
    with pytest.raises(UserError, match="the PEFT model has an adapter 'start', a name of this package's own"):
        trainer(LLAMA, own, {"output_dir": str(tmp_path / "third")})


def test_peft_models_and_adapters_in_a_wrong_place_are_refused(base, trainer, tokenizer):
    lora = LoraConfig(r=2, target_modules=["c_attn"])
    with pytest.raises(UserError, match="the model is a PeftModel, whose adapter is trained: leave out peft_config"):
        trainer(GPT, get_peft_model(base(GPT), lora), peft_config=lora)
    with pytest.raises(UserError, match="peft_config and the settings lora_r and lora describe one adapter"):
        trainer(GPT, base(GPT), {"lora_r": 4}, peft_config=lora)
    with pytest.raises(UserError, match="reference: the policy has no adapter 'x'; give a model or one of base"):
        trainer(GPT, get_peft_model(base(GPT), lora), reference="x")
    with pytest.raises(UserError, match=RESERVED):
        trainer(GPT, get_peft_model(base(GPT), lora, adapter_name="value_2"))
    model = base(GPT)
    model.add_adapter(lora)
    with pytest.raises(UserError, match="the model carries PEFT adapters of transformers"):
        from_objects(model, tokenizer(GPT), ModelConfig())


def test_further_fields_are_a_block_of_the_settings(tmp_path, sharp_folders):
    path = tmp_path / "ppo.yaml"
    lines = ["lora_r: 4", "lora_target_modules: up_proj,q_proj", "lora:", "  use_rslora: true"]
    path.write_text("\n".join([*lines, "  modules_to_save: [lm_head]", "  layers_to_transform: [1]", ""]))
    config = parse(PPOConfig, ["--config", str(path), "--model", sharp_folders[LLAMA], "--lora.exclude_modules", "up_proj"])
    loaded = load(config, torch.float32)
    made = loaded.backbone.peft.peft_config["policy"]
    assert (made.use_rslora, made.modules_to_save, made.layers_to_transform) == (True, ["lm_head"], [1])
    assert made.exclude_modules == {"up_proj"} or made.exclude_modules == ["up_proj"]
    adapted = {each for each in trainable(loaded.backbone) if "lora_A" in each}
    assert adapted
    assert all(".layers.1." in each and "up_proj" not in each for each in adapted)
    with pytest.raises(UserError, match=r"lora: `layers_to_transform` cannot be used .*; name the modules"):
        load(ModelConfig(model=sharp_folders[LLAMA], lora_r=2, lora={"layers_to_transform": [0]}), torch.float32)
    with pytest.raises(UserError, match="lora is given, but lora_r is 0"):
        load(ModelConfig(model=sharp_folders[LLAMA], lora={"use_dora": True}), torch.float32)


def test_a_continued_adapter_keeps_its_fields(sharp_folders, make_adapter):
    folder, _ = make_adapter(LLAMA, "q_proj", use_rslora=True)
    settings = {"model": folder, "lora_r": 2, "lora_alpha": 8, "lora_target_modules": "q_proj"}
    load(ModelConfig(**settings, lora={"use_rslora": True}), torch.float32)
    with pytest.raises(
        UserError, match=r"is an adapter with use_dora False, which training continues; lora\.use_dora is True"
    ):
        load(ModelConfig(**settings, lora={"use_dora": True}), torch.float32)
    with pytest.raises(UserError, match="is an adapter, which training continues: leave out peft_config"):
        load(ModelConfig(model=folder), torch.float32, peft_config=LoraConfig(r=2))


def test_an_adapter_is_continued_with_the_block_that_made_it(sharp_folders, tokenizer, tmp_path):
    """Whatever the order of entries; an adapter that exists is not initialized again."""
    block = {"modules_to_save": ["lm_head", "embed_tokens"], "init_lora_weights": "gaussian"}
    block |= {"rank_pattern": ["v_proj=3", "q_proj=4"], "alpha_pattern": ["q_proj=8.5", "v_proj=6"]}
    settings = {"lora_r": 2, "lora_alpha": 8, "lora_target_modules": "v_proj,q_proj", "lora": block}
    loaded = load(ModelConfig(model=sharp_folders[LLAMA], **settings), torch.float32)
    assert loaded.backbone.peft.peft_config["policy"].alpha_pattern == {"q_proj": 8.5, "v_proj": 6.0}
    loaded.backbone.peft.save_pretrained(tmp_path, selected_adapters=["policy"])
    tokenizer(LLAMA).save_pretrained(tmp_path / "policy")
    settings["lora_target_modules"] = "q_proj,v_proj"
    load(ModelConfig(model=str(tmp_path / "policy"), **settings), torch.float32)
    other = settings | {"lora": block | {"rank_pattern": ["v_proj=3", "q_proj=5"]}}
    with pytest.raises(UserError, match=r"lora\.rank_pattern is \['v_proj=3', 'q_proj=5'\]: leave it out"):
        load(ModelConfig(model=str(tmp_path / "policy"), **other), torch.float32)


@pytest.mark.parametrize(
    ("name", "entry"), [("rank_pattern", "q_proj=2.5"), ("alpha_pattern", "q_proj=x"), ("rank_pattern", "4")]
)
def test_numbers_of_single_modules_are_checked(name, entry, sharp_folders):
    with pytest.raises(UserError, match=rf"lora\.{name} is {entry}, but each must be MODULE=NUMBER"):
        load(ModelConfig(model=sharp_folders[LLAMA], lora_r=2, lora={name: [entry]}), torch.float32)


ROWS = [{"prompt": "Hi", "responses": ["Hello!", "No."], "ranks": [1, 2]}] * 4
STAGES = {
    "sft": (SFTTrainer, SFTConfig, [{"prompt": "Hi", "completion": "Hello!"}] * 4),
    "reward": (RewardTrainer, RewardConfig, ROWS),
    "dpo": (DPOTrainer, DPOConfig, ROWS),
}


@pytest.mark.parametrize("form", ["peft_config", "PeftModel"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_trains_an_adapter_of_peft_alone(stage, form, base, tokenizer, tmp_path):
    trainer_class, config_class, rows = STAGES[stage]
    lora = LoraConfig(r=2, use_rslora=True, target_modules=["q_proj"])
    model = get_peft_model(base(LLAMA), lora) if form == "PeftModel" else base(LLAMA)
    settings = run_settings(learning_rate=1e-2)
    config = config_class(output_dir=str(tmp_path / "run"), num_train_epochs=3, **settings)  # A has no gradient at first
    more = {"peft_config": lora} if form == "peft_config" else {}
    made = trainer_class(model, rows, config, tokenizer=tokenizer(LLAMA), **more)
    before = {name: weight.detach().clone() for name, weight in made.loaded.backbone.model.named_parameters()}
    folder = made.train()
    now = dict(made.loaded.backbone.model.named_parameters())
    moved = {name for name, weight in now.items() if not torch.equal(weight, before[name])}
    assert moved == trainable(made.loaded.backbone)
    assert len(moved) == 2 * 2
    stored = LoraConfig.from_pretrained(folder)
    assert (stored.r, stored.use_rslora, stored.target_modules) == (2, True, {"q_proj"})
