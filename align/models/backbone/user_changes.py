"""User changes to a module: hooks, a replaced `forward`, a subclass.

A backbone calls a model's layers and its vocabulary matrix, but not the module around them. A change of that module would
have no effect, so it is an error.
"""

from typing import Any

from torch import nn

from align.core.errors import UserError

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HEAD_ADVICE = "remove it, or give a reward function that calls the model"
MODEL_ADVICE = "remove it, or put it on a layer of the model"


def _is_own(kind: type[nn.Module]) -> bool:
    """Return whether a class has a `forward` that is not a library's."""
    return not kind.forward.__module__.startswith(("transformers.", "align.", "peft."))


def _is_published(kind: type[Any]) -> bool:
    """Return whether a class is a complete model of transformers."""
    return kind.__module__.startswith("transformers.models.")


def require_unchanged(module: nn.Module, name: str, advice: str) -> None:
    """Raise a UserError if a module has hooks or a replaced `forward`. `name` is the module's name."""
    if any(getattr(module, hooks, None) for hooks in HOOKS):
        raise UserError(f"{name} has a hook, which would not be called; {advice}")
    # accelerate replaces `forward` to move inputs to a device.
    if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
        raise UserError(f"{name} has another forward than its class, which would not be called; {advice}")
    if _is_own(type(module)) and any("forward" in vars(kind) for kind in type(module).__mro__ if _is_published(kind)):
        raise UserError(f"{name} overrides the forward of its class, which would not be called; {advice}")


def require_plain_head(head: nn.Linear, name: str) -> None:
    """Raise a UserError if a head's weights do not determine its output, as in a subclass of Linear."""
    require_unchanged(head, name, HEAD_ADVICE)
    if type(head) is not nn.Linear:
        raise UserError(
            f"{name} is a {type(head).__name__}, a subclass of Linear that would not be called; give a plain Linear, or a "
            "reward function that calls the model"
        )


def require_published_forward(model: nn.Module) -> None:
    """Raise a UserError if a classifier's class overrides `forward`, as a subclass may."""
    if _is_own(type(model)):
        raise UserError(
            f"its class {type(model).__name__} has a forward of its own, which would not be called; give a reward function "
            "that calls it"
        )
