"""Real data sets: from a folder, the cache, their sources, or scikit-learn."""

from bilevel.datasets.loading import DamagedFileError, DownloadError, load, locate, names
from bilevel.datasets.registry import Dataset

__all__ = ["DamagedFileError", "Dataset", "DownloadError", "load", "locate", "names"]
