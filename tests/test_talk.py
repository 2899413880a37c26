"""`safetrain ask`, `chat` and `serve` as a person, a pipe and a program meet them."""

import contextlib
import fcntl
import json
import os
import pty
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.data.tokenizer import ChatTokenizer, Prompts
from safetrain.core.errors import ConfigError, DataError, ModelError
from safetrain.core.memory import system
from safetrain.core.records.adapter_files import CHAT_FILE, PromptFormat, read_prompt_format
from safetrain.core.records.settings import LoraSettings
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from safetrain.engine.evaluation import answer
from safetrain.engine.upstream.serving import may_name
from safetrain.engine.weight_files import open_tuned
from tests.conftest import EMBEDDED, ROOT
from tests.engine.test_fuse import adapter_of

QUESTION, OTHER = "What is the capital of Portugal?", "And of Peru?"
TOKENIZER = ChatTokenizer(EMBEDDED)
Folder = Callable[..., Path]
STRONG = LoraSettings(8, 4.0, 0.0, 6, ("all-linear",))
MOVED = 0.05, STRONG  # by how much, so that it answers in words, and in others


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the embedded model, moved at random: it answers in words, and others than its base."""
    return adapter_of(EMBEDDED, tmp_path_factory.mktemp("talk") / "adapter", "lora", *MOVED)


def run(*words: str, lines: str | None = None) -> SimpleNamespace:
    done = CliRunner().invoke(app, list(words), input=lines, catch_exceptions=False)
    return SimpleNamespace(out=done.stdout, err=done.stderr)


def expected(adapter: Path | None, *turns: str, system: str = "", most: int = 256) -> list[str]:
    """Each prompt read anew, the whole chat before it."""
    model = open_tuned(EMBEDDED, adapter)
    prompts = Prompts(TOKENIZER, read_prompt_format(adapter) if adapter else None)
    messages, said = list[Any](), list[str]()
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        ids = answer(model, [prompts.ids(prompts.with_system(messages, system))], prompts.stop_ids, most, 1)[0]
        said.append(TOKENIZER.decode(ids).strip())
        messages.append({"role": "assistant", "content": said[-1]})
    return said


def test_in_a_pipe_each_line_is_a_turn_and_only_answers_come_out(adapter: Path) -> None:
    lines = f"{QUESTION}\n\n{OTHER}\n/reset\n{QUESTION}\n/exit\n{OTHER}\n"
    said = run("chat", "--adapter", str(adapter), lines=lines)
    first, second = expected(adapter, QUESTION, OTHER)
    assert said.out.splitlines() == [first, second, first]
    assert "\x1b" not in said.out
    assert said.err == "[new chat]\n"
    assert run("ask", QUESTION, "--adapter", str(adapter)).out == f"{first}\n"


def test_base_and_tuned_answer_the_same_question(adapter: Path) -> None:
    base, tuned = expected(None, QUESTION, OTHER), expected(adapter, QUESTION, OTHER)
    assert base[0] != tuned[0]
    said = run("chat", "--compare", "--adapter", str(adapter), lines=f"{QUESTION}\n{OTHER}\n").out.splitlines()
    assert said == [f"base:  {base[0]}", f"tuned: {tuned[0]}", f"base:  {base[1]}", f"tuned: {tuned[1]}"]
    assert run("ask", QUESTION, "--base", "--adapter", str(adapter)).out.splitlines() == said[:2]
    assert run("chat", "--base", "--adapter", str(adapter), lines=QUESTION).out == f"{base[0]}\n"
    assert run("chat", "--base", "--model", str(EMBEDDED), lines=QUESTION).out == f"{base[0]}\n"


def test_a_model_that_does_not_fit_into_memory_answers_the_same_from_disk(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "host_room_bytes", lambda _readings: 0)
    said = run("chat", "--compare", "--adapter", str(adapter), "--max-new-tokens", "8", lines=QUESTION)
    base, tuned = (expected(each, QUESTION, most=8)[0] for each in (None, adapter))
    assert [line for line in said.out.splitlines() if "cut off" not in line] == [f"base:  {base}", f"tuned: {tuned}"]
    assert "so its weights stay on disk and are read once for each token of an answer" in said.err


def test_an_adapter_that_nobody_has_measured_is_told_beside_its_answer(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(adapter, paths.ADAPTERS)
    asked = ("ask", QUESTION, "--max-new-tokens", "2")
    assert run(*asked).err == "this adapter has not been evaluated: 'safetrain stage evaluate' measures it\n"
    assert run(*asked, "--adapter", str(adapter)).err == ""


def test_the_system_prompt_of_all_rows_is_used_and_told(tmp_path: Path) -> None:
    prompt_format = adapter_of(EMBEDDED, tmp_path / "adapter", size=0.02)  # moved further, it heeds no system prompt
    write_record(prompt_format / CHAT_FILE, PromptFormat((0, 7), "", "", "Answer in Portuguese."))
    said = run("chat", "--adapter", str(prompt_format), lines=f"{QUESTION}\n/system \x1b[31mBe brief.\n{QUESTION}\n")
    with_it = expected(prompt_format, QUESTION, system="Answer in Portuguese.")
    assert said.out.splitlines()[:1] == with_it
    assert with_it != expected(prompt_format, QUESTION)
    assert "[system prompt shared by all training rows: Answer in Portuguese.]" in said.err
    assert r"[system prompt: \x1b[31mBe brief.]" in said.err
    assert run("ask", QUESTION, "--adapter", str(prompt_format)).out.splitlines() == with_it
    none = run("chat", "--system", "", "--adapter", str(prompt_format), lines=QUESTION)
    assert (none.out.splitlines(), none.err) == (expected(prompt_format, QUESTION), "")


def test_in_a_pipe_a_full_context_is_an_error_that_names_the_question(adapter: Path) -> None:
    long = "word " * 600
    for before, number in (("", 1), (f"{QUESTION}\n/reset\n\n{OTHER}\n", 3)):
        done = CliRunner().invoke(app, ["chat", "--adapter", str(adapter)], input=f"{before}{long}\n{QUESTION}\n")
        assert isinstance(done.exception, DataError)
        assert f"question {number} was not asked" in str(done.exception)
        assert "the model's context of 512" in str(done.exception)
        assert "/reset" in done.exception.do
        assert len(done.stdout.splitlines()) == number - 1  # what was answered before stands
    both = CliRunner().invoke(app, ["chat", "--compare", "--adapter", str(adapter)], input=f"{long}\n")
    assert isinstance(both.exception, DataError)
    assert both.stdout == ""


def test_commands_are_no_questions_and_an_empty_or_cut_answer_is_called_so(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helped = run("chat", "--adapter", str(adapter), lines="/help\n")
    assert (helped.out, "/reset starts a new chat, /exit ends it]" in helped.err) == ("", True)
    refused = CliRunner().invoke(app, ["chat", "--adapter", str(adapter)], input="/sytem You are brief.\n")
    assert "Unknown command /sytem" in str(refused.exception)
    monkeypatch.setattr("safetrain.engine.upstream.generation.Conversation.answer", lambda *_: iter(()))
    monkeypatch.setattr("safetrain.engine.upstream.generation.Conversation.ended", "stop", raising=False)
    assert run("chat", "--adapter", str(adapter), lines=QUESTION).out == "(empty answer)\n"
    monkeypatch.undo()
    cut = run("chat", "--adapter", str(adapter), "--max-new-tokens", "2", lines=QUESTION)
    assert cut.out.splitlines() == expected(adapter, QUESTION, most=2)
    assert cut.err == "[cut off: raise --max-new-tokens]\n"


def test_mistakes_are_found_before_the_model_is_opened(adapter: Path, tiny_model: Folder, tmp_path: Path) -> None:
    another = tiny_model()
    for command in (["ask", QUESTION], ["chat"], ["serve"]):
        with pytest.raises(ModelError, match="No trained adapter"):
            run(*command, "--adapter", str(tmp_path))
        with pytest.raises(ModelError, match="does not exist"):
            run(*command, "--adapter", str(adapter), "--model", str(tmp_path / "nowhere"))
        with pytest.raises(ModelError, match="another base model"):
            run(*command, "--adapter", str(adapter), "--model", str(another))
    (broken := tmp_path / "broken").mkdir()
    (broken / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    (broken / "adapters.safetensors").write_bytes((adapter / "adapters.safetensors").read_bytes()[:20000])
    with pytest.raises(ModelError, match="The adapter's weights cannot be read"):
        run("serve", "--port", "0", "--adapter", str(broken))
    refused = CliRunner().invoke(app, ["chat", "--adapter", str(adapter)], input=b"\xff\xfe\n")
    assert "not UTF-8" in str(refused.exception)
    with pytest.raises(ConfigError, match="question is empty"):
        run("ask", " ", "--adapter", str(adapter))
    with pytest.raises(ConfigError, match="either --base or --compare"):
        run("chat", "--base", "--compare", "--adapter", str(adapter))


class Terminal:
    """A program in a terminal of ``columns``."""

    def __init__(self, columns: int, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "INPUTRC": os.devnull}
        environment.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "safetrain.cli", *words],
            cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 240) -> str:
        """What is shown up to and with ``text``, which is taken off."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if not select.select([self._ours], [], [], 1)[0]:
                continue
            try:
                self.seen += os.read(self._ours, 65536).decode(errors="replace")
            except OSError:  # the program has ended
                assert text in self.seen, self.seen
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def interrupt(self, text: str) -> None:
        """Ctrl-C, once more where a line editor was just about to listen, until ``text`` is shown."""
        while text not in self.seen:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(AssertionError):
                self.wait_for(text, seconds=3)
                return

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened = list[Terminal]()

    def start(columns: int, *words: str) -> Terminal:
        opened.append(Terminal(columns, *words))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@pytest.fixture
def endless(tiny_model: Folder, tmp_path: Path) -> Path:
    """An adapter whose answers do not end."""
    base = tiny_model()
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 10**6}))
    made = adapter_of(base, tmp_path / "endless")
    (made / "chat.json").unlink()
    return made


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(endless: Path, terminal: Callable[..., Terminal]) -> None:
    seen = terminal(80, "chat", "--adapter", str(endless), "--max-new-tokens", "900000", "--temperature", "3")
    seen.wait_for("Ctrl-C stops an answer;")
    seen.wait_for("> ")
    seen.interrupt("[Ctrl-D or /exit ends the chat]")
    seen.wait_for("> ")
    seen.type("/help\r")
    seen.wait_for("[Ctrl-C stops an answer; /system TEXT")
    seen.wait_for("> ")
    seen.type("/sytem You are brief.\r")
    seen.wait_for("[Unknown command /sytem.")
    seen.wait_for("> ")
    seen.type("One?\r")
    seen.wait_for("One?")
    for _ in range(3):
        seen.wait_for("e")  # it is talking
    seen.process.send_signal(signal.SIGINT)
    seen.wait_for("[stopped]")
    seen.wait_for("> ")
    seen.type("\x04")
    assert seen.process.wait(60) == 0


class Server:
    """`safetrain serve` as a child."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "safetrain.cli", "serve", "--port", "0", *words],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.said = ""
        while not self.said.splitlines()[-1:] or not self.said.splitlines()[-1].startswith("curl "):
            line = self.process.stdout.readline()
            assert line, self.said + self.process.stderr.read()  # type: ignore[union-attr]
            self.said += line
        self.curl = self.said.splitlines()[-1]
        self.port = int(self.curl.partition("127.0.0.1:")[2].partition("/")[0])

    def request(self, path: str, body: object = None, **headers: str) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=240)
        content = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, content,
                           {"Content-Type": "application/json", **headers})  # fmt: skip
        response = connection.getresponse()
        found = response.status, response.read().decode()
        connection.close()
        return found

    def ask(self, question: str, **more: object) -> str:
        status, text = self.request("/v1/chat/completions", {"messages": [user(question)], **more})
        assert status == 200, text
        return json.loads(text)["choices"][0]["message"]["content"]

    def stop(self, number: int) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return code


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def served(adapter: Path) -> Iterator[SimpleNamespace]:
    server = Server("--adapter", str(adapter))
    yield SimpleNamespace(server=server, adapter=adapter)
    assert server.stop(signal.SIGTERM) == 0


def test_what_is_served_is_what_ask_answers_whatever_model_is_named(served: SimpleNamespace) -> None:
    server, (tuned,) = served.server, expected(served.adapter, QUESTION)
    assert tuned != expected(None, QUESTION)[0]
    assert run("ask", QUESTION, "--adapter", str(served.adapter)).out == f"{tuned}\n"
    done = subprocess.run(server.curl, shell=True, capture_output=True, text=True, check=True)  # the line it prints
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == expected(served.adapter, "Hello", most=512)[0]
    assert server.ask(QUESTION, model="gpt-4o", adapters="nowhere") == tuned
    name = json.loads(server.request("/v1/models")[1])["data"][0]["id"]
    assert name == "encyclopedia-3m-tuned"
    assert server.ask(QUESTION, model=name) == tuned


def test_a_stream_and_a_chat_and_several_at_once_get_the_same(served: SimpleNamespace) -> None:
    server, said = served.server, expected(served.adapter, QUESTION, OTHER)
    messages = [user(QUESTION), {"role": "assistant", "content": said[0]}, user(OTHER)]
    _, text = server.request("/v1/chat/completions", {"messages": messages, "stream": True})
    parts = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == said[1]
    questions = [f"What is the capital of {name}?" for name in ("Peru", "Japan", "the United Kingdom", "Chad")]
    alone = [server.ask(question) for question in questions]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(server.ask, questions)) == alone


def test_what_it_cannot_answer_is_a_bad_request(served: SimpleNamespace) -> None:
    for message, words in ((user("word " * 600), "the model's context"), ({"role": "bishop", "content": ""}, "bishop")):
        status, text = served.server.request("/v1/chat/completions", {"messages": [message]})
        assert (status, words in text) == (400, True)
    assert served.server.request("/v2/nothing")[0] == 404
    for body in (None, {"messages": [user(QUESTION)]}):
        assert served.server.request("/v1/chat/completions", body, Host="attacker.example")[0] == 403
    assert served.server.request("/v1/models", Host="localhost")[0] == 200


def test_a_port_that_is_taken_is_named_with_another(adapter: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="Address already in use") as caught:
            run("serve", "--adapter", str(adapter), "--port", str(port))
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "--port" in caught.value.do
    with pytest.raises(ConfigError, match="Nothing can be served at this address"):
        run("serve", "--adapter", str(adapter), "--host", "192.0.2.1", "--port", "0")


def test_it_ends_cleanly_also_in_the_middle_of_an_answer(endless: Path) -> None:
    server = Server("--adapter", str(endless))
    connection = HTTPConnection("127.0.0.1", server.port, timeout=240)
    body = {"messages": [user("?")], "stream": True, "max_tokens": 900000, "temperature": 3, "seed": 1}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    assert connection.getresponse().read(400)
    assert server.stop(signal.SIGINT) == 0
    connection.close()
    assert not [each for each in psutil.Process().children(recursive=True) if each.pid == server.process.pid]


@pytest.mark.parametrize(("header", "host", "answered"), [
    ("localhost:8080", "127.0.0.1", True), ("[::1]:8080", "::1", True), ("192.168.1.5:8080", "0.0.0.0", True),
    ("Mine.local:8080", "mine.local", True), ("", "127.0.0.1", True), ("attacker.example:8080", "127.0.0.1", False),
    ("localhost.attacker.example", "127.0.0.1", False), ("[::1", "127.0.0.1", False),
])  # fmt: skip
def test_a_host_header_of_another_name_is_refused(header: str, host: str, answered: bool) -> None:
    assert may_name(header, host) == answered
