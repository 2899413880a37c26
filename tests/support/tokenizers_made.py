"""Tokenizers of the kinds that models have, trained on a few texts: no download."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
CORPUS = (
    "The atomic number of molybdenum is 42. What is the capital of Portugal? Lisboa é a capital de Portugal.",
    "It's said that they've gone; I'll see, don't you? HELLO WORLD, Hello World  with   many    spaces\n\nand lines.",
    "数学は楽しい。 Привет, мир! Ελληνικά γράμματα, größer, naïve café, ação, ñandú 1234567890 3.14159",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n\tprint(f'{i}: {add(i, 1)}')  # done 🙂🚀",
)
STRIPPING_ENDS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "</s>")


def _bytes(pattern: str | None, *, whole_words: bool = False, nfc: bool = False, digits: bool = False) -> Any:
    """Byte-level BPE, split by ``pattern``, None for GPT-2's own."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_words))
    tokenizer.normalizer = normalizers.NFC() if nfc else None
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    steps += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def _letters(prefix: str) -> Any:
    """SentencePiece's BPE as tokenizer.json has it: ▁ for spaces, single bytes for letters that it lacks.

    ``prefix``: all (Llama 2), none (Gemma), or first (Mistral: once, at the beginning of a text).
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    learning = Tokenizer(models.BPE())
    learning.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    learning.train_from_iterator(CORPUS * 3, trainer)
    learnt = json.loads(learning.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256)), *learnt["vocab"]]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(pair) for pair in learnt["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    if prefix == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    else:
        steps = [normalizers.Prepend("▁"), replace]
        tokenizer.normalizer = normalizers.Sequence(steps) if prefix == "all" else replace
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _normalized(tokenizer: Any) -> Any:
    """Other letters than those of the text, more or fewer of them."""
    from tokenizers import normalizers

    tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


START = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = START + r"\p{N}{1,3}" + REST, START + r"\p{N}" + REST
KINDS: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: _bytes(None),
    "llama-bpe": lambda: _bytes(LLAMA3, whole_words=True),
    "dbrx": lambda: _bytes(LLAMA3),
    "qwen2": lambda: _bytes(QWEN2, nfc=True),
    "smollm": lambda: _bytes(None, digits=True),
    "llama": lambda: _letters("all"),
    "gemma": lambda: _letters("none"),
    "mistral": lambda: _letters("first"),
    "other letters": lambda: _normalized(_letters("first")),
    "unknown split": lambda: _bytes(r"\w+|\W+"),
}


def write_tokenizer(folder: Path, kind: str, *, stripping: Sequence[str] = (), template: str = TEMPLATE) -> int:
    """Write tokenizer.json and tokenizer_config.json into a model's folder; how many tokens there are.

    ``stripping``: special tokens that drop the white space behind them.
    """
    from tokenizers import AddedToken, processors

    tokenizer = KINDS[kind]()
    special = (*SPECIAL, "<|endoftext|>") if stripping else SPECIAL
    tokenizer.add_special_tokens([AddedToken(text, rstrip=text in stripping, normalized=False) for text in special])
    if kind != "qwen2":
        begin = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None if kind == "qwen2" else "<s>",
        "eos_token": "</s>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False, "chat_template": template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tokenizer.get_vocab_size()
