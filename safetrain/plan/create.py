"""Create an untrained Llama model as a folder in the Hugging Face layout: config, tokenizer, random weights.

Its shape follows published rules, for a number of parameters that counts embeddings, blocks and norms.

The same seed gives the same bytes on every machine and with any NumPy version: Philox's raw bits are fixed
(Salmon et al. 2011; NumPy's NEP 19 promises it for bit generators, not for normal numbers). 16 of these bits
choose one of 65,536 quantiles of the normal distribution from a table. So no library's logarithm affects the result.

The tokenizer is byte-level BPE trained on a text, or an unchanged copy of another model's.
"""

import bisect
import functools
import hashlib
import heapq
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
from safetrain.core.errors import ConfigError, DataError
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
from safetrain.plan.pretraining import count_text, wanted_tokens

# Parameters, and a width near ln(width) = 5.039 + 0.0555 layers (Levine et al. 2020, arXiv:2006.12467)
PRESETS = {"10m": (10_000_000, 256), "85m": (85_000_000, 576), "400m": (400_000_000, 1024), "800m": (800_000_000, 1344)}
HEAD, SMALL_HEAD = 64, 32
GROUPED_FROM = 384  # features
MANY_FEATURES = 1024
SMALL_MODEL, SHORT_CONTEXT, USUAL_CONTEXT = 50_000_000, 1024, 2048
LEAST_VOCABULARY = 5 + 256  # special tokens and bytes
SMALL_VOCABULARY = 1024  # with fewer, a text has nearly as many tokens as bytes
VOCABULARY_STEP, FINE_STEP = 1024, 64
BYTES_PER_TOKEN, SEEN = 3.5, 20
FREE = "free some space, or choose a smaller model"
BLOCK = 2**20  # weights in memory at a time; a multiple of 4, as 64 random bits give 4 weights
QUANTILES, EXACT_BITS = 2**16, 20
RESIDUAL_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
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
SAMPLE_BYTES = 64 * 2**20  # most text that a tokenizer is trained on


@dataclass(frozen=True)
class ShapeRequest:
    """The requested size of a model: ``hidden`` in features, ``context`` in tokens. None: derived from the size."""

    parameters: int
    hidden: int
    vocabulary: int | None = None
    context: int | None = None


@dataclass(frozen=True)
class ModelShape:
    """The shape of a Llama model with tied embeddings. Widths in features, ``context`` in tokens."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    feed_forward: int
    vocabulary: int
    context: int

    @property
    def head(self) -> int:
        """Width of an attention head."""
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        query, key = self.hidden, self.key_heads * self.head
        block = self.hidden * (2 * query + 2 * key + 3 * self.feed_forward + 2)
        return self.vocabulary * self.hidden + self.layers * block + self.hidden


def request_for(name: str, vocabulary: int | None = None, context: int | None = None) -> ShapeRequest:
    """The request for a preset; raises ConfigError for an unknown name."""
    if name not in PRESETS:
        raise ConfigError("No such preset.", expected=", ".join(PRESETS), got=name)
    return ShapeRequest(*PRESETS[name], vocabulary, context)


def shape_for(request: ShapeRequest, text_bytes: int | None = None) -> ModelShape:
    """The shape for a request; raises ConfigError if there is none.

    The best vocabulary also depends on the size of the text, ``text_bytes`` (None if unknown).
    """
    size, hidden = request.parameters, request.hidden
    heads, step = hidden // (HEAD if hidden >= 4 * HEAD else SMALL_HEAD), 64 if hidden < MANY_FEATURES else 128
    sizes = (3, 4, 2) if hidden >= GROUPED_FROM else ()  # of groups that share a key head (Ainslie et al. 2023)
    key_heads = heads // next((each for each in sizes if heads % each == 0), 1)
    vocabulary = request.vocabulary or vocabulary_for(size, hidden, text_bytes)
    context = request.context or (SHORT_CONTEXT if size < SMALL_MODEL else USUAL_CONTEXT)
    feed_forward = max(1, round(8 * hidden / 3 / step)) * step
    empty = ModelShape(hidden, 0, heads, key_heads, feed_forward, vocabulary, context)
    block = replace(empty, layers=1).parameters - empty.parameters
    layers = round((size - empty.parameters) / block)
    if layers < 1 or vocabulary < LEAST_VOCABULARY:
        raise ConfigError(
            f"A model of {size:,} parameters cannot have this vocabulary.",
            expected=f"{LEAST_VOCABULARY} (256 bytes and 5 special tokens) to {(size - block) // hidden:,} tokens",
            got=f"{vocabulary:,} tokens",
        )
    return replace(empty, layers=layers)


def vocabulary_for(parameters: int, hidden: int, text_bytes: int | None = None) -> int:
    """Vocabulary size for a model and a text.

    By the model: embeddings grow as the 0.83rd power of the other parameters; a model of 3 billion has 43,000 tokens of
    width 3,200 (Tao et al. 2024, arXiv:2407.13623). By the text: 95 % of a vocabulary V should occur at least 20 times
    (Gowda and May 2020, arXiv:2004.02334, have 100, but small texts are read in several epochs). By Zipf's law, the
    token of rank r occurs T / (r (ln V + 0.58)) times in a text of T tokens.
    """
    size_wanted = int(43_000 * 3_200 * (parameters / 3e9) ** 0.83 / hidden)
    if text_bytes is not None:
        rarest = text_bytes / BYTES_PER_TOKEN / SEEN / 0.95
        most = bisect.bisect_right(range(1, size_wanted), rarest, key=lambda size: size * (math.log(size) + 0.58))
        size_wanted = min(size_wanted, max(most, SMALL_VOCABULARY))
    step = VOCABULARY_STEP if size_wanted >= 2 * VOCABULARY_STEP else FINE_STEP
    return max(-(-LEAST_VOCABULARY // FINE_STEP) * FINE_STEP, size_wanted // step * step)


def rope_theta_for(context: int) -> float:
    """Base of the rotary position embedding: 10,000 (Su et al. 2021), more for long contexts.

    The least base for n tokens is 0.0424 n^1.628 (Men et al. 2024, arXiv:2405.14591); it is rounded to one digit.
    """
    least = 0.0424 * context**1.628
    digit = 10 ** math.floor(math.log10(least))
    return float(max(10_000, round(least / digit) * digit))


def create_model(
    folder: Path, request: ShapeRequest, seed: int, *, texts: Iterable[str] = (), where: str = "",
    tokenizer: Path | None = None, say: Callable[[str], None] = lambda _text: None,
) -> ModelShape:  # fmt: skip
    """Write a model, completely or not at all; its tokenizer is trained on ``texts`` or copied from another model.

    ``where`` names the texts, which are read once. Raises ConfigError if the folder exists or the shape is impossible,
    DataError for texts that cannot be read or are empty, ModelError for a folder without a tokenizer, DiskFullError.
    """
    require_new(folder)
    shape_for(request)  # an impossible shape is refused before texts are read
    if tokenizer is not None:
        config, copied, ids = json_object(tokenizer / "config.json"), ChatTokenizer(tokenizer), dict[str, object]()
        for name in ("bos", "eos", "pad"):  # several tokens may end a text
            value = config.get(f"{name}_token_id", copied.special_id(name))
            ids[f"{name}_token_id"] = value if isinstance(value, int) or name == "eos" else None
        stated = config.get("vocab_size")
        shape = shape_for(replace(request, vocabulary=max(copied.size, stated if isinstance(stated, int) else 0)))
        _write(folder, shape, seed, ids, lambda into: _copy_tokenizer(tokenizer, into))
        return shape
    say(f"reading {where}")
    sample, total_bytes = read_sample(texts, SAMPLE_BYTES)
    if not total_bytes:
        raise DataError("The data has no text.", where=where, do="name a file that has text or rows")
    vocabulary = shape_for(request, total_bytes).vocabulary
    say(f"training a tokenizer with {vocabulary:,} tokens")
    definition, tokens = _train_tokenizer(sample, vocabulary)
    shape = shape_for(replace(request, vocabulary=tokens))
    _write(folder, shape, seed, OWN_IDS, lambda into: _write_tokenizer(into, definition, shape.context))
    return shape


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
    """A header: an 8-byte little-endian length, then that many bytes of JSON, a multiple of 8 (safetensors' README)."""
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

    It is sqrt(2 / (5 x width)) ("small init": Nguyen and Salazar 2019, arXiv:1910.05895; used by GPT-NeoX): at a width
    of 1,000 it is the 0.02 of GPT-2, and larger in narrower models, so that logits and the outputs of all layers begin
    at one scale. For projections to the residual stream it is divided by sqrt(2 x layers) (Radford et al. 2019, GPT-2).
    """
    usual = math.sqrt(2 / (5 * shape.hidden))
    return usual / math.sqrt(2 * shape.layers) if tensor.endswith(RESIDUAL_OUTPUTS) else usual


def initial_weights(shape: ModelShape, seed: int, tensor: TensorHeader) -> Iterator[bytes]:
    """Yield the bytes of one float32 tensor, some MiB at a time: matrices are normally distributed around 0, norms 1.

    ``seed`` and the tensor's name decide the numbers.
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
    """Quantiles of the standard normal distribution in the middle of 65,536 equal parts; (65536,).

    They are rounded to 20 bits after the point, because machines may differ in the last of 52 bits.
    """
    normal = NormalDist()
    half = [normal.inv_cdf((place + 0.5) / QUANTILES) for place in range(QUANTILES // 2)]
    lower = np.rint(np.array(half) * 2**EXACT_BITS) / 2**EXACT_BITS
    return np.concatenate([lower, -lower[::-1]])


def reasons_of(shape: ModelShape) -> Iterator[tuple[str, str, str]]:
    """Yield the main values of a model with their reasons."""
    share = 100 * shape.vocabulary * shape.hidden / shape.parameters
    target = count_text(wanted_tokens(shape.parameters))
    yield "parameters", f"{shape.parameters:,}", f"{share:.0f} % embeddings; this size wants {target} tokens of text"
    ratio = "close to the best ratio of depth to width (Levine et al. 2020)"
    yield "layers x width", f"{shape.layers} x {shape.hidden}", ratio
    shared = f"{shape.key_heads} for keys and values (Ainslie et al. 2023)"
    yield "heads", f"{shape.heads} of width {shape.head}", shared
    by_rule = "as set or copied; else by model (Tao et al. 2024) and text (Gowda and May 2020)"
    yield "vocabulary", f"{shape.vocabulary:,}", by_rule
    yield "context", f"{shape.context:,}", "tokens; --context changes it"


def read_sample(texts: Iterable[str], most_bytes: int) -> tuple[list[str], int]:
    """Sample at most ``most_bytes`` of the texts, spread evenly and in order; also return the bytes of all texts.

    Texts are ranked by a hash of their position, and the lowest ranks stay, so the sample is always the same.
    """
    kept, held, total = list[tuple[int, int, str]](), 0, 0  # the largest rank first
    for place, text in enumerate(texts):
        size = len(text.encode("utf-8"))
        held, total = held + size, total + size
        rank = int.from_bytes(hashlib.blake2b(place.to_bytes(8, "big"), digest_size=8).digest(), "big")
        heapq.heappush(kept, (-rank, place, text))
        while held > most_bytes and len(kept) > 1:
            held -= len(heapq.heappop(kept)[2].encode("utf-8"))
    return [text for _, _, text in sorted(kept, key=lambda each: each[1])], total


def _train_tokenizer(texts: Sequence[str], vocabulary: int) -> tuple[str, int]:
    """Train byte-level BPE; return tokenizer.json and its number of tokens.

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
    return tokenizer.to_str(pretty=True), tokenizer.get_vocab_size()


def _write_tokenizer(folder: Path, definition: str, context: int) -> None:
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


def _copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files and the chat template."""
    for path in [*(source / name for name in TOKENIZER_FILES), *sorted(source.glob(TEMPLATES))]:
        if path.is_file():
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
