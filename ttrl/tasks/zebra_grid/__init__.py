"""Zebra-grid: a row of houses and their inhabitants, from clues; the answer is a markdown table.

`get_zebra_grid_tasks` loads published puzzles or makes new ones; `make_puzzle` makes one.
"""

from ttrl.tasks.zebra_grid.generator import make_puzzle
from ttrl.tasks.zebra_grid.grading import ZebraGridGrader
from ttrl.tasks.zebra_grid.tasks import get_zebra_grid_tasks, load_puzzles

__all__ = ["ZebraGridGrader", "get_zebra_grid_tasks", "load_puzzles", "make_puzzle"]
