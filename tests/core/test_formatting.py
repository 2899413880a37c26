"""Counts and durations read well."""

from safetrain.core.formatting import counted, duration_text


def test_one_is_singular_and_nothing_else() -> None:
    told = [counted(number, "bad row") for number in (0, 1, 2, 11)]
    assert told == ["0 bad rows", "1 bad row", "2 bad rows", "11 bad rows"]


def test_a_duration_has_the_unit_that_people_would_say() -> None:
    told = [duration_text(seconds) for seconds in (0.2, 40, 720, 27_000)]
    assert told == ["1 s", "40 s", "12 min", "7.5 h"]
