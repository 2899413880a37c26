"""Hits a training process where a plan says. Python loads this by itself: tests/support/chaos puts it on the path.

Active with a plan in ``CHAOS_PLAN`` and in the training process alone (for a jump of the clock in its supervisor too).
The engine is not changed: its functions are wrapped when their modules are imported.
"""

import functools
import importlib.machinery
import json
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.chaos.inject.chaos_sites import OF_RANKS, SITES, TRAINING, Site
else:
    from chaos_sites import (  # this folder is on the path, the project's root need not be
        OF_RANKS,
        SITES,
        TRAINING,
        Site,
    )

WORKER, SUPERVISOR = "safetrain.engine.worker", "stages.train"
STOPS = (signal.SIGTERM, signal.SIGINT)
STOP_SECONDS = 10.0  # for a stop to arrive over the supervisor
HANG_SECONDS = 3600.0


class Injector:
    """Counts calls, knows phase and step, and acts once."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.step = plan, 0
        self.truth = Path(plan["truth"])
        rank = int(os.environ.get("MLX_RANK", "0"))
        self._armed = "action" in plan and not self.truth.exists() and rank == plan.get("rank", 0)
        self._calls: dict[str, int] = {}
        self._phases: list[str] = []

    def wrap(self, site: Site, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, hit at the planned call of it."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._calls[site.name] = self._calls.get(site.name, 0) + 1
            mine = self._armed and self.plan["site"] == site.name and self.plan["occurrence"] == self._calls[site.name]
            self._phases.append(site.phase)
            try:
                result = self._hit(site, lambda: function(*args, **kwargs)) if mine else function(*args, **kwargs)
            finally:
                self._phases.pop()
            if site.name == "begin":
                self.step = result.step
            return result

        return wrapped

    def stepping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The engine's ``_count``, which is given a run, or ``open_run``, which returns one: it knows the step."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.step = (result or args[0]).state.step
            return result

        return wrapped

    def _hit(self, site: Site, function: Callable[[], Any]) -> Any:
        """Call the function with the action before, after, or some time into it; it does not return before that."""
        self._armed = False
        place, phase, step = self.plan["place"], self._phases[0], self.step
        act = functools.partial(self._act, site, phase, step)
        if place == "entry":
            act()
            return function()
        if place == "exit":
            result = function()
            act()
            return result
        timer = threading.Timer(self.plan["delay_seconds"], act)
        timer.start()
        result = function()
        timer.join()
        self._await_stop()
        return result

    def _act(self, site: Site, phase: str, step: int) -> None:
        truth = {"phase": phase, "step": step, "site": site.name, "pid": os.getpid()}
        with self.truth.open("w", encoding="utf-8") as file:
            file.write(json.dumps(truth))
            file.flush()
            os.fsync(file.fileno())
        ACTIONS[self.plan["action"]](self.plan)
        if threading.current_thread() is threading.main_thread():
            self._await_stop()

    def _await_stop(self) -> None:
        """A stop that comes from outside is waited for, so that it comes in the phase that was noted."""
        began = time.monotonic()
        while self.plan.get("awaits_stop") and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            if time.monotonic() - began > STOP_SECONDS:
                return
            time.sleep(0.002)


def send_signal(plan: dict[str, Any]) -> None:
    """To this process; a signal that ends it ends it here."""
    os.kill(os.getpid(), plan["signal"])
    if plan["signal"] not in STOPS:
        time.sleep(HANG_SECONDS)


def raise_error(_plan: dict[str, Any]) -> None:
    """An error in the program."""
    raise KeyError("chaos")


def last_words(plan: dict[str, Any]) -> None:
    """What a driver says before it aborts the process."""
    os.write(2, plan["text"].encode() + b"\n")
    os.abort()


def shift_clock(plan: dict[str, Any]) -> None:
    """From now on the wall clock shows another time in this process."""
    real = time.time
    time.time = lambda: real() + plan["shift_seconds"]


ACTIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "signal": send_signal,
    "signal from outside": lambda _plan: None,  # whoever waits for the truth sends it
    "raise": raise_error,
    "hang": lambda _plan: time.sleep(HANG_SECONDS),
    "last words": last_words,
    "shift clock": shift_clock,
}


class Finder(MetaPathFinder):
    """Finds the engine's modules as ever, and wraps their functions once they are loaded."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, its loader followed by the wrapping."""
        sites = [site for site in (*SITES, *OF_RANKS) if site.module == name]
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if sites else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_wrap(module: types.ModuleType) -> None:
            load(module)
            self._wrap_all(module, sites)

        spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec

    def _wrap_all(self, module: Any, sites: Sequence[Site]) -> None:
        for site in sites:
            outer, _, inner = site.attribute.rpartition(".")
            holder = functools.reduce(getattr, outer.split("."), module) if outer else module
            wrapped = self._injector.wrap(site, getattr(holder, inner))
            if isinstance(holder, types.ModuleType) and outer and "." not in outer:  # only as this module sees it
                setattr(module, outer, types.SimpleNamespace(**(vars(holder) | {inner: wrapped})))
            else:
                setattr(holder, inner, wrapped)
        if module.__name__ == TRAINING:
            module._count = self._injector.stepping(module._count)
            module.open_run = self._injector.stepping(module.open_run)


def shift_with(truth: Path, shift_seconds: float) -> None:
    """In the supervisor: the clock jumps when it does in the training process."""
    real = time.time
    time.time = lambda: real() + (shift_seconds if truth.exists() else 0.0)


def main() -> None:
    """Install what the plan asks for."""
    text = os.environ.get("CHAOS_PLAN")
    if not text:
        return
    plan = json.loads(text)
    if WORKER in sys.orig_argv:
        sys.meta_path.insert(0, Finder(Injector(plan)))
    elif SUPERVISOR in sys.orig_argv and plan.get("action") == "shift clock":
        shift_with(Path(plan["truth"]), plan["shift_seconds"])


main()
