"""The largest update of a run of which no more is known than its longest row."""

from safetrain.core.memory.terms import padded
from safetrain.core.records.settings import LargestUpdate


def worst_update(longest_row: int, rows: int) -> LargestUpdate:
    """Nothing but rows as long as the longest, every token a label."""
    tokens = rows * padded(longest_row - 1)
    return LargestUpdate(rows, longest_row - 1, tokens, tokens)
