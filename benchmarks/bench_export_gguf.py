"""GGUF files in llama.cpp itself: tokens, divergence from the model that was exported, greedy answers.

    python -m benchmarks.bench_export_gguf     with llama-cpp-python (the extra llama)

Every family that files are written for, small and with random, large weights in 4 bits, with a tokenizer of its kind.
Then the example, trained, and the time and memory that an export of a 0.5B shape takes.
"""

import importlib.util
import json
import random
import subprocess
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from safetrain.engine.cpu.blas import load_fast_blas

load_fast_blas()  # before anything imports mlx
import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.llama_judge import LlamaJudge, divergence, lora  # noqa: E402
from safetrain.core.data.token_rows import TokenRows, token_row  # noqa: E402
from safetrain.core.records.settings import LoraSettings  # noqa: E402
from safetrain.core.text.tokenizer import ChatTokenizer  # noqa: E402
from safetrain.engine.model import open_base  # noqa: E402
from safetrain.export.comparison import ExportJob  # noqa: E402
from safetrain.export.fuse import FLOAT, fuse_adapter  # noqa: E402
from safetrain.export.gguf_export import adapter_of, export_gguf  # noqa: E402
from tests.engine.test_training import rows as token_rows  # noqa: E402
from tests.export.test_fuse import adapter_of as moved_adapter  # noqa: E402
from tests.support.gguf_models import MODELS, build  # noqa: E402
from tests.support.random_models import build_model  # noqa: E402
from tests.support.tokenizers_made import CORPUS, SPECIAL  # noqa: E402

TYPES = ("exact", "f16", "q8_0", "q4_0")
WIDE: dict[str, Any] = {
    "bits": 4, "bfloat16": True, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
HALF: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864, "head_dim": 64,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
ROOT = Path(__file__).resolve().parent.parent
STRINGS, ANSWERS, NEW_TOKENS = 1000, 4, 12
LETTERS = {
    "latin": "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "accents": "áàâãäåæçéèêëíñóõöøúüÿßœŁžČ",
    "decomposed": "e\u0301a\u0303c\u0327o\u0308",
    "greek, cyrillic": "αβγδεζηθλμπΣΩабвгдежзийклЖЩЮ",
    "east asian": "数学は楽しい中文字符한국어ひらカタ",
    "right to left, indic": "שלוםعربيहिन्दीไทย",
    "digits": "0123456789٣४½²Ⅷ",
    "spaces": "  \t\n\r\u00a0\u2009\u3000▁",
    "symbols": "!?.,;:'\"()[]{}<>|@#$%^&*-_=+/\\~`€→∑",
    "emoji": "🙂🚀👩‍👩‍👧🏽🇵🇹",
}
HEADER = [
    "family", "tokens as in training, bare / in a chat", "type", "KiB",
    "divergence in llama.cpp", "same choices in llama.cpp", "same answers",
]  # fmt: skip


NOTES = (
    "Divergence: KL(mlx || llama.cpp), nats per label; exact: base in Q4_1 and adapter, to which llama.cpp multiplies "
    f"with inputs rounded to 8 bits; f16, q8_0, q4_0: one file. Answers: greedy, {NEW_TOKENS} tokens each. Tokens: of "
    "texts drawn from every kind of letters, spaces, digits, emoji, code and special tokens.",
    "915 of 1,000: the others are not in Unicode's form NFC, which llama.cpp does not make. 162 of 1,000: Mistral's "
    "space before bare texts. 993 and 974: rare wide spaces after Phi-3's special tokens.",
)


def strings(seed: int = 7) -> list[str]:
    """Texts of every kind of character, words, contractions, code, and special tokens inside."""
    draw, found = random.Random(seed), list[str]()
    words = " ".join(CORPUS).split(" ")
    while len(found) < STRINGS:
        parts = []
        for _ in range(draw.randint(1, 8)):
            kind = draw.random()
            if kind < 0.45:
                parts.append(" ".join(draw.choices(words, k=draw.randint(1, 5))))
            elif kind < 0.9:
                letters = LETTERS[draw.choice(list(LETTERS))]
                parts.append("".join(draw.choices(letters, k=draw.randint(1, 6))))
            else:
                parts.append(draw.choice(SPECIAL))
        found.append(draw.choice(["", " ", "  ", "\n"]).join(parts))
    return found


def chats(folder: Path) -> tuple[TokenRows, list[list[int]]]:
    """Rows to measure on, and prompts to answer."""
    tokenizer, draw = ChatTokenizer(folder), random.Random(3)
    words, rows, prompts = " ".join(CORPUS).split(" "), [], []
    for _ in range(16):
        asked, answered = (" ".join(draw.choices(words, k=12)) for _ in range(2))
        text = tokenizer.template.write([{"role": "user", "content": asked}], prompt=True)
        prompt, whole = tokenizer.encode_chat(text), tokenizer.encode_chat(f"{text}{answered}<|end|>")
        rows.append(token_row(whole, [place >= len(prompt) for place in range(len(whole))]))
        prompts.append(prompt)
    return TokenRows.of(rows), prompts[:ANSWERS]


def same_tokens(file: Path, folder: Path) -> str:
    """Of ``strings``."""
    from llama_cpp import Llama

    llama, tokenizer = Llama(str(file), vocab_only=True, verbose=False), ChatTokenizer(folder)

    def same(text: str) -> bool:
        return llama.tokenize(text.encode(), add_bos=False, special=True) == tokenizer.encode_chat(text)

    bare, asked = strings(), [f"<|user|>\n{text}<|end|>\n" for text in strings()]
    for text in [text for text in (*bare, *asked) if not same(text)][:3]:
        print("    other tokens:", ascii(text))
    return f"{sum(map(same, bare))} / {sum(map(same, asked))} of {STRINGS}"


def answers_of_llama(file: Path, adapter: Path | None, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy, ``NEW_TOKENS`` each."""
    from llama_cpp import Llama

    settings = {"n_ctx": 512, "n_threads": 1, "logits_all": True, "verbose": False, **lora(adapter)}
    llama, found = Llama(str(file), **settings), []
    for prompt in prompts:
        llama.reset()
        llama.eval(prompt)
        made: list[int] = []
        for _ in range(NEW_TOKENS):
            made.append(int(llama.scores[llama.n_tokens - 1].argmax()))
            llama.eval(made[-1:])
        found.append(made)
    return found


def answers_of_mlx(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The same by the model that was exported."""
    module, found = open_base(folder, dequantize=True).module, []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            ids.append(int(np.array(mx.argmax(module(mx.array([ids]))[0, -1]))))
        found.append(ids[len(prompt) :])
    return found


class Family:
    """A random model of a family, and what it answers."""

    def __init__(self, name: str, folder: Path, **changes: Any) -> None:
        self.name, self.base, self.folder = name, build(folder / "base", name, **changes), folder / "tuned"
        self.adapter = moved_adapter(self.base, folder / "adapter")
        self.measured, self.prompts = chats(self.base)
        fuse_adapter(self.job(self.folder), print, FLOAT)
        self.expected = answers_of_mlx(self.folder, self.prompts)
        self.tokens = ""

    def job(self, out: Path) -> ExportJob:
        """An export of the base with its adapter."""
        return ExportJob(self.base, self.adapter, out, self.measured, 256, 2**30, 1.0)

    def in_llama(self, file: Path, adapter: Path | None) -> tuple[float, float]:
        """Mean divergence of llama.cpp's logits from the model's at labels, and the share of equal choices."""
        judge, module = LlamaJudge(file, adapter=adapter), open_base(self.folder, dequantize=True).module
        apart, same = [], []
        for number in range(len(self.measured)):
            row = self.measured[number]
            places = np.flatnonzero(row.trained[1:])
            ours = np.array(module(mx.array([row.ids.tolist()]))[0].astype(mx.float32))[places]
            found = judge.logits(row.ids.tolist())[places]
            apart.append(divergence(ours, found))
            same.append(float((ours.argmax(axis=-1) == found.argmax(axis=-1)).mean()))
        return float(np.mean(apart)), float(np.mean(same))

    def row(self, kind: str) -> list[object]:
        """As one type of file."""
        file = self.folder.with_name(f"{kind}.gguf")
        report = export_gguf(self.job(file), None if kind == "exact" else kind, print)
        adapter = adapter_of(file) if kind == "exact" else None
        self.tokens = self.tokens or same_tokens(file, self.folder)
        answers = zip(answers_of_llama(file, adapter, self.prompts), self.expected, strict=True)
        apart, same = self.in_llama(file, adapter)
        return [
            self.name, self.tokens, kind, f"{report.size_bytes / 1024:.0f}", f"{apart:.1e}", f"{100 * same:.1f} %",
            f"{sum(one == two for one, two in answers)} of {len(self.prompts)}",
        ]  # fmt: skip


def example(scratch: Path) -> str:
    """The embedded model in llama.cpp, beside ``safetrain ask``: the example's test questions, greedy."""
    from llama_cpp import Llama

    project, questions = scratch / "clone", scratch / "questions.jsonl"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(project)], check=True)
    rows = [json.loads(line)["messages"] for line in (ROOT / "data/example/test.jsonl").read_text().splitlines()]
    questions.write_text("".join(json.dumps({"prompt": row[0]["content"]}) + "\n" for row in rows))

    def call(*command: str) -> str:
        return subprocess.check_output(["safetrain", *command], cwd=project, text=True)

    call("run")
    call("export", "gguf", "out/mine.gguf")
    ours = [json.loads(line)["answers"][0] for line in call("ask", "--jsonl", str(questions)).splitlines()]
    out = project / "out/mine.gguf"
    llama = Llama(str(out), n_ctx=512, n_threads=1, verbose=False, **lora(adapter_of(out)))
    theirs = [
        llama.create_chat_completion([dict(row[0])], temperature=0)["choices"][0]["message"]["content"] for row in rows
    ]
    same = sum(one == two for one, two in zip(ours, theirs, strict=True))
    return f"The example, base and adapter in llama.cpp: {same} of {len(rows)} answers are those of `safetrain ask`."


def half(scratch: Path) -> str:
    """Seconds and memory of an export of a 0.5B shape, in a process of its own."""
    job = ExportJob(scratch / "half", scratch / "half-adapter", scratch / "half.gguf", token_rows(60, 2), 1024, 2**33)
    build_model(job.base, bits=4, bfloat16=True, **HALF)
    moved_adapter(job.base, job.adapter, lora=LoraSettings(8, 2.0, 0.0, 24, ("all-linear",)))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        seconds, above = pool.submit(exported, job).result()
    size = job.out.stat().st_size
    return (
        f"A 0.5B Qwen2 shape: {seconds:.0f} s, {above / 2**20:.0f} MiB above the process's start; the file has "
        f"{size / 2**20:.0f} MiB, a quarter of it and its largest tensor {(size / 4 + 151936 * 560) / 2**20:.0f} MiB."
    )


def exported(job: ExportJob) -> tuple[float, int]:
    def resident(name: str) -> int:
        return 1024 * int(Path("/proc/self/status").read_text().partition(name)[2].split()[0])

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    began, before = time.monotonic(), resident("VmRSS:")
    export_gguf(job, None, print)
    return time.monotonic() - began, resident("VmHWM:") - before


def main() -> None:
    """One table."""
    if importlib.util.find_spec("llama_cpp") is None:
        print("llama-cpp-python is not installed: pip install -e '.[llama]'")
        return
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as scratch:
        families = [Family(name, Path(scratch) / str(number), **WIDE) for number, name in enumerate(MODELS)]
        for kind in TYPES:
            for family in families:
                print(f"== {family.name}, {kind}", flush=True)
                rows.append(family.row(kind))
        notes = (*NOTES, example(Path(scratch)), half(Path(scratch)))
    write_result("bench_export_gguf", "GGUF files in llama.cpp", HEADER, rows, notes)


if __name__ == "__main__":
    main()
