"""Keys and personal data in a text. What is found is shown masked: a report is read by more people than the data."""

import base64
import binascii
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from safetrain.core.data.quality import Faults

PRIVATE = "PRIVATE KEY-----"
KEYS = (  # a part that must stand in the text, what it looks like, whose it is
    ("AKIA", r"\bAKIA[0-9A-Z]{16}\b", "an AWS key"),
    ("ASIA", r"\bASIA[0-9A-Z]{16}\b", "an AWS key"),
    ("ghp_", r"\bghp_[A-Za-z0-9]{36}\b", "a GitHub token"),
    ("gho_", r"\bgho_[A-Za-z0-9]{36}\b", "a GitHub token"),
    ("ghs_", r"\bghs_[A-Za-z0-9]{36}\b", "a GitHub token"),
    ("github_pat_", r"\bgithub_pat_[A-Za-z0-9_]{50,}", "a GitHub token"),
    ("glpat-", r"\bglpat-[A-Za-z0-9_-]{20}\b", "a GitLab token"),
    ("sk-", r"\bsk-(?:proj-|ant-(?:api\d\d-)?|or-v1-)?[A-Za-z0-9_-]{20,}", "a key of a model's provider"),
    ("hf_", r"\bhf_[A-Za-z]{34}\b", "a Hugging Face token"),
    ("xox", r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}", "a Slack token"),
    ("AIza", r"\bAIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])", "a Google key"),
    ("_live_", r"\b[sr]k_live_[A-Za-z0-9]{20,}", "a Stripe key"),
    ("npm_", r"\bnpm_[A-Za-z0-9]{36}\b", "an npm token"),
    ("SG.", r"\bSG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}", "a SendGrid key"),
    (PRIVATE, r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----(?:\s|\\+[nr])*[A-Za-z0-9+/]{20,64}", "a private key"),
    ("eyJ", r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{20,}", "a JSON web token"),
)
PATTERNS = tuple(
    (part, re.compile(pattern), name, "-" if "-" in part else "_" if "_" in part else "")
    for part, pattern, name in KEYS
)
NAMED_EXAMPLES = ("example", "your", "xxxx", "john doe")
EXAMPLES = (*NAMED_EXAMPLES, "1234567890", "abcdef", "aaaa", "0000")  # keys of documentation
LEAST_RANDOM = 16  # letters and digits in a row that a provider's key has; words between dashes are shorter

MAIL = re.compile(r"(?<![\w.+/:-])([A-Za-z0-9][\w.+-]{1,63})@((?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,24})\b(?![/(:=])")
NO_PERSON = re.compile(
    r"^(?:[\w-]+\.)*(?:(?:example|test|domain\w?|email|company|mail|site|server|host|foo|bar|abc|xyz|acme|yourdomain"
    r"|mydomain|empresa|exemplo|ejemplo|exemple|beispiel|dominio|npm|contoso\w*|fabrikam|litwareinc|adatum|northwindtraders|tailspintoys"
    r"|proseware|wingtiptoys|fourthcoffee|googlegroups)\.\w+(?:\.\w+)?|(?:lists|noreply)\.[\w.-]+|invalid|local|localhost)$",
    re.IGNORECASE,
)  # fmt: skip
TOP_DOMAINS = re.compile(  # the usual ones, beside those of two letters
    r"com|org|net|edu|gov|mil|int|info|biz|name|pro|dev|app|tech|online|store|shop|site|xyz|club|email|cloud|blog"
    r"|live|life|world|today|news|media|agency|digital|solutions|studio|design|academy|group|global|center|company"
    r"|ventures|systems|software|network|museum|travel|jobs|mobi|tel|asia|cat|coop|aero|post|page|wiki|space"
    r"|website|top|icu|vip|work|art|bank|health|law|legal|consulting|engineering|education|school|university"
    r"|church|foundation|house|home|london|berlin|paris|nyc|amsterdam|tokyo|swiss|africa|fun|games|team|tools|zone"
    r"|city|photography|one"
)
FILE_ENDINGS = frozenset(("js", "ts", "rb", "go", "cs", "kt"))  # of two letters, and no country's
ROLES = frozenset(
    ("info", "support", "contact", "admin", "sales", "noreply", "reply", "help", "hello", "office", "webmaster",
     "postmaster", "git", "username", "name", "email", "test", "example", "someone", "me", "you", "contato",
     "suporte", "usuario", "security", "secure", "team", "community", "press", "jobs", "careers", "billing", "legal",
     "privacy", "abuse", "opencode", "alerts", "newsletter", "feedback", "service", "letters", "editor", "training",
     "academy", "templates", "sponsor", "maintainers", "vendas", "atendimento", "imprensa", "ouvidoria", "sac", "rh",
     "ajuda", "proposta", "propostas", "recursos", "direcao", "eventos", "reservas", "marketing", "customerservice")
)  # fmt: skip
NOBODY = re.compile(
    r"\w*(?:user[a-z]?\d*|feedback|support|enquiries)|j(?:ohn|ane|oe)?[._-]?doe\d*|john|jane|joe|bob|alice|foo|bar"
)
OFFICE = re.compile(  # how names begin that no private person has at a firm
    r"senha|contato|suporte|atendimento|ouvidoria|secretaria|faleconosco|protocolo|licitac|gabinete|coordenacao"
    r"|comunicacao|biblioteca|reitoria|matricula|cadastro|financeiro|comercial|imprensa|vendas|support|customer"
)
PRIVATE_MAIL = re.compile(  # where private persons have their addresses
    r"^(?:gmail|googlemail|hotmail|outlook|live|msn|yahoo|ymail|icloud|me|mac|aol|proton|protonmail|gmx|web|zoho|mail"
    r"|yandex|qq|163|126|naver|uol|bol|terra|ig|globo|globomail|sapo|orange|wanadoo|free|laposte|libero|t-online"
    r"|comcast|verizon|att|netcabo|clix|tutanota|fastmail|hey)\.\w+(?:\.\w+)?$",
    re.IGNORECASE,
)
NEAR = 250  # characters
PATTERN_TEXT = re.compile(  # whoever explains these makes addresses and numbers up
    r"\breg(?:ular )?ex(?:p|es|pressions?)?\b|express(?:ão|ões) regular(?:es)?", re.IGNORECASE
)
SHOWN = re.compile(r"(?<!`)`(?!`)[^`\n]{1,200}`(?!`)")
LUHN = re.compile(r"\bluhn\b", re.IGNORECASE)  # whoever explains how cards are checked makes one up
DIGITS = re.compile(r"[0-9](?:[0-9]|[ ().\-/](?=[0-9(])|[)] (?=[0-9])){7,}")
PHONE = re.compile(
    r"(?<![\w.+])(?:\+(?!0)\d{1,3}[ .-]?(?:\(\d{1,4}\)|\d{1,4})(?:[ .-]?\d{2,5}){2,4}"
    r"|\(\d{3}\) ?\d{3}-\d{4}|\(\d{2}\) ?9?\d{4}-\d{4})(?![\w-])"
)
FICTION = re.compile(
    r"^(?:\+1\D?)?\(?[2-9]\d\d\)?\D?555\D?\d{4}$|123.{0,2}45.?6|000.?000|1234.?5678|9999.?9999|987.?654.?321"
    r"|2147483647"
)
FREE_CALLS = re.compile(r"(?:\+1\D?)?\(?8(?:00|33|44|55|66|77|88)\D")  # to firms
YEARS = re.compile(r"^\+(?:19|20)\d\d[-. ][01]\d[-. ][0-3]\d|^\(\d\d\) ?(?:1\d|20)\d\d-(?:1\d|20)\d\d$")  # no phones
CARD = re.compile(r"(?<![\w.-])(?:[3-6]\d{3}([ -]?)\d{4}\1\d{4}\1\d{4}|3[47]\d{2}([ -]?)\d{6}\2\d{5})(?![\w.-]|-\d)")
TEST_CARDS = (
    "4111111111111111",
    "4242424242424242",
    "5555555555554444",
    "378282246310005",
    "371449635398431",
    "4012888888881881",
)
IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b")
NATIONAL = (  # a form, its module in python-stdnum, a name
    (re.compile(r"\b\d{3}\.\d{3}\.\d{3}-\d{2}\b"), "br.cpf", "a Brazilian CPF"),
    (re.compile(r"\b\d{2}\.\d{3}\.\d{3}/\d{4}-\d{2}\b"), "br.cnpj", "a Brazilian CNPJ"),
    (re.compile(r"(?<![\w-])(?!000|666|9\d\d)\d{3}-(?!00)\d{2}-(?!0000)\d{4}(?![\w-])"), "us.ssn", "a US SSN"),
    (re.compile(r"\b[12] ?\d{2} ?(?:0[1-9]|1[0-2]) ?\d{2} ?\d{3} ?\d{3} ?\d{2}\b"), "fr.nir", "a French NIR"),
)
IN_CONTEXT = (  # numbers that only the word before them tells from others
    (re.compile(r"\b(?:NIF|contribuinte)\b\D{0,12}(\d{3} ?\d{3} ?\d{3})\b"), "pt.nif", "a Portuguese NIF"),
    (re.compile(r"\bCPF\b\D{0,12}(\d{11})\b"), "br.cpf", "a Brazilian CPF"),
    (re.compile(r"\b(?:DNI|NIF)\b\D{0,12}(\d{8}-?[A-Z])\b"), "es.dni", "a Spanish DNI"),
    (re.compile(r"\bPESEL\b\D{0,12}(\d{11})\b"), "pl.pesel", "a Polish PESEL"),
    (re.compile(r"\bBSN\b\D{0,12}(\d{9})\b"), "nl.bsn", "a Dutch BSN"),
    (re.compile(r"\b[Cc]odice [Ff]iscale\b\W{0,4}([A-Z]{6}\d{2}[A-Z]\d{2}[A-Z]\d{3}[A-Z])\b"), "it.codicefiscale",
     "an Italian codice fiscale"),
)  # fmt: skip
CONTEXT_WORDS = ("NIF", "contribuinte", "CPF", "DNI", "PESEL", "BSN", "iscale")


def secrets_in(text: str) -> Faults:
    """Keys that open something."""
    found = []
    with_dash, with_bar = "-" in text, "_" in text
    for part, pattern, name, sign in PATTERNS:
        if (sign == "-" and not with_dash) or (sign == "_" and not with_bar) or part not in text:
            continue
        real = next((match[0] for match in pattern.finditer(text) if not _is_example(part, match[0])), "")
        if real:
            found.append(("SECRETS", f"{name} ({_masked_key(real)})"))
    return list({detail.partition(" (")[0]: (identifier, detail) for identifier, detail in found[::-1]}.values())[::-1]


def personal_data_in(text: str, without: Collection[str] = ()) -> Faults:
    """What names a person or their money, but for the addresses ``without``.

    In single backticks stands what a text shows as an example.
    """
    if "`" in text:
        text = SHOWN.sub("``", text)
    found: list[str] = []
    if "@" in text:
        found += [masked_mail(mail) for mail in _mails(text) if mail not in without][:1]
    if DIGITS.search(text):
        found += [*_phones(text), *_cards(text), *_ids(text)]
    return [("PERSONAL-DATA", detail) for detail in found]


def mails_in(text: str) -> set[str]:
    """The addresses that are personal data, in lower case."""
    return set(_mails(SHOWN.sub("``", text)))


def masked_mail(mail: str) -> str:
    """What is shown of an address."""
    return f"an e-mail address ({mail[0]}•••@•••.{mail.rpartition('.')[2]})"


def masked(value: str) -> str:
    """The ends of a value, and a dot for each letter and digit between them."""
    kept = 2 if len(value) < 12 else 3
    middle = re.sub(r"[^\W_]", "•", value[kept:-2])
    return value[:kept] + middle + value[-2:]


def _is_example(part: str, key: str) -> bool:
    """Whether a key is one of documentation, or no key at all; ``part`` says of which kind it is."""
    if part == PRIVATE:  # the first letters of many are alike, and without a digit
        body = key.rpartition("-----")[2]
        return len(set(body)) < 10 or any(word in body.lower() for word in NAMED_EXAMPLES)
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


def _masked_key(key: str) -> str:
    head = key[: 11 if key.startswith("github_pat_") else 4]
    return "-----BEGIN …" if key.startswith("-----") else f"{head}…, {len(key)} characters"


def _mails(text: str) -> Iterator[str]:
    """Addresses that name a person, as far as they say, in lower case."""
    for match in MAIL.finditer(text):
        name, domain = match[1].lower(), match[2].lower()
        top = domain.rpartition(".")[2]
        exists = TOP_DOMAINS.fullmatch(top) is not None or (len(top) == 2 and top not in FILE_ENDINGS)
        if exists and not (NO_PERSON.match(domain) or _is_role(name, domain) or _is_of_patterns(text, match)):
            yield f"{name}@{domain}"


def _is_of_patterns(text: str, match: re.Match[str]) -> bool:
    """Whether regular expressions are spoken of beside it."""
    return PATTERN_TEXT.search(text, max(0, match.start() - NEAR), match.end() + NEAR) is not None


def _is_role(name: str, domain: str) -> bool:
    """Whether nobody's own name stands before the @: a part of a firm, or an example."""
    name = name.partition("+")[0]  # behind it stands what its owner sorts mail by
    parts = re.split(r"[._-]", name)
    if name in ROLES or (len(parts[-1]) > 3 and parts[-1] in ROLES) or NOBODY.fullmatch(name):
        return True
    begins = OFFICE.match(name) is not None or (len(parts[0]) > 3 and parts[0] in ROLES)
    return begins and not PRIVATE_MAIL.match(domain)


def _phones(text: str) -> Iterator[str]:
    for match in PHONE.finditer(text):
        if _is_phone(match[0]) and not _is_of_patterns(text, match):
            yield f"a phone number ({masked(match[0])})"
            return


def _is_phone(value: str) -> bool:
    digits = re.sub(r"\D", "", value)
    if not 10 <= len(digits) <= 15 or FICTION.search(value) or YEARS.search(value) or FREE_CALLS.match(value):
        return False
    if value.startswith("+1") and (len(digits) != 11 or digits[1] in "01"):
        return False
    return 2 * digits.count("0") < len(digits)  # +200 300 400 500


def _cards(text: str) -> Iterator[str]:
    if LUHN.search(text):
        return
    for match in CARD.finditer(text):
        digits = re.sub(r"\D", "", match[0])
        if digits not in TEST_CARDS and len(set(digits)) > 4 and _validator("luhn")(digits):
            yield f"a card number ({masked(match[0])})"
            return


def _ids(text: str) -> Iterator[str]:
    for match in IBAN.finditer(text):
        if _validator("iban")(match[0]):
            yield f"an IBAN ({masked(match[0])})"
            break
    for pattern, module, name in NATIONAL:
        found = [match[0] for match in pattern.finditer(text) if _is_number(module, match[0])]
        if found:
            yield f"{name} ({masked(found[0])})"
    if any(word in text for word in CONTEXT_WORDS):
        for pattern, module, name in IN_CONTEXT:
            found = [match[1] for match in pattern.finditer(text) if _is_number(module, match[1])]
            if found:
                yield f"{name} ({masked(found[0])})"


def _is_number(module: str, value: str) -> bool:
    digits = re.sub(r"\W", "", value)
    return len(set(digits)) > 3 and "123456789" not in digits and _validator(module)(value)


def _validator(module: str) -> Callable[[str], bool]:
    import importlib  # python-stdnum: loaded where a number looks like one

    found: Any = importlib.import_module(f"stdnum.{module}")
    validate: Callable[[str], bool] = found.is_valid
    return validate
