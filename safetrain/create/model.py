"""Create an untrained Llama model as a folder in the Hugging Face layout: config, tokenizer, random weights.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from safetrain.core.errors import ConfigError, DataError
from safetrain.core.formatting import count_text
from safetrain.core.model.files import TEMPLATES, TOKENIZER_FILES, header_of
from safetrain.core.model.shapes import (
    OWN_IDS,
    ModelShape,
    TensorHeader,
    config_of,
    deviation,
    tensors_of,
    wanted_tokens,
)
from safetrain.core.storage.files import (
    full_disk_named,
    json_object,
    require_new,
    require_room,
    write_folder,
    write_json,
)
from safetrain.core.text.tokenizer import ChatTokenizer

BYTES_PER_TOKEN, SEEN = 3.5, 20
SMALL_VOCABULARY = 1024  # with fewer, a text has nearly as many tokens as bytes
FINE_STEP = 64  # of a vocabulary
FREE = "free some space, or choose a smaller model"
BLOCK = 2**20  # weights in memory at a time; a multiple of 4, as 64 random bits give 4 weights
QUANTILES, EXACT_BITS = 2**16, 20
END, PAD, SYSTEM, USER, ASSISTANT = "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (END, PAD, SYSTEM, USER, ASSISTANT)  # in the order of their IDs, from 0
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SAMPLE_BYTES = 64 * 2**20  # most text that a tokenizer is trained on


def with_vocabulary(shape: ModelShape, tokens: int) -> ModelShape:
    """A shape of about the same size for another vocabulary; raises ConfigError if the embedding takes all of it."""
    block = shape.parameters - replace(shape, layers=shape.layers - 1).parameters
    layers = shape.layers - round((tokens - shape.vocabulary) * shape.hidden / block)
    if layers < 1:
        what = f"A model of {shape.parameters:,} parameters is too small for a vocabulary of {tokens:,} tokens."
        raise ConfigError(what, do="choose a larger preset, or a tokenizer with fewer tokens")
    return replace(shape, vocabulary=tokens, layers=layers)


def vocabulary_for(shape: ModelShape, text_bytes: int) -> int:
    """Tokens for a text: the shape's own number, or fewer if the text is small.

    95 % of a vocabulary V should occur at least 20 times (Gowda and May 2020, arXiv:2004.02334, have 100, but small
    texts are read in several epochs). By Zipf's law, the token of rank r occurs T / (r (ln V + 0.58)) times in a text
    of T tokens.
    """
    rarest = text_bytes / BYTES_PER_TOKEN / SEEN / 0.95
    most = bisect.bisect_right(range(1, shape.vocabulary + 1), rarest, key=lambda size: size * (math.log(size) + 0.58))
    return min(shape.vocabulary, max(most // FINE_STEP * FINE_STEP, SMALL_VOCABULARY))


def create_model(
    folder: Path, shape: ModelShape, seed: int, *, texts: Iterable[str] = (), where: str = "",
    tokenizer: Path | None = None, say: Callable[[str], None] = lambda _text: None,
) -> ModelShape:  # fmt: skip
    """Write a model, completely or not at all; its tokenizer is trained on ``texts`` or copied from another model.

    ``where`` names the texts, which are read once. Raises ConfigError if the folder exists or the vocabulary is too
    large, DataError for texts that cannot be read or are empty, ModelError without a tokenizer, DiskFullError.
    """
    require_new(folder)
    if tokenizer is not None:
        config, copied, ids = json_object(tokenizer / "config.json"), ChatTokenizer(tokenizer), dict[str, object]()
        for name in ("bos", "eos", "pad"):  # several tokens may end a text
            value = config.get(f"{name}_token_id", copied.special_id(name))
            ids[f"{name}_token_id"] = value if isinstance(value, int) or name == "eos" else None
        stated = config.get("vocab_size")
        shape = with_vocabulary(shape, max(copied.size, stated if isinstance(stated, int) else 0))
        _write(folder, shape, seed, ids, lambda into: _copy_tokenizer(tokenizer, into))
        return shape
    say(f"reading {where}")
    sample, total_bytes = read_sample(texts, SAMPLE_BYTES)
    if not total_bytes:
        raise DataError("The data has no text.", where=where, do="name a file that has text or rows")
    vocabulary = vocabulary_for(shape, total_bytes)
    say(f"training a tokenizer with {vocabulary:,} tokens")
    definition, tokens = _train_tokenizer(sample, vocabulary)
    shape = with_vocabulary(shape, tokens)
    _write(folder, shape, seed, OWN_IDS, lambda into: _write_tokenizer(into, definition, shape.context))
    return shape


def _write(
    folder: Path, shape: ModelShape, seed: int, ids: Mapping[str, object], write_tokenizer: Callable[[Path], None]
) -> None:
    """Write all files into a hidden folder, then rename it."""
    config = config_of(shape, ids)
    tensors = tensors_of(config)
    parts = [(tensor.name, tensor.dtype, tensor.shape, tensor.size_bytes) for tensor in tensors]
    folder.parent.mkdir(parents=True, exist_ok=True)
    size_bytes = sum(tensor.size_bytes for tensor in tensors)
    require_room(folder.parent, size_bytes, "The disk has no room for the model.", FREE)

    def write(into: Path) -> None:
        write_json(into / "config.json", config)
        write_tokenizer(into)
        with (into / "model.safetensors").open("wb") as file:
            file.write(header_of(parts, {"format": "pt"}))  # names and shapes are those of transformers
            for tensor in tensors:
                file.writelines(initial_weights(shape, seed, tensor))

    with full_disk_named("The disk is full.", folder.parent, FREE):
        write_folder(folder, write)


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
        yield table[bits.random_raw(-(-size // 4)).astype("<u8").view("<u2")[:size]].tobytes()


@functools.cache
def normal_quantiles() -> np.ndarray:
    """Quantiles of the standard normal distribution in the middle of 65,536 equal parts; (65536,).

    They are rounded to 20 bits after the point, because machines may differ in the last of 52 bits.
    """
    normal = NormalDist()
    half = [normal.inv_cdf((place + 0.5) / QUANTILES) for place in range(QUANTILES // 2)]
    lower = np.rint(np.array(half) * 2**EXACT_BITS) / 2**EXACT_BITS
    return np.concatenate([lower, -lower[::-1]])


def describe_shape(shape: ModelShape) -> str:
    share, text = 100 * shape.vocabulary * shape.hidden / shape.parameters, wanted_tokens(shape.parameters)
    return (
        f"{shape.parameters:,} parameters ({share:.0f} % embeddings): {shape.layers} layers of width {shape.hidden}, "
        f"{shape.heads} heads ({shape.key_heads} for keys and values), {shape.vocabulary:,} tokens, context "
        f"{shape.context:,}; this size wants {count_text(text)} tokens of text"
    )


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
    for path in [*(source / name for name in TOKENIZER_FILES), *sorted(source.glob(TEMPLATES))]:
        if path.is_file():
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
