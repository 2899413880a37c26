"""Create an untrained language model as a folder in the Hugging Face layout: config, tokenizer, random weights.

The same seed gives the same bytes on every machine and with every NumPy: the stream of Philox's raw bits is fixed
(Salmon et al. 2011; NumPy's NEP 19 promises it of bit generators, not of their normal numbers), and 16 of these bits
choose one of 65,536 quantiles of the normal distribution from a table. So no library's logarithm affects the result.
"""

import dataclasses
import functools
import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from safetrain.core.errors import ConfigError, DataError
from safetrain.core.formatting import size_text
from safetrain.core.model.shapes import TYPE_BYTES, TYPES, TensorHeader, tensors_of
from safetrain.core.storage.files import full_disk_named, require_new, require_room, write_folder, write_json
from safetrain.plan.creation.shapes import ModelShape, ShapeRequest, shape_for
from safetrain.plan.creation.tokenizers import (
    OWN_IDS,
    SAMPLE_BYTES,
    SpecialIds,
    TextSample,
    TrainedTokenizer,
    copied_ids,
    copied_vocabulary,
    copy_tokenizer,
    read_sample,
    require_tokenizer,
    require_vocabulary,
    train_tokenizer,
    write_trained,
)
from safetrain.plan.pretraining import TOKENS_PER_PARAMETER, count_text

FREE = "free some space, choose a smaller model, or --dtype bfloat16"
DTYPES = ("float32", "bfloat16")
BLOCK = 2**20  # weights in memory at a time; a multiple of 4, as 64 random bits give 4 weights
SHARD_BYTES = 2 * 2**30
QUANTILES, EXACT_BITS = 2**16, 20
RESIDUAL_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
ASKED = "as asked"


@dataclass(frozen=True)
class TokenizerOfText:
    """A request to train a tokenizer on a sample of ``texts``, which are read once; ``where`` names them."""

    texts: Iterable[str]
    where: str
    split_digits: bool = False


@dataclass(frozen=True)
class InitialWeights:
    """Initial weights: matrices normal around 0, norms 1. ``seed`` and a tensor's name decide its numbers.

    The standard deviation is sqrt(2 / (5 x width)) ("small init": Nguyen and Salazar 2019, arXiv:1910.05895; taken by
    GPT-NeoX): at a width of 1,000 it is the 0.02 of GPT-2, and narrower models get more, so that logits and the
    outputs of all layers begin at one scale. What a block adds to the residual stream is divided by
    sqrt(2 x layers) (Radford et al. 2019, GPT-2).
    """

    hidden: int
    layers: int
    seed: int
    dtype: str = "float32"

    @property
    def deviation(self) -> float:
        """Standard deviation of the weights."""
        return math.sqrt(2 / (5 * self.hidden))

    @property
    def residual_deviation(self) -> float:
        """Standard deviation of the output projections, which are added to the residual stream."""
        return self.deviation / math.sqrt(2 * self.layers)

    def of(self, tensor: TensorHeader) -> Iterator[bytes]:
        """Yield the bytes of one tensor, some MiB at a time, in the order of a safetensors file."""
        count = math.prod(tensor.shape)
        if len(tensor.shape) == 1:
            yield _stored(np.ones(count, dtype=np.float32), self.dtype).tobytes()
            return
        deviation = self.residual_deviation if tensor.name.endswith(RESIDUAL_OUTPUTS) else self.deviation
        table = _stored((normal_quantiles() * deviation).astype(np.float32), self.dtype)
        key = hashlib.blake2b(f"{self.seed}\0{tensor.name}".encode(), digest_size=16).digest()
        bits = np.random.Philox(key=int.from_bytes(key, "little"))
        for start in range(0, count, BLOCK):
            size = min(BLOCK, count - start)
            places = bits.random_raw(-(-size // 4)).astype("<u8").view("<u2")[:size]
            yield table[places].tobytes()


@dataclass(frozen=True)
class CreatedModel:
    """A created model; ``sample`` and ``trained`` are set if a tokenizer was trained."""

    folder: Path
    shape: ModelShape
    weights: InitialWeights
    size_bytes: int
    sample: TextSample | None = None
    trained: TrainedTokenizer | None = None


def create_model(
    folder: Path,
    request: ShapeRequest,
    tokenizer: TokenizerOfText | Path,
    seed: int,
    dtype: str = "float32",
    say: Callable[[str], None] = lambda _text: None,
) -> CreatedModel:
    """Write ``folder`` completely or not at all; ``tokenizer`` may be the folder of a model to copy it from.

    Raises ConfigError if it exists or the shape is impossible, DataError for texts that cannot be read or are too
    few, ModelError for a folder without a tokenizer, DiskFullError.
    """
    require_new(folder)
    if dtype not in DTYPES:
        raise ConfigError("No such type of weights.", expected=" or ".join(DTYPES), got=dtype)
    shape_for(request)  # an impossible shape is refused before texts are read
    if isinstance(tokenizer, Path):
        require_tokenizer(tokenizer)
        shape = shape_for(dataclasses.replace(request, vocabulary=copied_vocabulary(tokenizer)))
        model = CreatedModel(folder, shape, InitialWeights(shape.hidden, shape.layers, seed, dtype), 0)
        return _written(model, copied_ids(tokenizer), lambda into: copy_tokenizer(tokenizer, into))
    say(f"reading {tokenizer.where}")
    sample = read_sample(tokenizer.texts, SAMPLE_BYTES)
    if not sample.sample_bytes:
        raise DataError("The data has no text.", where=tokenizer.where, do="name a file with text, or rows")
    vocabulary = shape_for(request, sample.total_bytes).vocabulary
    say(f"training a tokenizer of {vocabulary:,} tokens")
    trained = train_tokenizer(sample.texts, vocabulary, split_digits=tokenizer.split_digits)
    if request.vocabulary is not None:
        require_vocabulary(trained, vocabulary, sample.sample_bytes)
    shape = shape_for(dataclasses.replace(request, vocabulary=trained.tokens))
    model = CreatedModel(folder, shape, InitialWeights(shape.hidden, shape.layers, seed, dtype), 0, sample, trained)
    return _written(model, OWN_IDS, lambda into: write_trained(into, trained, shape.context))


def _written(model: CreatedModel, ids: SpecialIds, write_tokenizer: Callable[[Path], None]) -> CreatedModel:
    """Write all files into a hidden folder, then rename it; returns the model with the size of its weights."""
    config, place = config_of(model.shape, ids, model.weights), model.folder.parent
    tensors = tensors_of(config)
    size = sum(tensor.size_bytes for tensor in tensors)
    place.mkdir(parents=True, exist_ok=True)
    require_room(place, size, "The disk has no room for the model.", FREE)

    def write(into: Path) -> None:
        write_json(into / "config.json", config)
        write_tokenizer(into)
        write_weights(into, tensors, model.weights)

    with full_disk_named("The disk is full.", place, FREE):
        write_folder(model.folder, write)
    return dataclasses.replace(model, size_bytes=size)


def config_of(shape: ModelShape, ids: SpecialIds, rule: InitialWeights) -> dict[str, object]:
    """Content of config.json for transformers and mlx-lm."""
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
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.context,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": round(rule.deviation, 6),
        "torch_dtype": rule.dtype,
        "bos_token_id": ids.begin,
        "eos_token_id": list(ids.end) if isinstance(ids.end, tuple) else ids.end,
        "pad_token_id": ids.pad,
    }


@functools.cache
def normal_quantiles() -> np.ndarray:
    """(65536,) the quantiles of the standard normal distribution in the middle of as many equal parts.

    Rounded to 20 bits after the point: machines may differ in the last of 52.
    """
    normal = NormalDist()
    half = [normal.inv_cdf((place + 0.5) / QUANTILES) for place in range(QUANTILES // 2)]
    lower = np.rint(np.array(half) * 2**EXACT_BITS) / 2**EXACT_BITS
    return np.concatenate([lower, -lower[::-1]])


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Convert float32 to the stored type, little-endian; bfloat16 is rounded to nearest, ties to even."""
    if TYPE_BYTES[TYPES[dtype]] == 4:
        return values.astype("<f4")
    bits = values.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def write_weights(folder: Path, tensors: Sequence[TensorHeader], rule: InitialWeights) -> None:
    """Write model.safetensors, or shards with an index, with Hugging Face's names; raises OSError."""
    shards, room = list[list[TensorHeader]](), 0
    for tensor in tensors:
        if not shards or tensor.size_bytes > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(tensor)
        room -= tensor.size_bytes
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        places = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.size_bytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            file.write(_header(shard))
            for tensor in shard:
                file.writelines(rule.of(tensor))


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


def reasons_of(model: CreatedModel, request: ShapeRequest) -> Iterator[tuple[str, str, str]]:
    """Yield every value of a model with its reason."""
    shape, rule = model.shape, model.weights
    share = 100 * shape.embedding / shape.parameters
    yield "parameters", f"{shape.parameters:,}", f"embeddings and norms included; embeddings are {share:.0f} %"
    levine = "near ln(width) = 5.04 + 0.0555 layers (Levine et al. 2020)"
    yield "layers x width", f"{shape.layers} x {shape.hidden}", ASKED if request.hidden and request.layers else levine
    yield "heads", f"{shape.heads} of {shape.head}", ASKED if request.heads else "64 features each, 32 if narrow"
    group = shape.heads // shape.key_heads
    why = f"{group} heads share one (Ainslie et al. 2023)" if group > 1 else "one a head: sharing would save little"
    yield "keys and values", f"{shape.key_heads} of {shape.head}", why
    yield "feed-forward", f"{shape.feed_forward:,}", "8/3 of the width (Shazeer 2020), in groups of 64"
    if shape.tied:
        yield "head", "tied", "the embedding again (Press and Wolf 2017)"
    else:
        yield "head", "its own", "from a billion parameters on"
    yield from _reasons_of_text(model, request)
    yield "context", f"{shape.context:,}", ASKED if request.context else "tokens; --context for more"
    yield "rope_theta", f"{shape.rope_theta:,.0f}", "for this context (Su et al. 2021; Men et al. 2024)"
    yield "initial weights", f"std {rule.deviation:.4f}", "sqrt(2 / (5 x width)) (Nguyen and Salazar 2019)"
    yield "o_proj, down_proj", f"std {rule.residual_deviation:.4f}", "that / sqrt(2 x layers) (GPT-2)"
    yield "stored as", rule.dtype, f"seed {rule.seed}"


def _reasons_of_text(model: CreatedModel, request: ShapeRequest) -> Iterator[tuple[str, str, str]]:
    vocabulary = f"{model.shape.vocabulary:,}"
    if model.trained is None or model.sample is None:
        yield "vocabulary", vocabulary, "copied with the tokenizer"
        return
    size, total = size_text(model.sample.sample_bytes), size_text(model.sample.total_bytes)
    by_rule = "by model (Tao et al. 2024) and text (Gowda and May 2020)"
    yield "vocabulary", vocabulary, ASKED if request.vocabulary else by_rule
    is_all = model.sample.sample_bytes == model.sample.total_bytes
    sample = f"trained on {size}" if is_all else f"trained on a sample, {size} of {total}"
    yield "tokenizer", f"{model.trained.bytes_per_token:.2f} bytes per token", sample
    target = count_text(TOKENS_PER_PARAMETER * model.shape.parameters)
    there = count_text(model.sample.total_bytes / model.trained.bytes_per_token)
    yield "text for it", f"{target} tokens", f"20 a parameter (Hoffmann et al. 2022); this text has {there}"
