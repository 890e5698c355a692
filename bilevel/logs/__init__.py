"""The rows of a history, written down while the run goes on."""

from bilevel.logs.base import About, Log, Row
from bilevel.logs.recorder import Recorder, recording
from bilevel.logs.table import CSVLog
from bilevel.logs.tensorboard import TensorBoardLog

__all__ = ["About", "CSVLog", "Log", "Recorder", "Row", "TensorBoardLog", "recording"]
