"""One concept has one word: no second word of a glossary's entry is in the docs or in the program's messages."""

import ast
import re
from collections.abc import Iterator

from tests.conftest import ROOT
from tests.rules.imports import python_files
from tests.support.documented import BLOCK, pages

SECOND_WORDS = {
    "row": r"data ?points?",
    "label": r"(?:target|supervised) tokens?",
    "step": r"iterations?",
    "micro-batch": r"mini-?batch(?:es)?|microbatch(?:es)?",
    "chat template": r"prompt template",
    "stop token": r"(?:eos|end-of-sequence) tokens?",
    "near-duplicate": r"(?:near-identical|fuzzy|almost equal) \w+",
    "held-out rows": r"hold-?outs?",
    "base model": r"foundation models?",
    "tuned model": r"fine-?tuned models?",
    "adapter": r"delta weights|LoRA modules?",
    "fused model": r"merged (?:models?|adapters?)",
    "gradient checkpointing": r"activation (?:checkpointing|recomputation)",
    "checkpoint": r"snapshots?|save ?points?",
    "peak memory": r"high-water marks?|(?:peak|maximum) RAM",
    "available memory": r"(?:free|available|remaining) RAM|RAM left",
    "dry run": r"(?:trial|test) runs?",
    "post-mortem, verdict": r"autops(?:y|ies)|crash reports?",
    "rank (process)": r"replicas?|world size",
    "forgetting": r"catastrophic",
    "exact match": r"accuracy",
}


def messages() -> Iterator[tuple[str, str]]:
    """File with line, and text, of each string of the program that documents nothing."""
    for file in [*python_files("safetrain"), *python_files("stages")]:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in documents:
                continue
            yield f"{file.relative_to(ROOT)}:{node.lineno}", node.value


def test_the_glossary_has_the_words_that_are_held() -> None:
    known = re.findall(r"^\| ([^|]+) \| ", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.M)
    assert not set(SECOND_WORDS) - {each for word in known for each in (word, *word.split(", "))}


def test_no_concept_has_a_second_word() -> None:
    second = re.compile("|".join(rf"\b(?:{words})\b" for words in SECOND_WORDS.values()), re.IGNORECASE)
    texts = [*((page, BLOCK.sub("", text)) for page, text in pages().items()), *messages()]
    assert [f"{place}: {found[0]}" for place, text in texts for found in second.finditer(text)] == []
