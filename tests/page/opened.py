"""A project with a page, served by the real command, and requests to it."""

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlencode

from tests.conftest import BLAS_THREADS

LIMIT = 100_000  # bytes of an upload, in tests: a real page takes 1 GiB
SERVE = (
    "import sys; from safetrain.page import server; "
    f"server.MOST_UPLOAD_BYTES = {LIMIT}; server.serve(None, opens_browser=False)"
)


class Page:
    """A page that is being served. ``get`` and ``post`` are what its own requests are."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        found = re.search(r"http://(\S+)/\?token=(\S+)", self.process.stdout.readline())
        assert found, "the page did not start"
        self.host, self.token = found[1], found[2]
        self.address = f"http://{self.host}/?token={self.token}"
        self.cookie = f"safetrain-{self.host.partition(':')[2]}={self.token}"
        for _ in range(100):  # until it answers
            with contextlib.suppress(OSError):
                self.get("/static/page.js")
                return
            time.sleep(0.1)

    def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> tuple[int, dict[str, str], str]:
        """Send a request with these headers alone; returns status, headers and text."""
        connection = http.client.HTTPConnection(self.host, timeout=120)
        try:
            connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            if body is not None and "Content-Length" not in headers:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read().decode("utf-8", "replace")
        finally:
            connection.close()

    @property
    def own(self) -> dict[str, str]:
        return {"Cookie": self.cookie, "Origin": f"http://{self.host}"}

    def get(self, path: str = "/") -> tuple[int, dict[str, str], str]:
        return self.ask("GET", path, {"Cookie": self.cookie})

    def post(self, button: str, **values: str) -> tuple[int, dict[str, str], str]:
        return self.ask("POST", f"/do/{button}", self.own, urlencode(values).encode())

    def put(self, name: str, content: bytes) -> tuple[int, dict[str, str], str]:
        return self.ask("PUT", f"/upload/{name}", self.own, content)

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=30)


@contextlib.contextmanager
def opened(parent: Path, *, example: bool = True) -> Iterator[Page]:
    """A project in ``parent``, and its page."""
    kept = ("PATH", "LANG", "SAFETRAIN_CACHE_DIR", "SAFETRAIN_LOCK_DIR", *BLAS_THREADS)
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"HOME": str(parent), "GIT_CONFIG_NOSYSTEM": "1", "MLX_DISABLE_COMPILE": "1"}
    environment["MPLCONFIGDIR"] = os.environ["SAFETRAIN_CACHE_DIR"]
    folder = parent / "mine"
    folder.mkdir()
    if example:
        words = [sys.executable, "-m", "safetrain.cli", "init", "--example"]
        subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True)
    page = Page(folder, environment)
    try:
        yield page
    finally:
        page.close()
