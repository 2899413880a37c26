"""The tokenizer of a new model: byte-level BPE of a text, or the one of another model as it is."""

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
SPECIAL_TOKENS = (END, PAD, SYSTEM, USER, ASSISTANT)  # in the order of their ids, which begin at 0
END_ID, PAD_ID = 0, 1
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MEASURED_BYTES = 4 * 2**20  # that are tokenized to tell bytes per token
SAMPLE_BYTES = 64 * 2**20  # of text that a tokenizer is trained on, at most


@dataclass(frozen=True)
class SpecialIds:
    """Special tokens as config.json names them; None if a tokenizer has none. Several tokens may end a text."""

    begin: int | None
    end: int | tuple[int, ...] | None
    pad: int | None


OWN_IDS = SpecialIds(begin=None, end=END_ID, pad=PAD_ID)


@dataclass(frozen=True)
class TrainedTokenizer:
    """A tokenizer.json as text, its tokens, and how many bytes of its text a token has on average."""

    definition: str
    tokens: int
    bytes_per_token: float


@dataclass(frozen=True)
class TextSample:
    """Some of the texts that were read, in their order; all of them where they are few."""

    texts: tuple[str, ...]
    sample_bytes: int
    total_bytes: int


def read_sample(texts: Iterable[str], most_bytes: int) -> TextSample:
    """At most ``most_bytes`` of the texts, spread evenly.

    Each text has a number, by its place, and those with the smallest numbers stay: the same ones each time.
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
    """Byte-level BPE: at most ``vocabulary`` tokens, fewer where the text has no more pairs to join.

    Any text is its tokens again, byte by byte: nothing is normalized, and all 256 bytes are tokens. Digits are joined
    as the text has them, unless ``split_digits``; every token of one digit suits arithmetic, and makes numbers longer.
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
    measured = texts[:: max(1, -(-sum(map(len, texts)) // MEASURED_BYTES))]  # from all over
    size = sum(len(text.encode("utf-8")) for text in measured)
    count = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in measured)
    return TrainedTokenizer(tokenizer.to_str(pretty=True), tokenizer.get_vocab_size(), size / max(1, count))


def write_trained(folder: Path, trained: TrainedTokenizer, context: int) -> None:
    """tokenizer.json, and tokenizer_config.json with the chat template."""
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
    """Raises DataError where a text has too few pairs for the requested tokens."""
    if trained.tokens < vocabulary:
        raise DataError(
            "The text is too small for this vocabulary.",
            expected=f"{vocabulary:,} tokens",
            got=f"{trained.tokens:,}, of {size_text(sample_bytes)} of text",
            do=f"give more text, or --vocabulary {trained.tokens} or less",
        )


def copied_vocabulary(source: Path) -> int:
    """Rows of the embedding that a model's tokenizer needs, and its model has; raises ModelError."""
    stated = _json(source / "config.json").get("vocab_size")
    return max(ChatTokenizer(source).size, stated if isinstance(stated, int) else 0)


def copied_ids(source: Path) -> SpecialIds:
    """The special tokens of another model: by its config.json, else by its tokenizer; raises ModelError."""
    config, tokenizer = _json(source / "config.json"), ChatTokenizer(source)
    values = [config.get(f"{name}_token_id", tokenizer.special_id(name)) for name in ("bos", "eos", "pad")]
    begin, end, pad = (_ids(value) for value in values)
    return SpecialIds(begin if isinstance(begin, int) else None, end, pad if isinstance(pad, int) else None)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """The tokenizer's files as they are, and the chat template's."""
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
