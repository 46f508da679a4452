"""Conversations to token ids and back."""

from align.tokenization.base import Tokenization, encode_demonstration
from align.tokenization.loading import PairTokenization, load_tokenization, make_tokenization, with_unread_padding
from align.tokenization.rendering import (
    NAMED_TEMPLATES,
    PLAIN_TEMPLATE,
    ConversationError,
    set_template_date,
)

__all__ = [
    "NAMED_TEMPLATES",
    "PLAIN_TEMPLATE",
    "ConversationError",
    "PairTokenization",
    "Tokenization",
    "encode_demonstration",
    "load_tokenization",
    "make_tokenization",
    "set_template_date",
    "with_unread_padding",
]
