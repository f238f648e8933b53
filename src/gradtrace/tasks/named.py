"""The tasks that `task.name` can name."""

from __future__ import annotations

from gradtrace.tasks.arithmetic import ArithmeticTask
from gradtrace.tasks.base import Task
from gradtrace.tasks.calculator import CalculatorTask
from gradtrace.tasks.datasets import DatasetTask

TASKS: dict[str, type[Task]] = {task.name: task for task in (ArithmeticTask, CalculatorTask, DatasetTask)}
