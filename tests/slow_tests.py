"""Which tests are slow, found by what they use, and how many of them a run left out: a plugin of tests/conftest.py.

A test is marked `slow` if it, one of its fixtures or a helper of theirs under tests/ starts a process, a browser or a
database, or runs a whole stage of training or evaluation. Nobody has to keep a list; a test that is slow for another
reason has the marker in its file. What takes minutes or doubles a check of another test is marked `full`, and runs where
ALIGN_FULL is 1, as in continuous integration.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

MODULES = {"subprocess", "multiprocessing", "playwright", "psycopg", "vllm", "runpy"}
NAMES = {
    *("run_sft", "run_reward", "run_rule_model", "run_attribute_model", "run_ppo", "run_dpo", "run_distill", "run_loop"),
    *("run_all", "run_toxicity", "run_truthfulness", "run_winrate", "run_reward_eval", "run_train_judge"),
    "run_bias",
    "write_report",  # draws every plot
    "Checkpoints",  # the labeling app's: starts a process for a model
}
LONGEST = (
    *("test_resume", "test_algorithm", "test_browser_tasks", "test_checkpoints", "test_gradio_files", "test_launch"),
    *("test_losses_in_batches", "test_browser_lead_work", "test_adapters", "test_accessibility", "test_stop"),
    *("test_browser_rank", "test_browser_labeler", "test_crash", "test_layers", "test_loop", "test_examples"),
    *("test_sequence_parallel", "test_liveness", "test_limits", "test_sharded", "test_browser_lead"),
)
"""The files that take the longest, the longest first: they are tested first, or workers would wait for one of them."""
LEFT_OUT = "align_deselected"  # the key under which a worker of pytest-xdist tells its count


def _names(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes that a function's code uses, with those of the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _functions(value: Any) -> Iterator[FunctionType]:
    """The function itself; of a class, all its methods; nothing unless it is written in plain Python under tests/."""
    value = getattr(value, "_get_wrapped_function", lambda: value)()  # a fixture
    value = getattr(value, "__wrapped__", value)  # a context manager, or what hypothesis makes of a test
    if not str(getattr(value, "__module__", "")).startswith(("tests", "test_", "conftest")):
        return
    if isinstance(value, type):
        for member in vars(value).values():
            yield from _functions(member)
    elif isinstance(value, FunctionType):
        yield value


def _starts_something(function: Callable[..., Any], seen: dict[Any, bool]) -> bool:
    """Whether a function, or one under tests/ that it calls, uses what makes a test slow."""
    for inner in _functions(function):
        if inner in seen:
            if seen[inner]:
                return True
            continue
        seen[inner] = False  # also ends a recursion
        names = set(_names(inner.__code__))
        if "train" in names and any(name.endswith("Trainer") for name in names):
            seen[inner] = True
            return True
        for name in names:
            used = inner.__globals__.get(name)
            module = used.__name__ if isinstance(used, ModuleType) else str(getattr(used, "__module__", ""))
            if name in NAMES or {name.split(".")[0], module.split(".")[0]} & MODULES or _starts_something(used, seen):
                seen[inner] = True
                return True
    return False


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("ALIGN_FULL") != "1":
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
    seen: dict[Any, bool] = {}
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        fixtures = [definition.func for found in item._fixtureinfo.name2fixturedefs.values() for definition in found]
        test = getattr(item.function, "hypothesis", None)
        used = [test.inner_test if test else item.function, *fixtures]
        if any(_starts_something(function, seen) for function in used):
            item.add_marker("slow")
    # The longest files first, then those with slow tests: workers that share out whole files then end with small ones, at
    # about the same time.
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (places.get(item.path.stem, len(places)), item.path not in slow_files))


class Deselected:
    """Counts what a run left out; the workers of pytest-xdist each collect everything and tell the count at their end."""

    def __init__(self) -> None:
        self.count = 0

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.count += len(items)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[LEFT_OUT] = self.count

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.count = max(self.count, getattr(node, "workeroutput", {}).get(LEFT_OUT, 0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.count:
            terminalreporter.write_line(f"{self.count} tests were deselected; `make test-full` runs all")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Deselected())
