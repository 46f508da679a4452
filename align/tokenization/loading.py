"""The tokenization of a tokenizer in memory, or of a model by its name."""

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from align.builtin.zoo import resolve_model
from align.errors import UserError, first_line
from align.files import read_json
from align.tokenization.base import Tokenization
from align.tokenization.pairs import PairTokenization


def make_tokenization(
    tokenizer: PreTrainedTokenizerBase, chat_template: str, of_pairs: bool, encoder_decoder: bool = False
) -> Tokenization:
    """The tokenization of a tokenizer.

    Args:
        of_pairs: for an encoder, which reads prompt and response as a pair.
        encoder_decoder: for a model whose encoder reads the prompt.
    """
    if of_pairs:
        return PairTokenization(tokenizer, chat_template)
    return Tokenization(tokenizer, chat_template, encoder_decoder=encoder_decoder)


def load_tokenization(
    model: str, chat_template: str = "auto", of_pairs: bool = False, encoder_decoder: bool | None = None
) -> Tokenization:
    """The tokenization of a model name, a local folder or a hub name.

    Args:
        of_pairs: see `make_tokenization`.
        encoder_decoder: see `make_tokenization`; None: what the model's config says.

    Raises:
        UserError: if the tokenizer cannot be loaded.
    """
    source = str(resolve_model(model))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        if encoder_decoder is None:
            encoder_decoder = _is_encoder_decoder(source)
        return make_tokenization(tokenizer, chat_template, of_pairs, encoder_decoder)
    except (OSError, ValueError) as error:
        raise UserError(f"model '{model}': its tokenizer cannot be loaded ({first_line(error)})") from error


def _is_encoder_decoder(source: str) -> bool:
    """Whether the model in a folder or on the hub has an encoder that reads the prompt; of an adapter, its base."""
    settings = Path(source) / "adapter_config.json"
    if settings.exists() and not (Path(source) / "config.json").exists():
        return bool(read_json(settings).get("task_type") == "SEQ_2_SEQ_LM")
    return bool(AutoConfig.from_pretrained(source).is_encoder_decoder)
