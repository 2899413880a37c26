"""What the page costs while a training is watched, and how fast it is there.

    python -m benchmarks.bench_page

The bundled example, trained as the page's button does it, with no, one and four pages open. CPU seconds are those of
the page's own process during the training, and of the training process; the browser's are not counted.
"""

import http.client
import os
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.machine import write_result
from safetrain.page.views import HERE
from tests.page.opened import Page, opened

OPEN_PAGES = (0, 1, 4)


def main() -> None:
    """One row for each number of open pages."""
    rows = list[list[object]]()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ |= {"SAFETRAIN_LOCK_DIR": scratch, "SAFETRAIN_CACHE_DIR": f"{scratch}/cache"}
        Path(scratch, "cache").mkdir()
        with opened(Path(scratch)) as page:
            first, again = (seconds_of_a_view(page) for _ in range(2))
            for number, count in enumerate(OPEN_PAGES):
                rate = f"{0.001 + 0.0001 * number:g}"  # another one each time, or the run would be cached
                page.post("set", key="train.learning_rate", value=rate)
                rows.append(measure(page, count))
    scripts = sum(file.stat().st_size for file in (HERE / "static").glob("*.js"))
    notes = [f"First view {first:.2f} s, later ones {again:.3f} s; {scripts / 1000:.1f} kB of JavaScript."]
    header = ["pages open", "training, CPU s", "page, CPU s", "share", "sent, kB"]
    write_result("bench_page", "The page beside a training", header, rows, notes)


def seconds_of_a_view(page: Page) -> float:
    """The time of the whole document."""
    start = time.monotonic()
    page.get()
    return time.monotonic() - start


def measure(page: Page, count: int) -> list[object]:
    """Train with so many pages open."""
    received, connections = [0] * count, [watch(page) for _ in range(count)]
    for number, connection in enumerate(connections):
        threading.Thread(target=receive, args=(connection, received, number), daemon=True).start()
    page.post("run")
    while training_process(page) is None:  # after the plan
        time.sleep(0.2)
    server = psutil.Process(page.process.pid)
    before, trained, spent = cpu_seconds(server), 0.0, 0.0
    while (process := training_process(page)) is not None:
        with suppress(psutil.Error):  # it has just ended
            trained, spent = cpu_seconds(process), cpu_seconds(server) - before
        time.sleep(0.5)
    for connection in connections:
        connection.close()
    while '"/do/run"' not in page.get()[2]:  # the other stages run
        time.sleep(1.0)
    return [count, f"{trained:.1f}", f"{spent:.2f}", f"{100 * spent / trained:.2f} %", f"{sum(received) / 1000:.0f}"]


def watch(page: Page) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(page.host)
    connection.request("GET", "/events", headers={"Cookie": page.cookie})
    return connection


def receive(connection: http.client.HTTPConnection, received: list[int], number: int) -> None:
    with suppress(OSError, ValueError, AttributeError, http.client.HTTPException):  # closed at the end
        answer = connection.getresponse()
        while line := answer.readline():
            received[number] += len(line)


def training_process(page: Page) -> psutil.Process | None:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "safetrain.engine.worker" in process.cmdline() and process.cwd() == str(page.folder):
                return process
    return None


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
