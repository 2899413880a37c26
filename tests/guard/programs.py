"""What the small Python programs that are supervised here have in common."""

IMPORTS = """
import json, os, signal, sys, time
from pathlib import Path
from safetrain.engine.child_process import set_up_child
from safetrain.core.events import Begun, EventPipe, Failed, Finished, Said, open_events
from safetrain.core.recorder import Edge, Phase, Recorder, Work
from safetrain.core.records.metrics import StepRecord
from safetrain.core.records.settings import TrainJob
from safetrain.core.storage.files import read_record
from safetrain.core.storage.paths import JOB, RECORDER, rank_folder
"""
