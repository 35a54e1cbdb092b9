"""Temporal-clue: a murder in a house of many rooms, to be solved from clues about places, times and
motives.

`get_temporal_clue_tasks` loads published puzzles or makes new ones; `make_puzzle` makes one.
"""

from ttrl.tasks.temporal_clue.generator import SIZES, Scope, make_puzzle
from ttrl.tasks.temporal_clue.grading import TemporalClueGrader
from ttrl.tasks.temporal_clue.scene import PuzzleSize
from ttrl.tasks.temporal_clue.tasks import get_temporal_clue_tasks, load_puzzles

__all__ = [
    "SIZES",
    "PuzzleSize",
    "Scope",
    "TemporalClueGrader",
    "get_temporal_clue_tasks",
    "load_puzzles",
    "make_puzzle",
]
