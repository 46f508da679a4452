"""How users' mistakes are refused."""

from collections.abc import Callable
from typing import Any

import pytest

from align.core.errors import UserError


def refusal(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """The message, of one line, with which a call is refused."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)
