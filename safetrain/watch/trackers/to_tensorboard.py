"""To TensorBoard: event files in a folder, written by the package tensorboard itself."""

import secrets
from pathlib import Path

from safetrain.watch.trackers.sent import FOLDER, Sent, Target
from safetrain.watch.trackers.tracked import TrackedRun


def place_of(target: Target) -> str:
    """The folder that has a folder for each run."""
    return target.place or str(FOLDER / "tensorboard")


def open_run(run: TrackedRun, target: Target) -> str:
    """The name of a new run's folder."""
    return f"{target.name}-{secrets.token_hex(4)}" if target.name else secrets.token_hex(4)


def send(run: TrackedRun, sent: Sent, target: Target) -> str:
    """Append the steps, and the results; says where they are. Raises OSError."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.plugins.text.metadata import create_summary_metadata
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = Path(sent.place) / sent.run_id
    writer = EventFileWriter(str(folder))
    # TensorBoard drops what it has from this step on: an export that was interrupted is sent again, once.
    start = SessionLog(status=SessionLog.START)
    writer.add_event(Event(step=sent.last_step + 1, wall_time=sent.began_seconds, session_log=start))
    if sent.last_step < 0:
        table = "\n".join(["| setting | value |", "|---|---|", *(f"| {s.name} | {s.value} |" for s in run.settings)])
        text = TensorProto(dtype="DT_STRING", string_val=[table.encode()], tensor_shape=TensorShapeProto())
        told = Summary.Value(tag="settings", metadata=create_summary_metadata("", ""), tensor=text)
        writer.add_event(Event(step=0, wall_time=sent.began_seconds, summary=Summary(value=[told])))
    for step in run.steps:
        values = [Summary.Value(tag=scalar.name, simple_value=scalar.value) for scalar in step.scalars]
        at = sent.began_seconds + step.elapsed_seconds
        writer.add_event(Event(step=step.step, wall_time=at, summary=Summary(value=values)))
    if run.results:
        values = [Summary.Value(tag=scalar.name, simple_value=scalar.value) for scalar in run.results]
        writer.add_event(Event(step=run.steps.last_step, wall_time=run.recorded_seconds, summary=Summary(value=values)))
    writer.close()
    return f"{folder}; tensorboard --logdir {folder.parent}"
