"""Task families and the `Task` that all of them are made of."""

from ttrl.tasks.task import Grade, Grader, Task

__all__ = ["Grade", "Grader", "Task"]
