"""The padding token of a saved classifier, which transformers reads at the last token that is not padding."""

import copy

from transformers import AddedToken, PreTrainedTokenizerBase

from align.tokenization.base import Tokenization

_NO_UTF8 = ("ÿ", "<0xFF>")
"""Spellings of the byte 0xFF in vocabularies. UTF-8 has no such byte, hence no text yields the token."""


def with_unread_padding(tokenization: Tokenization, rows: int) -> PreTrainedTokenizerBase:
    """The tokenizer with a padding token that ends no text: its own, if that does not end a turn, or another one.

    The choice falls on a special token: one that is called padding, the unknown token, or any other. A tokenizer whose only
    special tokens end a text (GPT-2) pads with the byte 0xFF. If its vocabulary lacks that, it gets no padding token.

    Args:
        rows: of the embedding matrix, where the token needs one.

    Returns:
        The tokenizer itself, if its padding token stays, or a copy.
    """
    tokenizer = tokenization.tokenizer
    vocabulary = tokenizer.get_vocab()
    pad, ends = tokenizer.pad_token_id, tokenization.end_ids
    if pad is not None and pad not in ends and pad < rows:
        return tokenizer
    special = {token: id for token, id in vocabulary.items() if id in tokenization.special_ids}
    ordered = sorted(special, key=lambda token: ("pad" not in token.lower(), token != tokenizer.unk_token, special[token]))
    fitting = [token for token in (*ordered, *_NO_UTF8) if token in vocabulary and _fits(vocabulary[token], ends, rows)]
    tokenizer = copy.deepcopy(tokenizer)
    if not fitting:
        tokenizer.pad_token = None
        return tokenizer
    # As a single word: a name that holds the letter is read as before.
    is_byte = fitting[0] in _NO_UTF8
    token = AddedToken(fitting[0], single_word=True, normalized=False, special=True) if is_byte else fitting[0]
    tokenizer.add_special_tokens({"pad_token": token})
    return tokenizer


def _fits(id: int, ends: frozenset[int], rows: int) -> bool:
    return id not in ends and id < rows
