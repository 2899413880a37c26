"""Create an untrained language model as a folder in the Hugging Face layout: config, tokenizer, random weights.

The same seed gives the same bytes on every machine and with every NumPy: the stream of Philox's raw bits is fixed
(Salmon et al. 2011; NumPy's NEP 19 promises it of bit generators, not of their normal numbers), and 16 of these bits
choose one of 65,536 quantiles of the normal distribution from a table. So no library's logarithm affects the result.

The tokenizer is byte-level BPE trained on a text, or an unchanged copy of another model's.
"""

import functools
import hashlib
import json
import math
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import DataError, ModelError
from safetrain.core.formatting import size_text
from safetrain.core.model.files import TEMPLATES, TOKENIZER_FILES
from safetrain.core.model.shapes import TensorHeader, tensors_of
from safetrain.core.storage.files import (
    full_disk_named,
    json_object,
    require_new,
    require_room,
    write_folder,
    write_json,
)
from safetrain.plan.model_shape import ModelShape, ShapeRequest, rope_theta_for, shape_for
from safetrain.plan.pretraining import TOKENS_PER_PARAMETER, count_text

FREE = "free some space, or choose a smaller model"
BLOCK = 2**20  # weights in memory at a time; a multiple of 4, as 64 random bits give 4 weights
QUANTILES, EXACT_BITS = 2**16, 20
RESIDUAL_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
ASKED = "as asked"
END, PAD, SYSTEM, USER, ASSISTANT = "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (END, PAD, SYSTEM, USER, ASSISTANT)  # in the order of their IDs, from 0
OWN_IDS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MEASURED_BYTES = 4 * 2**20  # tokenized to measure bytes per token
SAMPLE_BYTES = 64 * 2**20  # most text that a tokenizer is trained on


@dataclass(frozen=True)
class CreatedModel:
    """The shape of a created model, and its tokenizer's text; the numbers are 0 if the tokenizer was copied."""

    shape: ModelShape
    bytes_per_token: float = 0.0
    sample_bytes: int = 0  # the text that the tokenizer was trained on
    total_bytes: int = 0


def create_model(
    folder: Path, request: ShapeRequest, seed: int, *, texts: Iterable[str] = (), where: str = "",
    tokenizer: Path | None = None, say: Callable[[str], None] = lambda _text: None,
) -> CreatedModel:  # fmt: skip
    """Write ``folder`` completely or not at all, with a tokenizer trained on ``texts`` or copied from a model's folder.

    ``where`` names the texts, which are read once. Raises ConfigError if the folder exists or the shape is impossible,
    DataError for texts that cannot be read or are empty, ModelError for a folder without a tokenizer, DiskFullError.
    """
    require_new(folder)
    shape_for(request)  # an impossible shape is refused before texts are read
    if tokenizer is not None:
        require_tokenizer(tokenizer)
        model = CreatedModel(shape_for(replace(request, vocabulary=copied_vocabulary(tokenizer))))
        _write(folder, model.shape, seed, copied_ids(tokenizer), lambda into: copy_tokenizer(tokenizer, into))
        return model
    say(f"reading {where}")
    sample, total_bytes = read_sample(texts, SAMPLE_BYTES)
    if not total_bytes:
        raise DataError("The data has no text.", where=where, do="name a file with text, or rows")
    vocabulary = shape_for(request, total_bytes).vocabulary
    say(f"training a tokenizer of {vocabulary:,} tokens")
    definition, tokens, bytes_per_token = train_tokenizer(sample, vocabulary)
    shape = shape_for(replace(request, vocabulary=tokens))
    _write(folder, shape, seed, OWN_IDS, lambda into: write_tokenizer(into, definition, shape.context))
    return CreatedModel(shape, bytes_per_token, sum(len(text.encode("utf-8")) for text in sample), total_bytes)


def _write(
    folder: Path, shape: ModelShape, seed: int, ids: Mapping[str, object], write_tokenizer: Callable[[Path], None]
) -> None:
    """Write all files into a hidden folder, then rename it."""
    config = config_of(shape, ids)
    tensors = tensors_of(config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    size_bytes = sum(tensor.size_bytes for tensor in tensors)
    require_room(folder.parent, size_bytes, "The disk has no room for the model.", FREE)

    def write(into: Path) -> None:
        write_json(into / "config.json", config)
        write_tokenizer(into)
        with (into / "model.safetensors").open("wb") as file:
            file.write(_header(tensors))
            for tensor in tensors:
                file.writelines(initial_weights(shape, seed, tensor))

    with full_disk_named("The disk is full.", folder.parent, FREE):
        write_folder(folder, write)


def config_of(shape: ModelShape, ids: Mapping[str, object]) -> dict[str, object]:
    """Content of config.json for transformers and mlx-lm, with the ``ids`` of special tokens."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.feed_forward,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta_for(shape.context),
        "max_position_embeddings": shape.context,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": round(deviation(shape), 6),
        "torch_dtype": "float32",
        **ids,
    }


def _header(tensors: Sequence[TensorHeader]) -> bytes:
    """An 8-byte little-endian length and that many bytes of JSON, a multiple of 8 (huggingface/safetensors, README)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # names and shapes are those of transformers
    place = 0
    for tensor in tensors:
        end = place + tensor.size_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def deviation(shape: ModelShape, tensor: str = "") -> float:
    """Standard deviation of the initial weights of a tensor.

    It is sqrt(2 / (5 x width)) ("small init": Nguyen and Salazar 2019, arXiv:1910.05895; taken by GPT-NeoX): at a width
    of 1,000 it is the 0.02 of GPT-2, and narrower models get more, so that logits and the outputs of all layers begin
    at one scale. What a block adds to the residual stream is divided by sqrt(2 x layers) (Radford et al. 2019, GPT-2).
    """
    usual = math.sqrt(2 / (5 * shape.hidden))
    return usual / math.sqrt(2 * shape.layers) if tensor.endswith(RESIDUAL_OUTPUTS) else usual


def initial_weights(shape: ModelShape, seed: int, tensor: TensorHeader) -> Iterator[bytes]:
    """Yield the bytes of one float32 tensor, some MiB at a time: matrices normal around 0, norms 1.

    ``seed`` and the tensor's name decide its numbers.
    """
    count = math.prod(tensor.shape)
    if len(tensor.shape) == 1:
        yield np.ones(count, dtype="<f4").tobytes()
        return
    table = (normal_quantiles() * deviation(shape, tensor.name)).astype("<f4")
    key = hashlib.blake2b(f"{seed}\0{tensor.name}".encode(), digest_size=16).digest()
    bits = np.random.Philox(key=int.from_bytes(key, "little"))
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        places = bits.random_raw(-(-size // 4)).astype("<u8").view("<u2")[:size]
        yield table[places].tobytes()


@functools.cache
def normal_quantiles() -> np.ndarray:
    """(65536,) the quantiles of the standard normal distribution in the middle of as many equal parts.

    Rounded to 20 bits after the point: machines may differ in the last of 52.
    """
    normal = NormalDist()
    half = [normal.inv_cdf((place + 0.5) / QUANTILES) for place in range(QUANTILES // 2)]
    lower = np.rint(np.array(half) * 2**EXACT_BITS) / 2**EXACT_BITS
    return np.concatenate([lower, -lower[::-1]])


def reasons_of(model: CreatedModel, request: ShapeRequest) -> Iterator[tuple[str, str, str]]:
    """Yield the main values of a model with their reasons."""
    shape, total, sample = model.shape, model.total_bytes, size_text(model.sample_bytes)
    share = 100 * shape.vocabulary * shape.hidden / shape.parameters
    yield "parameters", f"{shape.parameters:,}", f"embeddings and norms included; embeddings are {share:.0f} %"
    yield "layers x width", f"{shape.layers} x {shape.hidden}", "near the best of depth and width (Levine et al. 2020)"
    shared = f"{shape.key_heads} for keys and values (Ainslie et al. 2023)"
    yield "heads", f"{shape.heads} of {shape.head}", shared
    vocabulary = "by model (Tao et al. 2024) and text (Gowda and May 2020)" if total else "copied with the tokenizer"
    yield "vocabulary", f"{shape.vocabulary:,}", ASKED if request.vocabulary else vocabulary
    if total:
        trained_on = sample if model.sample_bytes == total else f"a sample, {sample} of {size_text(total)}"
        yield "tokenizer", f"{model.bytes_per_token:.2f} bytes per token", f"trained on {trained_on}"
        target = count_text(TOKENS_PER_PARAMETER * shape.parameters)
        there = count_text(total / model.bytes_per_token)
        yield "text for it", f"{target} tokens", f"20 a parameter (Hoffmann et al. 2022); this text has {there}"
    yield "context", f"{shape.context:,}", ASKED if request.context else "tokens; --context for more"
    yield "initial weights", f"std {deviation(shape):.4f}", "sqrt(2 / (5 x width)) (Nguyen and Salazar 2019)"


def read_sample(texts: Iterable[str], most_bytes: int) -> tuple[list[str], int]:
    """Sample at most ``most_bytes`` of the texts, spread evenly, in their order; and the bytes of all texts.

    A hash of its position ranks each text, and the smallest stay: the same ones each time.
    """
    kept, size, total, limit = list[tuple[int, int, str]](), 0, 0, 2**64
    for place, text in enumerate(texts):
        length = len(text.encode("utf-8"))
        total += length
        number = int.from_bytes(hashlib.blake2b(place.to_bytes(8, "big"), digest_size=8).digest(), "big")
        if number < limit:
            kept.append((number, length, text))
            size += length
        while size > most_bytes and len(kept) > 1:
            limit //= 2
            kept = [each for each in kept if each[0] < limit] or [min(kept)]
            size = sum(length for _, length, _ in kept)
    return [text for _, _, text in kept], total


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> tuple[str, int, float]:
    """Train byte-level BPE; return tokenizer.json, its number of tokens, and the mean bytes per token.

    There are fewer than ``vocabulary`` tokens if the text has no more pairs to merge. Decoding restores any text byte
    by byte: nothing is normalized, and all 256 bytes are tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    measured = texts[:: max(1, -(-sum(map(len, texts)) // MEASURED_BYTES))]  # spread over the text
    size = sum(len(text.encode("utf-8")) for text in measured)
    count = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in measured)
    return tokenizer.to_str(pretty=True), tokenizer.get_vocab_size(), size / max(1, count)


def write_tokenizer(folder: Path, definition: str, context: int) -> None:
    """Write tokenizer.json, and tokenizer_config.json with the chat template."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(definition, encoding="utf-8", newline="\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def require_tokenizer(source: Path) -> None:
    """Raise ModelError if ``source`` is not a folder with a tokenizer."""
    if not any((source / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise ModelError(
            "The tokenizer is missing.", where=str(source), expected="a model's folder, with tokenizer.json"
        )


def copied_vocabulary(source: Path) -> int:
    """Vocabulary size for a copied tokenizer: the larger of its size and config.json's; raises ModelError."""
    stated = json_object(source / "config.json").get("vocab_size")
    return max(ChatTokenizer(source).size, stated if isinstance(stated, int) else 0)


def copied_ids(source: Path) -> dict[str, object]:
    """IDs of special tokens of another model, from its config.json, else its tokenizer; raises ModelError.

    Several tokens may end a text.
    """
    config, tokenizer = json_object(source / "config.json"), ChatTokenizer(source)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: config.get(name, tokenizer.special_id(name.partition("_")[0])) for name in names}
    return {name: value if isinstance(value, int) or name.startswith("eos") else None for name, value in ids.items()}


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files and the chat template."""
    for path in [*(source / name for name in TOKENIZER_FILES), *sorted(source.glob(TEMPLATES))]:
        if path.is_file():
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
