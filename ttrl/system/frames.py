"""Make pandas tables from anything with rows: samples, tasks of an evaluation, iterations of a run.

pandas is imported on the first table: nothing else in ttrl needs it. The source of a table
documents its columns: `EvalResult`, `TaskResults`, `RunResult`.
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

    columns: the first columns, present even if no row has them. The others follow in the order of
    their first appearance. Values absent from a row are missing (NaN).

    Raises UserError without pandas.
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
