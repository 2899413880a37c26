"""A tuned model as GGUF files: base and adapter to the last bit, or one file that was measured; nothing half written.

And what no export takes, each of them: fuse, GGUF, PEFT.
"""

import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from mlx_lm.utils import load_adapters, load_model

from safetrain.core.data.token_rows import TokenRows, token_row
from safetrain.core.errors import ConfigError, DiskFullError, ModelError, SafetrainError
from safetrain.core.model.files import read_model_files
from safetrain.core.records.adapter_files import CHAT_FILE, PromptFormat
from safetrain.core.records.evaluation import ExportReport
from safetrain.core.records.settings import LoraSettings
from safetrain.core.storage.files import read_record, write_record
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.engine.model import open_base
from safetrain.engine.weight_files import ADAPTER_FILE, apply_adapter
from safetrain.export import fuse, gguf_export, peft
from safetrain.export.comparison import ExportJob
from safetrain.export.gguf_export import KINDS, architecture_of, export_gguf, report_of
from tests.export.test_fuse import adapter_of as moved_adapter
from tests.support.gguf_models import MODELS, build
from tests.support.tokenizers_made import CORPUS

pytestmark = pytest.mark.usefixtures("memory_limit")
LORA = LoraSettings(4, 2.0, 0.0, 2, ("all-linear",))
HIDDEN = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
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


def write(base: Path, out: Path, adapter: Path | None = None, kind: str | None = "q8_0", **changes: Any) -> Written:
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


def decoded(tensor: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers, scales and biases of a matrix in Q4_1, as ggml-common.h has them."""
    blocks = np.array(tensor.data).reshape(int(tensor.shape[1]), -1, 20)
    scales, biases = np.moveaxis(np.ascontiguousarray(blocks[..., :4]).view(np.float16), -1, 0)
    halves = blocks[..., 4:]
    return np.concatenate([halves & 15, halves >> 4], axis=-1).reshape(len(blocks), -1), scales, biases


def in_mlx_order(rows: np.ndarray, name: str, args: Any, model_type: str) -> np.ndarray:
    """Undo the order of q's and k's rows in llama.cpp's Llama."""
    heads = {"attn_q": args.num_attention_heads, "attn_k": args.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None or model_type not in ("llama", "mistral"):
        return rows
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize(("name", "group_size"), [
    ("llama", 32), ("llama, tied", 64), ("qwen2", 64), ("qwen3", 128), ("gemma2", 32), ("gemma3", 64), ("mistral", 128),
    ("phi3", 64), ("phi3, long", 32),
])  # fmt: skip
def test_base_and_adapter_arrive_to_the_last_bit(name: str, group_size: int, tmp_path: Path) -> None:
    """And what the two files say, multiplied in float32, are the logits of mlx."""
    base = build(tmp_path / "base", name, bits=4, bfloat16=True, group_size=group_size, **HIDDEN)
    adapter = adapter_of(base, tmp_path / "adapter")
    out, report, said = write(base, tmp_path / "m.gguf", adapter, kind=None)
    assert (report.type, report.kept, report.written) == ("exact", 1.0, None)
    assert any("every weight equal to the original" in line for line in said)
    module, config = load_model(base)
    inner, model_type = module.get("language_model", module), config["model_type"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture_of(model_type, base).upper()], 8)
    tensors, learnt = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors} for path in (out, tmp_path / "m-adapter.gguf")
    )
    plain, matrices = open_base(base, dequantize=True).module, 0
    for path, layer in inner.named_modules():
        if "scales" not in layer:
            continue
        matrices += 1
        place = names.get_name(f"{path}.weight", (".weight",)) or ""
        numbers, scales, biases = (
            in_mlx_order(each, place, inner.args, model_type) for each in decoded(tensors[place])
        )
        packed = np.array(layer.weight).view(np.uint8)
        assert np.array_equal(numbers, np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1))
        for found, own in ((scales, layer.scales), (biases, layer.biases)):
            assert np.array_equal(found[:, :: group_size // 32], np.array(own.astype(mx.float32)))
        weight = gguf.quants.dequantize(np.array(tensors[place].data), Kind.Q4_1)
        if f"{place}.lora_a" in learnt:
            a, b = (np.array(learnt[f"{place}.lora_{letter}"].data) for letter in "ab")
            weight = weight + said_in(tmp_path / "m-adapter.gguf", "adapter.lora.alpha") / len(a) * (b @ a)
        weight = in_mlx_order(weight, place, inner.args, model_type)
        dict(plain.get("language_model", plain).named_modules())[path].weight = mx.array(weight)
    assert matrices > 8
    module.set_dtype(mx.float32)
    ids = mx.array([[(7 * place) % 300 for place in range(200)]])
    expected = load_adapters(module, str(adapter))(ids)
    np.testing.assert_allclose(np.array(plain(ids)), np.array(expected), atol=1e-3)
    first, second, *stops, last = (tmp_path / "m.Modelfile").read_text().splitlines()
    assert (first, second, last) == ("FROM ./m.gguf", "ADAPTER ./m-adapter.gguf", "PARAMETER num_ctx 512")
    assert 'PARAMETER stop "<|end|>"' in stops


@pytest.mark.parametrize(("changes", "kind"), [
    ({"bits": 2}, Kind.Q4_1), ({"bits": 3}, Kind.Q4_1), ({"bits": 5}, Kind.Q5_1), ({"bits": 6}, Kind.F16),
    ({"bits": 8}, Kind.F16), ({"bits": 4, "mode": "mxfp4", "group_size": 32}, Kind.MXFP4),
    ({"bits": 8, "mode": "mxfp8", "group_size": 32}, Kind.BF16), ({"bits": None}, Kind.BF16),
    ({"bits": 4, "bfloat16": False}, Kind.F32), ({"bits": None, "bfloat16": False}, Kind.F32),
])  # fmt: skip
def test_every_base_gets_the_smallest_type_that_holds_it(changes: dict[str, Any], kind: Kind, tmp_path: Path) -> None:
    base = build(tmp_path / "base", "qwen2", **{"bfloat16": True, **HIDDEN, **changes})
    out, _, said = write(base, tmp_path / "m.gguf", kind=None)
    tensor = next(each for each in gguf.GGUFReader(out).tensors if each.name == "blk.0.ffn_up.weight")
    assert tensor.tensor_type == kind
    expected = np.array(open_base(base, dequantize=True).module.layers[0].mlp.up_proj.weight)
    found = gguf.quants.dequantize(np.array(tensor.data), kind)
    tolerance = (
        0.01 if kind in (Kind.Q4_1, Kind.Q5_1, Kind.F16) else 0.0
    )  # which mlx rounds to bfloat16 as it dequantizes
    np.testing.assert_allclose(found, expected, atol=tolerance)
    is_larger = changes["bits"] is not None and kind in (Kind.F16, Kind.BF16, Kind.F32)
    assert any("No smaller GGUF type" in line and " more." in line for line in said) == is_larger


def test_a_matrix_with_scales_that_float16_has_not_is_named(tmp_path: Path) -> None:
    base = build(tmp_path / "base", "llama, tied", bits=4, bfloat16=True)
    weights = base / "model.safetensors"
    arrays: dict[str, mx.array] = mx.load(str(weights))  # type: ignore[assignment]
    arrays["model.layers.1.mlp.up_proj.scales"] *= 1e-9
    mx.save_safetensors(str(weights), arrays, metadata={"format": "mlx"})
    out, report, said = write(base, tmp_path / "m.gguf", kind=None)
    assert report.type.startswith("rounded to 16 bits")
    assert any("1 of 15 matrices rounded" in line for line in said)
    assert any("holds these matrices: model.layers.1.mlp.up_proj." in line for line in said)
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(out).tensors}
    assert (kinds["blk.1.ffn_up.weight"], kinds["blk.0.ffn_up.weight"]) == (Kind.BF16, Kind.Q4_1)


@pytest.mark.parametrize(("method", "what"), [("dora", "DoRA's lengths"), ("full", r"layers\.1\.")])
def test_what_a_gguf_adapter_cannot_hold_is_named_with_the_way_out(method: str, what: str, tmp_path: Path) -> None:
    base = build(tmp_path / "base", "llama, tied")
    adapter = adapter_of(base, tmp_path / "adapter", method)
    with pytest.raises(ModelError, match=rf"A GGUF adapter cannot contain .*{what}(?s:.*)add --fused"):
        write(base, tmp_path / "m.gguf", adapter, kind=None)
    assert not list(tmp_path.glob("*m*"))
    write(base, tmp_path / "m.gguf", adapter, may_lose=1.0)
    assert "ADAPTER" not in (tmp_path / "m.Modelfile").read_text()


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
    assert report.written is not None
    assert report.base is not None
    assert report.written.divergence < DIVERGENCES[kind]
    assert report.base.divergence > 3 * report.written.divergence or kind == "q4_0"
    assert read_record(report_of(out), ExportReport) == report
    assert (report.type, report.base_fingerprint) == (kind, files.fingerprint)
    assert len(report.adapter_fingerprint) == 32
    assert said_in(out, "general.architecture") == architecture_of(files.model_type, Path())
    assert len(said_in(out, "tokenizer.ggml.tokens")) == files.vocab_size
    assert "<|assistant|>" in said_in(out, "tokenizer.chat_template")
    assert sorted(path.name for path in tmp_path.glob("m*")) == ["m.Modelfile", "m.gguf", "m.gguf.json"]
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
    assert report.written is not None
    assert 1e-5 < report.written.divergence < 1
    types = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert types["blk.0.ffn_up.weight"] == gguf.GGMLQuantizationType.Q5_0
    with pytest.raises(ModelError, match=r"llama-quantize cannot make q6_k(?s:.*)no such type"):
        write(base, tmp_path / "n.gguf", kind="q6_k")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "m.Modelfile", "m.gguf", "m.gguf.json",
    ]  # fmt: skip


Export = Callable[[Path, Path, Path], Any]
LIMITS = (256, 2**30)  # tokens together, mlx's memory


def to_peft(base: Path, adapter: Path, out: Path) -> None:
    peft.export_peft(ExportJob(base, adapter, out, chats(base), *LIMITS), "owner/base", print)


def to_gguf(base: Path, adapter: Path, out: Path) -> None:
    gguf_export.export_gguf(ExportJob(base, adapter, out, chats(base), *LIMITS), "q8_0", print)


def to_pair(base: Path, adapter: Path, out: Path) -> None:
    gguf_export.export_gguf(ExportJob(base, adapter, out, chats(base), *LIMITS), None, print)


def fused(base: Path, adapter: Path, out: Path) -> None:
    fuse.fuse_adapter(ExportJob(base, adapter, out, chats(base), *LIMITS), print)


@pytest.mark.parametrize(
    ("export", "writer"),
    [
        (fused, (fuse, "save_shards")),
        (to_gguf, (gguf_export, "encoded")),
        (to_pair, (gguf_export, "encoded")),
        (to_peft, (peft, "save_arrays")),
    ],
)
def test_what_cannot_be_exported_is_named_and_leaves_nothing(
    export: Export, writer: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, other = build(tmp_path / "base", "llama, tied"), build(tmp_path / "other", "llama, tied", seed=4)
    adapter, out = moved_adapter(base, tmp_path / "adapter"), tmp_path / "out.gguf"
    zeros = [
        moved_adapter(base, tmp_path / f"no {method}", method, size=0.0)
        for method in ("lora", "dora")[: 1 if export is to_pair else 2]
    ]
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
