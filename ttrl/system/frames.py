"""Tables for pandas, of whatever has rows: samples, tasks of an evaluation, iterations of a run.

pandas is imported when a table is asked for: nothing else in ttrl needs it. What a table is made
of says which columns it has: `EvalResult`, `TaskResults`, `RunResult`.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ttrl.errors import UserError
from ttrl.text import flat

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame


def data_frame(
    rows: Iterable[Mapping[str, Any]],
    *,
    columns: Iterable[str] = (),
) -> "DataFrame":
    """Return a DataFrame of rows; mappings inside them become columns with dotted names.

    columns: those that come first, and are there even if no row has them. The others follow in the
    order in which rows first have them. Values that a row lacks are missing (NaN).

    Raises UserError where pandas is not installed.
    """
    try:
        import pandas
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise UserError(
            "to_pandas() needs pandas: pip install pandas, or 'ttrl[pandas]'"
        ) from error
    flattened = [flat(row) for row in rows]
    names = dict.fromkeys(columns)
    for row in flattened:
        names |= dict.fromkeys(row)
    frame: DataFrame = pandas.DataFrame(flattened, columns=list(names))
    return frame
