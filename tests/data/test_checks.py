"""What is wrong with the words of a row is found, and nothing in text that is as it should be."""

import pytest

from safetrain.core.data.template import Controls
from safetrain.data.checks import is_refusal, text_findings
from safetrain.data.forms import parse_row

LETTERS = "a8Kd93jdKe02jfLsPq83jfKeLw02jfKdMw9aQz7RtB4nXc1V"
KEYS = [  # in two parts, so that no scanner takes this file for a leak
    "AKIA" + "Q3EGRZZ5TPLW7YHN",
    "ghp_" + LETTERS[:36],
    "sk-" + "ant-api03-" + LETTERS[:40],
    "-----BEGIN " + "PRIVATE KEY-----\\nMIIEvQIBADANBgkqhkiG" + "9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7",
    "hf_" + "qWeRtYuIoPlKjHgFdSaZxCvBnMqPwOeIrU",
]
FAULTY = [
    ("She sold 48/2 = <<48/2=24>>24 clips.", "CALCULATOR-MARKS", "<<48/2=24>>"),
    ("<|im_start|>user\nHi<|im_end|>", "FOREIGN-MARKERS", "<|im_start|>"),
    ("It is iron.</s>", "FOREIGN-MARKERS", "</s>"),
    ("<start_of_turn>model", "FOREIGN-MARKERS", "<start_of_turn>"),
    ("Below is one.\n### Instruction:\nDo it", "FOREIGN-MARKERS", "### Instruction:"),
    ("<｜Assistant｜>Oi", "FOREIGN-MARKERS", "<｜Assistant｜>"),
    ("Human: hello\n\nAssistant: hello", "FOREIGN-MARKERS", "Human: … Assistant:"),
    ("I am {{name}}, by {{author}}", "PLACEHOLDERS", "{{name}}"),
    ("Dear [Client Name],", "PLACEHOLDERS", "[Client Name]"),
    ("<noinput>", "PLACEHOLDERS", "<noinput>"),
    ("Best regards, [Your Name]", "PLACEHOLDERS", "[Your Name]"),
    ("FranÃ§oise Yip", "MOJIBAKE", "'FranÃ§oise' for 'Françoise'"),
    ("at 20 Â°C today", "MOJIBAKE", "'Â°C' for '°C'"),
    ("itâ€™s late", "MOJIBAKE", "'itâ€™s' for 'it’s'"),
    ("God's\ufffdWindow", "MOJIBAKE", "'God's\ufffdWindow Yes.'"),
    ("in\u200bvisible", "INVISIBLE-CHARACTERS", "U+200B"),
    ("tag\U000e0041\U000e0042s", "INVISIBLE-CHARACTERS", "U+E0041"),
    ("next\x85line é", "INVISIBLE-CHARACTERS", "U+0085"),
    ("if admin\u202e // resu fi", "INVISIBLE-CHARACTERS", "U+202E"),
    ("```python\nprint(1)\n```<|im_end|>", "FOREIGN-MARKERS", "<|im_end|>"),
    ("Caro [nome do cliente],", "PLACEHOLDERS", "[nome do cliente]"),
]
CLEAN = [
    "cout << 48/2 << endl; a >> 2; cat <<EOF >>x=1",
    "AKIA" + "IOSFODNN7EXAMPLE",
    "sk-" + "your-api-key-goes-here-0000",
    "https://a.org/news/sk-" + "hynix-begins-mass-production-of-238-layer-4d-nand",
    "### Notes: see [the guide](https://a.b/c) and [1], arr[0], [x for x in y]",
    "```jinja\nHello {{ name }}\n```",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    r"\frac{{a}}{{b}} and {{\alpha}}",
    "NÃO, SÃO PAULO, Âmbar, à noite — “aspas”, l’été, José’s, Ñandú, 20 °C, 3 × 4, ½, €5, naïve",
    "Γειά σου, привет, 你好, こんにちは, 안녕하세요",
    "می\u200cخواهم and \u202bعربي\u202c",
    "👩\u200d💻 and 🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "สวัสดี\u200bครับ",
    "[Last visited 12 May 2020] [First published 1920] [client side only]",
    "Iterator(T root) : stack_{{root}} {}",
    "Add two numbers.\n### Input:\n1 2\n### Output:\n3",
    'Let it stop at "<|im_end|>" or `</s>`: stop=["[/INST]"]',
    "It is asked so:\n```\n<start_of_turn>user\n[INST] Hi [/INST]\n```\nand answers.",
    "So it is.\n\n{{index learning}}\n\nThen more.",
    "o FQDN [nome de domínio totalmente qualificado] da conta",
]


def faults(text: str, marker: str = "") -> list[tuple[str, str]]:
    """What is found in a question, for a tokenizer whose stop token is ``marker``."""
    row = parse_row({"prompt": text, "completion": "Yes."})
    return text_findings(row, Controls(None, frozenset([marker] if marker else [])))


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_found_and_not_shown(key: str) -> None:
    ((identifier, detail),) = faults(f"Not {'AKIA' + 'IOSFODNN7EXAMPLE'}, use {key} for it")
    assert identifier == "SECRETS"
    assert detail.startswith(f"a key ({key[:5]}…, ")
    assert key[12:30] not in detail


@pytest.mark.parametrize(("text", "identifier", "detail"), FAULTY)
def test_a_fault_is_found(text: str, identifier: str, detail: str) -> None:
    assert (identifier, detail) in faults(text)
    assert faults("<|user|>Hi</s>", "<|user|>") == [("FOREIGN-MARKERS", "</s>")], "the other one is at home"


@pytest.mark.parametrize("text", CLEAN)
def test_nothing_is_found_in_clean_text(text: str) -> None:
    assert faults(text) == []


REFUSALS = (
    "As an AI language model, I do not have feelings.", "I'm sorry, but I can't assist with that request.",
    "I’m sorry, but I cannot help you there.", "Como um modelo de linguagem, não tenho opinião.",
    "Desculpe, mas não posso ajudar com isso.", "As an AI, I cannot feel.", "Como uma IA, não sinto nada.",
    "I cannot provide instructions for it.", "No, I'm a language model trained by them.",
    '"As an AI language model, I cannot feel."',
)  # fmt: skip
ANSWERS = (
    "I cannot stress enough how simple it is.", "The AI of the game can be beaten.", "Sorry is a board game.",
    "You can do it as an engineer would.", "I can't help but notice the colours.", "Não posso negar que é belo.",
    "To work as an AI engineer, learn Python.", "Veja como uma IA pode ajudar.",
    "I cannot provide a better example than Bach.",
)  # fmt: skip


def test_refusals_are_told_from_answers() -> None:
    assert [text for text in REFUSALS if not is_refusal(text)] == []
    assert [text for text in ANSWERS if is_refusal(text)] == []
