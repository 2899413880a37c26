"""Checks of a row's text. Each first looks for a character or two that its pattern needs, which is much faster."""

import re
from collections.abc import Iterator

import numpy as np

from safetrain.core.text.tokenizer import Controls
from safetrain.data.rows import Row

MARKER = re.compile(  # not in quotation marks
    r"""(?:(["'`*])|(?<!["'`*]))(<(?:\|[a-z][a-z0-9_]{1,30}\|>|｜[^｜\n]{2,40}｜>|</?SYS>>|/s>|(?:start|end)_of_turn>"""
    r"|[be]os>)|\[/?INST\])(?(1)(?!\1))"
)
FENCE = re.compile(r"^[ \t]*```.*?^[ \t]*```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^### ?(?:Instruction|Response|Human|Assistant):", re.MULTILINE)
ASKING, ANSWERING = re.compile(r"^(?:Human|User): ", re.MULTILINE), re.compile(r"^(?:Assistant|AI): ", re.MULTILINE)

BRACES = re.compile(r"(?<!\w)\{\{ ?[A-Za-z_][\w-]{0,30} ?\}\}")
CODE = ("`", "{%", "</", "\\", "=", "{{#", "${", '"{{', "'{{")  # with one of these in the text, double braces are code
TEMPLATING = re.compile(r"jinja|mustache|handlebars|ansible|angular|django|liquid|twig|vue|helm", re.IGNORECASE)
BRACKETS = re.compile(
    r"(?<![\w\])\\])\[(?:(?:[Yy]our|[Ii]nsert|Seu|Sua|[Ii]nsira) [^\[\]\n]{2,40}|seu nome|[Nn]ome d[ao] \w{2,20}"
    r"|(?:Company|Recipient|Client|Customer|First|Last|Full) (?:Name|Address|Email|Phone)|Name|Nome)\](?![(\[])"
    r"|<no ?(?:in|out)put>"
)

BROKEN = re.compile(r"[ÂÃâÅÄÐÑ√├][^\x00-\x7f]")  # occurs in all wrongly decoded text
LAYING_OUT = "\u200b\u202a-\u202e\u2066-\u2069"  # word breaks and writing direction, which some scripts need
LAID_OUT = re.compile("[\u0590-\u08ff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\ufb1d-\ufdff\ufe70-\ufefe]")  # scripts
UNSEEN = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2060-\u2064\ufeff\u180e\u00ad\ufff9-\ufffb"
JOINERS = (
    "|(?<=[ -~])[\u200c\u200d](?=[ -~])"
    "|(?<![\U0001f3f4\U000e0000-\U000e007f])[\U000e0000-\U000e007f]"  # tags; after a black flag they name a region
)
INVISIBLE, INVISIBLE_IN_SCRIPTS = re.compile(f"[{UNSEEN}{LAYING_OUT}]{JOINERS}"), re.compile(f"[{UNSEEN}]{JOINERS}")
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")  # complete terminal escape sequences

REFUSAL = re.compile(  # at the beginning of a sentence or clause
    r"(?:^[\s\"“*(]*|[.!?,]\s)(?:unfortunately |but |and )?(?:"
    r"(?:as|i am|i'm) (?:just |only )?an? (?:(?:large |ai )?language model\b|(?:ai|artificial intelligence)"
    r"(?:[,.!]|$| (?:and|but|(?:language )?model|assistant|chatbot)\b))"
    r"|(?:como|(?:eu )?sou) (?:apenas )?uma? (?:modelo de linguagem\b|(?:ia|inteligência artificial)[,.!])"
    r"|(?:i'm|i am|we're) (?:very |really |so )?sorry,? (?:but )?(?:i|we) (?:can't|cannot|am (?:not |un)able|won't)\b"
    r"|i (?:can't|cannot|am unable to|am not able to) (?:assist|comply|fulfill?|answer that|do that"
    r"|help (?:you|with)\b|provide (?:you|that|this|instructions|information|advice|assistance)\b)"
    r"|(?:sinto muito|desculpe|lamento),? (?:mas )?(?:eu )?não posso\b"
    r"|(?:eu )?não posso (?:ajudar|fornecer|responder|atender)\b)"
)
HEAD = 160  # characters of an answer that are searched for a refusal

KEY_PARTS = ("AKIA", "ghp_", "gho_", "ghs_", "github_pat_", "glpat-", "sk-", "hf_", "xox", "AIza", "_live_", "npm_",
             "SG.", "PRIVATE KEY-----")  # fmt: skip
KEY = re.compile(  # from AWS, GitHub, GitLab, model providers, Hugging Face, Slack, Google, Stripe, npm, SendGrid
    r"\bAKIA[0-9A-Z]{16}\b|\bgh[ops]_[A-Za-z0-9]{36}\b|\bgithub_pat_[A-Za-z0-9_]{50,}|\bglpat-[A-Za-z0-9_-]{20}\b"
    r"|\bsk-(?=[\w-]{0,200}?[A-Za-z0-9]{16})[A-Za-z0-9_-]{20,}|\bhf_[A-Za-z]{34}\b|\bxox[abeoprs]-[A-Za-z0-9-]{10,}"
    r"|\bAIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])|\b[sr]k_live_[A-Za-z0-9]{20,}|\bnpm_[A-Za-z0-9]{36}\b"
    r"|\bSG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}|-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----[\s\\nr]*[A-Za-z0-9+/]{20,64}"
)
EXAMPLES = ("example", "your", "xxxx", "1234567890", "abcdef", "aaaa", "0000")  # in keys from documentation

MAIL = re.compile(  # or, without a group, the rest of a web address
    r"://\S*|(?<![\w.+-])([A-Za-z0-9][\w.+-]{0,63})@((?:[A-Za-z0-9][A-Za-z0-9-]*\.)+)"
    r"(?i:(com|org|net|edu|gov|info|biz|name|pro|app|dev|online|[a-z]{2}))(?![\w@-]|\.\w)"
)
SHARED_MAIL = re.compile(  # of examples, offices and programs
    r"(?i)^(?:(?:your|test)[\w.-]*|(?:info|support|contact|contato|admin|sales|help|service|office|user(?:name)?|name|e?mail"
    r"|you|me|hello|someone|postmaster|webmaster|git|root|abuse|press|jobs)\d*)@|no.?reply|doe\d*@"
    r"|@(?:[\w-]+\.)*(?:[\w-]*(?:example|exemplo|domain|company|e-?mail|website)|acme|test|abc|xyz)\."
)
DIGITS = re.compile(r"\d[\d ()./-]{5,}\d")  # in every telephone number
PHONE = re.compile(  # after a word that says so, international, with an area code in brackets, or in three parts
    r"://\S*|\b(?i:order|invoice|isbn|iban|ref|serial|tracking|ticket|account|id|pedido)\b[^\d.!?+(]{0,20}\d[\d -]*"
    r"|\b(?i:(?:tele)?(?:phone|fone)|tel|mobile|cell|celular|whatsapp|fax)(?: number| no| nr)?(?: is|[:.]+) ?"
    r"(\+?\(?\d(?:[ ()/.-]{0,2}\d){6,12})(?![\w-]|[.,/]\d)"
    r"|(?<![\w+.,/#~-])(\+[1-9](?:[ ()-]{0,2}\d){8,13}|\(0?[1-9]\d{1,2}\) ?\d{3,5}[ -]\d{4}"
    r"|(?:1[-.])?[2-9]\d\d(?:-[2-9]\d\d-|\.[2-9]\d\d\.)\d{4})(?![\w-]|[.,/]\d)"
)
INVENTED = re.compile(r"555\d{4}(?:\d{3})?$|1234567|(\d)\1{5}|^[01]?8(?:00|33|44|55|66|77|88)\d{7}$")  # or free

CLOSING, SENTENCE_ENDS = "\"'”’»)]}*_`", ".!?…。！？।؟"
NO_PROSE = re.compile(r"^(?:[-*•+#|>$@\t]|    |\d+[.)]|\w\))|://|[{}<>=\\|`]|\w\(|\s[#@]\w+$")
UNFINISHED = re.compile(  # ends with a word that needs another, or within a second sentence; no greetings
    r"[,:(–—]$|\b(?:the|an?|of|and|to|in|with|for|that|from|by|as|at|or|d[aeo]s?|um|uma|para|em|com|que|el|las?|los|y|un"
    r"|una|de[rnms]|die|das|und|mit|von|zu|le|les|et|des)$|[。！？][^。！？\"“”]+$|[^\W\d_A-Z]{3}[.!?][\"')”’»]*\s+"
    r"(?!(?i:yours?|sincerely|regards|best|love|warm|kind|thank|cheers|aten|abra|att|cord|signed))[^\W\d_][^.!?\"“”]*$"
)
NOT_JUDGED, ENDED, UNMARKED, CUT = range(4)  # ways in which an answer ends
PROSE_LETTERS, LEAST_JUDGED, ENDED_SHARE, LEAST_AT_LIMIT = 25, 100, 0.95, 5  # the last: answers of the greatest length


def text_findings(row: Row, controls: Controls) -> Iterator[tuple[str, str]]:
    """Run all checks on a row; yields the findings' ids and details.

    FOREIGN-MARKERS leaves out stop tokens, which STOP-IN-TEXT reports, and the tokenizer's own tokens in bare text.
    """
    words = row.text or "\n\n".join([message.content for message in row.messages])
    own_markers = controls.tokens if row.format == "text" else None
    for marker in dict.fromkeys(foreign_markers(words)):
        if marker not in controls.stops and (own_markers is None or not own_markers.fullmatch(marker)):
            yield "FOREIGN-MARKERS", marker
    for identifier, check in CHECKS.items():
        if detail := check(words):
            yield identifier, detail
    others = [*(message.details for message in row.messages), row.tools]  # thinking, calls and tools
    for key in secrets("\n\n".join([words, *(text.replace("\\n", "\n") for text in others)])):
        yield "SECRETS", f"a secret key ({key[:5]}…, {len(key)} characters)"
    for call in (call for message in row.messages for call in message.keys.get("tool_calls", ())):
        if isinstance(call["function"]["arguments"], str):
            yield "ARGUMENTS-NOT-JSON", repr(call["function"]["arguments"])
    if not all(message.content.strip() for message in row.messages if message.role in ("user", "tool")):
        yield "EMPTY-MESSAGE", ""
    if row.messages and row.messages[-1].role == "user":
        yield "ENDS-WITH-USER", ""
    if not row.is_rejected and any(
        is_refusal(message.content) for message in row.messages if message.role == "assistant"
    ):
        yield "REFUSALS", ""
    answers = [message.content for message in row.messages if message.role == "assistant"]
    for detail in () if row.is_rejected else personal_data("\n\n".join([row.text, *answers])):
        yield "PERSONAL-DATA", detail


def foreign_markers(text: str) -> list[str]:
    """Find literal markers of other chat formats, except in quotation marks or code."""
    markers: list[str] = []
    if "<" in text or "INST]" in text:
        markers = [match[2] for match in MARKER.finditer(FENCE.sub("", text) if "```" in text else text)]
        if "<s>" in text and "[INST]" not in markers:
            markers = [marker for marker in markers if marker != "</s>"]  # strikethrough in HTML
    if "###" in text:
        markers += HEADING.findall(text)
    asking = ASKING.search(text) if not markers and ("Human: " in text or "User: " in text) else None
    if asking is not None and ANSWERING.search(text, asking.end()) is not None:
        markers.append("Human: … Assistant:")
    return markers


def placeholder(text: str) -> str:
    """Find the first unfilled placeholder."""
    gap = None
    if "{{" in text and not any(part in text for part in CODE) and not TEMPLATING.search(text):
        gap = BRACES.search(text)
    if gap is None and ("[" in text or "<no" in text):
        gap = BRACKETS.search(text)
    return gap[0] if gap else ""


def mojibake(text: str) -> str:
    """Find the first wrongly decoded word and its correction, or the text around a lost character."""
    if "\ufffd" in text:
        place = text.index("\ufffd")
        return "'" + " ".join(text[max(0, place - 15) : place + 15].split()) + "'"
    if text.isascii() or not BROKEN.search(text):
        return ""
    import ftfy  # imported only for data that may be broken
    import ftfy.badness

    for word in re.split("[ \n\t]+", text):
        if ftfy.badness.is_bad(word) and (repaired := ftfy.fix_encoding(word)) != word:
            return f"'{word}' for '{repaired}'"
    return ""


def invisible_character(text: str) -> str:
    """Find the first invisible character that the text's script does not need."""
    letter = None if text.replace("\n", "").isprintable() else _invisible_in(text).search(text)
    return f"U+{ord(letter[0]):04X}" if letter else ""


def without_invisible(text: str) -> str:
    """Remove what ``invisible_character`` finds; vertical tabs and form feeds become line ends."""
    while invisible_character(text):  # a removal may create another match
        text = ESCAPES.sub("", text)
        text = _invisible_in(text).sub(lambda match: "\n" if match[0] in "\v\f" else "", text)
    return text


def _invisible_in(text: str) -> re.Pattern[str]:
    return INVISIBLE_IN_SCRIPTS if LAID_OUT.search(text) else INVISIBLE


def secrets(text: str) -> list[str]:
    """Find API keys that look real, unlike examples in documentation and names with dashes."""
    found = list[str]()
    for key in KEY.findall(text) if any(part in text for part in KEY_PARTS) else ():
        value = key.rpartition("-----")[2]
        is_random = len(set(value)) >= 10 and (value.startswith("hf_") or any(map(str.isdigit, value[4:])))
        found += [key] if is_random and not any(word in value.lower() for word in EXAMPLES) else []
    return found


def personal_data(text: str) -> Iterator[str]:
    """Find e-mail addresses and telephone numbers that may be a person's, masked."""
    for mail in MAIL.finditer(text) if "@" in text else ():
        if mail[1] and not SHARED_MAIL.search(mail[0]):
            yield f"an e-mail address ({mail[1][0]}…@{mail[2][0]}….{mail[3]})"
    for phone in PHONE.finditer(text) if DIGITS.search(text) else ():
        number = phone[1] or phone[2]
        if number and not INVENTED.search(re.sub(r"\D", "", number)):
            yield f"a telephone number ({number[:3]}…{number[-2:]})"


def ending(answer: str) -> int:
    """How an answer ends: judged is its last line if that is prose."""
    line = answer.rstrip().rpartition("\n")[2]
    words = line.rstrip(CLOSING)
    if len(words) < PROSE_LETTERS or NO_PROSE.search(line):
        return NOT_JUDGED
    if words[-1] in SENTENCE_ENDS:
        return ENDED
    if words != line or not (words[-1].isalpha() or words[-1] in ",:(–—"):
        return NOT_JUDGED
    return CUT if UNFINISHED.search(words) else UNMARKED


def cut_answers(endings: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Find the rows whose answer breaks off where nearly all others end; (rows,) each, ``lengths`` in characters."""
    at_limit = (endings > ENDED) & (lengths + 1 >= lengths.max(initial=0))  # an export may also strip a space
    at_limit &= at_limit.sum() >= LEAST_AT_LIMIT  # else one without a mark may be a title
    judged = endings[~at_limit & (endings != NOT_JUDGED)]
    if (judged == ENDED).sum() < ENDED_SHARE * max(LEAST_JUDGED, len(judged)):
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(at_limit | (endings == CUT))


def is_refusal(answer: str) -> bool:
    """Whether an answer begins with a refusal, or with "as an AI model"."""
    return REFUSAL.search(answer[:HEAD].lower().replace("’", "'")) is not None


CHECKS = {"PLACEHOLDERS": placeholder, "MOJIBAKE": mojibake, "INVISIBLE-CHARACTERS": invisible_character}
