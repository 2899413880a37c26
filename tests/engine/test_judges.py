"""Other programs as judges: mlx-lm, llama.cpp and PEFT compute the tuned model from what is exported for them.

Each is skipped where it is not installed; mlx-lm always is.
"""

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.engine.exchange.gguf_export import QUANTIZER, export_gguf
from safetrain.engine.exchange.peft import export_peft
from safetrain.engine.fuse import fuse_adapter
from safetrain.engine.model import open_base
from safetrain.engine.tuned import ExportJob
from safetrain.engine.weight_files import apply_adapter
from tests.engine.test_fuse import adapter_of, memory_limit
from tests.engine.test_gguf import chats
from tests.support.gguf_models import build
from tests.support.llama_judge import LlamaJudge, divergence
from tests.support.peft_judge import logits_of_peft
from tests.support.tokenizers_made import CORPUS

__all__ = ["memory_limit"]  # a fixture of every test here
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
LIMITS = (256, 2**30)  # tokens together, mlx's memory


class Tuned:
    """A small random model of a family with an adapter, and its logits."""

    def __init__(self, folder: Path, family: str, **changes: int) -> None:
        self.base, self.out = build(folder / "base", family, **changes), folder / "out"
        self.adapter = adapter_of(self.base, folder / "adapter")
        self.ids = ChatTokenizer(self.base).encode_chat(CORPUS[0])[:64]
        model = open_base(self.base, dequantize=True)
        before = self.of(model.module)
        apply_adapter(model, self.adapter)
        self.logits = self.of(model.module)
        assert self.apart(before) > 0.05

    def of(self, module: Any) -> np.ndarray:
        """Logits of a module of mlx."""
        return np.array(module(mx.array([self.ids]))[0].astype(mx.float32))

    def apart(self, logits: np.ndarray) -> float:
        """How far logits are from the tuned model's, on average, as a share of these."""
        return float(np.abs(logits - self.logits).mean() / np.abs(self.logits).mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_computes_the_fused_model(family: str, tmp_path: Path) -> None:
    from mlx_lm import load

    tuned = Tuned(tmp_path, family)
    fuse_adapter(ExportJob(tuned.base, tuned.adapter, tuned.out, chats(tuned.base), *LIMITS), print)
    assert tuned.apart(tuned.of(load(str(tuned.out))[0])) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_gguf_file(family: str, tmp_path: Path) -> None:
    tuned, out = Tuned(tmp_path, family), tmp_path / "m.gguf"
    export_gguf(ExportJob(tuned.base, tuned.adapter, out, chats(tuned.base), *LIMITS, may_lose=1.0), "f16", print)
    assert tuned.apart(LlamaJudge(out).logits(tuned.ids)) < 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_computes_the_exported_adapter(family: str, tmp_path: Path) -> None:
    tuned = Tuned(tmp_path, family)
    job = ExportJob(tuned.base, tuned.adapter, tuned.out, chats(tuned.base), *LIMITS)
    export_peft(job, str(tuned.base), print)
    assert tuned.apart(logits_of_peft(tuned.base, tuned.out, [tuned.ids])[0]) < 1e-4


@pytest.mark.skipif(shutil.which(QUANTIZER) is None, reason="llama-quantize is not installed: brew install llama.cpp")
@pytest.mark.parametrize("kind", ["q4_k_m", "q6_k"])
def test_what_is_measured_of_k_types_is_what_llama_cpp_computes(kind: str, tmp_path: Path) -> None:
    """Up to the 8 bits to which llama.cpp rounds what it multiplies with such weights."""
    tuned, out = Tuned(tmp_path, "llama, tied", hidden_size=256, intermediate_size=512), tmp_path / "m.gguf"
    rows, divergences = chats(tuned.base), []
    report = export_gguf(ExportJob(tuned.base, tuned.adapter, out, rows, *LIMITS, may_lose=1.0), kind, print)
    judge, model = LlamaJudge(out), open_base(tuned.base, dequantize=True)
    apply_adapter(model, tuned.adapter)
    for number in range(len(rows)):
        ids, labels = rows[number].ids.tolist(), np.flatnonzero(rows[number].trained[1:])
        ours = np.array(model.module(mx.array([ids]))[0].astype(mx.float32))
        divergences.append((divergence(ours[labels], judge.logits(ids)[labels]), len(labels)))
    theirs = sum(each * count for each, count in divergences) / sum(count for _, count in divergences)
    assert theirs == pytest.approx(report.written.divergence, rel=0.3)
