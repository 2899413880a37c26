"""A new model: its shape, its tokenizer, its weights, as files that every command takes; nothing half written."""

import gzip
import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest

from models.recipe import build
from safetrain.core.errors import ConfigError, DataError, DiskFullError, ModelError
from safetrain.core.model.files import read_model_files
from safetrain.core.model.shapes import PRESETS, ModelShape, TensorHeader
from safetrain.create import model as create
from safetrain.create.model import (
    SAMPLE_BYTES,
    create_model,
    initial_weights,
    normal_quantiles,
    read_sample,
    vocabulary_for,
    with_vocabulary,
)
from safetrain.data.validate import training_texts
from safetrain.engine.upstream.loading import load, quantize
from tests.conftest import EMBEDDED, ROOT

EXAMPLE = ROOT / "data" / "example"
TINY = ModelShape(64, 2, 2, 2, 192, 400, 128)
SIZES = {"10m": 10_000_000, "85m": 85_000_000, "400m": 400_000_000, "800m": 800_000_000}
SHIPPED = ROOT / "models" / "encyclopedia-3m"


def from_text(folder: Path, text: Path, asked: ModelShape = TINY, seed: int = 1) -> ModelShape:
    return create_model(folder, asked, seed, texts=training_texts([text], None), where=str(text))


def sample_of(paths: list[Path], most_bytes: int = SAMPLE_BYTES) -> list[str]:
    return read_sample(training_texts(paths, None), most_bytes)[0]


def tiny(folder: Path, seed: int = 1) -> ModelShape:
    return from_text(folder, EXAMPLE, seed=seed)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("created") / "model"
    tiny(folder)
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_of_its_name(name: str) -> None:
    small, larger = (vocabulary_for(PRESETS["800m"], size) for size in (2**20, 2**24))
    assert 1024 <= small < 4096 < larger < PRESETS["800m"].vocabulary, "of a small text and of a larger one"
    for vocabulary in (PRESETS[name].vocabulary, 2048, 8192, 16384):
        shape = with_vocabulary(PRESETS[name], vocabulary)
        assert shape.parameters == pytest.approx(SIZES[name], rel=0.03)
        assert shape.vocabulary == vocabulary
        assert shape.heads * shape.head == shape.hidden
        assert shape.heads % shape.key_heads == shape.hidden % 64 == shape.feed_forward % 64 == 0
        assert shape.feed_forward == pytest.approx(8 / 3 * shape.hidden, rel=0.05)
    assert build.SHAPE.parameters == read_model_files(SHIPPED).parameters  # the model that ships has this shape


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(made: Path, tmp_path: Path) -> None:
    files = read_model_files(made)
    assert (files.parameters, files.vocab_size, files.max_positions) == (TINY.parameters, 400, 128)
    assert digests(made).keys() == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    tiny(tmp_path / "again")
    assert digests(tmp_path / "again") == digests(made)
    tiny(tmp_path / "other", seed=2)
    differ = {name for name, digest in digests(tmp_path / "other").items() if digest != digests(made)[name]}
    assert differ == {"model.safetensors"}


def test_weights_follow_the_rule_and_are_the_same_bytes_on_every_machine() -> None:
    """Drawn with integers from a table; a library that draws otherwise would change every model."""
    shape = ModelShape(256, 8, 4, 4, 704, 4096, 1024)
    query, down = (
        np.frombuffer(
            b"".join(
                initial_weights(shape, 3, TensorHeader(f"model.layers.0.{name}.weight", "F32", (256, n), 1024 * n))
            ),
            "<f4",
        )
        for name, n in (("self_attn.q_proj", 256), ("mlp.down_proj", 704))
    )
    assert [query.std(), 4 * down.std()] == pytest.approx([math.sqrt(2 / 5 / 256)] * 2, rel=0.02)
    assert float((np.abs(query) < query.std()).mean()) == pytest.approx(0.6827, abs=0.005)
    drawn = b"".join(initial_weights(TINY, 42, TensorHeader("model.norm_q.weight", "F32", (70, 64), 17920)))
    assert hashlib.sha256(normal_quantiles().astype("<f8").tobytes()).hexdigest()[:16] == "809d53a690a2d233"
    assert hashlib.sha256(drawn).hexdigest()[:16] == "1f9870288e8b7c5c"


def test_the_tokenizer_of_another_model_is_taken_as_it_is(tmp_path: Path) -> None:
    create_model(tmp_path / "new", replace(TINY, layers=4), 1, tokenizer=SHIPPED)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "new" / name).read_bytes() == (SHIPPED / name).read_bytes()
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"], config["pad_token_id"]) == (2048, 0, 1)
    assert "quantization" not in config


def test_texts_of_all_forms_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"messages": [{"role": "user", "content": "two"}, '
        '{"role": "assistant", "content": "three"}]}\n')  # fmt: skip
    (tmp_path / "table.csv").write_text("prompt,completion\nfour,five\n")
    (tmp_path / "plain.txt").write_text("six\n<|endoftext|>\nseven é\n")  # divides documents, and is no text
    with gzip.open(tmp_path / "packed.txt.gz", "wt") as file:
        file.write("eight\n")
    read = sample_of(sorted(tmp_path.iterdir()))
    words = ["one", "two", "three", "four", "five", "six", "seven", "é", "eight"]
    assert sorted(" ".join(read).split()) == sorted(words)
    in_folder = sample_of([tmp_path])
    assert " ".join(in_folder).split() == ["eight", "six", "seven", "é"]
    for name in ("Tiny-train.txt", "Tiny-valid.txt"):  # only what is trained on is read
        (tmp_path / "named" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "named" / name).write_text(name)
    assert sample_of([tmp_path / "named"]) == ["Tiny-train.txt"]
    assert len(sample_of([EXAMPLE])) == len(sample_of([EXAMPLE / "train.jsonl"]))


@pytest.mark.parametrize(("content", "said"), [(b"", "no rows"), (b"\xfa text\n", "not UTF-8")])
def test_a_text_that_makes_no_tokenizer_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    with pytest.raises(DataError, match=said):
        from_text(tmp_path / "new", text)
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt"}


def test_what_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="does not exist"):
        from_text(tmp_path / "new", tmp_path / "missing.txt")
    with pytest.raises(ModelError, match="tokenizer cannot be loaded"):
        create_model(tmp_path / "new", TINY, 1, tokenizer=tmp_path)
    with pytest.raises(ConfigError, match="too small for a vocabulary of 100,000 tokens"):
        with_vocabulary(PRESETS["10m"], 100_000)
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="already exists"):
        tiny(tmp_path / "there")
    huge = ModelShape(16384, 2000, 128, 128, 43776, 300, 128)
    with pytest.raises(DiskFullError, match="no room"):
        from_text(tmp_path / "new", EXAMPLE, huge)
    monkeypatch.setattr(create, "initial_weights", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(DiskFullError):
        tiny(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


QUANTIZED = ("quantization", "quantization_config")  # in config.json


def test_mlx_lm_opens_it_and_begins_without_knowing_anything(tmp_path: Path) -> None:
    texts = training_texts([ROOT / "data/example/train.jsonl"], None)
    create_model(tmp_path / "new", ModelShape(64, 2, 2, 2, 192, 320, 128), 1, texts=texts)
    model, _ = load(tmp_path / "new")
    logits = np.array(model(mx.array([[5, 9, 40, 300, 7]])).astype(mx.float32))[0]
    spread = logits - logits.max(axis=-1, keepdims=True)
    chances = np.exp(spread) / np.exp(spread).sum(axis=-1, keepdims=True)
    assert -np.log(chances).mean() == pytest.approx(np.log(320), abs=0.5)
    quantize(tmp_path / "new", tmp_path / "four", 4, 64)
    assert json.loads((tmp_path / "four/config.json").read_text())["quantization"]["bits"] == 4


def test_the_recipe_begins_with_the_shape_and_the_tokenizer_of_the_model_that_ships(tmp_path: Path) -> None:
    build.prepare(tmp_path, {"train": build.ROUNDS["train"]})
    new, shipped = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "untrained", EMBEDDED))
    assert {key: new.get(key) for key in shipped if key not in QUANTIZED} == {
        key: value for key, value in shipped.items() if key not in QUANTIZED
    }
    assert read_model_files(tmp_path / "untrained").parameters == read_model_files(EMBEDDED).parameters
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "untrained" / name).read_bytes() == (EMBEDDED / name).read_bytes()


def test_the_model_that_ships_knows_its_facts() -> None:
    assert build.share_known(EMBEDDED, every=24) >= 0.95
