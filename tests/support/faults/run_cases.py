"""The faults of a run as a whole: 4 (resume), 5 (saving), 6 (accumulation), 8 (death), 10 (validation)."""

import contextlib
import functools
import signal
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import mlx_lm.utils
import numpy as np

from safetrain.core.records.adapter_files import fingerprint
from tests.support.faults import peer
from tests.support.faults.data_cases import load
from tests.support.faults.fault import Fault, Finding
from tests.support.faults.limits import files_of_at_most
from tests.support.faults.project import Project, chat, distance, norm, scratch, weights, write_rows
from tests.support.random_models import EMBEDDED

ROWS = [chat(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.") for a in range(8) for b in range(4)]
VALID = [chat(f"What is {a} plus 9?", f"{a} plus 9 is {a + 9}.") for a in range(8)]
FILE_LIMIT = 20_000  # bytes; the adapters here have several times as many
ONE_WORD = [{"text": "iron " * 12}] * 8
ANOTHER_TEXT = [{"text": "The symbol of iron is Fe."}] * 2
NO_LEARNING = 1e-12  # a learning rate that leaves a float32 model where it is
HARDLY_LEARNING = 1e-6  # one that changes its loss by less than a hundredth in four updates


def resume_peer() -> Finding:
    """16 iterations of mlx-lm, and 8 continued by 8, compared with what the second 8 do."""
    data, folder = write_rows(scratch() / "resume", ROWS, VALID), scratch() / "resume-peer"
    whole = ("--iters", "16", "--save-every", "8")
    half = ("--iters", "8", "--save-every", "8")
    peer.command_line(data, folder / "whole", *whole)
    peer.command_line(data, folder / "broken", *half)
    checkpoint = folder / "broken" / "0000008_adapters.safetensors"
    before = weights(checkpoint)
    peer.command_line(data, folder / "broken", *half, "--resume-adapter-file", str(checkpoint))
    middle, end = (weights(folder / "whole" / f"{step:07d}_adapters.safetensors") for step in (8, 16))
    ratio = distance(weights(folder / "broken" / "adapters.safetensors"), end) / distance(middle, end)
    overwritten = distance(before, weights(checkpoint)) > 0
    text = f"ends {ratio:.2f} x the second half's own way from the unbroken run; step 8 is overwritten: {overwritten}"
    return Finding(ratio > 0.1 and overwritten and distance(before, middle) == 0, text)


UPDATES, KILL_AFTER = 60, 12
RESUME_PINS = (
    "train.batch_size=4",
    "train.gradient_accumulation=2",
    "train.num_epochs=100",
    f"train.max_steps={UPDATES}",
    "train.save_steps=5",
    "train.log_steps=1",
    "train.eval_steps=20",
    "lora.dropout=0.1",
)


@functools.cache
def unbroken() -> str:
    """The fingerprint of the adapter of a run that nobody interrupted."""
    project = Project("unbroken", ROWS, VALID)
    project.plan(*RESUME_PINS)
    project.train(*RESUME_PINS)
    return fingerprint(project.output / "adapters")


def interrupted(name: str, signal_number: int) -> tuple[int, int, str]:
    """Exit code of a run that a signal ended, the step at which it went on, the fingerprint it came to."""
    project = Project(name, ROWS, VALID)
    project.plan(*RESUME_PINS)
    code = project.kill_training(signal_number, KILL_AFTER, *RESUME_PINS)
    project.train(*RESUME_PINS)
    return code, project.summary()["resumed_from_step"], fingerprint(project.output / "adapters")


def resume_ours() -> Finding:
    """The same adapter, bit for bit, after a Ctrl-C."""
    code, step, found = interrupted("stopped", signal.SIGINT)
    exact = found == unbroken()
    text = f"Ctrl-C (exit {code}), continued at step {step} of {UPDATES}: adapter {'identical' if exact else 'differs'}"
    return Finding(not (exact and code == 130 and 0 < step < UPDATES), text)


def save_peer() -> Finding:
    """A good adapter file of mlx-lm after a save that the disk refused."""
    folder, data = scratch() / "save-peer", peer.TokenRows([([3, 4, 5, 6, 7], 0)] * 4)
    file = folder / "adapters.safetensors"
    peer.trained(peer.adapted_model(), data, folder, batch_size=2, iters=1)
    good = file.stat().st_size
    try:
        with files_of_at_most(FILE_LIMIT):
            peer.trained(peer.adapted_model(), data, folder, batch_size=2, iters=1)
        refused = "no error"
    except (OSError, RuntimeError) as error:
        refused = type(error).__name__
    text = f"{refused}; the good file of {good} bytes has {file.stat().st_size}, loads: {loads(file)}"
    return Finding(not loads(file), text)


def loads(file: Path) -> bool:
    """Whether a safetensors file can be read."""
    try:
        return bool(weights(file))
    except (OSError, RuntimeError):
        return False


def save_ours() -> Finding:
    """The adapter of ours after a run that the disk refused to save."""
    project = Project("save", ROWS, VALID)
    pins = ("train.max_steps=2", "train.num_epochs=1")
    project.plan(*pins)
    project.train(*pins)
    folder = project.output / "adapters"
    good = fingerprint(folder)
    refused = project.stage("train", *pins, "train.learning_rate=0.01", file_limit=FILE_LIMIT)
    whole = fingerprint(folder) == good and loads(folder / "adapters.safetensors")
    left = [path.name for path in project.output.rglob("*.partial*")]
    text = f"exit {refused.code}; the good adapter is {'untouched' if whole else 'gone'}, half files left: {len(left)}"
    return Finding(not (refused.code and whole and not left), text)


def accumulation_peer() -> Finding:
    """The gradient of two rows at once and of the two one after the other; and the last partial window."""
    rows = peer.TokenRows([(list(range(3, 3 + length)), 0) for length in (3, 28)])
    moves = []
    for batch_size, accumulation in ((2, 1), (1, 2)):
        model = peer.adapted_model()
        before = peer.adapter_of(model)
        args = {"batch_size": batch_size, "iters": accumulation, "grad_accumulation_steps": accumulation}
        peer.trained(model, rows, scratch() / "accumulation", optimizer=optim.SGD(learning_rate=1.0), **args)
        moves.append({name: value - before[name] for name, value in peer.adapter_of(model).items()})
    error = distance(*moves) / norm(moves[0])
    five = peer.TokenRows([([3 + index, 7, 8], 0) for index in range(5)])
    ends = []
    for iterations in (4, 5):
        model = peer.adapted_model()
        args = {"batch_size": 1, "iters": iterations, "grad_accumulation_steps": 2}
        peer.trained(model, five, scratch() / "window", **args)
        ends.append(peer.adapter_of(model))
    dropped = distance(*ends) == 0
    text = f"1 x 2 rows instead of 2 x 1: gradient off by {100 * error:.0f} %; row 5 of 5 changes nothing: {dropped}"
    return Finding(error > 0.1 and dropped, text)


def accumulation_ours() -> Finding:
    """The same in ours: loss and gradient norm of the first update, and the rows of an epoch."""
    rows = [chat("Say it.", "Fe."), chat("Say it all.", "iron " * 13)]
    project, found = Project("accumulation", rows), []
    project.plan("train.batch_size=2", "train.gradient_accumulation=1")
    for pins in (("2", "1"), ("1", "2")):
        project.train(f"train.batch_size={pins[0]}", f"train.gradient_accumulation={pins[1]}", "train.max_steps=1")
        found.append(project.column("grad_norm")[-1])
    error = abs(found[1] / found[0] - 1)
    five = Project("window", ROWS[:5], VALID)
    pins5 = ("train.batch_size=1", "train.gradient_accumulation=2", "train.num_epochs=1")
    five.plan(*pins5)
    five.train(*pins5)
    steps = five.summary()["steps"]
    text = f"gradient norm off by {100 * error:.5f} %; 5 rows, 2 per update: {steps} updates"
    return Finding(not (error < 1e-4 and steps == 3), text)


def death_peer() -> Finding:
    """What is on the disk when mlx-lm's process ends at iteration 30 of 60."""
    folder, data = scratch() / "death-peer", peer.TokenRows([([3, 4, 5, 6, 7], 0)] * 4)
    with contextlib.suppress(peer.ProcessEndedError):
        peer.trained(peer.adapted_model(), data, folder, batch_size=2, iters=60, die_at=30)
    left = [path.name for path in folder.iterdir()]
    return Finding(not left, f"ended at iteration 30 of 60: {len(left)} files left, 30 iterations lost")


def death_ours() -> Finding:
    """SIGKILL at some step: the same command goes on and comes to the same adapter."""
    code, step, found = interrupted("killed", signal.SIGKILL)
    exact = found == unbroken()
    text = f"killed (exit {code}), continued at step {step} of {UPDATES}: adapter {'identical' if exact else 'differs'}"
    return Finding(not (exact and code == -signal.SIGKILL and step), text)


def validation_peer() -> Finding:
    """Validations of a model that does not change, the order of training beside them, and the weights that are kept."""
    rows = random_rows(6, seed=1)
    still = {"batch_size": 2, "iters": 9, "val_batches": 2}
    found = [
        peer.trained(
            peer.adapted_model(),
            rows,
            scratch() / "validation",
            optimizer=optim.Adam(learning_rate=NO_LEARNING),
            valid=random_rows(24, seed=2),
            steps_per_eval=every,
            **still,
        )
        for every in (1, peer.NEVER)
    ]
    moved = len(set(found[0].valid)) > 1
    disturbed = found[0].losses != found[1].losses
    values = ", ".join(f"{loss:.3f}" for loss in found[0].valid[:4])
    best, kept = overfitted_peer()
    text = (
        f"validations of an unchanged model: {values}; validating more often changes the batches: {disturbed}; "
        f"best {best:.2f}, kept {kept:.2f}"
    )
    return Finding(moved and disturbed and kept > best + 0.1, text)


def random_rows(count: int, seed: int) -> peer.TokenRows:
    """Rows of random tokens."""
    source = np.random.default_rng(seed)
    return peer.TokenRows([(source.integers(3, 2048, 12).tolist(), 0) for _ in range(count)])


def overfitted_peer() -> tuple[float, float]:
    """Where training makes validation worse: the best loss that mlx-lm saw, and that of the adapter it kept."""
    folder = scratch() / "overfitted-peer"
    train_rows, valid, _ = load(write_rows(folder / "rows", ONE_WORD, ANOTHER_TEXT))
    args = {"batch_size": 1, "iters": 20, "steps_per_eval": 2, "val_batches": -1}
    high, model = optim.Adam(learning_rate=0.003), peer.adapted_model(EMBEDDED)
    seen = peer.trained(model, train_rows, folder, optimizer=high, valid=valid, **args)
    kept = peer.adapted_model(EMBEDDED)
    kept.load_weights(str(folder / "adapters.safetensors"), strict=False)
    return min(seen.valid), peer.validation_loss(kept, valid)


def validation_ours() -> Finding:
    """The same of ours."""
    project, losses = Project("validation", ROWS, VALID), []
    pins = ("train.batch_size=4", "train.gradient_accumulation=1", "train.num_epochs=1", "train.max_steps=4")
    project.plan(*pins)
    for every in (1, 4):
        still = (f"train.learning_rate={HARDLY_LEARNING}", f"train.eval_steps={every}", "train.log_steps=1")
        project.train(*pins, *still)
        losses.append((project.column("train_loss"), project.column("valid_loss")))
    (often, valid), (seldom, _) = losses
    overfitted = Project("overfitted", ONE_WORD, ANOTHER_TEXT, model=EMBEDDED)
    high = ("train.batch_size=1", "train.gradient_accumulation=1", "train.learning_rate=0.003", "train.max_steps=20")
    overfitted.plan(*high)
    overfitted.train(*high, "train.eval_steps=2", "train.num_epochs=3")
    result = overfitted.summary()
    kept = judged(overfitted)
    spread = max(valid) - min(valid)
    text = (
        f"{len(valid)} validations differ by {spread:.3f}; validating more often changes the batches: "
        f"{often != seldom}; best {result['best_valid_loss']:.2f} at step {result['best_step']}, kept {kept:.2f}, "
        f"last {result['valid_loss']:.2f}"
    )
    is_best = abs(kept - result["best_valid_loss"]) < 0.02 * result["best_valid_loss"]
    good = spread < 0.01 and often == seldom and is_best and result["valid_loss"] > result["best_valid_loss"]
    return Finding(not good, text)


def judged(project: Project) -> float:
    """The kept adapter as mlx-lm loads it: its loss over the validation rows, padding not counted."""
    model = mlx_lm.utils.load(str(EMBEDDED), adapter_path=str(project.output / "adapters"))[0]
    data, total, count = load(project.data)[1], 0.0, 0
    for index in range(len(data)):
        ids, _ = data.process(data[index])
        loss, labels = peer.default_loss(model, mx.array([ids]), mx.array([[0, len(ids) - 1]]))
        total, count = total + float(loss.item()) * int(labels.item()), count + int(labels.item())
    return total / count


FAULTS = [
    Fault(4, "Resume restores weights only", "the weights of the unbroken run", resume_peer, resume_ours),
    Fault(
        5,
        "A save that fails destroys the last good one",
        f"files may have {FILE_LIMIT} bytes: the good adapter stays",
        save_peer,
        save_ours,
    ),
    Fault(
        6,
        "Accumulation is a mean of means and drops the last window",
        "the gradient of the whole batch; every row counts",
        accumulation_peer,
        accumulation_ours,
    ),
    Fault(
        8,
        "Out of memory ends the process, and nothing is saved",
        "the run goes on where it was",
        death_peer,
        death_ours,
        observable=False,
        argument="only a GPU runs out of memory like this (Metal aborts in a completion handler, where no trainer's "
        "code runs); shown instead: a process that ends in the middle of a run",
    ),
    Fault(
        10,
        "Validation is a moving target, the best adapter is lost",
        "one model, one value; the best adapter is kept",
        validation_peer,
        validation_ours,
    ),
]
