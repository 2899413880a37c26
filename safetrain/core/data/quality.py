"""What is wrong with a text by itself: marks of other models' chats, gaps left to fill in, broken encoding, refusals.

Each check first asks whether a character or two stand in the text at all, which is some hundred times quicker than a
search by pattern and settles most rows.
"""

import itertools
import re
from collections.abc import Callable
from typing import Any

Faults = list[tuple[str, str]]  # ids of findings, and a detail of each

ANGLED = re.compile(r"<(?:\|[a-z][a-z0-9_]{1,30}\|>|｜[^｜\n]{2,40}｜>|</?SYS>>|/s>|(?:start|end)_of_turn>|[be]os>)")
LLAMA = re.compile(r"\[/?INST\]")
SPOKEN_OF = re.compile(  # markers in quotation marks, and code: there they are meant
    r"^[ \t]*```.*?^[ \t]*```|([\"'`*])(?:<{1,2}[^<>\n]{1,42}>{1,2}|\[/?INST\])\1", re.MULTILINE | re.DOTALL
)
HEADINGS = re.compile(r"### ?(?:Instruction|Response|Human|Assistant|User|Input|Instrução|Resposta):")
ASKING, ANSWERING = re.compile(r"^(?:Human|User): ", re.MULTILINE), re.compile(r"^(?:Assistant|AI): ", re.MULTILINE)
BRACES = re.compile(r"(?<!\w)\{\{ ?(?!(?:index|id|include|figure|note|hint|cite|main|toc) )[A-Za-z_][\w .-]{0,30}\}\}")
GAPS = re.compile(
    r"(?<![\w\])\\])\[(?:(?:[Yy]our|[Ii]nsert|INSERT|Seu|Sua|[Ii]nsira) [^\[\]\n]{2,40}|[Nn]ome d[aoe] [^\[\]\n]{2,24}"
    r"|(?:seu|sua) (?:nome|e-?mail|endereço|telefone|número|empresa|cargo|cidade|idade|assinatura)\b[^\[\]\n]{0,30}"
    r"|(?:[Cc]ompany|[Rr]ecipient|[Cc]lient|[Cc]ustomer)(?:['’]s)?(?: [A-Za-z]{2,15})?"
    r" (?:[Nn]ame|[Aa]ddress|[Ee]-?mail|[Pp]hone|[Nn]umber|[Tt]itle|[Ll]ogo|[Ww]ebsite)(?:[ /,][^\[\]\n]{1,30})?"
    r"|(?:[Ff]irst|[Ll]ast|[Ff]ull) [Nn]ame|Name|Nome|REDACTED)\](?![(\[])"
)
NO_INPUTS = ("<noinput>", "<no input>", "<nooutput>")
MARKUP = ("```", "{%", "</", "\\", "v-if", "=>", "{{#", "${")  # what is written in double braces there is code
MOST_BRACES = 20  # gaps of one text whose line is looked at
CODE_LINE = re.compile(r"[`=<;]|[\"']\{\{|^\s*(?:- )?[a-z_][\w.-]*: *\{\{ ")  # what a gap's line has if it is code
TEMPLATING = re.compile(r"jinja|mustache|handlebars|ansible|angular|django|liquid|twig|vue|helm", re.IGNORECASE)
BROKEN = re.compile(r"[Â-ôÐ-ï][\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]|[√├][©®°±†£•¶ß´¨≠ÆØ∞≤≥¥µ∂∑∏πºªæø¿¡]")
MOST_BROKEN = 20  # places of one text that are looked at
INVISIBLE = re.compile(
    "[\u200b\u2060-\u2064\ufeff\u180e\u00ad\x7f-\x9f\ufff9-\ufffb]|(?<=[ -~])[\u200c\u200d](?=[ -~])"
)
CONTROLS_OF_LATIN = re.compile(rb"\xc2[\x80-\x9f\xad]")
HIDDEN_PUNCTUATION = re.compile(rb"\xe2\x80[\x8b-\x8d\xaa-\xae]")
RARE = (b"\xef\xbf", b"\xef\xbb\xbf", b"\xf3\xa0", b"\xe2\x81", b"\xe1\xa0\x8e", b"\x7f")
LEADS = ("Ã", "Â", "â€", "Å", "Ä", "Ð", "Ñ", "√", "├")
TAGS = re.compile("(?<![\U0001f3f4\U000e0000-\U000e007f])[\U000e0000-\U000e007f]")  # behind a black flag: a region's
DIRECTIONS = re.compile("[\u202a-\u202e\u2066-\u2069]")
RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefe]")
SPACELESS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")  # Thai and others part words with U+200B
SELF_NAMING = re.compile(  # an AI engineer is none
    r"\b(?:as|i am|i'm|being) (?:just |only )?an? (?:(?:large )?language model"
    r"|(?:ai|artificial intelligence)(?=\W*$|\s?[,.;:!?)(–—-]| (?:(?:language )?model|assistant|chatbot|bot|system"
    r"|program|developed|trained|created|designed|built|made|and|but|so|not|without|i|my|it|there)\b))"
    r"|\b(?:como|sou) (?:apenas )?uma? (?:modelo de linguagem|modelo de lenguaje"
    r"|(?:ia|inteligência artificial)(?=\W*$|\s?[,.;:!?)(–—-]| (?:de linguagem|assistente|generativa|treinada"
    r"|desenvolvida|criada|e|mas|não|eu)\b))"
)
SELF_NAMES = (" ai", "language model", "artificial", "uma ia", "de linguagem", "de lenguaje")
IN_QUOTES = re.compile(r"[\s(=:][\"'`“][^\"'`”\n]*$")  # an answer that is said by somebody in it
DECLINES = re.compile(
    r"(?:i'm|i am|we're) (?:very |really |so )?sorry,? (?:but )?(?:i|we) "
    r"(?:can't|cannot|can not|am not able|am unable|won't)"
    r"|i (?:can't|cannot|can not|am unable to|am not able to) (?:assist"
    r"|help(?! (?:but|it|myself|(?:the way|how|what) i|\w+ing)\b)"
    r"|provide(?! (?:an? |any )?(?:better|clearer|greater|finer|stronger|simpler|more|enough)\b)"
    r"|fulfil|comply|answer that|do that)"
    r"|(?:sinto muito|desculpe|lamento),? (?:mas )?(?:eu )?não posso"
    r"|não posso (?:ajudar|fornecer|responder|atender)"
)
HEAD = 160  # characters of an answer in which a refusal stands


def text_faults(text: str, known: Callable[[str], bool]) -> Faults:
    """What is found in ``text``; ``known`` says of a chat marker whether it is meant to stand there."""
    found: Faults = []
    angled, bracket = "<" in text, "[" in text
    if angled or bracket or "### " in text or "###I" in text or "Assistant: " in text or "AI: " in text:
        found += _markers(text, known)
    if angled or bracket or "{{" in text:
        found += _placeholders(text)
    if not text.isascii() or "\x7f" in text:
        found += _characters(text)
    return found


def is_refusal(answer: str) -> bool:
    """Whether an answer declines, or says that it is a machine's, where answers begin."""
    head = answer[:HEAD].lower().replace("’", "'")
    naming = SELF_NAMING.search(head) if any(name in head for name in SELF_NAMES) else None
    if naming is not None and not IN_QUOTES.search(head[: naming.start()]):
        return True
    apologetic = "sorry" in head or "can" in head or "posso" in head or "unable" in head or "not able" in head
    return apologetic and DECLINES.search(head) is not None


def _markers(text: str, known: Callable[[str], bool]) -> Faults:
    found = dict.fromkeys(ANGLED.findall(text) if "<" in text else ())
    if "INST]" in text:
        found.update(dict.fromkeys(LLAMA.findall(text)))
    if found:
        said = SPOKEN_OF.sub("", text)
        found = {marker: None for marker in found if marker in said}
    if "###" in text:
        places = [match for match in HEADINGS.finditer(text) if match.start() == 0 or text[match.start() - 1] == "\n"]
        headings = dict.fromkeys(match[0] for match in places)
        if any("Input" not in heading for heading in headings):  # alone it is one of a programming problem
            found.update(headings)
    if "</s>" in found and text.count("<s>") >= text.count("</s>") and "[INST]" not in found:
        found.pop("</s>")  # HTML's crossed out words
    if not found and _is_dialogue(text):
        found["Human: … Assistant:"] = None
    return [("FOREIGN-MARKERS", marker) for marker in found if not known(marker)]


def _is_dialogue(text: str) -> bool:
    """Two searches, because one for both would look for an answer from each question on."""
    if "Human: " not in text and "User: " not in text:
        return False
    asking = ASKING.search(text)
    return asking is not None and ANSWERING.search(text, asking.end()) is not None


def _braces(text: str) -> re.Match[str] | None:
    """The first gap in double braces, unless they are code: there they are meant."""
    if "{{" not in text or any(part in text for part in MARKUP) or TEMPLATING.search(text):
        return None
    for match in itertools.islice(BRACES.finditer(text), MOST_BRACES):
        start, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
        if not CODE_LINE.search(text[start : end if end >= 0 else len(text)]):
            return match
    return None


def _placeholders(text: str) -> Faults:
    gap = _braces(text) or (GAPS.search(text) if "[" in text else None)
    if gap is not None:
        return [("PLACEHOLDERS", gap[0])]
    if "<no" in text:
        return [("PLACEHOLDERS", name) for name in NO_INPUTS if name in text][:1]
    return []


def _characters(text: str) -> Faults:
    """Bytes are searched first, and many times faster than characters."""
    data = text.encode("utf-8", "surrogatepass")
    latin = b"\xc2" in data
    broken = _mojibake(text) if latin or any(lead in text for lead in LEADS) else ""
    found: Faults = [("MOJIBAKE", broken)] if broken else []
    if (
        any(part in data for part in RARE)
        or (latin and CONTROLS_OF_LATIN.search(data))
        or (b"\xe2\x80" in data and HIDDEN_PUNCTUATION.search(data))
    ):
        found += _hidden(text, broken=bool(broken))
    return found


def _hidden(text: str, *, broken: bool) -> Faults:
    """``broken``: what was decoded wrongly holds such characters, and is told by itself."""
    found: Faults = []
    if "\ufffd" in text:
        found.append(("REPLACEMENT-CHARACTERS", _around(text, text.index("\ufffd"))))
    seen = text.replace("\u200b", "") if SPACELESS.search(text) else text
    invisible = INVISIBLE.search(seen) or TAGS.search(seen)
    if invisible is not None and not broken:
        found.append(("INVISIBLE-CHARACTERS", f"U+{ord(invisible[0][0]):04X}"))
    direction = DIRECTIONS.search(text)
    if direction is not None and not RIGHT_TO_LEFT.search(text):
        found.append(("DIRECTION-CONTROLS", f"U+{ord(direction[0]):04X}"))
    return found


def _mojibake(text: str) -> str:
    """The first word that was decoded wrongly, and what it should be; empty where there is none."""
    for number, match in enumerate(BROKEN.finditer(text)):
        if number == MOST_BROKEN:
            break
        start, end = match.start(), match.end()
        while start > 0 and end - start < 40 and not text[start - 1].isspace():
            start -= 1
        while end < len(text) and end - start < 40 and not text[end].isspace():
            end += 1
        repaired = _repaired(text[start:end])
        if repaired:
            return f"'{text[start:end]}' for '{repaired}'"
    return ""


def _repaired(word: str) -> str:
    ftfy = _ftfy()
    repaired = str(ftfy.fix_encoding(word))
    return repaired if repaired != word and ftfy.badness.is_bad(word) else ""


def _ftfy() -> Any:
    import ftfy  # only data that looks broken needs it
    import ftfy.badness

    return ftfy


def _around(text: str, place: int) -> str:
    return "'" + " ".join(text[max(0, place - 15) : place + 15].split()) + "'"
