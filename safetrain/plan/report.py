"""`safetrain selftest --report`: runs each section in a child that may die, and keeps what it said."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from safetrain.core.protocol.selftest import KINDS, DeviceFacts, Line
from safetrain.core.storage.records import from_line
from safetrain.plan.child import room_cap, run_lines
from safetrain.plan.report_system import SystemFacts, read_system

Kind = TypeVar("Kind", bound=Line)
FILES = "safetrain.plan.report_files"
SECTIONS = ("device", "products", "attention", "rows", "kernels", "exactness", "model", "update", "mlx_lm")
SECTION_SECONDS = 120.0
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Section:
    """What one child said before it ended, and how it ended when that was badly."""

    lines: tuple[Line, ...] = ()
    ended: str = ""

    def all(self, kind: type[Kind]) -> list[Kind]:
        """Its lines of one kind."""
        return [line for line in self.lines if isinstance(line, kind)]


@dataclass(frozen=True)
class Report:
    """Everything that was asked. A section that is not there was never begun."""

    date: str
    seconds: float
    system: SystemFacts
    sections: dict[str, Section] = field(default_factory=dict)

    def all(self, section: str, kind: type[Kind]) -> list[Kind]:
        """Lines of one kind in a section; none where it was never begun."""
        return self.sections.get(section, Section()).all(kind)

    @property
    def device(self) -> DeviceFacts | None:
        """What mlx said of the device, if it did."""
        return next(iter(self.all("device", DeviceFacts)), None)


def collect(engine: str, model: Path, say: Callable[[str], None]) -> Report:
    """Run all sections, those of mlx in the module ``engine``; a Ctrl-C ends with those that are done.

    ``say`` is given the name of each section before it begins.
    """
    began, sections = time.monotonic(), dict[str, Section]()
    system = read_system()
    steps = {"files": (FILES, list[str]())} | {name: (engine, [name, str(model)]) for name in SECTIONS}
    if not model.is_dir():  # the report needs none
        del steps["model"]
    for name, (module, arguments) in steps.items():
        try:
            say(name)
            sections[name] = in_child(module, arguments)
        except KeyboardInterrupt:
            sections[name] = Section(ended=INTERRUPTED)
            break
    return Report(time.strftime("%Y-%m-%d"), time.monotonic() - began, system, sections)


def in_child(module: str, arguments: list[str]) -> Section:
    """What ``python -m module arguments`` says; lines that are none of ours are a library's."""
    lines, ended = run_lines(module, arguments, SECTION_SECONDS, room_cap())
    return Section(tuple(value for line in lines if (value := from_line(line, KINDS)) is not None), ended)
