"""A tuned model as a GGUF file: the weights that were trained, nothing half written.

And what no export takes, each of them: fuse, GGUF, PEFT.
"""

import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")

from safetrain.core.data.token_rows import TokenRows, token_row  # noqa: E402
from safetrain.core.errors import ConfigError, DiskFullError, ModelError, SafetrainError  # noqa: E402
from safetrain.core.model.files import read_model_files  # noqa: E402
from safetrain.core.records.adapter_files import CHAT_FILE, PromptFormat  # noqa: E402
from safetrain.core.records.evaluation import ExportReport  # noqa: E402
from safetrain.core.records.settings import LoraSettings  # noqa: E402
from safetrain.core.storage.files import read_record, write_record  # noqa: E402
from safetrain.core.text.tokenizer import ChatTokenizer  # noqa: E402
from safetrain.engine.model import open_base  # noqa: E402
from safetrain.engine.weight_files import ADAPTER_FILE, apply_adapter  # noqa: E402
from safetrain.export import fuse, gguf_export, peft  # noqa: E402
from safetrain.export.comparison import ExportJob  # noqa: E402
from safetrain.export.gguf_export import KINDS, architecture_of, export_gguf, report_of  # noqa: E402
from tests.export.test_fuse import adapter_of as moved_adapter  # noqa: E402
from tests.support.gguf_models import MODELS, build  # noqa: E402
from tests.support.tokenizers_made import CORPUS  # noqa: E402

pytestmark = pytest.mark.usefixtures("memory_limit")
LORA = LoraSettings(4, 2.0, 0.0, 2, ("all-linear",))
DIVERGENCES = {"f16": 1e-3, "bf16": 5e-2, "q8_0": 5e-2, "q4_0": 3.0}  # of random models with large weights
ERRORS = {"f16": 1e-3, "bf16": 5e-3, "q8_0": 1e-2, "q4_0": 0.15}  # of a matrix


class Written(NamedTuple):
    out: Path
    report: ExportReport
    said: list[str]


def chats(folder: Path) -> TokenRows:
    tokenizer, found = ChatTokenizer(folder), []
    for text in CORPUS:
        prompt = tokenizer.template.write([{"role": "user", "content": text[:40]}], prompt=True)
        asked, whole = tokenizer.encode_chat(prompt), tokenizer.encode_chat(f"{prompt}{text[40:]}<|end|>")
        found.append(token_row(whole, [place >= len(asked) for place in range(len(whole))]))
    return TokenRows.of(found)


def job_of(base: Path, out: Path, adapter: Path | None = None, **changes: Any) -> ExportJob:
    """With an adapter beside the base if none is named."""
    beside = base.with_name(f"{base.name}-adapter")
    adapter = adapter or (beside if beside.exists() else adapter_of(base, beside))
    return ExportJob(base, adapter, out, chats(base), 256, 2**30, **changes)


def write(base: Path, out: Path, adapter: Path | None = None, kind: str = "q8_0", **changes: Any) -> Written:
    said: list[str] = []
    return Written(out, export_gguf(job_of(base, out, adapter, **changes), kind, said.append), said)


def adapter_of(base: Path, folder: Path, method: str = "lora", size: float = 0.05) -> Path:
    """One that was taught no tokens that end an answer."""
    return moved_adapter(base, folder, method, size, prompt_format=PromptFormat((), ""))


def tuned(base: Path, adapter: Path) -> Any:
    model = open_base(base, dequantize=True)
    apply_adapter(model, adapter)
    return model.module


def said_in(out: Path, key: str) -> Any:
    return gguf.GGUFReader(out).fields[key].contents()


@pytest.mark.parametrize(("name", "method", "bits", "kind"), [
    *((name, "lora", None, "f16") for name in MODELS),
    *(("llama, biases", method, bits, "f16") for method, bits in (("lora", 4), ("dora", 4), ("full", None))),
    *(("llama, tied", "lora", None, kind) for kind in KINDS if kind != "f16"),
])  # fmt: skip
def test_the_tuned_weights_are_in_the_file(name: str, method: str, bits: int | None, kind: str, tmp_path: Path) -> None:
    """Read again, they compute what was trained, as near as their type can be."""
    base = build(tmp_path / "base", name, bits=bits)
    adapter, files = adapter_of(base, tmp_path / "adapter", method), read_model_files(base)
    out, report, _ = write(base, tmp_path / "m.gguf", adapter, kind=kind, may_lose=1.0)
    assert report.written.divergence < DIVERGENCES[kind]
    assert report.base.divergence > 3 * report.written.divergence or kind == "q4_0"
    assert read_record(report_of(out), ExportReport) == report
    assert (report.type, report.base_fingerprint) == (kind, files.fingerprint)
    assert len(report.adapter_fingerprint) == 32
    assert said_in(out, "general.architecture") == architecture_of(files.model_type, Path())
    assert len(said_in(out, "tokenizer.ggml.tokens")) == files.vocab_size
    assert "<|assistant|>" in said_in(out, "tokenizer.chat_template")
    assert sorted(path.name for path in tmp_path.glob("m*")) == ["m.gguf", "m.gguf.json"]
    if name == "llama, tied":
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
        assert tensors["blk.0.ffn_up.weight"].tensor_type == KINDS[kind]
        assert tensors["blk.0.attn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
        assert tensors["token_embd.weight"].tensor_type == KINDS["q8_0" if kind == "q4_0" else kind]
        assert "output.weight" not in tensors, "tied"
        expected = np.array(tuned(base, adapter).layers[0].mlp.up_proj(mx.eye(64))).T
        found = gguf.quants.dequantize(tensors["blk.0.ffn_up.weight"].data, KINDS[kind])  # by the package itself
        assert np.linalg.norm(found - expected) < ERRORS[kind] * np.linalg.norm(expected)


def test_what_does_not_hold_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    base = build(tmp_path / "base", "llama, tied")
    small = adapter_of(base, tmp_path / "small", size=0.003)
    with pytest.raises(ModelError, match=r"improvement: in q4_0, it loses more than 2 %(?s:.*)--may-lose 100"):
        write(base, tmp_path / "m.gguf", small, kind="q4_0")
    model = base / "model.safetensors"
    arrays: dict[str, mx.array] = mx.load(str(model))  # type: ignore[assignment]
    arrays["model.layers.1.mlp.up_proj.weight"] *= 1e7
    mx.save_safetensors(str(model), arrays)
    with pytest.raises(ModelError, match=r"in f16, it has a loss that is not a number(?s:.*)bf16"):
        write(base, tmp_path / "m.gguf", kind="f16")
    job = job_of(base, tmp_path / "m.gguf")
    model.write_bytes(model.read_bytes()[:-100])
    with pytest.raises(ModelError, match="damaged or not fully downloaded"):
        export_gguf(job, "q8_0", print)
    assert not list(tmp_path.glob("*m.*"))


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
     "its rotary scaling is yarn"),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "a sliding window"),
])  # fmt: skip
def test_families_and_settings_that_llama_cpp_computes_otherwise_are_named(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = build(tmp_path / "base", name, **changes)
    with pytest.raises(ModelError, match="type mamba2 cannot be exported"):
        architecture_of("mamba2", Path("here"))
    with pytest.raises(ModelError, match=message):
        write(base, tmp_path / "m.gguf")


def test_chats_begin_and_end_as_taught(tmp_path: Path) -> None:
    base = build(tmp_path / "base", "llama, biases")
    end = ChatTokenizer(base).id_of("<|system|>")
    adapter = adapter_of(base, tmp_path / "adapter")
    write_record(adapter / CHAT_FILE, PromptFormat((end,), "Well, "))
    out = write(base, tmp_path / "m.gguf", adapter, may_lose=1.0).out
    assert "'Well, '" in said_in(out, "tokenizer.chat_template")
    assert end in (said_in(out, "tokenizer.ggml.eos_token_id"), said_in(out, "tokenizer.ggml.eot_token_id"))


PLAYED_QUANTIZER = """#!{python}
import sys, gguf
source, target, kind = sys.argv[1:]
if kind != "Q4_K_M":
    sys.exit("no such type")
reader = gguf.GGUFReader(source)
writer = gguf.GGUFWriter(target, "llama")
writer.add_token_list(reader.fields["tokenizer.ggml.tokens"].contents())
for tensor in reader.tensors:
    kind = gguf.GGMLQuantizationType.{kind} if tensor.data.ndim == 2 else gguf.GGMLQuantizationType.F32
    values = gguf.quants.quantize(tensor.data.astype("float32"), kind)
    writer.add_tensor(tensor.name, values, raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""


def test_types_with_k_are_made_by_llama_quantize_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in its place, which writes blocks that safetrain itself does not write."""
    base = build(tmp_path / "base", "llama, tied")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ConfigError, match="llama-quantize, which is not installed") as caught:
        write(base, tmp_path / "m.gguf", kind="q4_k_m")
    assert "brew install llama.cpp" in str(caught.value)
    program = tmp_path / "bin" / "llama-quantize"
    program.parent.mkdir()
    program.write_text(PLAYED_QUANTIZER.format(python=sys.executable, kind="Q5_0"))
    program.chmod(0o755)
    report = write(base, tmp_path / "m.gguf", kind="q4_k_m", may_lose=1.0).report
    assert report.type == "q4_k_m"
    assert 1e-5 < report.written.divergence < 1
    types = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert types["blk.0.ffn_up.weight"] == gguf.GGMLQuantizationType.Q5_0
    with pytest.raises(ModelError, match=r"llama-quantize cannot make q6_k(?s:.*)no such type"):
        write(base, tmp_path / "n.gguf", kind="q6_k")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "m.gguf", "m.gguf.json",
    ]  # fmt: skip


Export = Callable[[Path, Path, Path], Any]
LIMITS = (256, 2**30)  # tokens together, mlx's memory


def to_peft(base: Path, adapter: Path, out: Path) -> None:
    peft.export_peft(ExportJob(base, adapter, out, chats(base), *LIMITS), "owner/base", print)


def to_gguf(base: Path, adapter: Path, out: Path) -> None:
    gguf_export.export_gguf(ExportJob(base, adapter, out, chats(base), *LIMITS), "q8_0", print)


def fused(base: Path, adapter: Path, out: Path) -> None:
    fuse.fuse_adapter(ExportJob(base, adapter, out, chats(base), *LIMITS), print)


@pytest.mark.parametrize(
    ("export", "writer"),
    [(fused, (fuse, "save_shards")), (to_gguf, (gguf_export, "taken")), (to_peft, (peft, "save_arrays"))],
)
def test_what_cannot_be_exported_is_named_and_leaves_nothing(
    export: Export, writer: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, other = build(tmp_path / "base", "llama, tied"), build(tmp_path / "other", "llama, tied", seed=4)
    adapter, out = moved_adapter(base, tmp_path / "adapter"), tmp_path / "out.gguf"
    zeros = [moved_adapter(base, tmp_path / f"no {method}", method, size=0.0) for method in ("lora", "dora")]
    taken = tmp_path / "mine.gguf"
    taken.write_text("mine")
    names = sorted(path.name for path in tmp_path.iterdir())

    def refused(match: str, error: type[SafetrainError] = ModelError, *, of: Path = adapter, to: Path = out) -> None:
        with pytest.raises(error, match=match):
            export(base, of, to)
        assert sorted(path.name for path in tmp_path.iterdir()) == names

    for nothing in zeros:
        refused("The adapter changes nothing", of=nothing)
    with pytest.raises(ModelError, match="trained on another base"):  # of the same shapes
        export(other, adapter, out)
    refused("already exists", ConfigError, to=taken)
    assert taken.read_text() == "mine"
    with monkeypatch.context() as patched:
        patched.setattr("safetrain.core.storage.files.SPARE_BYTES", 2**62)
        if export is not to_peft:  # which is small
            refused("too little disk space", DiskFullError)
    with monkeypatch.context() as patched:  # filled by another program, after the room was looked at
        patched.setattr(*writer, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        refused("nothing was written", DiskFullError)
    weights = adapter / ADAPTER_FILE
    weights.write_bytes(weights.read_bytes()[:-50])
    refused("cannot be read")
    weights.unlink()
    refused("has no adapters|cannot be read")
