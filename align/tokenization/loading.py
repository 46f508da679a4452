"""The tokenization of a tokenizer in memory, or of a model by its name."""

from collections.abc import Callable

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from align.builtin.zoo import resolve_model
from align.core.errors import UserError, first_line
from align.tokenization.base import Tokenization
from align.tokenization.pairs import PairTokenization
from align.tokenization.rendering import ConversationError

EndIds = Callable[[PreTrainedTokenizerBase], tuple[int, ...]]
"""Further ids that end a response, given the tokenizer."""


def make_tokenization(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str,
    of_pairs: bool,
    end_ids: EndIds | None = None,
    encoder_decoder: bool = False,
) -> Tokenization:
    """The tokenization of a tokenizer.

    Args:
        of_pairs: for an encoder, which reads prompt and response as a pair.
        end_ids: the ends that the model's generation config adds.
        encoder_decoder: for a model whose encoder reads the prompt.
    """
    more = end_ids(tokenizer) if end_ids else ()
    if of_pairs:
        return PairTokenization(tokenizer, chat_template, more)
    return Tokenization(tokenizer, chat_template, more, encoder_decoder)


def load_tokenization(
    model: str,
    chat_template: str = "auto",
    of_pairs: bool = False,
    end_ids: EndIds | None = None,
    encoder_decoder: bool = False,
) -> Tokenization:
    """The tokenization of a model name, a local folder or a hub name.

    Args:
        of_pairs: see `make_tokenization`.
        end_ids: see `make_tokenization`.
        encoder_decoder: see `make_tokenization`.

    Raises:
        UserError: if the tokenizer cannot be loaded, or its chat template leaves out turns.
    """
    source = resolve_model(model)
    try:
        return make_tokenization(AutoTokenizer.from_pretrained(source), chat_template, of_pairs, end_ids, encoder_decoder)
    except ConversationError as error:
        raise UserError(f"model '{model}': {error}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"model '{model}': its tokenizer cannot be loaded ({first_line(error)})") from error
