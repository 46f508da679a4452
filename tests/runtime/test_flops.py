import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.models.backbone import flops_profile
from align.models.heads import LanguageModel, RewardModel
from align.models.loading import load
from align.models.lora import LoraSettings
from align.ppo.flops import RoleFlopsProfiles, phase_flops
from align.runtime.flops import (
    PEAKS,
    FlopsProfile,
    Matrices,
    Stack,
    forward_flops,
    peak_flops,
    sampling_flops,
    training_flops,
)

DECODER = FlopsProfile(Stack(Matrices(100, 10), 7), Matrices(1000, 0))
PAIR = FlopsProfile(Stack(Matrices(100, 0), 7), Matrices(1000, 0), Stack(Matrices(50, 0), 5), Matrices(20, 0))


def test_decoders_and_encoder_decoders_by_hand():
    # 5 tokens through 110 weights, 3 through the vocabulary, 5 x 5 pairs of tokens at 4 L H Q.
    assert forward_flops(DECODER, 2, [3], 3) == 2 * 5 * 110 + 2 * 3 * 1000 + 4 * 7 * 25
    # A frozen weight has no gradient of its own: 4 instead of 6.
    assert training_flops(DECODER, 2, [3], 3) == 5 * (6 * 100 + 4 * 10) + 6 * 3 * 1000 + 12 * 7 * 25
    # The prompt's 2 tokens see up to 2 + 3; responses of 3 and 1 see 5 and 3.
    assert forward_flops(DECODER, 2, [3, 1]) == 2 * 6 * 110 + 4 * 7 * (2 * 5 + 3 * 5 + 1 * 3)
    # 2 tokens in the encoder; behind the start token 4 in the decoder, whose cross attention reads 2 keys and values.
    encoder = 2 * 2 * 50 + 4 * 5 * 4
    assert forward_flops(PAIR, 2, [3], 3) == encoder + 2 * 4 * 100 + 2 * 2 * 20 + 4 * 7 * 4 * (4 + 2) + 2 * 3 * 1000


def test_layers_below_every_trained_weight_cost_a_forward_pass_by_hand():
    lowest = FlopsProfile(Stack(Matrices(100, 10, 30), 7, 3), Matrices(1000, 0))
    assert forward_flops(lowest, 2, [3], 3) == 2 * 5 * 140 + 2 * 3 * 1000 + 4 * 7 * 25
    learned = 5 * (6 * 100 + 4 * 10 + 2 * 30) + 6 * 3 * 1000 + (12 * 4 + 4 * 3) * 25
    assert training_flops(lowest, 2, [3], 3) == learned
    encoder = Stack(Matrices(0, 0, 50), 5, 5)  # whose part of the backward pass is empty
    pair = FlopsProfile(Stack(Matrices(100, 0), 7), Matrices(1000, 0), encoder)
    of_decoder = 6 * 4 * 100 + 12 * 7 * 4 * (4 + 2) + 6 * 3 * 1000
    assert training_flops(pair, 2, [3], 3) == 2 * 2 * 50 + 4 * 5 * 4 + of_decoder


def test_sampling_by_hand():
    # The prompt's 2 tokens, then 2 of the 3 that were sampled, which see 3 and 4 tokens.
    assert sampling_flops(DECODER, 2, [3]) == 2 * 4 * 110 + 2 * 3 * 1000 + 4 * 7 * (4 + 3 + 4)
    # Decoder: the start token and 2 more, which see 1 to 3 tokens and each the 2 of the prompt.
    encoder = 2 * 2 * 50 + 4 * 5 * 4 + 2 * 2 * 20
    assert sampling_flops(PAIR, 2, [3]) == encoder + 2 * 3 * 100 + 2 * 3 * 1000 + 4 * 7 * (6 + 6)
    # A second response of 1 token: a decoder draws it from the prompt's last state and reads nothing more; an encoder's
    # states are reused, but their keys and values are made for each response.
    assert sampling_flops(DECODER, 2, [3, 1]) == sampling_flops(DECODER, 2, [3]) + 2 * 1000
    assert sampling_flops(PAIR, 2, [3, 1]) == sampling_flops(PAIR, 2, [3]) + 2 * 2 * 20 + 2 * 100 + 2 * 1000 + 4 * 7 * (
        2 + 1
    )


def test_an_update_is_the_sum_of_its_roles():
    work, shared = [(2, [3, 2]), (4, [1])], RoleFlopsProfiles(DECODER, DECODER)
    parts = [
        sampling_flops(DECODER, p, r) + 2 * forward_flops(DECODER, p, r, sum(r)) + 4 * training_flops(DECODER, p, r, sum(r))
        for p, r in work
    ]
    assert sum(phase_flops(shared, work, 4).values()) == sum(parts)
    more = [forward_flops(PAIR, p, r) + 4 * training_flops(PAIR, p, r) + forward_flops(DECODER, p, r) for p, r in work]
    separate = RoleFlopsProfiles(DECODER, DECODER, PAIR, (DECODER,))
    assert sum(phase_flops(separate, work, 4).values()) == sum(parts) + sum(more)


PROMPT, RESPONSE = 20, 12


def counted(work):
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("lora_r", [0, 4])
def test_torch_counts_the_same(load_sharp, tiny_name, lora_r):
    loaded = load_sharp(tiny_name, lora_r=lora_r)
    loaded.backbone.model.set_attn_implementation("eager")  # torch's counter does not know the fused kernel on CPUs
    profile, policy = flops_profile(loaded.backbone, loaded.adapter), LanguageModel(loaded.backbone, loaded.adapter)
    prompt, response = Padded.from_lists([[9] * PROMPT]), Padded.from_lists([[8] * RESPONSE])
    with torch.no_grad():
        assert counted(lambda: policy(prompt, response, response.mask())) == forward_flops(
            profile, PROMPT, [RESPONSE], RESPONSE
        )
    found = counted(lambda: policy(prompt, response, response.mask()).sum().backward())
    expected = training_flops(profile, PROMPT, [RESPONSE], RESPONSE)
    if lora_r == 0:
        assert found == expected
    else:  # nothing is learned below the first layer: its projections of the embeddings give no gradient back
        assert 0.93 * expected < found < expected


LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
"""Weights of a layer of tiny-llama: q and o, k and v, and three of the MLP."""


def second_layer_adapted(folder, modules, gradient_checkpointing=False):
    lora = {"lora_r": 4, "lora_target_modules": modules, "lora": LoraSettings(layers_to_transform=[1])}
    return load(ModelConfig(model=folder, gradient_checkpointing=gradient_checkpointing, **lora), torch.float32)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_backward_pass_ends_at_the_lowest_layer_with_an_adapter(sharp_folders, gradient_checkpointing):
    """As torch counts it, with the second layer of two adapted."""
    loaded = second_layer_adapted(sharp_folders["tiny-llama"], "q_proj,v_proj", gradient_checkpointing)
    loaded.backbone.model.set_attn_implementation("eager")
    profile, policy = flops_profile(loaded.backbone, loaded.adapter), LanguageModel(loaded.backbone, loaded.adapter)
    of_adapter, tokens = 4 * (64 + 64) + 4 * (64 + 32), PROMPT + RESPONSE
    assert profile.decoder == Stack(Matrices(of_adapter, LAYER, LAYER), 2 * 64, 64)
    prompt, response = Padded.from_lists([[9] * PROMPT]), Padded.from_lists([[8] * RESPONSE])
    learned = policy(prompt, response, response.mask()).sum()
    found = counted(learned.backward)
    expected = training_flops(profile, PROMPT, [RESPONSE], RESPONSE) - forward_flops(profile, PROMPT, [RESPONSE], RESPONSE)
    # Not needed: the gradients of the layer's input, through q, k, v and the adapters' first matrices, and of the keys.
    expected -= 2 * tokens * (64 * 64 + 2 * 64 * 32 + 2 * 4 * 64) + 2 * 64 * tokens**2
    if gradient_checkpointing:  # the layer is read once more, up to the input of its last matrix
        expected += 2 * tokens * (LAYER - 64 * 128 + of_adapter) + 4 * 64 * tokens**2
    assert found == expected


def test_a_gradient_of_an_encoder_comes_through_the_whole_decoder(sharp_folders):
    loaded = second_layer_adapted(sharp_folders["tiny-t5"], "q,v")
    both = flops_profile(loaded.backbone, "policy")
    of_layer = 4 * 64 * 64 + 3 * 64 * 128
    assert both.encoder.matrices.forward_only == of_layer
    assert (both.encoder.attention, both.encoder.forward_only) == (2 * 64, 64)
    assert both.decoder.matrices.forward_only == both.decoder.forward_only == both.cross.forward_only == 0
    loaded.backbone.encoder.requires_grad_(False)
    alone = flops_profile(loaded.backbone, "policy")
    assert alone.encoder.matrices.frozen == alone.encoder.matrices.trained == 0
    assert alone.encoder.forward_only == 2 * 64
    assert alone.decoder.forward_only == 64
    assert alone.cross.forward_only == 2 * 64 * 64


def test_torch_counts_a_shared_prompt_with_its_mask(load_sharp):
    loaded = load_sharp("tiny-llama")
    loaded.backbone.model.set_attn_implementation("eager")
    from align.models.heads import ScalarHead

    model = RewardModel(loaded.backbone, ScalarHead(64), None)
    prompt, responses = Padded.from_lists([[9] * 20]), Padded.from_lists([[8] * 12, [7] * 5])
    with torch.no_grad():
        found = counted(lambda: model(prompt, responses, torch.zeros(2, dtype=torch.long)))
    # The kernel multiplies all 37 x 37 pairs and masks those of the other response; here they are not counted.
    masked = 37 * 37 - (20 * 32 + 12 * 32 + 5 * 25)
    profile = flops_profile(loaded.backbone, None)
    assert found - 4 * profile.decoder.attention * masked - forward_flops(profile, 20, [12, 5]) == pytest.approx(
        0, abs=2 * 2 * 64
    )


def test_shapes_of_the_tiny_models(sharp_backbones):
    """Llama: q, o 64 x 64, k, v 64 x 32, three of 64 x 128, in 2 layers; its output matrix 264 x 64."""
    llama = flops_profile(sharp_backbones["tiny-llama"], None)
    assert llama == FlopsProfile(
        Stack(Matrices(2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128), 0), 2 * 64), Matrices(264 * 64, 0)
    )
    t5 = flops_profile(sharp_backbones["tiny-t5"], None)
    assert t5.cross == Matrices(2 * 2 * 64 * 64, 0)
    assert t5.encoder == Stack(Matrices(2 * (4 * 64 * 64 + 3 * 64 * 128), 0), 2 * 64)


def test_the_peak_is_known_or_measured(monkeypatch):
    monkeypatch.setattr("align.runtime.flops._peaks", {})
    cpu = torch.device("cpu")
    measured = peak_flops(cpu, torch.float32)
    assert measured == peak_flops(cpu, torch.float32) > 1e8, "measured once a process"
    assert peak_flops(cpu, torch.float32, 100 * measured) == 100 * measured, "a peak is not below what was achieved"
    assert peak_flops(cpu, torch.float32) == 100 * measured
    monkeypatch.undo()
    names = {
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H100 NVL": 835e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA L4": 121e12,
    }
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(torch.device("cuda"), torch.bfloat16) == peak, name
    assert list(PEAKS).index("L40S") < list(PEAKS).index("L4")
