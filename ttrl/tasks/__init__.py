"""Task families and their common `Task`.

Each family has a function `get_…_tasks`, raising TaskError for unusable settings and data, and a
grader with a method `reference()` for a reply earning 1.0. In the split "train" the seed decides;
validation and test are the same for each.
"""

from ttrl.tasks.task import Grade, Grader, Task

__all__ = ["Grade", "Grader", "Task"]
