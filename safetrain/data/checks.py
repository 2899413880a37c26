"""What is wrong with the words of a row, one function a finding: each yields the details that it finds in a text.

Each check first asks whether a character or two stand in the text at all, which is some hundred times quicker than a
search by pattern and settles most rows.
"""

import base64
import binascii
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator

from safetrain.core.data.template import Controls
from safetrain.data.rows import Row

SEPARATOR = "\n\n"  # between the messages of a row
Known = Callable[[str], bool]  # whether a chat marker is meant to stand in a text

ANGLED = re.compile(r"<(?:\|[a-z][a-z0-9_]{1,30}\|>|｜[^｜\n]{2,40}｜>|</?SYS>>|/s>|(?:start|end)_of_turn>|[be]os>)")
LLAMA = re.compile(r"\[/?INST\]")
SPOKEN_OF = re.compile(  # markers in quotation marks, and code: there they are meant
    r"^[ \t]*```.*?^[ \t]*```|([\"'`*])(?:<{1,2}[^<>\n]{1,42}>{1,2}|\[/?INST\])\1", re.MULTILINE | re.DOTALL
)
HEADINGS = re.compile(r"^### ?(?:Instruction|Response|Human|Assistant|User|Input):", re.MULTILINE)
ASKING, ANSWERING = re.compile(r"^(?:Human|User): ", re.MULTILINE), re.compile(r"^(?:Assistant|AI): ", re.MULTILINE)

BRACES = re.compile(r"(?<!\w)\{\{ ?(?!(?:index|id|include|figure|note|hint|cite|main|toc) )[A-Za-z_][\w .-]{0,30}\}\}")
CODE = ("```", "{%", "</", "\\", "v-if", "=>", "{{#", "${")  # what is written in double braces there is code
CODE_LINE = re.compile(r"[`=<;]|[\"']\{\{|^\s*(?:- )?[a-z_][\w.-]*: *\{\{ ")  # what a placeholder's line has if it is
TEMPLATING = re.compile(r"jinja|mustache|handlebars|ansible|angular|django|liquid|twig|vue|helm", re.IGNORECASE)
MOST_LOOKED_AT = 20  # places of one text
BRACKETS = re.compile(
    r"(?<![\w\])\\])\[(?:(?:[Yy]our|[Ii]nsert|INSERT|Seu|Sua|[Ii]nsira) [^\[\]\n]{2,40}"
    r"|[Nn]ome d[aoe] [^\[\]\n]{2,24}|(?:seu|sua) (?:nome|e-?mail|endereço|telefone|número|cidade)\b[^\[\]\n]{0,30}"
    r"|(?:[Cc]ompany|[Rr]ecipient|[Cc]lient|[Cc]ustomer)(?:['’]s)?(?: [A-Za-z]{2,15})?"
    r" (?:[Nn]ame|[Aa]ddress|[Ee]-?mail|[Pp]hone|[Nn]umber|[Tt]itle)"
    r"|(?:[Ff]irst|[Ll]ast|[Ff]ull) [Nn]ame|Name|Nome|REDACTED)\](?![(\[])"
)
NO_INPUTS = ("<noinput>", "<no input>", "<nooutput>")

BROKEN = re.compile(r"[Â-ôÐ-ï][\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]|[√├][©®°±†£•¶ß´¨≠ÆØ∞≤≥¥µ∂∑∏πºªæø¿¡]")
LEADS = ("Ã", "Â", "â€", "Å", "Ä", "Ð", "Ñ", "√", "├")  # one of them stands in what is broken
INVISIBLE = re.compile(
    "[\u200b\u2060-\u2064\ufeff\u180e\u00ad\x7f-\x9f\ufff9-\ufffb]|(?<=[ -~])[\u200c\u200d](?=[ -~])"
    "|(?<![\U0001f3f4\U000e0000-\U000e007f])[\U000e0000-\U000e007f]"  # tags; after a black flag they name a region
)
DIRECTIONS = re.compile("[\u202a-\u202e\u2066-\u2069]")
RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefe]")
SPACELESS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")  # Thai and others part words with U+200B

SELF_NAMING = re.compile(  # an AI engineer is not one
    r"\b(?:as|i am|i'm|being) (?:just |only )?an? (?:(?:large )?language model"
    r"|(?:ai|artificial intelligence)(?=\W*$|\s?[,.;:!?)(–—-]| (?:(?:language )?model|assistant|chatbot|bot|system"
    r"|program|developed|trained|created|designed|built|made|and|but|so|not|without|i|my|it|there)\b))"
    r"|\b(?:como|sou) (?:apenas )?uma? (?:modelo de linguagem|(?:ia|inteligência artificial)(?=\W*$|\s?[,.;:!?)(–—-]))"
)
IN_QUOTES = re.compile(r"[\s(=:][\"'`“][^\"'`”\n]*$")  # someone in the answer says it
DECLINES = re.compile(
    r"(?:i'm|i am|we're) (?:very |really |so )?sorry,? (?:but )?(?:i|we) "
    r"(?:can't|cannot|can not|am not able|am unable|won't)"
    r"|i (?:can't|cannot|can not|am unable to|am not able to) (?:assist|fulfil|comply|answer that|do that"
    r"|help(?! (?:but|it|myself|(?:the way|how|what) i|\w+ing)\b)"
    r"|provide(?! (?:an? |any )?(?:better|clearer|greater|finer|stronger|simpler|more|enough)\b))"
    r"|(?:sinto muito|desculpe|lamento),? (?:mas )?(?:eu )?não posso|não posso (?:ajudar|fornecer|responder|atender)"
)
HEAD = 160  # characters of an answer in which a refusal stands

CALCULATOR = re.compile(r"<<[\d\s.,+\-*/()%$=]*\d[\d\s.,+\-*/()%$]*=[\d\s.,+\-/()%$]*>>")  # GSM8K

KEYS = (  # a part that must stand in the text, what it looks like, whose it is
    ("AKIA", r"\bAKIA[0-9A-Z]{16}\b", "an AWS key"),
    ("ASIA", r"\bASIA[0-9A-Z]{16}\b", "an AWS key"),
    *((part, rf"\b{part}[A-Za-z0-9]{{36}}\b", "a GitHub token") for part in ("ghp_", "gho_", "ghs_")),
    ("github_pat_", r"\bgithub_pat_[A-Za-z0-9_]{50,}", "a GitHub token"),
    ("glpat-", r"\bglpat-[A-Za-z0-9_-]{20}\b", "a GitLab token"),
    ("sk-", r"\bsk-(?:proj-|ant-(?:api\d\d-)?|or-v1-)?[A-Za-z0-9_-]{20,}", "a key of a model's provider"),
    ("hf_", r"\bhf_[A-Za-z]{34}\b", "a Hugging Face token"),
    ("xox", r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}", "a Slack token"),
    ("AIza", r"\bAIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])", "a Google key"),
    ("_live_", r"\b[sr]k_live_[A-Za-z0-9]{20,}", "a Stripe key"),
    ("npm_", r"\bnpm_[A-Za-z0-9]{36}\b", "an npm token"),
    ("SG.", r"\bSG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}", "a SendGrid key"),
    (
        "PRIVATE KEY-----",
        r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----(?:\s|\\+[nr])*[A-Za-z0-9+/]{20,64}",
        "a private key",
    ),
    ("eyJ", r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{20,}", "a JSON web token"),
)
PATTERNS = tuple((part, re.compile(pattern), name) for part, pattern, name in KEYS)
EXAMPLES = ("example", "your", "xxxx", "john doe", "1234567890", "abcdef", "aaaa", "0000")  # in keys of documentation
LEAST_RANDOM = 16  # letters and digits in a row that a provider's key has; words between dashes are shorter


def text_findings(row: Row, controls: Controls) -> list[tuple[str, str]]:
    """Ids of findings in the words of a row, and a detail of each.

    The tokenizer's own markers belong in bare text, and what ends an answer is STOP-IN-TEXT.
    """
    words = text_of(row)
    found = list[tuple[str, str]]()
    if "<" in words or "[" in words or "{{" in words or "###" in words or ": " in words:
        in_text = controls.tokens if row.format == "text" else None

        def known(marker: str) -> bool:
            return marker in controls.stops or (in_text is not None and in_text.fullmatch(marker) is not None)

        found += [("FOREIGN-MARKERS", marker) for marker in foreign_markers(words, known)]
        found += [("PLACEHOLDERS", detail) for detail in placeholders(words)]
        found += [("CALCULATOR-MARKS", detail) for detail in calculator_marks(words)]
    if not words.isascii() or "\x7f" in words:
        broken = list(mojibake(words))
        found += [("MOJIBAKE", detail) for detail in broken]
        found += [] if broken else [("INVISIBLE-CHARACTERS", detail) for detail in invisible_characters(words)]
    others = [message.details for message in row.messages if message.details] + ([row.tools] if row.tools else [])
    for each in others:  # thinking, arguments of calls, descriptions of tools
        words = SEPARATOR.join([words, *_texts_in(each)])
    found += [("SECRETS", detail) for detail in secrets(words)]
    if any(is_refusal(message.content) for message in row.messages if message.role == "assistant"):
        found.append(("REFUSALS", ""))
    return found


def text_of(row: Row) -> str:
    """What a row says, message by message."""
    return row.text or SEPARATOR.join([message.content for message in row.messages])


def foreign_markers(text: str, known: Known) -> Iterator[str]:
    """Markers of other models' chats, written out in a text; not those in quotation marks or code."""
    found = dict.fromkeys(ANGLED.findall(text) if "<" in text else ())
    if "INST]" in text:
        found.update(dict.fromkeys(LLAMA.findall(text)))
    if found:
        said = SPOKEN_OF.sub("", text)
        found = {marker: None for marker in found if marker in said}
    if "###" in text:
        headings = dict.fromkeys(HEADINGS.findall(text))
        if any("Input" not in heading for heading in headings):  # alone it is one of a programming problem
            found.update(headings)
    if "</s>" in found and text.count("<s>") >= text.count("</s>") and "[INST]" not in found:
        found.pop("</s>")  # HTML's crossed out words
    if not found and ("Human: " in text or "User: " in text):
        asking = ASKING.search(text)
        if asking is not None and ANSWERING.search(text, asking.end()) is not None:
            found["Human: … Assistant:"] = None
    yield from (marker for marker in found if not known(marker))


def placeholders(text: str) -> Iterator[str]:
    """The first gap that was left to fill in."""
    found = _braces(text) or (BRACKETS.search(text) if "[" in text else None)
    if found is not None:
        yield found[0]
    elif "<no" in text:
        yield from [name for name in NO_INPUTS if name in text][:1]


def calculator_marks(text: str) -> Iterator[str]:
    """The first mark that GSM8K's answers have for a calculator."""
    found = CALCULATOR.search(text) if "<<" in text else None
    if found is not None:
        yield found[0]


def mojibake(text: str) -> Iterator[str]:
    """The first word that was decoded wrongly and what it should be, or what stands around a lost character."""
    if "\ufffd" in text:
        place = text.index("\ufffd")
        yield "'" + " ".join(text[max(0, place - 15) : place + 15].split()) + "'"
        return
    for match in itertools.islice(BROKEN.finditer(text) if any(map(text.__contains__, LEADS)) else (), MOST_LOOKED_AT):
        before = re.split(r"\s", text[max(0, match.start() - 20) : match.start()])[-1]
        word = before + re.split(r"\s", text[match.start() : match.end() + 20])[0]
        repaired = _repaired(word)
        if repaired != word:
            yield f"'{word}' for '{repaired}'"
            return


def invisible_characters(text: str) -> Iterator[str]:
    """The first character that no reader sees, unless its script needs it."""
    if text.replace("\n", "").isprintable():
        return
    if SPACELESS.search(text):
        text = text.replace("\u200b", "")
    found = INVISIBLE.search(text)
    if found is None and not RIGHT_TO_LEFT.search(text):
        found = DIRECTIONS.search(text)
    if found is not None:
        yield f"U+{ord(found[0][0]):04X}"


def secrets(text: str) -> Iterator[str]:
    """Whose key stands in the text, and how it begins; keys of documentation are left out."""
    for part, pattern, name in PATTERNS:
        if part not in text:
            continue
        real = next((match[0] for match in pattern.finditer(text) if not _is_example(part, match[0])), "")
        if real:
            yield f"{name} ({'-----BEGIN' if real.startswith('-') else real[:4]}…, {len(real)} characters)"


def is_refusal(answer: str) -> bool:
    """Whether an answer declines, or says that it is a machine's, where answers begin."""
    head = answer[:HEAD].lower().replace("’", "'")
    if " a" in head or "um" in head:
        naming = SELF_NAMING.search(head)
        if naming is not None and not IN_QUOTES.search(head[: naming.start()]):
            return True
    apologetic = "sorry" in head or "can" in head or "posso" in head or "able" in head
    return apologetic and DECLINES.search(head) is not None


def _braces(text: str) -> re.Match[str] | None:
    """The first placeholder in double braces, unless they are code: there they are meant."""
    if "{{" not in text or any(part in text for part in CODE) or TEMPLATING.search(text):
        return None
    for match in itertools.islice(BRACES.finditer(text), MOST_LOOKED_AT):
        start, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
        if not CODE_LINE.search(text[start : end if end >= 0 else len(text)]):
            return match
    return None


def _repaired(word: str) -> str:
    import ftfy  # only data that looks broken needs it
    import ftfy.badness

    return str(ftfy.fix_encoding(word)) if ftfy.badness.is_bad(word) else word


def _is_example(part: str, key: str) -> bool:
    """Whether a key is one of documentation, or not a key at all; ``part`` says of which kind it is."""
    if part.startswith("PRIVATE"):
        body = key.rpartition("-----")[2]
        return len(set(body)) < 10 or any(word in body.lower() for word in EXAMPLES[:4])
    lowered = (key + _payload(key) if part == "eyJ" else key).lower()
    if any(word in lowered for word in EXAMPLES) or len(set(key)) < 10:
        return True
    if part == "sk-" and max(map(len, re.split("[-_]", key))) < LEAST_RANDOM:
        return True
    return part != "hf_" and not any(map(str.isdigit, key[4:]))


def _payload(token: str) -> str:
    """What a JSON web token says."""
    middle = token.split(".")[1]
    try:
        return base64.urlsafe_b64decode(middle + "=" * (-len(middle) % 4)).decode("utf-8", "replace")
    except binascii.Error:
        return ""


@functools.lru_cache(maxsize=64)  # many rows offer the same tools
def _texts_in(value: str) -> tuple[str, ...]:
    """All texts of a JSON text except keys, in order."""
    found: list[str] = []
    waiting = [json.loads(value)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict | list):
            waiting += reversed(item.values() if isinstance(item, dict) else item)
    return tuple(found)
