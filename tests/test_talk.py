"""`safetrain ask` and `chat` as a person and a pipe meet them."""

import contextlib
import fcntl
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import ConfigError, DataError, ModelError
from safetrain.core.memory import system
from safetrain.core.records.adapter_files import CHAT_FILE, PromptFormat, read_prompt_format
from safetrain.core.records.settings import LoraSettings
from safetrain.core.storage import paths
from safetrain.core.storage.files import write_record
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.engine.evaluation import answer
from safetrain.engine.weight_files import open_tuned
from safetrain.watch.chat import Prompts
from tests.conftest import EMBEDDED, ROOT
from tests.export.test_fuse import adapter_of

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


@cache
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


def test_questions_of_a_file_get_several_answers_each(adapter: Path, tmp_path: Path) -> None:
    file = tmp_path / "questions.csv"
    file.write_text(f"prompt,answer\n{QUESTION},Lisbon\n{OTHER},Lima\n")
    words = "ask", str(file), "--jsonl", "--adapter", str(adapter), "--max-new-tokens", "64"
    sampled = [json.loads(line) for line in run(*words, "--samples", "4").out.splitlines()]
    assert [(row["prompt"], row["answer"], len(row["answers"])) for row in sampled] == [
        (QUESTION, "Lisbon", 4), (OTHER, "Lima", 4),
    ]  # fmt: skip
    assert all(len(set(row["answers"])) > 1 for row in sampled)
    assert [row["scores"] for row in sampled] == [[0.0] * 4] * 2, "none is the expected answer to the letter"
    assert [json.loads(line) for line in run(*words, "--samples", "4").out.splitlines()] == sampled
    greedy = [json.loads(line)["answers"] for line in run(*words).out.splitlines()]
    assert greedy == [expected(adapter, question, most=64) for question in (QUESTION, OTHER)]
    short = [json.loads(line)["answers"] for line in run(*words[:-1], "8").out.splitlines()]
    assert short == [[], []], "an answer that was cut off is no candidate"
    file.write_text(f"question\n{QUESTION}\n")
    with pytest.raises(DataError, match=r"no row with a prompt(.*\n)*.*questions\.csv, row 1"):
        run(*words)
    file.write_text(f"prompt\n{'long ' * 600}\n")
    with pytest.raises(DataError, match="does not fit into the model's context"):
        run(*words)
    file.write_text(f'prompt,options,answer\n{QUESTION},"[""Lisbon"", ""Lima""]",0\n')
    weighed = json.loads(run(*words).out)
    assert list(weighed["probabilities"]) == ["Lisbon", "Lima"]
    assert sum(weighed["probabilities"].values()) == pytest.approx(1)
    likeliest = max(weighed["probabilities"], key=weighed["probabilities"].get)
    assert (weighed["answers"], weighed["scores"]) == ([likeliest], [float(likeliest == "Lisbon")])
    said = run("ask", QUESTION, "--option", "Lisbon", "--option", "Lima", "--adapter", str(adapter)).out.splitlines()
    assert [line.split()[0] for line in said] == [likeliest, *{"Lisbon", "Lima"} - {likeliest}]
    with pytest.raises(ConfigError, match="Options are different texts"):
        run("ask", QUESTION, "--option", "Lisbon", "--adapter", str(adapter))
    with pytest.raises(ConfigError, match="no such file"):
        run("ask", "nowhere.jsonl", "--jsonl", "--adapter", str(adapter))


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
    assert run(*asked).err == "this adapter has not been evaluated: 'safetrain run' measures it\n"
    assert run(*asked, "--adapter", str(adapter)).err == ""


def test_the_system_prompt_of_all_rows_is_used_and_told(tmp_path: Path) -> None:
    prompt_format = adapter_of(EMBEDDED, tmp_path / "adapter", size=0.02)  # moved further, it heeds no system prompt
    write_record(prompt_format / CHAT_FILE, PromptFormat((0, 7), "", "", "Answer in Portuguese."))
    said = run("chat", "--adapter", str(prompt_format), lines=QUESTION)
    with_it = expected(prompt_format, QUESTION, system="Answer in Portuguese.")
    assert said.out.splitlines() == with_it
    assert with_it != expected(prompt_format, QUESTION)
    assert "[system prompt shared by all training rows: Answer in Portuguese.]" in said.err
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
    refused = CliRunner().invoke(app, ["chat", "--adapter", str(adapter)], input="/sytem You are brief.\n")
    assert "Unknown command /sytem. Ctrl-C stops an answer, /reset starts a new chat" in str(refused.exception)
    monkeypatch.setattr("safetrain.engine.upstream.generation.Conversation.answer", lambda *_: iter(()))
    monkeypatch.setattr("safetrain.engine.upstream.generation.Conversation.ended", "stop", raising=False)
    assert run("chat", "--adapter", str(adapter), lines=QUESTION).out == "(empty answer)\n"
    monkeypatch.undo()
    cut = run("chat", "--adapter", str(adapter), "--max-new-tokens", "2", lines=QUESTION)
    assert cut.out.splitlines() == expected(adapter, QUESTION, most=2)
    assert cut.err == "[cut off: raise --max-new-tokens]\n"


def test_mistakes_are_found_before_the_model_is_opened(adapter: Path, tiny_model: Folder, tmp_path: Path) -> None:
    another = tiny_model()
    for command in (["ask", QUESTION], ["chat"]):
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
        run("ask", QUESTION, "--adapter", str(broken))
    refused = CliRunner().invoke(app, ["chat", "--adapter", str(adapter)], input=b"\xff\xfe\n")
    assert "not UTF-8" in str(refused.exception)
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
    seen.wait_for("Ctrl-C stops an answer,")
    seen.wait_for("> ")
    seen.interrupt("[Ctrl-D or /exit ends the chat]")
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
