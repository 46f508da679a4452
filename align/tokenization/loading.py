"""The tokenization of a tokenizer in memory, or of a model by its name."""

from collections.abc import Callable

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from align.builtin.zoo import resolve_model
from align.errors import UserError, first_line
from align.tokenization.base import Tokenization
from align.tokenization.pairs import PairTokenization

EndIds = Callable[[PreTrainedTokenizerBase], tuple[int, ...]]
"""Further ids that end a response, given the tokenizer."""


def make_tokenization(
    tokenizer: PreTrainedTokenizerBase, chat_template: str, of_pairs: bool, end_ids: EndIds | None = None
) -> Tokenization:
    """The tokenization of a tokenizer; `of_pairs`: for an encoder, which reads prompt and response as a pair."""
    more = end_ids(tokenizer) if end_ids else ()
    return (PairTokenization if of_pairs else Tokenization)(tokenizer, chat_template, more)


def load_tokenization(
    model: str, chat_template: str = "auto", of_pairs: bool = False, end_ids: EndIds | None = None
) -> Tokenization:
    """The tokenization of a model name, a local folder or a hub name.

    Args:
        of_pairs: see `make_tokenization`.
        end_ids: the ends that the model's generation config adds.

    Raises:
        UserError: if the tokenizer cannot be loaded.
    """
    source = resolve_model(model)
    try:
        return make_tokenization(AutoTokenizer.from_pretrained(source), chat_template, of_pairs, end_ids)
    except (OSError, ValueError) as error:
        raise UserError(f"model '{model}': its tokenizer cannot be loaded ({first_line(error)})") from error
