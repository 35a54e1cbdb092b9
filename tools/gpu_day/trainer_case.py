"""One training step in this process, at the shapes of a run: what profiles and offloading measure.

Uses tools/check_memory.py: a model of published shape, made-up groups of eight samples, the real
recipe, two optimizer steps of which the second is timed.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import check_memory
from check_memory import ON_GPU, Case, Measured, Moments
from made_model import TINY, random_model
from measure import best_product, shares
from steps import Place


def run_case(place: Place, name: str, **settings: Any) -> tuple[Measured, Path]:
    """Run a case of check_memory by its name, with further settings of the recipe.

    Returns what was measured, and the folder that the recipe wrote into.
    """
    case = ON_GPU[name]
    model = place.models / "1.5b"
    if place.rehearse:
        case = Case(TINY, {"dtype": "bf16", "updates_per_iteration": 2, **settings}, 2, 256)
    else:
        case = dataclasses.replace(case, settings=case.settings | settings)
    random_model(model, case.shape, place.device)
    own = place.folder / str(len(list(place.folder.iterdir())))
    own.mkdir()
    (own / "model").symlink_to(model / "model")
    moments = wrapped_moments(not place.rehearse)
    return check_memory.in_this_process(case, own, moments, place.device), own / "out"


@functools.cache
def wrapped_moments(on_gpu: bool) -> Moments:
    """Return what watches the recipe's memory in this process, put around it once."""
    moments = Moments(on_gpu=on_gpu)
    moments.wrap_recipe()
    return moments


def tell_case(place: Place, name: str, measured: Measured) -> list[float | str]:
    """Return a row of the table of cases: see CASE_COLUMNS."""
    best, _ = best_product(place.device)
    row = measured.row
    of_sheet, of_best = shares(row["flops_per_second"], best)
    return [
        name,
        row["seconds"],
        row["tokens_per_second"],
        of_sheet,
        of_best,
        measured.allocated / 1e9,
        measured.estimated / 1e9,
    ]


CASE_COLUMNS = [
    "setting",
    "seconds",
    "tokens/s",
    "of 989 TFLOP/s",
    "of the best product",
    "GB",
    "planned",
]
