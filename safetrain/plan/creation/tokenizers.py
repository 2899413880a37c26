"""The tokenizer of a new model: byte-level BPE trained on a text, or an unchanged copy of another model's."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.core.errors import DataError, ModelError
from safetrain.core.formatting import size_text
from safetrain.core.model.files import TEMPLATES, TOKENIZER_FILES

END, PAD, SYSTEM, USER, ASSISTANT = "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (END, PAD, SYSTEM, USER, ASSISTANT)  # in the order of their IDs, from 0
END_ID, PAD_ID = 0, 1
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
class SpecialIds:
    """IDs of special tokens in config.json; None if a tokenizer lacks one. Several tokens may end a text."""

    begin: int | None
    end: int | tuple[int, ...] | None
    pad: int | None


OWN_IDS = SpecialIds(begin=None, end=END_ID, pad=PAD_ID)


@dataclass(frozen=True)
class TrainedTokenizer:
    """A tokenizer.json as text, its number of tokens, and the mean bytes per token of its text."""

    definition: str
    tokens: int
    bytes_per_token: float


@dataclass(frozen=True)
class TextSample:
    """A sample of the texts in their order; all texts if they are few."""

    texts: tuple[str, ...]
    sample_bytes: int
    total_bytes: int


def read_sample(texts: Iterable[str], most_bytes: int) -> TextSample:
    """Sample at most ``most_bytes`` of the texts, spread evenly.

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
    return TextSample(tuple(text for _, _, text in kept), size, total)


def train_tokenizer(texts: Sequence[str], vocabulary: int, *, split_digits: bool = False) -> TrainedTokenizer:
    """Train byte-level BPE with at most ``vocabulary`` tokens, fewer if the text has no more pairs to merge.

    Decoding restores any text byte by byte: nothing is normalized, and all 256 bytes are tokens. Digits are merged like
    other text unless ``split_digits``: single digits help arithmetic, but make numbers longer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, by_bytes]) if split_digits else by_bytes
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
    return TrainedTokenizer(tokenizer.to_str(pretty=True), tokenizer.get_vocab_size(), size / max(1, count))


def write_trained(folder: Path, trained: TrainedTokenizer, context: int) -> None:
    """Write tokenizer.json, and tokenizer_config.json with the chat template."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(trained.definition, encoding="utf-8", newline="\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def require_vocabulary(trained: TrainedTokenizer, vocabulary: int, sample_bytes: int) -> None:
    """Raise DataError if a text has too few pairs for the requested vocabulary."""
    if trained.tokens < vocabulary:
        raise DataError(
            "The text is too small for this vocabulary.",
            expected=f"{vocabulary:,} tokens",
            got=f"{trained.tokens:,}, of {size_text(sample_bytes)} of text",
            do=f"give more text, or --vocabulary {trained.tokens} or less",
        )


def copied_vocabulary(source: Path) -> int:
    """Vocabulary size for a copied tokenizer: the larger of its size and config.json's; raises ModelError."""
    stated = _json(source / "config.json").get("vocab_size")
    return max(ChatTokenizer(source).size, stated if isinstance(stated, int) else 0)


def copied_ids(source: Path) -> SpecialIds:
    """Special tokens of another model, from its config.json, else its tokenizer; raises ModelError."""
    config, tokenizer = _json(source / "config.json"), ChatTokenizer(source)
    values = [config.get(f"{name}_token_id", tokenizer.special_id(name)) for name in ("bos", "eos", "pad")]
    begin, end, pad = (_ids(value) for value in values)
    return SpecialIds(begin if isinstance(begin, int) else None, end, pad if isinstance(pad, int) else None)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files and the chat template."""
    for path in [*(source / name for name in TOKENIZER_FILES), *sorted(source.glob(TEMPLATES))]:
        if path.is_file():
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


def require_tokenizer(source: Path) -> None:
    """Raise ModelError if ``source`` is not a folder with a tokenizer."""
    if not any((source / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise ModelError(
            "The tokenizer is missing.", where=str(source), expected="a model's folder, with tokenizer.json"
        )


def _ids(value: object) -> int | tuple[int, ...] | None:
    if isinstance(value, list):
        return tuple(number for number in value if isinstance(number, int))
    return value if isinstance(value, int) else None


def _json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
