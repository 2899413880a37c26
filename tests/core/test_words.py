"""Counts read well."""

from safetrain.core.words import counted


def test_one_is_singular_and_nothing_else() -> None:
    told = [counted(number, "bad row") for number in (0, 1, 2, 11)]
    assert told == ["0 bad rows", "1 bad row", "2 bad rows", "11 bad rows"]
