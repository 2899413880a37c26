"""The faults around the model and the machine: 7 (memory), 12 (checkpointing), 13 (no guards), 15 (traps)."""

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm.lora
from mlx_lm.models.llama import TransformerBlock
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.trainer import TrainingArgs, grad_checkpoint

from safetrain.core.records.settings import read_recommendation, write_recommendation
from tests.support.faults import peer
from tests.support.faults.data_cases import CHATS
from tests.support.faults.fault import Fault, Finding
from tests.support.faults.project import Done, Project, is_finite, norm, scratch, tiny_model, write_rows

LARGE_VOCABULARY = 32_768
DORA_BITS = (3, 5, 6)
NONSENSE = 1e20  # as a learning rate


def memory_peer() -> Finding:
    """What mlx-lm makes of its option for the allocator's cache, and what it reports of memory."""
    data, received = write_rows(scratch() / "memory", CHATS, CHATS), []
    with patch.object(mlx_lm.lora, "train", lambda **arguments: received.append(arguments["args"])):
        peer.command_line(data, scratch() / "memory-peer", "--clear-cache-threshold", "5GB")
    folder, rows = scratch() / "memory-report", peer.TokenRows([([3, 4, 5], 0)] * 2)
    report = peer.trained(peer.adapted_model(), rows, folder, batch_size=1, iters=1).train[0]
    reported = [name for name in report if "memory" in name]
    threshold = received[0].clear_cache_threshold
    text = f"--clear-cache-threshold 5GB arrives as {threshold}; memory reported: {', '.join(reported)}"
    return Finding(threshold == 0 and reported == ["peak_memory"], text)


def memory_ours() -> Finding:
    """What ours reports of memory, and what it does with a budget that does not suffice."""
    project = Project("memory", CHATS)
    project.plan()
    project.train("train.max_steps=2")
    summary = project.summary()
    names = ("peak_memory_bytes", "peak_footprint_bytes", "predicted_peak_bytes")
    measured = all(summary.get(name, 0) > 0 for name in names)
    plan = project.output / "recommended_config.json"
    write_recommendation(plan, dataclasses.replace(read_recommendation(plan), memory_budget_bytes=2**20))
    refused = project.stage("train", "train.max_steps=2")
    text = f"reported: {', '.join(names)}; with a budget of 1 MiB: exit {refused.code} before the first step"
    return Finding(not (measured and refused.code == 5), text)


def class_peer() -> Finding:
    """What mlx-lm's gradient checkpointing does to a model it was not called for, and when it is called twice."""
    original = TransformerBlock.__call__
    with patch.object(TransformerBlock, "__call__", original):  # puts the class back
        bystander = peer.adapted_model()
        grad_checkpoint(peer.adapted_model().layers[0])
        changed = type(bystander.layers[0]).__call__ is not original
        once = checkpoints_in_a_call(bystander)
        grad_checkpoint(peer.adapted_model().layers[0])
        twice = checkpoints_in_a_call(bystander)
    layers = len(bystander.layers)
    text = (
        f"a model it was not called for: class changed {changed}, {once} checkpoints in {layers} layers; "
        f"after a second training {twice}"
    )
    return Finding(changed and (once, twice) == (layers, 2 * layers), text)


def checkpoints_in_a_call(model: Any) -> int:
    """How often mx.checkpoint is used in one forward pass."""
    original, count = mx.checkpoint, 0

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        nonlocal count
        count += 1
        return original(function)

    with patch.object(mx, "checkpoint", counting):
        mx.eval(model(mx.array([[3, 4, 5]])))
    return count


def class_ours() -> Finding:
    """The class of the blocks before and after a run of ours with gradient checkpointing, in one process, twice."""
    project, key = Project("class", CHATS), "train.gradient_checkpointing=true"
    runs = [planned_run(project, key, "train.max_steps=2") for _ in range(2)]
    changed = [done.class_is_changed for done in runs]
    return Finding(any(changed), f"{key}: class changed after two trainings in one process: {any(changed)}")


def planned_run(project: Project, *pins: str) -> Done:
    """Plan and train."""
    project.plan(*pins)
    return project.train(*pins)


def guards_peer() -> Finding:
    """How long a gradient mlx-lm applies, what learning rate it takes, and what its logits cost."""
    model, data = peer.adapted_model(), peer.TokenRows([([3, 4, 5, 6, 7], 0)] * 4)
    before = peer.adapter_of(model)
    peer.trained(model, data, scratch() / "guards", optimizer=optim.SGD(learning_rate=1.0), batch_size=1, iters=1)
    moved = norm({name: value - before[name] for name, value in peer.adapter_of(model).items()})
    fast = optim.Adam(learning_rate=NONSENSE)
    losses = peer.trained(
        peer.adapted_model(), data, scratch() / "guards", optimizer=fast, batch_size=1, iters=5
    ).losses
    clips = [field.name for field in dataclasses.fields(TrainingArgs) if "norm" in field.name or "clip" in field.name]
    peak = peak_of_peer()
    text = (
        f"no clipping (a gradient of norm {moved:.1f} is applied whole); rate {NONSENSE:g} is taken: "
        f"trains to the end with loss {losses[-1]}; {peak / 2**20:.0f} MiB for 4 x 128 tokens, "
        f"{LARGE_VOCABULARY} words in the vocabulary"
    )
    return Finding(not clips and not math.isfinite(losses[-1]) and peak > 4 * 128 * LARGE_VOCABULARY * 4, text)


def wide_rows() -> list[dict[str, Any]]:
    """Four chat rows of about 128 tokens with short answers."""
    return [{"messages": [{"role": "user", "content": "iron " * 60}, *CHATS[i]["messages"][1:]]} for i in range(4)]


def peak_of_peer() -> int:
    """The peak of mlx's allocator in an update of mlx-lm."""
    data = mlx_lm.lora.load_dataset(
        types.SimpleNamespace(
            data=str(write_rows(scratch() / "wide", wide_rows(), CHATS)), train=True, test=False, mask_prompt=True
        ),
        peer.tokenizer(),
    )[0]
    model = peer.adapted_model(tiny_model(vocabulary=LARGE_VOCABULARY))
    mx.eval(model.parameters())
    mx.reset_peak_memory()
    report = peer.trained(model, data, scratch() / "wide-peer", batch_size=4, iters=2).train
    return int(report[-1]["peak_memory"] * 1e9)


def guards_ours() -> Finding:
    """The same of ours: the gradient's norm and its limit, the learning rate, the peak."""
    project = Project("guards", CHATS)
    project.plan()
    refused = project.stage("train", f"train.learning_rate={NONSENSE:g}")
    moved = []
    for limit in ("1e-7", "1e7"):
        project.train("train.max_steps=1", f"train.max_grad_norm={limit}", "train.learning_rate=0.01")
        moved.append(norm({k: v for k, v in project.adapter().items() if k.endswith("lora_b")}))
    wide = Project("wide", wide_rows(), CHATS, model=tiny_model(vocabulary=LARGE_VOCABULARY))
    pins = ("train.batch_size=4", "train.gradient_accumulation=1", "train.max_steps=2")
    wide.plan(*pins)
    wide.train(*pins)
    peak = wide.summary()["peak_memory_bytes"]
    text = (
        f"clips (a limit of 1e-7 makes the first update {moved[1] / moved[0]:.0f} times smaller); rate {NONSENSE:g}: "
        f"exit {refused.code}; {peak / 2**20:.0f} MiB for the same batch"
    )
    two_copies = 2 * 4 * 128 * LARGE_VOCABULARY * 4  # of all logits
    good = refused.code == 2 and moved[0] < 0.5 * moved[1] and peak < two_copies
    return Finding(not good, text)


def traps_peer() -> Finding:
    """A callback that is dropped, a default that a shallow model refuses, DoRA on quantized weights."""
    data, calls = write_rows(scratch() / "traps", CHATS, CHATS), peer.Recorder()
    settings = {**mlx_lm.lora.CONFIG_DEFAULTS, "model": str(tiny_model()), "data": str(data), "train": True}
    settings |= {"num_layers": 2, "iters": 10, "batch_size": 2, "adapter_path": str(scratch() / "traps-peer")}
    with peer.quiet():
        mlx_lm.lora.run(types.SimpleNamespace(**settings), training_callback=calls)
    shallow = ""
    try:
        peer.command_line(data, scratch() / "traps-shallow", "--num-layers", "16")
    except ValueError as error:
        shallow = type(error).__name__
    failing = [bits for bits in (2, 3, 4, 5, 6, 8) if not dora_works(bits)]
    text = (
        f"the callback given to run() gets {len(calls.train)} calls; default num_layers on 2 layers: {shallow}; "
        f"DoRA fails at {', '.join(map(str, failing))} bits"
    )
    return Finding(not calls.train and bool(shallow) and failing == list(DORA_BITS), text)


def dora_works(bits: int) -> bool:
    """Whether mlx-lm's DoRA layer of a quantized matrix computes."""
    quantized = nn.QuantizedLinear(128, 64, bias=False, group_size=64, bits=bits)
    try:
        mx.eval(DoRALinear.from_base(quantized)(mx.zeros((1, 128))))
    except ValueError:
        return False
    return True


def traps_ours() -> Finding:
    """DoRA at the same bits, through the stages; the number of layers is the model's without being asked for."""
    losses, finite = [], True
    for bits in DORA_BITS:
        project = Project(f"dora-{bits}", CHATS, model=tiny_model(bits=bits))
        planned_run(project, "train.method=dora", "train.max_steps=2", "train.dequantize_base=false")
        losses.append(project.column("train_loss")[-1])
        finite = finite and is_finite(project.adapter()) and math.isfinite(losses[-1])
    values = ", ".join(f"{bits} bits {loss:.2f}" for bits, loss in zip(DORA_BITS, losses, strict=True))
    return Finding(not finite, f"two updates of DoRA on a model of two layers, last loss: {values}")


FAULTS = [
    Fault(
        7,
        "Memory is pushed to the limit and misreported",
        "a limit that works; a report of the whole process",
        memory_peer,
        memory_ours,
        observable=False,
        argument="wiring the working set needs Metal; shown instead: the option that never arrives, and the reports",
    ),
    Fault(
        12,
        "Gradient checkpointing changes a class",
        "other models of the type are left alone",
        class_peer,
        class_ours,
    ),
    Fault(
        13,
        "No clipping, no guard of the learning rate, all logits",
        "bounded updates, refused nonsense, logits for labels only",
        guards_peer,
        guards_ours,
    ),
    Fault(15, "Traps for callers; DoRA on quantized weights", "what is asked for happens", traps_peer, traps_ours),
]
