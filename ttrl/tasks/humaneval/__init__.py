"""HumanEval: complete a function in Python; its own tests decide, run in a sandbox.

`get_humaneval_tasks` loads the problems; `run_sandboxed` runs a program within limits.
"""

from ttrl.tasks.humaneval.sandbox import SandboxLimits, run_sandboxed
from ttrl.tasks.humaneval.tasks import HumanEvalGrader, get_humaneval_tasks

__all__ = ["HumanEvalGrader", "SandboxLimits", "get_humaneval_tasks", "run_sandboxed"]
