"""Real data sets, from a folder, a cache, their sources, or scikit-learn."""

from bilevel.datasets.files import DamagedFileError
from bilevel.datasets.loading import DownloadError, load, locate, names
from bilevel.datasets.registry import Dataset

__all__ = ["DamagedFileError", "Dataset", "DownloadError", "load", "locate", "names"]
