"""How numbers are told to people."""


def counted(number: int, noun: str) -> str:
    """``1 update``, ``2 updates``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
