"""Bases in 4 or 8 bits under LoRA adapters, by bitsandbytes: QLoRA (arXiv 2305.14314) and the 8-bit weights of LLM.int8().

A format is `int8`, `nf4` or `fp4`, the last two with `-double` if their block scales are quantized too; "" is a base that is
not quantized. A quantized weight is dequantized for each product, which is computed in the run's dtype. Log-probs are
therefore the same in every batch and in every mode, and merging does not change the model that the adapter was trained on.
"""

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer

from align.core.errors import UserError
from align.core.plugins import require_extra


def load_bitsandbytes() -> Any:
    """Import bitsandbytes. Raise a UserError if it is not installed."""
    with require_extra("quant"):
        import bitsandbytes
    return bitsandbytes


def quantization_settings(quantization: str, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return transformers' settings for loading a base in a format. Products are computed in `dtype`."""
    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    kind, _, double = quantization.partition("-")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=bool(double),
        bnb_4bit_compute_dtype=dtype,
    )


def quantization_of(config: PreTrainedConfig) -> str:
    """Return the format of a model quantized by bitsandbytes, in memory or on disk; "" for any other model.

    Raises:
        UserError: if another library quantized it.
    """
    settings = getattr(config, "quantization_config", None) or {}
    given = settings if isinstance(settings, dict) else settings.to_dict()
    if not given:
        return ""
    if given.get("load_in_8bit"):
        return "int8"
    if given.get("load_in_4bit"):
        double = "-double" if given.get("bnb_4bit_use_double_quant") else ""
        return f"{given.get('bnb_4bit_quant_type', 'fp4')}{double}"
    method = str(given.get("quant_method", "unknown"))
    raise UserError(
        f"model '{config.name_or_path}': quantized by {method.rpartition('.')[2].lower()}, which is not supported; load the "
        "unquantized model, with load_in_4bit or load_in_8bit if memory is short"
    )


def require_quantizable(quantization: str, source: str, stored: str, sharded: bool) -> None:
    """Raise a UserError, before loading, if a base cannot be loaded in a format.

    Args:
        stored: format on disk.
        sharded: whether ZeRO-3 shards the weights while they load.
    """
    if quantization and stored and stored != quantization:
        raise UserError(
            f"model '{source}' is stored as {stored}: leave out load_in_4bit and load_in_8bit, or load the unquantized model"
        )
    if not (quantization or stored):
        return
    if sharded:
        raise UserError(
            f"model '{source}': a quantized base is not supported with ZeRO-3, which splits weights between processes; use "
            "ZeRO-2 or one copy in each process (configs/accelerate/ddp.yaml)"
        )
    load_bitsandbytes()


def require_adapter(quantization: str, name: str, has_adapter: bool) -> None:
    """Raise a UserError if all weights of a quantized model would be trained."""
    if quantization and not has_adapter:
        raise UserError(
            f"model '{name}' is quantized ({quantization}): its weights cannot be trained; set lora_r (such as 16), or "
            "leave out load_in_4bit and load_in_8bit"
        )


def quantize_on_meta(model: PreTrainedModel, quantization: str, dtype: torch.dtype) -> None:
    """Replace the layers of a model without data, as transformers does when loading a quantized model."""
    load_bitsandbytes()
    from transformers.integrations import replace_with_bnb_linear

    settings = quantization_settings(quantization, dtype)
    kept = HfQuantizer.get_modules_to_not_convert(model, None, list(model._keep_in_fp32_modules or ()))
    before = {name: layer.bias for name, layer in model.named_modules() if isinstance(getattr(layer, "bias", None), Tensor)}
    replace_with_bnb_linear(model, kept, settings)
    for name, bias in before.items():  # the new layers' are in float32
        model.get_submodule(name).bias = bias
    # PEFT recognizes a quantized model by these.
    model.config.quantization_config = settings
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = settings.load_in_4bit, settings.load_in_8bit


def prepare_quantized(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Let quantized layers compute in `dtype`, in the same way in training, evaluation and sampling."""
    if not quantization_of(model.config):
        return
    bnb = load_bitsandbytes()
    for layer in model.modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            layer.compute_dtype, layer.compute_type_is_set = dtype, True
            # On a CPU with AVX512, evaluation mode would repack the weights for a kernel without gradients.
            layer.support_avx512bf16_for_cpu = False
        elif isinstance(layer, bnb.nn.Linear8bitLt):
            layer.__class__ = _weight_only_class(bnb)


_weight_only: list[type[nn.Module]] = []


def _weight_only_class(bnb: Any) -> type[nn.Module]:
    """Return a `Linear8bitLt` that quantizes no activations.

    LLM.int8() quantizes activations too, except columns with an outlier in any row of the batch, so a log-prob would depend
    on other rows of the batch. On a CPU, bitsandbytes trains without this and evaluates with it.
    """
    if not _weight_only:
        from bitsandbytes.autograd._functions import MatMul8bitFp

        class WeightOnlyLinear8bit(bnb.nn.Linear8bitLt):  # type: ignore[misc]
            """x [.., in] times int8 weights [out, in] with a scale for each row."""

            def forward(self, x: Tensor) -> Tensor:
                """[.., in] -> [.., out]."""
                if self.weight.CB is not None:
                    self.init_8bit_state()
                bias = None if self.bias is None else self.bias.to(x.dtype)
                product: Tensor = MatMul8bitFp.apply(x, self.weight, None, bias, self.state)  # type: ignore[no-untyped-call]
                return product

        _weight_only.append(WeightOnlyLinear8bit)
    return _weight_only[0]


@torch.no_grad()
def dequantized_weight(layer: nn.Module) -> Tensor:
    """Return the weight [out, in] of a linear layer, dequantized if needed."""
    weight: Any = layer.weight
    if (state := getattr(weight, "quant_state", None)) is not None:
        return cast(Tensor, load_bitsandbytes().functional.dequantize_4bit(weight.data, state))
    if weight.dtype == torch.int8:
        scales: Tensor = weight.SCB if weight.SCB is not None else layer.state.SCB  # type: ignore[union-attr,assignment]
        return cast(Tensor, weight.data.float() * scales.float().unsqueeze(1).mul(1.0 / 127.0))
    return cast(Tensor, weight.data)


def dequantized(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of the same class in `dtype` with dequantized weights of `model`, which must not be used afterward."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    with torch.device("meta"):
        plain: PreTrainedModel = type(model)(config)
    layers = dict(model.named_modules())
    weights: dict[str, Tensor] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        weights[name] = value.data.to(dtype)
        if not value.is_floating_point() and leaf == "weight":
            whole = dequantized_weight(layers[path]).to(dtype)
            weights[name] = whole.T.contiguous() if isinstance(plain.get_submodule(path), Conv1D) else whole
    buffers = dict(model.named_buffers(remove_duplicate=False))
    stored = plain.state_dict().keys()
    plain.load_state_dict({name: value for name, value in (weights | buffers).items() if name in stored}, assign=True)
    for name, buffer in buffers.items():  # rotary frequencies are not part of a state dict
        path, _, leaf = name.rpartition(".")
        if name not in stored:
            plain.get_submodule(path).register_buffer(leaf, buffer, persistent=False)
    names: dict[int, str] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        first = names.setdefault(id(weight), name)  # of the weights that are tied in `model`
        setattr(plain.get_submodule(path), leaf, plain.get_parameter(first))
    plain.all_tied_weights_keys = dict(model.all_tied_weights_keys)
    plain.config.dtype = dtype
    plain.generation_config = model.generation_config
    plain.eval()
    return plain
