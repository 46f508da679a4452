"""Find extensions by the entry points of installed packages, or by module:Class.

The entry points of the group `align.ppo.extensions` name classes. Extensions of this package have the names of the settings
that enable them. Extensions of other packages are listed in the setting `extensions`.
"""

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache, partial
from importlib.metadata import EntryPoint, distributions
from typing import Any

from align.core.errors import UserError, nearest_name
from align.core.plugins import call_own_code, import_function
from align.core.settings import Settings, is_extension_setting
from align.ppo.extensions.active import Extensions
from align.ppo.extensions.extension import Extension

GROUP = "align.ppo.extensions"
REMOVED_HOOKS = {
    "transform_scores": "shape",
    "token_rewards": "shape",
    "token_weights": "shape",
    "on_experience": "after_update",
    "after_evaluation": "evaluate",
    "resume": "load_state_dict",
}
"""Hooks of earlier versions, and their replacements."""


@cache
def installed_extensions() -> dict[str, EntryPoint]:
    """Return the entry points of all installed packages by name. The first on `sys.path` takes precedence."""
    # `entry_points` reads one distribution per name, so metadata left by an earlier installation would hide others.
    points = [point for package in distributions() for point in package.entry_points if point.group == GROUP]
    return {point.name: point for point in reversed(points)}


def configured_extensions(config: Settings, **objects: Any) -> Extensions:
    """Make the configured extensions in the order of their settings; those in `config.extensions` come last.

    Args:
        config: the settings of PPO.
        objects: objects in memory by setting name, passed to the setting's extension in addition to its value.

    Raises:
        UserError: if a setting is invalid, or an extension cannot be imported.
    """
    extensions = Extensions()
    for name, value in extension_settings(config):
        if name not in installed_extensions():
            raise UserError(f"{name}: its extension is not installed; install align again, in the clone: pip install -e .")
        extension_class = installed_extensions()[name].load()
        extensions.append(extension_class(value, *([objects[name]] if name in objects else [])))
        extensions[-1].name = name
    extensions += [user_extension(name) for name in getattr(config, "extensions", [])]
    # Extensions that select the policy come last: they read the scores that all others have changed.
    return Extensions(sorted(extensions, key=lambda extension: bool(extension.selects_by)))


def extension_settings(config: Settings, all_of_them: bool = False, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of each setting that enables an extension, as `block.setting` inside a block.

    Args:
        all_of_them: whether to include disabled extensions.
        prefix: prefix of the names.
    """
    for item in fields(config):
        value = getattr(config, item.name)
        if is_extension_setting(item):
            if value or all_of_them:
                yield prefix + item.name, value
        elif is_dataclass(value) and isinstance(value, Settings):
            yield from extension_settings(value, all_of_them, f"{prefix}{item.name}.")


def user_extension(name: str) -> Extension:
    """Make the extension of an entry point, or `module:Class`.

    Raises:
        UserError: if it cannot be imported, is not a subclass of `Extension`, or has a method that looks like a misspelled
            hook.
    """
    who = f"extension '{name}'"
    if ":" in name or name not in installed_extensions():
        extension_class = import_function(name, "extension", "module:Class or the name of an installed extension")
    else:
        extension_class = call_own_code(who, installed_extensions()[name].load)
    if not (isinstance(extension_class, type) and issubclass(extension_class, Extension)):
        raise UserError(f"{who}: must be a subclass of align.ppo.extensions.Extension")
    try:
        inspect.signature(extension_class).bind()
    except TypeError as error:
        raise UserError(f"{who}: {error}; its constructor is called without arguments") from error
    hooks = {hook for hook in vars(Extension) if not hook.startswith("_")}
    for method, _ in inspect.getmembers(extension_class, inspect.isfunction):
        if method in hooks or method.startswith("_"):
            continue
        if meant := REMOVED_HOOKS.get(method) or nearest_name(method, hooks, 0.85):
            raise UserError(f"{who}: there is no hook {method}; rename it to {meant}, or to _{method} if it is not a hook")
    extension: Extension = call_own_code(who, extension_class)
    extension.name = name
    for hook in hooks:
        if inspect.isroutine(getattr(extension_class, hook)) and hook in _overridden(extension_class):
            checked = partial(call_own_code, f"{who}: {hook}", getattr(extension, hook), collective=True)
            setattr(extension, hook, checked)
    return extension


def _overridden(extension_class: type[Extension]) -> set[str]:
    return {hook for hook in vars(Extension) if getattr(extension_class, hook) is not getattr(Extension, hook)}
