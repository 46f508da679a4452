import pytest
import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from align.core.seeds import RngStream
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded, entropy_of
from align.models.backbone import static_decoding, wrap
from align.models.backbone.kinds import use_block_attention
from align.models.backbone.norms import fuse_norms
from align.models.heads import LanguageModel, RewardModel, ScalarHead
from align.models.loading import LoadedModel, load
from align.sampling.generation import SamplingParams, draw, row_uniforms, sample
from tests.models.architectures import make_model

FLOAT32 = 1e-4
BFLOAT16 = 0.1
"""Nats. bfloat16 has 8 bits of mantissa: logits near 10 are off by up to 0.04 by rounding alone."""
MODELS = ["tiny-llama", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("tiny-gpt2", "tiny-t5", "smollm2-135m"))]
"""A processor is compared with itself: one model shows that the tests still run."""


@pytest.fixture(params=MODELS)
def loaded(request, sharp_folders) -> LoadedModel:
    """A model in float32 on the processor."""
    model = sharp_folders.get(request.param, request.param)
    torch.manual_seed(0)
    return load(ModelConfig(model=model, dtype="float32"), torch.float32)


@pytest.fixture
def batch() -> tuple[Padded, Padded]:
    """Six prompts with responses of different lengths."""
    generator = torch.Generator().manual_seed(3)
    rows = [
        [torch.randint(8, 264, (count,), generator=generator).tolist() for count in counts]
        for counts in ((2, 12, 5, 5, 8, 3), (9, 1, 4, 7, 3, 6))
    ]
    return Padded.from_lists(rows[0]), Padded.from_lists(rows[1])


def outputs(model: LoadedModel, batch: tuple[Padded, Padded], device: torch.device) -> dict[str, torch.Tensor]:
    """What the roles compute, and the gradient of the loss, on the processor again."""
    backbone = model.backbone.to(device)
    prompt, response = (part.to(device) for part in batch)
    index = torch.tensor([0, 0, 1, 2, 2, 2], device=device)
    prompts = prompt.rows([0, 1, 2])
    language_model, head = LanguageModel(backbone), ScalarHead(backbone.hidden_size).to(device)
    log_probs = language_model(prompt, response)
    backbone.zero_grad(set_to_none=True)
    (-log_probs.sum() / response.lengths.sum()).backward()
    found = {
        "log-probs": log_probs,
        "log-probs, prompts shared": language_model(prompts, response, prompt_of_response=index),
        "rewards": RewardModel(backbone, head)(prompt, response),
        "entropy": entropy_of(backbone.logits(backbone.hidden(prompt, response)))[:, :-1].masked_fill(~response.mask(), 0),
    }
    gradients = {
        f"gradient of {name}": weight.grad for name, weight in backbone.named_parameters() if weight.grad is not None
    }
    return {name: value.detach().float().cpu() for name, value in (found | gradients).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_roles_and_gradients(loaded, batch, device, dtype, record_property):
    loaded.backbone.to(dtype)
    torch.manual_seed(1)
    expected = outputs(loaded, batch, torch.device("cpu"))
    torch.manual_seed(1)  # the same head
    found = outputs(loaded, batch, device)
    tolerance = FLOAT32 if dtype == torch.float32 else BFLOAT16
    for name, value in expected.items():
        scale = max(1.0, float(value.abs().max()))
        error = float((found[name] - value).abs().max()) / scale
        if not name.startswith("gradient"):
            record_property(name, error)
        assert error <= tolerance, name
    assert any(name.startswith("gradient") and float(value.abs().max()) > 0 for name, value in expected.items())


def test_greedy_responses(loaded, batch, device):
    prompts, sampling = batch[0].tolists(), SamplingParams(8, temperature=0.0)
    uniforms, ends = row_uniforms(len(prompts), sampling, 0, RngStream.ROLLOUT), loaded.tokenization.end_ids
    expected = sample(loaded.backbone, prompts, uniforms, sampling, ends)
    found = sample(loaded.backbone.to(device), prompts, uniforms, sampling, ends)
    assert found.ids == expected.ids
    assert found.ended == expected.ended


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_a_recorded_step_gives_the_same_responses(loaded, batch, tokens, device, monkeypatch):
    """On a GPU a step of decoding is replayed as a CUDA graph; rows that end leave, and the step is recorded anew."""
    prompts, ends, sampling = batch[0].tolists(), frozenset(range(1, 264, 20)), SamplingParams(tokens)
    uniforms = row_uniforms(len(prompts), sampling, 0, RngStream.ROLLOUT)
    backbone = loaded.backbone.to(device)
    monkeypatch.setattr(static_decoding, "DEVICES", set())
    expected = sample(backbone, prompts, uniforms, sampling, ends)
    monkeypatch.setattr(static_decoding, "DEVICES", {device.type})
    assert sample(backbone, prompts, uniforms, sampling, ends) == expected


def test_a_step_of_experts_is_not_recorded(batch, device, monkeypatch):
    monkeypatch.setattr(static_decoding, "DEVICES", {device.type})
    prompts, sampling = batch[0].tolists(), SamplingParams(8, temperature=0.0)
    backbone, uniforms = wrap(make_model("Mixtral, experts")), row_uniforms(len(prompts), sampling, 0, RngStream.ROLLOUT)
    expected = sample(backbone, prompts, uniforms, sampling, frozenset())
    state, _ = backbone.to(device).prefill(batch[0].to(device))
    assert backbone.reserve(state, 4) is state
    assert sample(backbone, prompts, uniforms, sampling, frozenset()) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 700, 64), (2, 300, 16, 128)])  # of states, and of the heads of queries
def test_norms_in_one_kernel_compute_the_same(shape, dtype, device):
    torch.manual_seed(0)
    holder = nn.ModuleList([Qwen3RMSNorm(shape[-1], eps=1e-5)]).to(device, dtype)
    (norm,) = holder
    nn.init.normal_(norm.weight, mean=1.0)
    states = 10 * torch.randn(shape, device=device, dtype=dtype)

    def output_and_gradients():
        read = states.clone().requires_grad_()
        found = norm(read)
        return [found.detach(), *torch.autograd.grad(probed(found), [read, norm.weight])]

    expected = output_and_gradients()
    fuse_norms(holder)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for ours, theirs in zip(output_and_gradients(), expected, strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) <= tolerance


def test_tokens_are_drawn_alike(device):
    """Only where a number falls within a rounding error of a token's edge may the next token be drawn."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(512, 49152, generator=generator)
    uniforms = torch.rand(512, generator=generator, dtype=torch.float64)
    expected = draw(logits.clone(), uniforms)
    found = draw(logits.to(device), uniforms.to(device)).cpu()
    assert (found == expected).float().mean() >= 0.99


def probed(states):
    """A loss of states that no norm makes constant, as it makes their squares: the same random number for each entry."""
    generator = torch.Generator().manual_seed(5)
    return (states.float() * torch.randn(states.shape, generator=generator).to(states.device)).mean()


BACKENDS = {"cpu": "aot_eager", "cuda": "inductor"}
"""On a processor the graph alone is checked: there, generated code would take minutes to compile."""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-llama", pytest.param("smollm2-135m", marks=pytest.mark.gpu)])
def test_compiled_layers_compute_the_same(model, device, sharp_folders):
    torch.manual_seed(0)
    backbone = load(ModelConfig(model=sharp_folders.get(model, model), dtype="float32"), torch.float32).backbone.to(device)
    ids = torch.randint(8, 264, (4, 24), generator=torch.Generator().manual_seed(0)).to(device)
    prompt, response = (Padded(part, torch.full((4,), 12, device=device)) for part in ids.split(12, dim=1))

    def states_and_gradient():
        backbone.zero_grad(set_to_none=True)
        states = backbone.hidden(prompt, response)
        probed(states).backward()
        return states.detach(), backbone.model.get_input_embeddings().weight.grad

    expected = states_and_gradient()
    for layer in backbone.model.base_model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=BACKENDS[device.type])
    found = states_and_gradient()
    assert all(torch.allclose(a, b, atol=1e-4 * float(b.abs().max())) for a, b in zip(found, expected, strict=True))


TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Of the largest: a GPU may multiply float32 as TF32 in the kernel that is made."""


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)  # on a CPU, FlexAttention has no gradient
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2", "smollm2-135m"])
def test_blocks_compute_what_the_dense_mask_does(model, dtype, device, sharp_folders, record_property):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    backbone = load(ModelConfig(model=sharp_folders.get(model, model)), dtype).backbone.to(device)
    lengths = (torch.tensor([200, 70]), torch.tensor([90, 140, 30, 60, 100]))
    prompt, response = (
        Padded(torch.randint(8, 264, (len(each), int(each.max())), generator=generator), each).to(device) for each in lengths
    )
    owner = torch.tensor([0, 0, 0, 1, 1], device=device)

    def states_and_gradients():
        backbone.zero_grad(set_to_none=True)
        states = backbone.hidden(prompt, response, owner)[:, :-1][response.mask()]
        probed(states).backward()
        return [states.detach(), *(weight.grad for weight in backbone.parameters() if weight.grad is not None)]

    expected = states_and_gradients()
    use_block_attention(backbone)
    found = states_and_gradients()
    assert len(found) == len(expected) > 1
    errors = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in zip(found, expected, strict=True)]
    record_property("largest error", max(errors))
    assert max(errors) <= TOLERANCE[dtype]
