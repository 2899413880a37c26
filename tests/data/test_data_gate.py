"""What is wrong with the words of rows is found at its line, and nothing in text that is as it should be."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from safetrain.cli import app
from safetrain.core.errors import DataError
from safetrain.core.records.reports import Finding
from safetrain.core.text.tokenizer import Controls
from safetrain.data import compare
from safetrain.data.checks import is_refusal, text_findings
from safetrain.data.forms import parse_row
from safetrain.data.validate import validate
from tests.conftest import EMBEDDED, chat
from tests.corpora import clean_rows as clean
from tests.data.reading import by_id, gate

Write = Callable[..., Path]
CLEAN_ROWS = 60
CONTEXT = {"BEYOND-CONTEXT"}  # of the small model that the tests have
LONG = "The river follows the old road to the harbour, and from there it is not far to the northern station of the town"
LETTERS = "a8Kd93jdKe02jfLsPq83jfKeLw02jfKdMw9aQz7RtB4nXc1V"
KEYS = [  # in two parts, so that no scanner takes this file for a leak
    "AKIA" + "Q3EGRZZ5TPLW7YHN",
    "ghp_" + LETTERS[:36],
    "sk-" + "ant-api03-" + LETTERS[:40],
    "-----BEGIN " + "PRIVATE KEY-----\\nMIIEvQIBADANBgkqhkiG" + "9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7",
    "hf_" + "qWeRtYuIoPlKjHgFdSaZxCvBnMqPwOeIrU",
]
PLANTED = [
    (chat("Which key?", f"It is {KEYS[1]}."), "SECRETS", "a secret key (ghp_a…, 40 characters)"),
    (chat("Which metal?", "<|im_start|>Iron."), "FOREIGN-MARKERS", "<|im_start|>"),
    (chat("Who are you?", "I am {{name}}."), "PLACEHOLDERS", "{{name}}"),
    (chat("Who acts in it?", "FranÃ§oise Yip."), "MOJIBAKE", "'Françoise"),
    (chat("Which\u200b metal?", "Iron."), "INVISIBLE-CHARACTERS", "U+200B"),
    (chat("Is it good?", "As an AI language model, I have no opinion."), "REFUSALS", "refusal"),
]


def found_in(*paths: Path) -> dict[str, Finding]:
    return {finding.id: finding for finding in validate(paths, EMBEDDED).findings}


def gated(source: Path, into: Path, downgrade: tuple[str, ...] = ()) -> dict[str, Finding]:
    return by_id(gate(source, into, context=100_000, downgrade=downgrade).findings)


def test_a_planted_fault_is_found_at_its_line(write_jsonl: Write) -> None:
    rows = clean(CLEAN_ROWS)
    for number, (row, _, _) in enumerate(PLANTED):
        rows.insert(41 + number, row)
    path = write_jsonl("a.jsonl", rows)
    found = found_in(path)
    for number, (_, identifier, said) in enumerate(PLANTED):
        assert (found[identifier].where, found[identifier].count) == ((f"{path}:{42 + number}",), 1)
        assert said in found[identifier].message
    others = {name for name, finding in found.items() if finding.severity != "note"} - CONTEXT
    assert others == {identifier for _, identifier, _ in PLANTED}


def test_what_rows_repeat_is_found_with_what_they_repeat(write_jsonl: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    other = [{"role": "system", "content": "Another text."}, *chat("How far is it?", "Nine miles.")["messages"]]  # type: ignore[misc]
    rows = [
        *clean(CLEAN_ROWS), chat("How far is it?", "Two miles."), chat("how far is it", "Three miles."),
        chat("How far is it?", "two miles"), {"messages": other},
        chat(f"{LONG} or what?", "Yes."), chat(f"{LONG} or not?", "No."),
    ]  # fmt: skip
    path = write_jsonl("a.jsonl", rows)
    found = found_in(path)
    assert found["ANSWERS-DIFFER"].where == (f"{path}:62 matches {path}:61",)
    assert found["NEAR-COPIES"].where[-1] == f"{path}:66 matches {path}:65"
    monkeypatch.setattr(compare, "MOST_TEXTS", 5)
    near = found_in(path)["NEAR-COPIES"]
    assert (near.severity, "; more than 5 rows: only identical questions" in near.message) == ("note", True)
    same = [chat(str(row), "It is better to ask somebody who knows.") for row in range(25)]
    short = [chat(f"Is it {row}?", "Yes.") for row in range(40)]  # commoner, but no sentence
    dominates = found_in(write_jsonl("a.jsonl", [*clean(100), *same, *short]))["ANSWER-DOMINATES"]
    assert (dominates.count, "share 1 answer (15 % of all rows)" in dominates.message) == (25, True)


def test_the_json_of_findings_has_the_texts_at_their_places(write_jsonl: Write) -> None:
    rows: list[object] = [chat("What is this?", "A row."), "{broken", chat("What is this?", "A row.")]
    path = write_jsonl("rows.jsonl", rows)
    done = CliRunner().invoke(app, ["validate", str(path), "--model", str(EMBEDDED), "--json"])
    told = json.loads(done.stdout)
    places = {each["id"]: each["where"][0] for each in told["findings"]}
    assert told["texts"][places["ROW-UNREADABLE"]].strip() == "{broken"
    assert json.loads(told["texts"][places["REPEATED-ROWS"]]) == rows[2]
    assert (told["count"], told["noun"], done.exit_code) == (3, "row", 1)


def test_hardly_any_clean_row_is_warned_of(write_jsonl: Write) -> None:
    assert set(found_in(write_jsonl("a.jsonl", clean(200)))) <= CONTEXT
    controls = Controls(None, frozenset())
    assert sum(len(list(text_findings(parse_row(row), controls))) for row in clean(600, 2)) < 2


@pytest.mark.parametrize(("answer", "said"), [
    ("Write to maria.silva@gmail.com.", "an e-mail address (m…@g….com)"),
    ("Escreva para (joao@correio.com.br)", "an e-mail address (j…@c….br)"),
    ("Call +49 171 2398446.", "a telephone number (+49…46)"),
    ("Ligue para (11) 98765-4308, por favor", "a telephone number ((11…08)"),
    ("It is 415-832-1298", "a telephone number (415…98)"),
    ("Tel.: 030 2397815", "a telephone number (030…15)"),
    ("The phone number is 01712398446.", "a telephone number (017…46)"),
    ("Write to user@example.com, noreply@firm.io, info@firm.io or jo@example.org.", ""),
    ("git clone git@github.com:a/b.git; see https://x.org/@jo@x.org?tel=415-832-1298, icon@2x.png, a@b", ""),
    ("Call (212) 555-0123, 555-0199, +1 415-555-0132, 1-800-832-1298 or 123-456-7890.", ""),
    ("Order 415-832-1298 of 2024-05-17, ISBN 978-0-306-40615-7, IBAN DE89 3704 0044 0532 0130 00, 300 200 1000.", ""),
    ("It is 12/05/2024 10:30, +3.14159265358, 192.168.100.1, 4111 1111 1111 1111, 1,000,000,000, v2.415.832.1298.", ""),
])  # fmt: skip
def test_personal_data_in_answers_is_a_note_and_masked(write_jsonl: Write, answer: str, said: str) -> None:
    path = write_jsonl("a.jsonl", [*clean(CLEAN_ROWS), chat("How?", answer), chat(f"{answer} Is it?", "Yes.")])
    found = found_in(path).get("PERSONAL-DATA")
    if not said:
        assert found is None
        return
    assert found is not None
    assert (found.severity, found.count, found.where) == ("note", 1, (f"{path}:61",))
    assert found.message == f"personal data in answers of 1 row: {said}"


def test_answers_that_break_off_where_the_others_end_are_named(write_jsonl: Write) -> None:
    def cut(rows: list[dict[str, object]]) -> list[int]:
        found = found_in(path := write_jsonl("a.jsonl", rows)).get("ANSWERS-CUT")
        assert found is None or found.severity == "note"
        return [] if found is None else [int(place.removeprefix(f"{path}:")) for place in found.where]

    ended = [chat(f"How is {n}?", f"The answer to the question number {n} is not known.") for n in range(120)]
    broken = [
        chat("Who?", "It is, as they say, a matter of the"), chat("When?", "It was after the war. It was winter"),
        chat("Why?", "There are several reasons, the weather,"), chat("O quê?", "Foi uma longa viagem de rio em"),
    ]  # fmt: skip
    whole = [
        "The Old Man and the Sea by Ernest Hemingway", "Blue", "- the first of all the things\n- the second of all the",
        "def answer(of, the):\n    return the, of, and, the, of", "See https://example.org/all/that/is/known/of/the",
        '{"name": "the answer to the question of"}', "Dear all, it was lovely. Yours sincerely, Jane Austen",
        "It is a matter of taste and of time :)", "The result of the whole sum is 42", "“It is a matter of heart.”",
    ]  # fmt: skip
    titles = [chat(f"Which book is {number}?", text) for number, text in enumerate(whole)]
    assert cut([*ended, *broken, *titles]) == [121, 122, 123, 124]
    assert cut([*ended[:50], *broken]) == [], "too few to judge"
    assert (
        cut([*ended, *broken, *(chat(str(n), f"A title without a mark at its end {n:04}x") for n in range(30))]) == []
    )
    long = [chat(f"What of {n}?", f"{'It is a long story about ' * 4}{n} {'abcdefgh ' * 30}"[:200]) for n in range(60)]
    found = found_in(write_jsonl("a.jsonl", [*ended, *long]))["ANSWERS-CUT"]
    assert found.count == 60, "all are cut at one length"


def test_other_code_and_other_mathematics_are_other_questions(write_jsonl: Write, tmp_path: Path) -> None:
    asked = [
        ("What is (2 + 3) * 4?", "What is 2 + (3 * 4)?"),
        ("Why use C#?", "Why use C?"),
        ("Find f'(2)", "find f(2)."),
    ]
    rows = [chat(question, f"Answer {number}.") for pair in asked for number, question in enumerate(pair)]
    assert "ANSWERS-DIFFER" not in found_in(write_jsonl("a.jsonl", [*clean(CLEAN_ROWS), *rows]))
    path = write_jsonl("d/train.jsonl", [*clean(CLEAN_ROWS), *rows[::2]])
    write_jsonl("d/valid.jsonl", clean(20, 8))
    write_jsonl("d/test.jsonl", [*clean(20, 9), *rows[1::2]])
    found = gated(path.parent, tmp_path)
    assert found["SPLITS-OVERLAP"].count == 3
    assert "with nearly the same question" in found["SPLITS-OVERLAP"].message


def test_what_lies_in_two_given_splits_is_told_with_both_places(write_jsonl: Write, tmp_path: Path) -> None:
    """Apple's wwdc25 data in small: each validation question stands in train, most of them in other case."""
    asked = [f"How many {unit} did player {number} throw for?" for number in range(12) for unit in ("yards", "Balls")]
    train = [chat(question, f"{number} of them.") for number, question in enumerate(asked * 2)]
    valid = [chat(question.lower() if number % 3 else question, "5") for number, question in enumerate(asked[::2])]
    path = write_jsonl("d/train.jsonl", [chat("Which metal is it?", "Iron."), *train, chat(f"{LONG} or what?", "Yes.")])
    write_jsonl("d/valid.jsonl", valid)
    write_jsonl("d/test.jsonl", [*clean(5, 8), chat("which metal is it", "Tin."), chat(f"{LONG} or not?", "No.")])
    with pytest.raises(DataError, match=r"1 row in test .*\[QUESTION-IN.*\n.*test\.jsonl:6 matches .*train\.jsonl:1\n"):
        gated(path.parent, tmp_path)
    report = gate(path.parent, tmp_path, downgrade=("QUESTION-IN-TEST",))
    assert by_id(report.findings)["QUESTION-IN-TEST"].severity == "warning"
    overlaps = {each.message: each for each in report.findings if each.id == "SPLITS-OVERLAP"}
    assert overlaps.pop("12 rows in valid with the same question as a row in train").count == len(valid) == 12
    (near,) = overlaps.values()
    assert near.message == "1 row in test with nearly the same question as a row in train"
    assert near.where == (f"{path.parent / 'test.jsonl'}:7 matches {path}:50",)


TEXTS = json.loads(
    Path(__file__).with_name("texts.json").read_text(encoding="utf-8")
)  # of published rows, or like them
LIKE_KEYS = (
    "AKIA" + "IOSFODNN7EXAMPLE", "sk-" + "your-api-key-goes-here-0000",
    "https://a.org/news/sk-" + "hynix-begins-mass-production-of-238-layer-4d-nand",
)  # fmt: skip


def faults(text: str, marker: str = "") -> list[tuple[str, str]]:
    """What is found in a question, for a tokenizer whose stop token is ``marker``."""
    row = parse_row({"prompt": text, "completion": "Yes."})
    return list(text_findings(row, Controls(None, frozenset([marker] if marker else []))))


@pytest.mark.parametrize(("text", "identifier", "detail"), TEXTS["faulty"])
def test_a_fault_is_found(text: str, identifier: str, detail: str) -> None:
    assert (identifier, detail) in faults(text)
    assert faults("<|user|>Hi</s>", "<|user|>") == [("FOREIGN-MARKERS", "</s>")], "the other one is at home"


@pytest.mark.parametrize("text", [*TEXTS["clean"], *LIKE_KEYS])
def test_nothing_is_found_in_clean_text(text: str) -> None:
    assert faults(text) == []


def test_refusals_are_told_from_answers() -> None:
    assert [text for text in TEXTS["refusals"] if not is_refusal(text)] == []
    assert [text for text in TEXTS["answers"] if is_refusal(text)] == []


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_found_wherever_it_is_and_not_shown(key: str) -> None:
    ((identifier, detail),) = faults(f"Not {'AKIA' + 'IOSFODNN7EXAMPLE'}, use {key} for it")
    assert identifier == "SECRETS"
    assert detail.startswith(f"a secret key ({key[:5]}…, ")
    assert key[12:30] not in detail
    call = {"type": "function", "function": {"name": "look", "arguments": {"key": [f"a\n{key}"]}}}
    for answer in ({"reasoning_content": f"With {key}.", "content": "a"}, {"content": "", "tool_calls": [call]}):
        row = parse_row({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", **answer}]})
        assert [name for name, _ in text_findings(row, Controls(None, frozenset()))] == ["SECRETS"]
