"""Conversations to token ids and back: chat templates and special tokens."""

from align.tokenization.base import Tokenization
from align.tokenization.demonstrations import encode_demonstration
from align.tokenization.loading import load_tokenization, make_tokenization
from align.tokenization.padding import with_unread_padding
from align.tokenization.pairs import PairTokenization
from align.tokenization.rendering import ConversationError, DroppedTextError, SpecialTokenError
from align.tokenization.templates import NAMED_TEMPLATES, PLAIN_TEMPLATE, set_template_date

__all__ = [
    "NAMED_TEMPLATES",
    "PLAIN_TEMPLATE",
    "ConversationError",
    "DroppedTextError",
    "PairTokenization",
    "SpecialTokenError",
    "Tokenization",
    "encode_demonstration",
    "load_tokenization",
    "make_tokenization",
    "set_template_date",
    "with_unread_padding",
]
