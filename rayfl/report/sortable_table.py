"""Tables whose rows a reader can put in another order: their places are worked out here, and the page moves them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rayfl.report.charts import Key


@dataclass(frozen=True)
class Column:
    """A column: its heading, the text of each row, and what each is sorted by (None: the column is not sortable).

    Rows are sorted by their first number, smallest first and NaN last, then by the next one.
    """

    head: str
    cells: Sequence[str]
    by: Sequence[tuple[float, ...]] | None = None


def sortable(
    name: str, keys: Sequence[Key], columns: Sequence[Column], chosen: str, **more: object
) -> dict[str, object]:
    """The table `name`, its rows as they come and the column with the heading `chosen` marked as their order.

    A row is (key, cells, places); places [num_columns] are the row's place in the order of each column. Rows that tie
    and columns that cannot be sorted by keep the order given.
    """
    places = [_places(column.by, len(keys)) for column in columns]
    rows = [
        (key, [column.cells[row] for column in columns], [place[row] for place in places])
        for row, key in enumerate(keys)
    ]
    heads = [(column.head, column.by is not None, column.head == chosen) for column in columns]
    return {"name": name, "heads": heads, "rows": rows, **more}


def _places(by: Sequence[tuple[float, ...]] | None, count: int) -> list[int]:
    if by is None:
        return list(range(count))
    order = sorted(range(count), key=lambda row: [(math.isnan(value), value) for value in by[row]])
    return sorted(range(count), key=order.__getitem__)
