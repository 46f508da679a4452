"""Conversations to token ids and back: chat templates and special tokens."""

from align.tokenization.base import SpecialTokenError, Tokenization
from align.tokenization.demonstrations import encode_demonstration
from align.tokenization.loading import load_tokenization, make_tokenization
from align.tokenization.padding import with_unread_padding
from align.tokenization.pairs import PairTokenization
from align.tokenization.templates import NAMED_TEMPLATES, PLAIN_TEMPLATE

__all__ = [
    "NAMED_TEMPLATES",
    "PLAIN_TEMPLATE",
    "PairTokenization",
    "SpecialTokenError",
    "Tokenization",
    "encode_demonstration",
    "load_tokenization",
    "make_tokenization",
    "with_unread_padding",
]
