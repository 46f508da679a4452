"""Language models with TRL's value head, for existing folders and scripts and as value models of the trainer."""

import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BitsAndBytesConfig, PreTrainedModel

from align.core.errors import UserError
from align.model_registry.registry import fetch_model
from align.models.checkpoint import push_model

PREFIX = "v_head."
ADAPTER_HEAD = "v_head.safetensors"
"""File of a value head next to an adapter."""
PICKLED = "pytorch_model.bin"
"""File in which TRL saved a value head without safetensors, or next to an adapter."""


class ValueHead(nn.Module):
    """Dropout, followed by a linear layer from a hidden state to a number.

    Args:
        width: size of the hidden states.
        dropout: dropout probability.
    """

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.summary = nn.Linear(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Convert hidden states [B, L, H] to values [B, L] in the dtype of the head."""
        values: Tensor = self.summary(self.dropout(hidden).to(self.summary.weight.dtype))
        return values.squeeze(-1)


class PreTrainedModelWrapper(nn.Module):
    """Language model whose forward pass returns logits in float32, the loss if there are labels, and values.

    Args:
        pretrained_model: transformers or PEFT model.
        summary_dropout_prob: dropout of the value head. `summary_dropout_prob` in the model's config takes precedence.
        v_head_init_strategy: `normal` draws the weight and sets the bias to 0. Default: torch's initialization of linear
            layers.
        v_head_initializer_range: standard deviation for `normal`.
    """

    transformers_parent_class: Any = None
    lm_head_namings = ("lm_head", "embed_out", "output_layer")
    """Names of vocabulary matrices, for scripts that use this attribute."""

    def __init__(
        self,
        pretrained_model: PreTrainedModel | PeftModel,
        summary_dropout_prob: float = 0.1,
        v_head_init_strategy: str | None = None,
        v_head_initializer_range: float = 0.2,
    ) -> None:
        super().__init__()
        self.pretrained_model: Any = pretrained_model
        self.config: Any = pretrained_model.config
        self.is_peft_model = isinstance(pretrained_model, PeftModel)
        text = self.config.get_text_config(decoder=True)
        width = getattr(text, "word_embed_proj_dim", None) or text.hidden_size
        self.v_head = ValueHead(width, getattr(self.config, "summary_dropout_prob", summary_dropout_prob))
        if v_head_init_strategy == "normal":
            nn.init.normal_(self.v_head.summary.weight, std=v_head_initializer_range)
            nn.init.zeros_(self.v_head.summary.bias)
        elif v_head_init_strategy is not None:
            raise UserError(f"v_head_init_strategy is {v_head_init_strategy!r}, but must be 'normal' or None")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path | PreTrainedModel | PeftModel,
        peft_config: PeftConfig | None = None,
        is_trainable: bool = False,
        **kwargs: Any,
    ) -> "PreTrainedModelWrapper":
        """Wrap a model in memory, or load a model with its value head. If there is no value head, create one.

        Args:
            pretrained_model_name_or_path: model, folder or Hub id. An adapter is loaded onto its base model.
            peft_config: configuration of a new adapter.
            is_trainable: whether a loaded adapter is trainable.
            kwargs: arguments of the value head and of the model's `from_pretrained`.

        Raises:
            UserError: If the model is not a folder and cannot be downloaded, the value head is in a pickled file, or a
                reward adapter is requested.
        """
        if kwargs.pop("reward_adapter", None) is not None:
            raise UserError("reward_adapter is not supported: give the trainer a merged classifier as its reward_model")
        flags = {name: True for name in ("load_in_8bit", "load_in_4bit") if kwargs.pop(name, False)}
        if flags:  # transformers 5 accepts them only in a config
            kwargs["quantization_config"] = BitsAndBytesConfig(**flags)
        own = ("summary_dropout_prob", "v_head_init_strategy", "v_head_initializer_range")
        of_head = {name: kwargs.pop(name) for name in own if name in kwargs}
        model: Any = pretrained_model_name_or_path
        stored: dict[str, Tensor] = {}
        if isinstance(model, str | Path):
            folder = fetch_model(model)
            stored = stored_head(folder)
            is_adapter = (folder / "adapter_config.json").exists()
            base = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path if is_adapter else folder
            model = cls.transformers_parent_class.from_pretrained(base, **kwargs)
            if is_adapter:
                model = PeftModel.from_pretrained(model, str(folder), is_trainable=is_trainable)
        if peft_config is not None and not isinstance(model, PeftModel):
            model = get_peft_model(model, peft_config)
        wrapped = cls(model, **of_head)
        if stored:
            wrapped.v_head.load_state_dict(stored)
        return wrapped

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_past_key_values: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Return logits [B, L, V] in float32, the loss or None, values [B, L] and, if requested, the cache."""
        kwargs |= {"output_hidden_states": True, "return_dict": True}
        output = self.pretrained_model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        states = output.decoder_hidden_states if self.config.is_encoder_decoder else output.hidden_states
        cache = (output.past_key_values,) if return_past_key_values else ()
        return output.logits.float(), output.loss, self.v_head(states[-1]), *cache

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped model's `generate`."""
        return self.pretrained_model.generate(*args, **kwargs)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Enable gradient checkpointing in the wrapped model."""
        self.pretrained_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Disable gradient checkpointing in the wrapped model."""
        self.pretrained_model.gradient_checkpointing_disable()

    def push_to_hub(self, repo_id: str, token: str | None = None, **kwargs: Any) -> str:
        """Save the model with its value head and upload it. `kwargs` are arguments of `save_pretrained`."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, **kwargs)
            return push_model(Path(folder), repo_id, token=token)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the weights of the wrapped model under their own names, and the weights of the value head."""
        head = {f"{PREFIX}{name}": weight for name, weight in self.v_head.state_dict().items()}
        return {**self.pretrained_model.state_dict(*args, **kwargs), **head}

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Save the model with its value head as safetensors.

        If the model is an adapter, the head is saved to a separate file.
        """
        if not self.is_peft_model:
            self.pretrained_model.save_pretrained(save_directory, state_dict=self.state_dict(), **kwargs)
            return
        self.pretrained_model.save_pretrained(str(save_directory), **kwargs)
        head = {f"{PREFIX}{name}": weight.contiguous() for name, weight in self.v_head.state_dict().items()}
        save_file(head, Path(save_directory) / ADAPTER_HEAD)


def stored_head(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the value head in a folder. Empty if there is no value head.

    Raises:
        UserError: If the value head may be in a pickled file, which is not loaded.
    """
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            names = [name for name in list(tensors.keys()) if name.startswith(PREFIX)]
            found |= {name.removeprefix(PREFIX): tensors.get_tensor(name) for name in names}
    if not found and (folder / PICKLED).exists() and _may_hold_a_head(folder / PICKLED):
        raise UserError(
            f"{folder}: its value head may be in {PICKLED}, a pickled file, which is not read; convert it to safetensors "
            f"({ADAPTER_HEAD})"
        )
    return found


def _may_hold_a_head(path: Path) -> bool:
    """Return whether a pickled file may contain a value head. Search it for names of weights without loading it."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("data.pkl")]
            return any(PREFIX.encode() in archive.read(name) for name in names)
    except zipfile.BadZipFile:
        return True


class AutoModelForCausalLMWithValueHead(PreTrainedModelWrapper):
    """Decoder with a value head."""

    transformers_parent_class = AutoModelForCausalLM


class AutoModelForSeq2SeqLMWithValueHead(PreTrainedModelWrapper):
    """Encoder-decoder with a value head on its decoder."""

    transformers_parent_class = AutoModelForSeq2SeqLM
    is_encoder_decoder = True


class PolicyAndValueModel(nn.Module):
    """Container of the trained models, with TRL's attribute names.

    Args:
        policy: language model.
        value_model: model that predicts returns.
    """

    def __init__(self, policy: nn.Module, value_model: nn.Module) -> None:
        super().__init__()
        self.policy, self.value_model = policy, value_model
        self.config: Any = policy.config

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether gradient checkpointing is enabled. Read by TRL's `unwrap_model_for_generation`."""
        return bool(getattr(self.policy, "is_activation_checkpointing", False))

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Enable gradient checkpointing in the policy."""
        self.policy.activation_checkpointing_enable(gradient_checkpointing_kwargs)  # type: ignore[operator]

    def gradient_checkpointing_disable(self) -> None:
        """Disable gradient checkpointing in the policy."""
        self.policy.activation_checkpointing_disable()  # type: ignore[operator]
