"""Does safetrain train the right tokens with the chat templates that models are published with? Every case judged.

    python -m benchmarks.bench_templates [--cache FOLDER] [--only PART-OF-A-NAME]

The templates are read at run time from two packages (see benchmarks/templates/material.py) and given to safetrain
in folders of models without weights. What is right is found by an oracle that shares no code with safetrain: from
the text that a template writes, in which every message has a word of its own, and from a table written by hand of
what opens and closes a turn in each family of templates. Ends with 1 when a case is wrong.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.templates.conversations import Conversation, conversations
from benchmarks.templates.material import digest, published
from benchmarks.templates.report import write_report
from benchmarks.templates.running import Result, run_template
from safetrain.core.storage.files import cache_directory
from safetrain.data.validate import validate

LEAST = 100  # templates


def main() -> None:
    """Judge every template with every conversation."""
    chosen = _arguments()
    templates = published(chosen.cache)
    if len(templates) < LEAST:
        sys.exit(f"{len(templates)} templates are fewer than {LEAST}")
    wanted = [template for template in templates if chosen.only in " ".join(template.names)]
    results = run_all(wanted, conversations())
    wrong = write_report(results, digest(templates), keep=not chosen.only)
    sys.exit(int(wrong > 0))


def run_all(templates: Sequence[Any], rows: Sequence[Conversation]) -> list[Result]:
    """The results of all templates, with a line of progress for each."""
    results = []
    for number, template in enumerate(templates, 1):
        print(f"{number}/{len(templates)} {template.name}", file=sys.stderr, flush=True)
        results.append(run_template(template, rows, validate))
    return results


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=cache_directory() / "chat-templates")
    parser.add_argument("--only", default="", help="templates whose name contains this; the result is not kept")
    return parser.parse_args()


if __name__ == "__main__":
    main()
