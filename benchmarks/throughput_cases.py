"""What bench_throughput trains: three models with their rows, written into a folder that every side reads from.

Run as a program it writes one case: model, data folder, the rows as tokens, and the weights in float32 for a
trainer that cannot read quantized ones. Importing it is cheap, for the process that starts and measures the others.
"""

import dataclasses
import json
import math
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "data" / "example"
EMBEDDED = ROOT / "models" / "encyclopedia-3m"
UNTRAINED = -100  # the label that PyTorch's cross-entropy leaves out
VALID_ROWS = 8
SHORTEST_ROW = 16
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SMALL = {"max_tokens": 24, "median": 20, "batch_size": 2, "rows": 6, "least_updates": 2, "seconds": 1.0}


@dataclass(frozen=True)
class Case:
    """One model and its rows. ``median`` None: the rows of data/example; ``seconds``: how long another engine trains,
    but for at least ``least_updates`` updates, the first of which is not counted, and at most for one epoch."""

    name: str
    title: str
    max_tokens: int
    batch_size: int
    rows: int | None  # None: all there are
    least_updates: int
    seconds: float = 90.0
    median: int | None = None
    spread: float = 0.0  # standard deviation of the logarithm of a row's length
    changes: dict[str, Any] = field(default_factory=dict)  # of the embedded model's config.json; empty: that model
    for_torch: bool = True  # also in float32


MIDDLE = {
    "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 2048, "num_attention_heads": 12,
    "num_key_value_heads": 12, "head_dim": 64, "vocab_size": 8192,
}  # fmt: skip
LARGE_VOCABULARY = {
    "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 768, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 150_000,
}  # fmt: skip
LONG_TAILED = "91M Llama, rows of 120 tokens in the middle, 512 at most"
CASES = (
    Case("a", "encyclopedia-3m, data/example", max_tokens=128, batch_size=8, rows=None, least_updates=10),
    Case("b", LONG_TAILED, 512, 8, 160, 3, median=120, spread=0.8, changes=MIDDLE),
    Case("c", "vocabulary of 150,000, 4 x 512 tokens", 512, 4, 20, 3, median=512, changes=LARGE_VOCABULARY),
)


def quick(case: Case) -> Case:
    """The same case with next to nothing to train, to see that everything runs."""
    changes = {**case.changes, "num_hidden_layers": 2} if case.changes else {}
    small = {key: value for key, value in SMALL.items() if key != "median" or case.median is not None}
    return dataclasses.replace(case, changes=changes, **small)  # type: ignore[arg-type]  # a mapping of mixed types


def model_folder(case: Case, scratch: Path) -> Path:
    """Where the quantized model of a case is."""
    return scratch / "model" if case.changes else EMBEDDED


def main() -> None:
    """``python -m benchmarks.throughput_cases FOLDER CASE``, the case as JSON."""
    from safetrain.engine.cpu.blas import load_fast_blas

    load_fast_blas()
    from tests.support.random_models import build_model

    scratch, case = Path(sys.argv[1]), Case(**json.loads(sys.argv[2]))
    model = model_folder(case, scratch)
    if case.changes:
        build_model(model, bits=4, **case.changes)
    write_data(case, model, scratch / "data")
    write_tokens(model, scratch / "data" / "train.jsonl", case.max_tokens, scratch / "rows.json")
    if case.for_torch:
        dequantize(model, scratch / "float32")


def write_data(case: Case, model: Path, folder: Path) -> None:
    """train, valid and test files: lines of data/example, or made-up rows."""
    folder.mkdir()
    for name in ("train", "valid", "test"):
        count = case.rows if name == "train" else VALID_ROWS
        if case.median is None:
            lines = (EXAMPLE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        else:
            lines = [json.dumps(row) for row in made_up_rows(case, model, count or VALID_ROWS, name)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def made_up_rows(case: Case, model: Path, count: int, seed: str) -> list[dict[str, Any]]:
    """Chats of made-up words. Their lengths are spread log-normally around the median, cut at the longest allowed."""
    from safetrain.core.text.tokenizer import ChatTokenizer

    tokenizer, draw = ChatTokenizer(model), random.Random(f"{case.name} {seed}")
    syllables = [a + b for a in "bdfgklmnprstv" for b in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(500)]
    length_of = {word: len(tokenizer.encode(f" {word}")) for word in words}
    around = len(as_trained(tokenizer, chat(["ba"], ["ba"])))
    rows = []
    for _ in range(count):
        wanted = round(draw.lognormvariate(math.log(case.median or 1), case.spread))
        wanted = min(max(wanted, SHORTEST_ROW), case.max_tokens) - around
        chosen = ["ba"]
        while (word := draw.choice(words)) and wanted >= length_of[word]:
            chosen.append(word)
            wanted -= length_of[word]
        half = len(chosen) // 2
        row = chat(["ba", *chosen[:half]], chosen[half:])
        assert len(as_trained(tokenizer, row)) <= case.max_tokens + 2, "words do not add up"
        rows.append(row)
    return rows


def chat(question: list[str], answer: list[str]) -> dict[str, Any]:
    """A row of two turns."""
    turns = {"user": question, "assistant": answer}
    return {"messages": [{"role": role, "content": " ".join(words)} for role, words in turns.items()]}


def write_tokens(model: Path, train: Path, max_tokens: int, target: Path) -> None:
    """Every training row as its ids and its labels, as safetrain trains them."""
    import numpy as np

    from safetrain.core.data.token_rows import TokenRows
    from safetrain.core.text.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer(model)
    lines = train.read_text(encoding="utf-8").splitlines()
    rows = []
    for row in TokenRows.of([as_trained(tokenizer, json.loads(line)) for line in lines]).cut(max_tokens):
        ids, labels = row.ids.tolist(), np.where(row.trained, row.ids.astype(np.int64), UNTRAINED).tolist()
        rows.append({"ids": ids, "labels": labels})
    target.write_text(json.dumps(rows))


def dequantize(model: Path, folder: Path) -> None:
    """The model with its quantized weights as float32, under the same names, which Hugging Face's Llama has too."""
    import mlx.core as mx

    config = json.loads((model / "config.json").read_text())
    quantization = config.pop("quantization")
    quantized = cast(dict[str, Any], mx.load(str(model / "model.safetensors")))
    weights: dict[str, Any] = {}
    for name, value in quantized.items():
        layer, _, part = name.rpartition(".")
        if part in ("scales", "biases"):
            continue
        if part == "weight" and f"{layer}.scales" in quantized:
            scales, biases = quantized[f"{layer}.scales"], quantized[f"{layer}.biases"]
            value = mx.dequantize(
                value, scales, biases, group_size=quantization["group_size"], bits=quantization["bits"]
            )
        weights[name] = value.astype(mx.float32)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def as_trained(tokenizer: Any, row: object) -> Any:
    """The tokens and labels of a row as a training sees them."""
    from safetrain.data.forms import parse_row
    from safetrain.data.render import Renderer
    from safetrain.data.tokenize import labelled

    renderer = Renderer(tokenizer.template, tokenizer.controls, tokenizer.end_token)
    rendered = renderer.render(parse_row(row))
    return labelled(rendered, tokenizer.encode_chats([rendered.text])[0])[0]


if __name__ == "__main__":
    main()
