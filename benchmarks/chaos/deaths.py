"""Endings of the training process itself: hangs, errors, what drivers say before an abort, bad numbers, a clock."""

from collections.abc import Iterator
from typing import Any

from tests.support.chaos.ending import Ending, Ground, hit
from tests.support.chaos.project import Done, Project, chat, left_over, sums

DAY_SECONDS = 86_400.0
METAL = "[METAL] Command buffer execution failed: "
WATCHDOG = METAL + "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"
HANDLES = "[metal::malloc] Resource limit (499000) exceeded."
RARE = "ß"  # in one training row alone


def deaths(ground: Ground) -> Iterator[Ending]:
    """All of them."""
    yield hang(ground)
    yield python_error(ground)
    yield driver_abort(ground, WATCHDOG, "gpu_watchdog", goes_on=True)
    yield driver_abort(ground, HANDLES, "resource_limit", goes_on=False)
    yield from (clock_jump(ground, days) for days in (1, -1))
    yield bad_numbers(ground)


def hang(ground: Ground) -> Ending:
    """A gradient that never ends."""
    ending = Ending("the gradient never ends (train.hang_minutes=0.03)")
    done, truth, told = train_hit(ground.project, hit("hang"), "train.hang_minutes=0.03")
    ending.expect(
        told, cause="hang", confidence="confirmed", is_memory=False, exit_code=124, phase="gradient",
        step=truth["step"] + 1,
    )  # fmt: skip
    ending.require(done.code == 124, f"exit code {done.code} and not 124")
    stacks = (ground.project.flight / "stacks.txt").read_text()
    ending.require("sitecustomize.py" in stacks, "its stacks do not show where it hung")
    go_on(ground, ending)
    return ending


def python_error(ground: Ground) -> Ending:
    """An error in the program."""
    ending = Ending("a KeyError in the gradient")
    done, truth, told = train_hit(ground.project, hit("raise"))
    ending.expect(
        told, cause="python_error", is_memory=False, exit_code=1, phase="gradient", step=truth["step"] + 1
    )  # fmt: skip
    ending.require(done.code == 1, f"exit code {done.code} and not 1")
    go_on(ground, ending)
    return ending


def driver_abort(ground: Ground, text: str, cause: str, *, goes_on: bool) -> Ending:
    """Last words that do not speak of memory: no smaller micro-batch is tried; ``goes_on``: shorter GPU work is."""
    ending = Ending(f"stderr says '{text}', then abort")
    done, truth, told = train_hit(ground.project, hit("last words", text=text))
    ending.expect(
        told, cause=cause, confidence="confirmed", is_memory=False, exit_code=134, phase="gradient",
        step=truth["step"] + 1,
    )  # fmt: skip
    code = 0 if goes_on else 134
    ending.require(done.code == code, f"exit code {done.code} and not {code}")
    if goes_on:
        ending.compare(ground.project, ground.reference, done)
        return ending
    ending.require("going on by itself" not in done.out, "it started again by itself")
    go_on(ground, ending)
    return ending


def clock_jump(ground: Ground, days: int) -> Ending:
    """The wall clock of both processes jumps."""
    ending = Ending(f"the wall clock jumps by {days:+d} day in the middle")
    plan = hit("shift clock", shift_seconds=days * DAY_SECONDS)
    done, _, told = train_hit(ground.project, plan, "train.hang_minutes=0.2")
    ending.verdict = "goes on" if done.code == 0 else str(told.get("cause"))
    ending.compare(ground.project, ground.reference, done)
    return ending


def bad_numbers(ground: Ground) -> Ending:
    """One row has a token whose embedding is infinite: stopped before it, and the same command stops there again."""
    ending = Ending("an infinite embedding, in one row")
    rows = [*sums(), chat(f"What is {RARE}?", "A letter.")]
    project = Project(ground.folder / "bad-numbers", rows=rows, model={"tie_word_embeddings": False, "bits": None})
    poison(project)
    project.plan()
    done = project.train(anew=True)
    told = project.json("postmortem.json")
    ending.expect(told, cause="bad_update", confidence="confirmed", is_memory=False, exit_code=7)
    ending.require(done.code == 7, f"exit code {done.code} and not 7")
    again = project.train()
    ending.require(again.code == 7, f"the same command ends with {again.code} and not 7")
    ending.resumed = "the same command stops there again"
    return ending


def poison(project: Project) -> None:
    """Make the embedding of the rare letter infinite."""
    import mlx.core as mx

    from safetrain.core.text.tokenizer import ChatTokenizer

    folder = project.folder / "models" / "tiny"
    tokenizer: Any = ChatTokenizer(folder)
    token = tokenizer.encode(RARE)[-1]
    arrays = mx.load(str(folder / "model.safetensors"))
    if not isinstance(arrays, dict):
        raise RuntimeError("a model without names")
    arrays["model.embed_tokens.weight"][token] = float("inf")
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})


def train_hit(project: Project, plan: dict[str, Any], *overrides: str) -> tuple[Done, dict[str, Any], dict[str, Any]]:
    """Start anew, be hit as planned, to the end; returns that, the truth and the post-mortem."""
    (project.output / "postmortem.json").unlink(missing_ok=True)
    done = project.train(*overrides, plan=plan, anew=True)
    truth = project.read_truth()
    if truth is None:
        raise RuntimeError(f"the training never came to the place where it was to be hit: {done.out[-2000:]}")
    return done, truth, project.json("postmortem.json")


def go_on(ground: Ground, ending: Ending, *overrides: str) -> Done:
    """The same command again: it must continue where the post-mortem says, and end as if nothing had happened."""
    project = ground.project
    promised = project.json("postmortem.json").get("resumes_from_step")
    ending.require(not (left := left_over(project.folder)), f"still there: {left}")
    done = project.train(*overrides)
    ending.compare(project, ground.reference, done)
    found = project.json("training_summary.json").get("resumed_from_step")
    ending.require(found == promised and bool(found), f"continued from step {found}, promised was {promised}")
    return done
