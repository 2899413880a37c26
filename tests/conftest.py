"""What every test needs: the fast BLAS before mlx, the CPU, a lock and cache of its own, small models built in code.

Tests of the engine compute on the CPU, where what they say holds to the last bit; ``SAFETRAIN_TEST_GPU=1`` lets mlx
choose. Processes that a test starts take the machine's own device, as for a person.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from safetrain.engine.blas import load_fast_blas

load_fast_blas()  # before any test imports mlx
import mlx.core as mx  # noqa: E402

if os.environ.get("SAFETRAIN_TEST_GPU") != "1":
    mx.set_default_device(mx.cpu)

ROOT = Path(__file__).resolve().parent.parent
EMBEDDED = ROOT / "models" / "encyclopedia-3m"


@pytest.fixture(autouse=True)
def own_lock(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not queue behind a training of the person who runs them."""
    monkeypatch.setenv("SAFETRAIN_LOCK_DIR", str(tmp_path_factory.mktemp("lock")))


@pytest.fixture
def tiny_model(tmp_path: Path) -> Callable[..., Path]:
    """Builds a random two-layer Llama with the embedded model's tokenizer: ``tiny_model(bits=4)``."""

    def build(name: str = "tiny", bits: int | None = None, tie: bool = True) -> Path:
        from tests.support.random_models import build_model

        return build_model(
            tmp_path / name,
            bits=bits,
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=128,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tie,
        )

    return build


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes objects, or raw lines, to a file: ``write_jsonl("a.jsonl", [{...}, "raw"])``."""

    def write(name: str, rows: list[object]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write


def chat(question: str, answer: str) -> dict[str, object]:
    """A chat row."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
