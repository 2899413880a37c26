"""The model that is trained is the one in the folder: what its files say is computed, or refused by name."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from safetrain.core.errors import ModelError
from safetrain.core.model.files import read_model_files
from safetrain.core.text.tokenizer import ChatTokenizer
from safetrain.engine.model import open_base
from safetrain.engine.upstream.family import build, unread_setting
from safetrain.engine.upstream.loading import load, quantize
from safetrain.export.fuse import FLOAT, fuse_adapter
from safetrain.plan.preflight import selftest
from tests.support.families import build_family, config_of, families
from tests.support.random_models import TINY, build_model

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "linear", "factor": 4.0},
)
THETAS, SHARES = ("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")
LOCAL = ("rope_local_base_freq", "swa_rope_theta", "rope_local_theta")
IDS = [(7 * number) % 300 for number in range(40)]
NEEDS_A_PACKAGE = "olmo"  # ai2-olmo, which is not installed here
OTHER = ("bitnet", "mistral4", "kimi_linear")  # computes only on a Mac; reads only rope_parameters; does not rotate


def with_text(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, "text_config": dict(text)} if "text_config" in config else dict(text)


def as_transformers_5_writes(text: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without their older rotary keys, which are in rope_parameters."""
    rope = {"rope_theta": next(text[key] for key in THETAS if key in text), "rope_type": "default"}
    for key in set(SHARES) & set(text):
        rope["partial_rotary_factor"] = text[key]
    scaling = text.get("rope_scaling") or {}
    rope |= {("rope_type" if key == "type" else key): value for key, value in scaling.items()}
    local = [text[key] for key in LOCAL if key in text]
    usual = {key: value for key, value in rope.items() if key == "partial_rotary_factor"}
    sliding = {"rope_theta": local[0], "rope_type": "default", **usual} if local else {}
    kept = {key: text[key] for key in text if key not in (*THETAS, *SHARES, *LOCAL, "rope_scaling")}
    return kept | {"rope_parameters": {"full_attention": rope, "sliding_attention": sliding} if local else rope}


def logits_of(module: Any) -> np.ndarray:
    mx.random.seed(1)
    parameters = sorted(tree_flatten(module.parameters()))
    drawn = [(name, 0.1 * mx.random.normal(value.shape).astype(value.dtype)) for name, value in parameters]
    module.load_weights(drawn, strict=False)
    return np.array(module(mx.array([IDS])).astype(mx.float32))


def by_mlx_lm(config: dict[str, Any]) -> Any:
    architecture, arguments = _get_classes(config)
    return architecture(arguments.from_dict(config))


def test_both_spellings_of_rotary_settings_give_every_family_the_same_logits(subtests: pytest.Subtests) -> None:
    """To the bit. A scaling that a family does not compute is refused by name, and no other scaling is."""
    same, refused = 0, 0
    for family in families():
        config = config_of(family) if family != NEEDS_A_PACKAGE else {}
        text = config.get("text_config", config)
        if not any(key in text for key in THETAS) or family in OTHER:
            continue
        with subtests.test(family):
            plain = logits_of(by_mlx_lm(config))
            new = with_text(config, as_transformers_5_writes(text))
            assert unread_setting(json.dumps(new)) == ""
            assert np.array_equal(logits_of(build(new)), plain)
            same += 1
            for scaling in SCALINGS:
                scaled = {**text, "rope_scaling": {**scaling, "type": scaling["rope_type"]}}
                try:
                    theirs = logits_of(by_mlx_lm(with_text(config, scaled)))
                except (ValueError, LookupError):  # they refuse it
                    continue
                new = with_text(config, as_transformers_5_writes(scaled))
                unread = unread_setting(json.dumps(new))
                if not np.array_equal(theirs, plain):
                    assert unread == ""
                    assert np.array_equal(logits_of(build(new)), theirs)
                    break
                refused += unread != ""
                assert unread or not np.array_equal(logits_of(build(new)), plain)
    assert same >= 95
    assert refused >= 74, "counted with mlx-lm 0.32.2"


def new_llama(folder: Path, **more: Any) -> Path:
    """A Llama as transformers 5 saves it: rope_theta and scaling only in rope_parameters."""
    build_model(folder, **{**TINY, "rope_theta": 5e5, "rope_scaling": LLAMA3, "tie_word_embeddings": True, **more})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(as_transformers_5_writes(config)))
    return folder


def llama3(size: int) -> np.ndarray:
    """The frequencies of a head of ``size``, with theta 500000 and the scaling LLAMA3."""
    plain = 5e5 ** (-np.arange(0, size, 2) / size)
    turns = 256 * plain / (2 * math.pi)  # within the context before scaling
    share = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    scaled: np.ndarray = share * plain + (1 - share) * plain / 8.0
    return scaled


def test_the_frequencies_are_those_of_the_published_formula(tmp_path: Path) -> None:
    """Llama 3's scaling, in the model that is trained, in one that is quantized, and in what mlx-lm opens alone."""
    folder = new_llama(tmp_path / "new")
    quantize(folder, tmp_path / "quantized", 4, 32)
    expected = llama3(TINY["hidden_size"] // TINY["num_attention_heads"])
    modules = [load(folder)[0], load(tmp_path / "quantized")[0], load_model(tmp_path / "quantized")[0]]
    for module in modules:
        np.testing.assert_allclose(1 / np.array(module.layers[0].self_attn.rope._freqs), expected, rtol=1e-5)


@pytest.mark.parametrize(("more", "expected"), [
    ({}, 0.1 * math.log(4) + 1), ({"attention_factor": 1.0}, 1.0), ({"attention_factor": 1.3}, 1.3),
    ({"attention_factor": 1.3, "mscale_all_dim": 0.7}, 1.3),
])  # fmt: skip
def test_yarn_scales_by_the_attention_factor_and_begins_at_the_context(more: dict[str, Any], expected: float) -> None:
    """YaRN's context is max_position_embeddings if it is not given; mlx-lm's own constant is 4096."""
    rope = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, **more}
    config = {**config_of("llama"), "max_position_embeddings": 64}
    given = {key: value for key, value in config.items() if key != "rope_theta"} | {"rope_parameters": rope}
    found, full = build(given), {**rope, "original_max_position_embeddings": 64}
    assert found.layers[0].self_attn.rope.mscale == pytest.approx(expected)
    by_hand = by_mlx_lm({**config, "rope_scaling": full}).layers[0].self_attn.rope
    assert np.array_equal(found.layers[0].self_attn.rope._freqs, by_hand._freqs)


FLAT, LINEAR = {"rope_theta": 5e5, **LLAMA3}, {"rope_theta": 1e6, **SCALINGS[1]}
BY_TYPE = {"full_attention": LINEAR, "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}


@pytest.mark.parametrize(("name", "given", "full"), [("llama", FLAT, FLAT), ("gemma3", BY_TYPE, LINEAR)])
def test_what_is_exported_says_what_was_computed(
    name: str, given: dict[str, Any], full: dict[str, Any], tmp_path: Path
) -> None:
    """The fused model in both spellings, which transformers reads like the base; the GGUF file by its numbers."""
    gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
    from transformers import AutoConfig

    from tests.export.test_gguf import adapter_of, job_of, write
    from tests.support.gguf_models import build as build_for_gguf

    base = build_for_gguf(tmp_path / "base", name)
    config = json.loads((base / "config.json").read_text())
    plain = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    (base / "config.json").write_text(json.dumps({**plain, "rope_parameters": given}))
    adapter = adapter_of(base, tmp_path / "adapter")
    content = gguf.GGUFReader(write(base, tmp_path / "m.gguf", adapter, "f16", may_lose=1.0).out)
    assert content.fields[f"{name}.rope.freq_base"].contents() == full["rope_theta"]
    if name == "llama":
        factors = next(tensor.data for tensor in content.tensors if tensor.name == "rope_freqs.weight")
        size = 2 * len(factors)
        np.testing.assert_allclose(1 / factors, llama3(size) * 5e5 ** (np.arange(0, size, 2) / size), rtol=1e-5)
    out = tmp_path / "fused"
    fuse_adapter(job_of(base, out, adapter, may_lose=1.0), print, FLOAT)
    fused = json.loads((out / "config.json").read_text())
    assert (fused["rope_parameters"], fused["rope_theta"]) == (given, full["rope_theta"])
    assert fused["rope_scaling"]["factor"] == full["factor"]
    before, after = (AutoConfig.from_pretrained(folder).rope_parameters for folder in (base, out))
    for one, two in [(before, after)] if name == "llama" else [(before[key], after[key]) for key in BY_TYPE]:
        assert one.items() <= two.items()


@pytest.mark.parametrize("family", ["gemma3_text", "cohere2"])
def test_the_kinds_of_layers_that_transformers_writes_become_the_pattern(family: str) -> None:
    """Every second block sees the whole text, whatever the family's default pattern."""
    config = {**config_of(family), "sliding_window": 8}
    kinds = ["sliding_attention", "full_attention"] * 2
    plain = {key: value for key, value in config.items() if key != "sliding_window_pattern"}
    expected = logits_of(by_mlx_lm({**plain, "sliding_window_pattern": 2}))
    assert np.array_equal(logits_of(build({**plain, "layer_types": kinds})), expected)


NESTED = {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({"hidden_act": "relu"}, "llama in mlx-lm does not read hidden_act relu"),
    "phi3": ({"rope_scaling": {**SCALINGS[0], "type": "yarn", "long_factor": [1.0]}},
             "does not read the rotary scaling yarn"),
    "cohere": ({"rope_parameters": {"rope_theta": 1e4, **SCALINGS[1]}, "layer_norm_eps": 1e-5},
               "does not read the rotary scaling linear"),
    "qwen2": ({"rope_parameters": {**NESTED, "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}},
              "does not read rope_parameters for each attention type"),
    "gemma3_text": ({"rope_parameters": {**NESTED, "sliding_attention": {"rope_theta": 1e4, **SCALINGS[1]}},
                     "sliding_window": 64, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16, "head_dim": 16},
                    "does not read the rotary scaling linear"),
    "cohere2": ({"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
                 "num_hidden_layers": 4, "layer_norm_eps": 1e-5, "head_dim": 32, "sliding_window_pattern": 4},
                "does not read layer_types without a pattern"),
    "qwen3": ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "head_dim": 32},
              "does not read partial_rotary_factor 0.5"),
}  # fmt: skip


@pytest.mark.parametrize("family", REFUSED)
def test_what_a_family_would_not_compute_is_refused_by_name(family: str, tmp_path: Path) -> None:
    settings, words = REFUSED[family]
    folder = build_model(tmp_path / "m", model_type=family, **{**TINY, "rope_theta": 1e4, **settings})
    with pytest.raises(ModelError, match=words):
        open_base(folder, dequantize=False)


def change(folder: Path, **settings: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


def test_weights_that_do_not_belong_to_the_model_are_named(tmp_path: Path) -> None:
    folder = build_model(tmp_path / "m", **TINY, tie_word_embeddings=True)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    embedding = weights["model.embed_tokens.weight"]
    for head, words in ((embedding, ""), (embedding + 1, "a head .* other than the embedding, but config.json ties")):
        mx.save_safetensors(str(folder / "model.safetensors"), {**weights, "lm_head.weight": head})
        if not words:
            open_base(folder, dequantize=False)
            continue
        with pytest.raises(ModelError, match=words):
            open_base(folder, dequantize=False)
    open_base(change(folder, tie_word_embeddings=False), dequantize=False)  # as it says
    with pytest.raises(ModelError, match="mlx-lm's llama does not have these weights") as caught:
        open_base(change(folder, num_hidden_layers=40), dequantize=False)
    assert "Missing 342 parameters: model.layers.10.input_layernorm.weight" in str(caught.value)
    assert len(str(caught.value)) < 600
    change(folder, num_hidden_layers=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    shutil.copy(folder / "model.safetensors", folder / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match=r"that its index does not name(.|\n)*model-00002-of-00002"):
        read_model_files(folder)


def test_checkpoints_of_other_quantizers_are_called_what_they_are(tmp_path: Path) -> None:
    bnb = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    folder = build_model(tmp_path / "m", **TINY)
    with pytest.raises(
        ModelError, match=r"quantized by bitsandbytes \(nf4\), which mlx-lm cannot read(.|\n)*unquantized"
    ):
        read_model_files(change(folder, quantization_config=bnb))
    change(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    weights: Any = mx.load(str(folder / "model.safetensors"))
    weights |= {f"{name}_scale_inv": mx.ones((1, 1)) for name in weights if name.endswith("proj.weight")}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    assert read_model_files(folder).quantization_bits == 8
    with pytest.raises(ModelError, match="quantized by fp8, which mlx-lm cannot read for llama") as caught:
        open_base(folder, dequantize=False)
    assert "Received 14 parameters not in model" in str(caught.value)
    assert "fetch the unquantized model" in str(caught.value).splitlines()[0]
    change(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    mx.save_safetensors(str(folder / "model.safetensors"), weights | {"model.layers.0.mlp.up_proj.g_idx": mx.ones(8)})
    with pytest.raises(ModelError, match="quantized by gptq, which mlx-lm cannot read for llama: fetch"):
        open_base(folder, dequantize=False)


@pytest.mark.parametrize("method", [{}, {"quant_method": None}])
def test_a_quantization_of_mlx_under_the_other_key_is_read(method: dict[str, Any], tmp_path: Path) -> None:
    folder = build_model(tmp_path / "m", bits=4, **TINY)
    expected = load(folder)[0](mx.array([IDS]))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**config.pop("quantization"), **method}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_model_files(folder).quantization_bits == 4
    assert mx.array_equal(load(folder)[0](mx.array([IDS])), expected)


def test_the_self_test_says_why_a_model_cannot_be_trained_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^Jamba cannot be trained: in mlx-lm"):
        selftest("safetrain.engine.dry_run", build_family(tmp_path / "jamba", "jamba"))
    unstirred = build_model(tmp_path / "rwkv", **config_of("rwkv7"))  # zeros, whose length has no gradient
    with pytest.raises(ModelError, match=r"^rwkv7 cannot be trained: with mlx-lm's own layers its gradient is NaN"):
        selftest("safetrain.engine.dry_run", unstirred)


def test_a_tokenizer_that_its_library_calls_wrong_is_used_as_its_settings_say(tmp_path: Path) -> None:
    """transformers warns about every large tokenizer of Mistral, and repairs it only when told to."""
    wrong = pre_tokenizers.Split(Regex(r"\p{L}+|\s+"), "isolated")
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"token {number}" for number in range(100_000))]
    own = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    own.pre_tokenizer = pre_tokenizers.Sequence([wrong, pre_tokenizers.ByteLevel(use_regex=False)])
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}

    def opened(**more: Any) -> ChatTokenizer:
        own.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, **more}))
        return ChatTokenizer(tmp_path)

    with pytest.raises(ModelError, match=r"a rule that Mistral has corrected(.|\n)*add \"fix_mistral_regex\": true"):
        opened()
    kept, repaired = (opened(fix_mistral_regex=choice) for choice in (False, True))
    assert kept.encode_chats(["it's"])[0].tokens != repaired.encode_chats(["it's"])[0].tokens
    own = Tokenizer.from_str(repaired.backend.to_str())
    assert opened().encode("it's") == repaired.encode("it's")
