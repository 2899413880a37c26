"""Where a row stands in its file, in the words of all messages."""

from typing import NamedTuple


class Place(NamedTuple):
    """The line in which a row begins, and in arrays and tables its number; both from 1, and 0 where there is none."""

    line: int
    row: int = 0

    @property
    def number(self) -> int:
        """The line; the row where there is none, and in an array that is one long line."""
        return max(self.line, self.row)

    def of(self, name: str, column: int = 0) -> str:
        """``a.jsonl:3``, as editors open it; ``a.csv, row 2 (line 3)``; ``a.parquet, row 2``."""
        if not self.row:
            return f"{name}:{self.line}:{column}" if column else f"{name}:{self.line}"
        line = f" (line {self.line}, column {column})" if column else f" (line {self.line})" if self.line else ""
        return f"{name}, row {self.row}{line}"
