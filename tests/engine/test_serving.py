"""Which Host headers the server answers."""

import pytest

from safetrain.engine.upstream.serving import may_name


@pytest.mark.parametrize(("header", "host", "answered"), [
    ("localhost:8080", "127.0.0.1", True), ("[::1]:8080", "::1", True), ("192.168.1.5:8080", "0.0.0.0", True),
    ("Mine.local:8080", "mine.local", True), ("", "127.0.0.1", True), ("attacker.example:8080", "127.0.0.1", False),
    ("localhost.attacker.example", "127.0.0.1", False), ("[::1", "127.0.0.1", False),
])  # fmt: skip
def test_a_host_header_of_another_name_is_refused(header: str, host: str, answered: bool) -> None:
    assert may_name(header, host) == answered
