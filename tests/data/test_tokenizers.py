"""Labels fall on the right tokens whatever the tokenizer does to its text: marks for spaces, bytes, other letters."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from safetrain.core.data.tokenizer import ChatTokenizer
from safetrain.data.forms import parse_row
from tests.data.models import renderer, trained, turns

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = turns("Is ﬁron 🙂?", "É Fe 🙂 铁.", "Gold", "Au, é isso")


def sentence_piece(tokenizer: Any) -> None:
    """As Llama 2's: a mark before the text and for every space."""
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(spaces)


def normalized(tokenizer: Any) -> None:
    """Other letters than those of the text, more or fewer of them."""
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])


@pytest.mark.parametrize(("template", "end"), [(LLAMA_2, "</s>"), (CHATML, "<|im_end|>")])
@pytest.mark.parametrize("kind", [sentence_piece, normalized])
def test_the_answers_and_their_ends_are_trained(kind: Any, template: str, end: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    kind(tokenizer)
    first = ["<unk>", *SPECIAL[:2], *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=first, show_progress=False)
    tokenizer.train_from_iterator(["It is Fe, or Au. Gold and iron, é isso."] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "config.json").write_text("{}")
    space = " " if end == "</s>" else ""
    assert [text.strip() for text in trained(tmp_path, CHAT)] == [f"É Fe 🙂 铁.{space}{end}", f"Au, é isso{space}{end}"]
    found = ChatTokenizer(tmp_path)
    text = renderer(found).render(parse_row({"messages": CHAT})).text
    (encoding,) = found.encode_chats([text])
    assert encoding.ids == found.encode_chat(text)
