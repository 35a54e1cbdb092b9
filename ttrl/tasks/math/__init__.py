"""Mathematics beyond numbers: MATH, AIME, DAPO, and a grader for roots, π, sets and intervals.

`get_math_tasks`, `get_aime_tasks` and `get_dapo_tasks` load problems. `MathGrader` compares answers
with math-verify in a process of its own. `same_answer` is the comparison itself.
"""

from ttrl.tasks.math.equality import same_answer
from ttrl.tasks.math.grading import MathGrader
from ttrl.tasks.math.tasks import get_aime_tasks, get_dapo_tasks, get_math_tasks

__all__ = ["MathGrader", "get_aime_tasks", "get_dapo_tasks", "get_math_tasks", "same_answer"]
