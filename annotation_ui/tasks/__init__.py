"""Labeling tasks. A new task is a Python file here, a JavaScript file in static/tasks/ and a line in `TASKS`."""

from annotation_ui.tasks.base import BadInputError, Json, Setting, Task
from annotation_ui.tasks.compare import Compare
from annotation_ui.tasks.demonstrate import Demonstrate
from annotation_ui.tasks.edit import Edit
from annotation_ui.tasks.judge_rules import JudgeRules
from annotation_ui.tasks.probe import Probe
from annotation_ui.tasks.rank import Rank
from annotation_ui.tasks.spans import Spans

TASKS: dict[str, Task] = {
    task.name: task for task in (Rank(), JudgeRules(), Demonstrate(), Edit(), Spans(), Probe(), Compare())
}
"""Tasks by name."""


def comparable_tasks() -> tuple[str, ...]:
    """Return the names of tasks in which several labelers' answers to an item can be compared."""
    return tuple(name for name, task in TASKS.items() if task.comparable)


def task_settings() -> list[tuple[Task, Setting]]:
    """Return (task, setting) for the batch settings of all tasks."""
    return [(task, setting) for task in TASKS.values() for setting in task.settings]


__all__ = ["TASKS", "BadInputError", "Json", "Task", "comparable_tasks", "task_settings"]
