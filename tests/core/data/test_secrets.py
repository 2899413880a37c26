"""Keys and personal data are found and shown masked; numbers that only look like them are left alone.

Keys stand here in two parts, so that nobody's scanner takes this file for a leak.
"""

import pytest

from safetrain.core.data.secrets import masked, personal_data_in, secrets_in

LETTERS = "a8Kd93jdKe02jfLsPq83jfKeLw02jfKdMw9aQz7RtB4nXc1V"
KEYS = [
    ("AKIA" + "Q3EGRZZ5TPLW7YHN", "an AWS key"),
    ("ghp_" + LETTERS[:36], "a GitHub token"),
    ("github_pat_" + LETTERS + "_x9", "a GitHub token"),
    ("sk-" + "proj-" + LETTERS[:40], "a key of a model's provider"),
    ("sk-" + "ant-api03-" + LETTERS[:40], "a key of a model's provider"),
    ("xoxb-" + "2938475610-" + LETTERS[:20], "a Slack token"),
    ("AIza" + LETTERS[:35], "a Google key"),
    ("sk_" + "live_" + LETTERS[:24], "a Stripe key"),
    ("-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEowIBAAKCAQEAx8s9" + LETTERS, "a private key"),
    ("-----BEGIN " + "PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG" + "9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7", "a private key"),
    ("-----BEGIN " + "PRIVATE KEY-----\\nMIIEvQIBADANBgkqhkiG" + "9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7", "a private key"),
    ("-----BEGIN OPENSSH " + "PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQ", "a private key"),
    ("hf_" + "qWeRtYuIoPlKjHgFdSaZxCvBnMqPwOeIrU", "a Hugging Face token"),
    ("sk-" + "or-v1-" + "8d3f0a9b" * 8, "a key of a model's provider"),
    ("eyJ" + LETTERS[:20] + ".eyJ" + LETTERS[:30] + "." + LETTERS[:30], "a JSON web token"),
]
PERSONAL = [
    ("write to maria.silva81@gmail.com", "an e-mail address (m•••@•••.com)"),
    ("it`s maria.silva81@gmail.com", "an e-mail address (m•••@•••.com)"),
    ("as in `a@b.org`, write to maria.silva81@gmail.com", "an e-mail address (m•••@•••.com)"),
    ("call +351 912 345 678 now", "a phone number"),
    ("call +1 (212) 736-5000", "a phone number"),
    ("ligue (88) 98765-4321", "a phone number"),
    ("write to ana.teamaker@gmail.com", "an e-mail address (a•••@•••.com)"),
    ("ligue (11) 98765-4321", "a phone number"),
    ("ligue +55 (21) 3555-9876", "a phone number"),
    ("ask contatomaria@gmail.com", "an e-mail address (c•••@•••.com)"),
    ("ask maria+news@firm.com.br", "an e-mail address (m•••@•••.br)"),
    ("ask alice15@firm.com.br", "an e-mail address (a•••@•••.br)"),
    ("A regex.   " + "Much else. " * 30 + "Write to maria.silva81@gmail.com", "an e-mail address (m•••@•••.com)"),
    ("an example: +351 912 345 678", "a phone number"),
    ("the pattern of a CPF, as a regex: 529.982.247-25", "a Brazilian CPF"),
    ("paid with 4532-0151-1283-0366", "a card number"),
    ("to DE89 3704 0044 0532 0130 00", "an IBAN"),
    ("CPF 529.982.247-25", "a Brazilian CPF"),
    ("CNPJ 11.444.777/0001-61", "a Brazilian CNPJ"),
    ("SSN 536-22-8145", "a US SSN"),
    ("NIF 501442600", "a Portuguese NIF"),
]
CLEAN = [
    "AKIA" + "IOSFODNN7EXAMPLE",
    "sk-" + "your-api-key-goes-here-0000",
    "user@example.com, git@github.com:a/b, info@firm.org, @decorator, x@y",
    "3.14159265358979, 2024-01-02 10:20:30, 1 000 000 000, 192.168.100.200",
    "4111 1111 1111 1111 and 4532-0151-1283-0367",
    "111.111.111-11 and 123.456.789-00",
    "f(x) = (12345678 - 1234) / 555-0123",
    "ISBN 978-3-16-148410-0, +1-555-0142, 0x1234567890abcdef",
    "DE00 0000 0000 0000 0000 00",
    "12 34 56 78 90 12 34 56",
    "+2024-01-15 10:30:00, (12) 2019-2020, (39) 1939-1945, +100 200 300 400",
    "anna@contosowest.com, osfeedback@firm.org, fixbot@users.noreply.github.com, tool-security@firm.io",
    "core@lists.firm.io, testuser1@firm.pt, ana@ejemplo.com, templates@firm.com",
    "Type `maria.silva81@gmail.com` or `+1 (212) 736-5000` into the field.",
    "Luhn's algorithm accepts 4532-0151-1283-0366.",
    "joe_doe@gmail.com, bob@gmail.com, press@firm.com",
    "+2147483647, +919876543210, +91-9876543218",
    "(123) 456-7890, +7(903)-123-45-67, +12065551219, (425) 555-1019, (800) 736-5000, +1 877 736-5000",
    "senhaportal@firm.gov.br, suporte.ti@firm.br, support-eu@firm.com, nova.proposta@firm.gov.br, sac@firm.com.br",
    "johndoe+reviewer@gmail.com, secretaria2@firm.edu.br",
    "A regular expression finds alice15@gmail.com and +351 912 345 678.",
    "Com expressões regulares acha-se alice15@gmail.com.",
    "img@2x.png, lodash@npm.org, user.name@pytest.fixture, mixin@index.js",
    "https://a.org/news/sk-" + "hynix-begins-mass-production-of-238-layer-4d-nand",
    "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9"
    + ".eyJzdWIiOiIxMjM0NTY3ODkwIiwibmFtZSI6IkpvaG4gRG9lIiwiaWF0IjoxNTE2MjM5MDIyf"
    "Q.SflKxwRJSMeKKF2QT4fwpMeJf36POk6yJV_adQssw5c",
]


@pytest.mark.parametrize(("key", "name"), KEYS)
def test_a_key_is_found_and_not_shown(key: str, name: str) -> None:
    ((identifier, detail),) = secrets_in(f"Use {key} for it")
    assert identifier == "SECRETS"
    assert detail.startswith(name)
    assert key[12:30] not in detail


@pytest.mark.parametrize(("text", "detail"), PERSONAL)
def test_personal_data_is_found_and_masked(text: str, detail: str) -> None:
    found = [item for identifier, item in personal_data_in(text) if identifier == "PERSONAL-DATA"]
    assert any(item.startswith(detail) for item in found)
    value = text.split(" ", 2)[-1]
    assert all(value not in item for item in found)


@pytest.mark.parametrize("text", CLEAN)
def test_what_only_looks_so_is_left_alone(text: str) -> None:
    assert secrets_in(text) == []
    assert personal_data_in(text) == []


def test_a_key_behind_an_example_of_its_kind_is_found() -> None:
    text = f"Not {'AKIA' + 'IOSFODNN7EXAMPLE'} but {KEYS[0][0]} and {'ASIA' + 'Q3EGRZZ5TPLW7YHN'}"
    assert secrets_in(text) == [("SECRETS", "an AWS key (AKIA…, 20 characters)")]


def test_the_ends_of_a_value_are_shown() -> None:
    assert masked("4532-0151-1283-0366") == "453•-••••-••••-••66"
