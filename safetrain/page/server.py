"""The page of a project in a browser, on this machine only: its routes, and what is refused."""

import asyncio
import os
import re
import secrets
import socket
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import AsyncIterator
from pathlib import Path
from unicodedata import normalize
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from safetrain.core.errors import ConfigError, DataError, SafetrainError
from safetrain.core.formatting import print_text, size_text
from safetrain.core.signals import Terminated
from safetrain.core.storage import paths
from safetrain.core.storage.files import require_room
from safetrain.page.commands import Form, free_name, inside, press, refresh, running_process
from safetrain.page.views import HERE, LIVE, SECTIONS, Tongue, changes, pages, render
from safetrain.watch.report import TEMPLATES

PORT, TRIES = 8710, 20
TOKEN, LANGUAGE = "token", "safetrain-language"
MOST_UPLOAD_BYTES, MOST_FORM_BYTES, MOST_CONNECTIONS, MOST_UPLOADS = 2**30, 2**16, 48, 2
LOOK_SECONDS, MOST_PAUSE_SECONDS = 1.0, 10.0  # between looks
SHARE = 100  # while something runs, the pause is so many times as long as the look
ONLY = "default-src 'none'; base-uri 'none'; frame-ancestors 'none'; "
OWN_CONTENT = f"{ONLY}script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; form-action 'self'"
REPORT_CONTENT = f"{ONLY}style-src 'unsafe-inline'; img-src data:; form-action 'none'"  # as the report itself says
HEADERS = {
    "content-security-policy": OWN_CONTENT, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "x-frame-options": "DENY", "cross-origin-opener-policy": "same-origin", "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
}  # fmt: skip
STATIC = {"htmx.min.js", "hx-sse.min.js", "page.js", "page.css"}
HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?")  # another port may be forwarded to this one
MOST_LETTERS = 120  # of a name
ODD = re.compile(r"[^\w. ()+-]")  # in the name of an upload
OUTSIDE = "This page is for the one who started it: open the address that safetrain page has printed."


class Locked:
    """Lets only requests of the page itself through: from this machine, with its token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_locked(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in own]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        is_own = self._is_own(Request(scope, receive))
        await (self._app if is_own else PlainTextResponse(OUTSIDE, 403))(scope, receive, send_locked)

    def _is_own(self, request: Request) -> bool:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        in_address = request.query_params.get(TOKEN, "") if request.url.path == "/" else ""
        given = in_address or request.cookies.get(cookie_of(host), "")
        if HOST.fullmatch(host) is None or not secrets.compare_digest(given.encode(), self._token.encode()):
            return False
        reads = request.method in ("GET", "HEAD")
        if origin != f"http://{host}" and not (reads and origin is None):
            return False
        is_link = reads and bool(in_address)  # from a terminal, or a notebook
        return is_link or request.headers.get("sec-fetch-site", "none") in ("same-origin", "none")


def cookie_of(host: str) -> str:
    """The cookie of a page: browsers do not tell cookies apart by port."""
    return f"safetrain-{host.rpartition(':')[2]}"


class Live:
    """Renders a section again when what it reads has changed; all open pages share the result."""

    def __init__(self) -> None:
        self._lock, self._seen = asyncio.Lock(), dict[tuple[str, str], object]()
        self._next_look_seconds = dict[str, float]()  # by language; monotonic clock
        self._shown = dict[tuple[str, str], str]()  # by language and section

    async def sections(self, tongue: Tongue, *, now: bool = False) -> dict[str, str]:
        """The HTML of every section."""
        async with self._lock:
            now = now or (tongue.language, LIVE[0]) not in self._shown
            if now or time.monotonic() >= self._next_look_seconds[tongue.language]:
                took = await run_in_threadpool(self._look, tongue)
                pause = min(SHARE * took, MOST_PAUSE_SECONDS) if running_process() is not None and not now else 0.0
                self._next_look_seconds[tongue.language] = time.monotonic() + max(LOOK_SECONDS, pause)
            return {name: self._shown[tongue.language, name] for name in SECTIONS}

    def _look(self, tongue: Tongue) -> float:
        """Render what has changed; returns the CPU time in seconds that the live sections took."""
        refresh()
        took, tick = 0.0, time.monotonic() // 2 if running_process() is not None else 0.0
        marks = {is_live: (changes(live=is_live), tick * is_live) for is_live in (False, True)}
        for section in SECTIONS:
            began, is_live = time.thread_time(), section in LIVE
            key, seen = (tongue.language, section), marks[is_live]
            if self._seen.get(key) != seen:
                self._seen[key], self._shown[key] = seen, render(section, tongue)
            took += is_live * (time.thread_time() - began)
        return took


def application(token: str) -> ASGIApp:
    """The page's routes, behind Locked."""
    live, uploads = Live(), asyncio.Semaphore(MOST_UPLOADS)

    async def page(request: Request) -> Response:
        tongue = _tongue_of(request)
        facts = {"sections": await live.sections(tongue, now=True), "project": Path.cwd().name}
        text = pages().get_template("page.html").render(t=tongue, language=tongue.language, **facts)
        response = HTMLResponse(text)
        response.set_cookie(cookie_of(request.headers["host"]), token, httponly=True, samesite="strict")
        response.set_cookie(LANGUAGE, tongue.language, httponly=True, samesite="strict")
        return response

    async def events(request: Request) -> Response:
        return StreamingResponse(_events(request, live), media_type="text/event-stream")

    async def do(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_FORM_BYTES:
                return PlainTextResponse("This form is too long.", 413)
        tongue, form = _tongue_of(request), parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
        said, has_failed = await run_in_threadpool(_pressed, request.path_params["button"], form)
        await live.sections(tongue, now=True)
        return HTMLResponse(pages().get_template("said.html").render(t=tongue, said=said, has_failed=has_failed))

    async def upload(request: Request) -> Response:
        if uploads.locked():
            return PlainTextResponse("Wait until the other files are here.", 503)
        async with uploads:
            try:
                return PlainTextResponse(str(await _saved(request)))
            except (SafetrainError, OSError) as error:
                return PlainTextResponse(str(error), 413 if isinstance(error, DataError) else 400)
            except ClientDisconnect:
                return Response(status_code=400)

    routes = [
        Route("/", page), Route("/events", events), Route("/do/{button}", do, methods=["POST"]),
        Route("/upload/{name:path}", upload, methods=["PUT"]), Route("/report.html", _report),
        Route("/static/{name}", _static),
    ]  # fmt: skip
    return Locked(Starlette(routes=routes), token)


def _tongue_of(request: Request) -> Tongue:
    chosen = request.query_params.get("lang") or request.cookies.get(LANGUAGE)
    return Tongue(chosen or request.headers.get("accept-language", "")[:2])


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in STATIC:
        return PlainTextResponse("not found", 404)
    content = (TEMPLATES / "style.css").read_bytes() if name == "page.css" else b""  # the page looks like the report
    kind = "text/css" if name == "page.css" else "text/javascript"
    return Response(content + (HERE / "static" / name).read_bytes(), media_type=kind)


async def _report(_request: Request) -> Response:
    if not paths.REPORT.is_file() or paths.REPORT.is_symlink():
        return PlainTextResponse("There is no report: safetrain report", 404)
    return FileResponse(paths.REPORT, media_type="text/html", headers={"content-security-policy": REPORT_CONTENT})


async def _events(request: Request, live: Live) -> AsyncIterator[str]:
    """Send each section that looks different than before, as long as the page is open."""
    tongue, sent = _tongue_of(request), dict[str, str]()
    while not await request.is_disconnected():
        now = await live.sections(tongue)
        new = [name for name in now if sent.get(name) != now[name]]
        parts = [f'<hx-partial hx-target="#{name}" hx-swap="innerMorph">{now[name]}</hx-partial>' for name in new]
        lines = [f"data: {line}" for line in "\n".join(parts).splitlines()]
        yield "\n".join([*lines, "", ""]) if new else ": nothing new\n\n"
        sent = now
        await asyncio.sleep(LOOK_SECONDS)


def _pressed(button: str, form: Form) -> tuple[str, bool]:
    """What the command of a button said, and whether it failed."""
    try:
        return press(button, form)
    except (SafetrainError, OSError) as error:
        return str(error), True


async def _saved(request: Request) -> Path:
    """Save an upload in data/, whole or not at all, under a free name. Raises DataError, ConfigError, DiskFullError."""
    names = normalize("NFC", request.path_params["name"]).split("/")
    parts = [ODD.sub("_", part).strip(". ").lstrip("-")[-MOST_LETTERS:] for part in names]
    if not all(parts) or parts[-1].endswith(".dvc") or parts[-1] in ("dvc.yaml", "dvc.lock"):
        raise ConfigError("A file of this name cannot be kept in data/.", got=names[-1][:MOST_LETTERS])
    if len(parts) > 1 and "first" in request.query_params:
        parts[0] = free_name(Path("data", parts[0])).name  # the others of its folder follow it
    target = Path(inside(str(Path("data", *parts)), must_exist=False))
    size = int(request.headers.get("content-length") or 0)
    _require_size(size)
    target.parent.mkdir(parents=True, exist_ok=True)
    require_room(target.parent, size, "The disk has no room for this file.", "free some disk space")
    descriptor, temporary = tempfile.mkstemp(prefix=".upload-", suffix=".partial", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            async for part in request.stream():
                _require_size(file.tell() + len(part))
                await run_in_threadpool(file.write, part)
            file.flush()
            os.fsync(file.fileno())
        return Path(temporary).replace(free_name(target))
    finally:
        Path(temporary).unlink(missing_ok=True)


def _require_size(size: int) -> None:
    if size > MOST_UPLOAD_BYTES:
        do = "copy it into data/ yourself, and name it on the page"
        raise DataError("This file is too large for the page.", expected=f"up to {size_text(MOST_UPLOAD_BYTES)}", do=do)


def serve(port: int | None, *, opens_browser: bool) -> None:
    """Show the page until Ctrl-C; what its commands have started goes on. Raises OSError if ``port`` is taken."""
    token, listener = secrets.token_urlsafe(24), _listener(port)
    for section in SECTIONS:
        render(section, Tongue("en"))  # loads what the first view needs
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/?{TOKEN}={token}"
    print_text(f"The page of this project, for you alone: {address}")
    print_text("Ctrl-C ends the page; what it has started goes on.", sys.stderr)
    settings = uvicorn.Config(
        application(token), log_level="critical", limit_concurrency=MOST_CONNECTIONS, ws="none", lifespan="off",
        timeout_graceful_shutdown=1, server_header=False, proxy_headers=False,
    )  # fmt: skip
    if opens_browser:  # the socket listens already: the browser waits for the first answer
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    try:
        uvicorn.Server(settings).run(sockets=[listener])
    except Terminated:
        raise
    except KeyboardInterrupt:  # the usual end of a page
        return


def _listener(port: int | None) -> socket.socket:
    """A socket that listens on 127.0.0.1: without ``port``, on the first free one from PORT."""
    numbers = [port] if port is not None else [*range(PORT, PORT + TRIES), 0]
    for number in numbers:
        try:
            return socket.create_server(("127.0.0.1", number))
        except OSError:
            if number == numbers[-1]:
                raise
    raise OSError("no port is free")
