"""The page is for the person who started it: what is refused, and what is only ever shown as text."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.page.opened import LIMIT, Page, opened
from tests.support.chaos.project import wait_for

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAFETRAIN_LOCK_DIR", str(tmp_path_factory.mktemp("lock")))
        with opened(tmp_path_factory.mktemp("locked")) as served:
            (served.folder / "data/outside").symlink_to("/etc")
            (served.folder / "data/rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 3)
            yield served


HOSTS = (
    "example.com", "127.0.0.1.example.com", "localhost.example.com", "127.0.0.1@example.com", "example.com@127.0.0.1",
    "0.0.0.0", "127.0.0.2", "[::2]", "", "169.254.169.254", "127.0.0.1:1:2",
)  # fmt: skip
ORIGINS = ("http://example.com", "null", "https://{host}", "http://127.0.0.1:1", "http://{host}.example.com", "file://")
WITHOUT = ("/", "/events", "/models", "/estimate", "/report.html", "/static/page.js", "/?token=", "/?token=wrong")


@pytest.mark.parametrize("host", HOSTS)
def test_another_host_is_refused(page: Page, host: str) -> None:
    status, _, text = page.ask("GET", "/", {"Cookie": page.cookie, "Host": host})
    assert status in (400, 403)
    assert page.token not in text


@pytest.mark.parametrize("origin", ORIGINS)
def test_another_origin_is_refused(page: Page, origin: str) -> None:
    headers = {"Cookie": page.cookie, "Origin": origin.format(host=page.host)}
    assert page.ask("POST", "/do/run", headers, b"")[0] == 403


@pytest.mark.parametrize("path", WITHOUT)
def test_nothing_is_shown_without_the_token(page: Page, path: str) -> None:
    status, headers, text = page.ask("GET", path, {})
    assert (status, "set-cookie" in headers, page.token in text) == (403, False, False)


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("POST", "/do/run", {}),  # a form of another program, without Origin
        ("PUT", "/upload/a.csv", {}),
        ("GET", "/", {"Sec-Fetch-Site": "cross-site"}),
        ("GET", "/static/page.js", {"Sec-Fetch-Site": "same-site"}),
        ("GET", "/events", {"Sec-Fetch-Site": "cross-site"}),
        ("POST", "/do/run?token={token}", {"Cookie": "", "Origin": "http://{host}"}),  # the token opens the page alone
        ("GET", "/events?token={token}", {"Cookie": ""}),
    ],
)
def test_requests_of_other_sites_are_refused(page: Page, method: str, path: str, headers: dict[str, str]) -> None:
    sent = {"Cookie": page.cookie} | {name: value.format(host=page.host) for name, value in headers.items()}
    assert page.ask(method, path.format(token=page.token), sent)[0] == 403


@pytest.mark.parametrize("method", ["DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_other_methods_do_nothing(page: Page, method: str) -> None:
    assert page.ask(method, "/do/run", page.own)[0] == 405


@pytest.mark.parametrize(
    "path",
    ["/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py", "/static/LICENSE-htmx",
     "/report.html", "/params.yaml", "/checkpoints_qlora/report.html", "//etc/passwd"],
)  # fmt: skip
def test_no_other_file_is_served(page: Page, path: str) -> None:
    report = page.folder / "checkpoints_qlora/report.html"
    report.parent.mkdir(exist_ok=True)
    if not report.is_symlink():
        report.symlink_to("/etc/passwd")
    status, _, text = page.get(path)
    assert status == 404
    assert "root:" not in text
    report.unlink()


@pytest.mark.parametrize(
    ("button", "values"),
    [
        ("check", {"path": "/etc/passwd"}), ("check", {"path": "../mine/params.yaml"}), ("check", {"path": "--help"}),
        ("check", {"path": "data/outside/passwd"}), ("check", {"path": "data/../../x"}), ("check", {"path": ".dvc"}),
        ("check", {"path": "data/a\0b"}), ("check", {}), ("repair", {"path": "/etc/passwd"}),
        ("use_data", {"path": "data/outside"}), ("use_model", {"path": "/etc"}), ("use_model", {"path": "data/none"}),
        ("set", {"key": "gate.least_gain", "value": "1"}), ("set", {"key": "data.path", "value": "/etc"}),
        ("set", {"key": "train.seed --help", "value": "1"}), ("fetch", {"hub_id": "--into=/tmp"}),
        ("estimate", {"model": "../x"}), ("back", {"run": "--json"}), ("export", {"kind": "../x"}),
        ("ask", {"question": ""}), ("ask", {"question": "x" * 5000}), ("back", {}), ("stop", {}), ("rm", {}),
    ],
)  # fmt: skip
def test_a_button_runs_nothing_else(page: Page, button: str, values: dict[str, str]) -> None:
    logs = sorted((page.folder / ".dvc/tmp/page").glob("*.log"))
    before = [log.read_bytes() for log in logs if log.name != "status.log"]
    status, _, text = page.post(button, **values)
    assert status == 200
    assert 'class="said bad"' in text
    assert [log.read_bytes() for log in logs if log.name != "status.log"] == before


def test_options_in_a_value_stay_a_value(page: Page) -> None:
    text = page.post("set", key="train.num_epochs", value="--help")[2]
    assert "train.num_epochs" in text
    assert 'class="said bad"' in text


@pytest.mark.parametrize(
    "name", ["../x.csv", "%2e%2e/x.csv", "..%2f..%2fx.csv", "/etc/x.csv", "outside/x.csv", "", "...", "a/../../x.csv"]
)
def test_an_upload_stays_in_data(page: Page, name: str) -> None:
    status, _, text = page.put(name, b"prompt,completion\na,b\n")
    if status == 200:
        saved = (page.folder / text).resolve()
        assert saved.is_relative_to(page.folder / "data")
        saved.unlink()
    else:
        assert status in (400, 403, 404, 413)
    assert not (page.folder / "x.csv").exists()
    assert not Path("/etc/x.csv").exists()


def test_an_upload_is_whole_or_not_there(page: Page) -> None:
    before = sorted((page.folder / "data").rglob("*"))
    huge = page.ask("PUT", "/upload/a.csv", {**page.own, "Content-Length": str(2 * 2**30)})
    assert huge[0] == 413  # before a byte of it was sent
    assert "too large" in huge[2]
    with socket.create_connection(page.host.split(":")) as wire:  # type: ignore[arg-type]
        head = f"PUT /upload/b.csv HTTP/1.1\r\nHost: {page.host}\r\nCookie: {page.cookie}\r\nOrigin: http://{page.host}\r\n"
        wire.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(LIMIT // 10_000 + 1):  # of unknown length
            wire.sendall(b"2710\r\n" + b"a" * 10_000 + b"\r\n")
        assert b" 413 " in wire.recv(100)
    with socket.create_connection(page.host.split(":")) as wire:  # type: ignore[arg-type]
        wire.sendall(f"{head}Content-Length: 500\r\n\r\nabc".encode())  # and the browser is gone
    wait_for(lambda: sorted((page.folder / "data").rglob("*")) == before, "the end of the uploads", 10)
    assert page.get("/static/page.js")[0] == 200


def test_a_form_has_a_limit(page: Page) -> None:
    assert page.ask("POST", "/do/ask", page.own, b"question=" + b"x" * 70_000)[0] == 413


def test_every_answer_forbids_scripts_that_are_not_the_page_s(page: Page) -> None:
    for path in ("/", "/static/page.js", "/models", "/nowhere"):
        headers = page.get(path)[1]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "script-src 'self';" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    status, headers, text = page.ask("GET", f"/?token={page.token}", {"Sec-Fetch-Site": "cross-site"})  # a notebook's
    assert status == 200
    assert "HttpOnly" in headers["set-cookie"]
    assert "SameSite=strict" in headers["set-cookie"]
    assert not re.findall(r"<script(?![^>]*src=\"/static/)|\son\w+=|style=", text)


def test_what_rows_names_and_answers_say_is_text(page: Page) -> None:
    status, _, saved = page.put(quote("<img src=x onerror=alert(3)>.csv"), b"prompt,completion\n")
    assert (status, "<" in saved) == (200, False)
    rows = "".join(json.dumps({"prompt": f"{n} {EVIL}", "completion": EVIL}) + "\n" for n in (1, 1, 2, 3))
    (page.folder / "data/evil.jsonl").write_text(rows)
    (page.folder / "data/<b>bold.jsonl").write_text(rows)
    (page.folder / "models/<i>tuned").mkdir()
    (page.folder / "models/<i>tuned/config.json").write_text("{}")
    page.post("check", path="data/evil.jsonl")
    logs = page.folder / ".dvc/tmp/page"
    words = json.dumps(["safetrain", "ask", "--base", "--", EVIL])
    (logs / "ask.log").write_text(f"{words}\nbase:  {EVIL}\ntuned: </div>{EVIL}\n\n[exit 0]\n")
    texts = [page.get()[2], page.get("/models")[2], page.post("check", path=f"data/{EVIL}")[2]]
    wait_for(lambda: texts.append(page.get()[2]) or "REPEATED-ROWS" in texts[-1], "the findings", 60)  # type: ignore[func-returns-value]
    assert any("&lt;script&gt;alert(1)" in text for text in texts)
    for text in texts:
        assert not re.findall(r"<script>|<img|<b>bold|<i>tuned|</div>&lt;", text)
