"""Task families and the `Task` that all of them are made of.

Each family has a function `get_…_tasks`, which raises TaskError for settings and data that it
cannot use, and a grader, whose `reference()` returns a reply that earns 1.0. In the split "train"
the seed decides; validation and test are the same for each.
"""

from ttrl.tasks.task import Grade, Grader, Task

__all__ = ["Grade", "Grader", "Task"]
