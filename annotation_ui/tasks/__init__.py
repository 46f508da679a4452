"""The five tasks by name."""

from annotation_ui.tasks.base import BadInputError, Json, Task
from annotation_ui.tasks.compare import Compare
from annotation_ui.tasks.demonstrate import Demonstrate
from annotation_ui.tasks.judge_rules import JudgeRules
from annotation_ui.tasks.probe import Probe
from annotation_ui.tasks.rank import Rank

TASKS: dict[str, Task] = {task.name: task for task in (Rank(), JudgeRules(), Demonstrate(), Probe(), Compare())}
COMPARABLE = ("rank", "rules", "compare")
"""The tasks in which several labelers' answers to an item can be compared."""

__all__ = ["COMPARABLE", "TASKS", "BadInputError", "Json", "Task"]
