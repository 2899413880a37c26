"""What may be found in files and keys, in the words of rows and between rows. The rest is in findings.py."""

from dataclasses import dataclass

ERROR, WARNING, NOTE = "error", "warning", "note"
FIX = "safetrain validate FILE --fix OUT writes a copy without them"


@dataclass(frozen=True)
class Kind:
    """A kind of finding. ``message`` has {rows} and {detail}. ``fixed``: an error that no key can make a warning."""

    severity: str
    message: str
    remedy: str
    fixed: bool = False
    by_detail: bool = False  # one finding for each detail
    lists: bool = False  # one finding, in which the details are listed
    has_examples: bool = False  # a detail ends with an example in brackets, which makes it no other detail


SOURCE_KINDS = {
    "KEYS-IGNORED": Kind(NOTE, "nothing reads these keys of {rows}: {detail}", "nothing, if that is meant", lists=True),
    "SPLIT-KEY-UNREAD": Kind(
        WARNING, "{rows} say under 'split' which split they are of, and nothing reads it: {detail}",
        "write a file for each split into one folder: train.jsonl, valid.jsonl, test.jsonl", by_detail=True,
    ),
    "KEYS-BESIDE-ROWS": Kind(
        NOTE, "the rows stand in an object, and nothing reads its other keys: {detail}",
        "nothing, if that is meant; a system text belongs in each row", by_detail=True,
    ),
    "COLUMNS-TAKEN": Kind(
        NOTE, "taken in {rows}: {detail}", "nothing, if that is meant; data.columns names others", by_detail=True
    ),
    "LINK-UNREAD": Kind(
        WARNING, "{detail} in the data folder is a link that leads out of it, and is not followed",
        "copy the file there, or name it itself: data.path", by_detail=True,
    ),
    "LINK-FOLLOWED": Kind(
        NOTE, "{detail} in the data folder is a link, and what it leads to was read; DVC does not look there",
        "after files have come or gone there: dvc repro -f -s validate_data; or let data.path itself be the link",
        by_detail=True,
    ),
    "FILE-EMPTY": Kind(
        WARNING, "a file of the data folder has no rows, and is passed over", "fetch it again, or take it away",
    ),
    "FILES-UNREAD": Kind(
        WARNING, "{detail} in the data folder is not read", "give it the name of a split, or take it away",
        by_detail=True,
    ),
}  # fmt: skip


CORPUS_KINDS = {
    "TOKENIZER-DIFFERS": Kind(
        ERROR, "the corpus was made with another tokenizer than the model's: {detail}",
        "take the model that its tokenizer is of, or tokenize the corpus with this model's",
    ),
    "TOKENIZER-NAMED": Kind(
        NOTE, "the corpus says that it was tokenized with {detail}; sampled documents fit the model's tokenizer",
        "nothing, if that is the model's", by_detail=True,
    ),
    "DOCUMENTS-OPEN": Kind(
        WARNING, "documents do not end with a token that ends a text by the model's files: {detail}. Nothing would "
        "predict how the next one begins, and the model would not learn to end",
        "tokenize the corpus with the model's end token (datatrove: eos_token)",
    ),
    "DOCUMENTS-EMPTY": Kind(
        NOTE, "documents without text: {detail}", "nothing: they are passed over, or teach an end alone"
    ),
}  # fmt: skip


QUALITY_KINDS = {
    "QUESTION-IN-TEST": Kind(
        ERROR, "{rows} of test ask exactly what a row of train asks: the result would measure what was learnt by heart",
        "remove them from train, or from test; or let the split be made: give one file",
    ),
    "SPLITS-OVERLAP": Kind(
        WARNING, "{rows} of {detail}", "remove them from one, or give one file: a split that is made here keeps them "
        "together", by_detail=True, has_examples=True,
    ),
    "NEAR-COPIES-ACROSS": Kind(
        WARNING, "{rows} of {detail}", "remove them from one, or give one file: a split that is made here keeps near "
        "copies together", by_detail=True,
    ),
    "NEAR-COPIES": Kind(
        NOTE, "{rows} of train ask nearly what an earlier row asks", "nothing, if that is meant; else keep one of each"
    ),
    "COMPARED-IN-PART": Kind(
        NOTE, "so many questions resemble each other that not all were compared: near copies may be among those left",
        "remove repeated forms, or set data.near_duplicate_similarity nearer to 1",
    ),
    "ANSWERS-DIFFER": Kind(
        WARNING, "the question of {rows} is answered otherwise by an earlier row",
        "keep one answer of each; nothing, if several are right",
    ),
    "ANSWER-DOMINATES": Kind(
        WARNING, "{rows} have {detail}: the model would learn to say it whatever is asked",
        "keep fewer of them",
    ),
    "CUT-OFF-ANSWERS": Kind(
        WARNING, "the answer of {rows} stops in the middle of a sentence or of code: the model would "
        "learn to stop there", "complete or remove them",
    ),
    "REFUSALS": Kind(
        WARNING, "an answer of {rows} refuses, or speaks as an AI model", "remove them, unless the model shall learn it"
    ),
    "FOREIGN-MARKERS": Kind(
        WARNING, "a chat marker, {detail}, stands in the text of {rows}, where it is text and ends or begins nothing",
        "make chats of these rows (messages with roles), or take the markers out", by_detail=True,
    ),
    "PLACEHOLDERS": Kind(
        WARNING, "a gap was left to fill in, as {detail}, in {rows}", "fill it in, or remove the rows"
    ),
    "MOJIBAKE": Kind(
        WARNING, "text was decoded wrongly in {rows}: {detail}",
        "safetrain validate FILE --fix OUT puts most of it right; or make the file again in UTF-8",
    ),
    "REPLACEMENT-CHARACTERS": Kind(
        WARNING, "U+FFFD stands where characters were lost in {rows}: {detail}",
        "make the file again from its source: what was lost is not in it",
    ),
    "INVISIBLE-CHARACTERS": Kind(
        WARNING, "characters that nobody sees, as {detail}, in {rows}: they become tokens", "take them out of the text"
    ),
    "DIRECTION-CONTROLS": Kind(
        WARNING, "controls of the writing direction, as {detail}, in {rows} without right-to-left script: text reads "
        "otherwise than it is", "take them out of the text",
    ),
    "SECRETS": Kind(
        WARNING, "{detail} stands in {rows}: a model may repeat it to anybody",
        "take it out, and revoke it if it is a real one", by_detail=True, has_examples=True,
    ),
    "PERSONAL-DATA": Kind(
        WARNING, "{detail} stands in {rows}: a model may repeat it to anybody", "replace it by an invented one",
        by_detail=True, has_examples=True,
    ),
    "EMAIL-ADDRESSES": Kind(
        NOTE, "{detail} stands in {rows}: a model may repeat it to anybody; there are few such addresses here",
        "nothing for published or invented ones; replace a person's", by_detail=True, has_examples=True,
    ),
    "LABELS-LOST": Kind(
        WARNING, "the end of {rows} lies beyond the model's context: {detail} would not be trained",
        "shorten or split these rows, or use a model with a longer context",
    ),
    "LANGUAGES": Kind(NOTE, "written in several languages: {detail}", "nothing, if that is meant"),
    "OTHER-LANGUAGE": Kind(
        NOTE, "{rows} are in another language than the rest ({detail})", "nothing, if that is meant"
    ),
    "LENGTH-OUTLIERS": Kind(
        NOTE, "far longer than the others (half have at most {detail} tokens): {rows}", "look whether rows were joined"
    ),
    "FEW-ROWS": Kind(NOTE, "there are few rows {detail}", "more rows, if there are any"),
}  # fmt: skip
