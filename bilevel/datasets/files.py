"""Files of data sets: found in the folder BILEVEL_DATA or the cache, read whole and verified, written whole."""

import hashlib
import io
import os
import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np

from bilevel._archives import read_array, read_header
from bilevel._io import cache_folder, read_bounded, replacing
from bilevel.datasets.registry import ArraySpec, FileSet

_BLOCK_BYTES = 2**20


class DamagedFileError(ValueError):
    """A file that is not the data set its name promises."""


def find(name: str) -> Path | None:
    """Return the file of a set, or None where neither folder has it."""
    named, folders = os.environ.get("BILEVEL_DATA"), [cache_folder()]
    if named:
        folders.insert(0, Path(named).expanduser())
        if not folders[0].is_dir():
            raise NotADirectoryError(f"`BILEVEL_DATA={named}` is not a folder; correct it or unset it.")
    return next((path for folder in folders if (path := folder / f"{name}.npz").exists()), None)


def checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of names, types, shapes and values: the bytes of an archive are not reproducible."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        # By blocks of rows: an array in Fortran order is never copied whole.
        step = max(1, _BLOCK_BYTES * len(array) // max(1, array.nbytes))
        for start in range(0, len(array), step):
            digest.update(np.ascontiguousarray(array[start : start + step]).data)
    return digest.hexdigest()


def verify(arrays: Mapping[str, np.ndarray], known: FileSet) -> None:
    """Raise ValueError unless these are the arrays of the set, to the last bit."""
    for spec in known.arrays:
        _check_form(spec, arrays[spec.name].dtype, arrays[spec.name].shape)
    if (found := checksum(arrays)) != known.checksum:
        raise ValueError(f"the checksum of the contents is {found}, not {known.checksum}")


def read(path: Path, known: FileSet) -> dict[str, np.ndarray]:
    """Return the verified arrays of a file."""
    most = _BLOCK_BYTES + sum(prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in known.arrays)
    try:
        with zipfile.ZipFile(io.BytesIO(read_bounded(path, most))) as archive:
            wanted, found = sorted(f"{spec.name}.npy" for spec in known.arrays), sorted(archive.namelist())
            if wanted != found:
                raise ValueError(f"it holds {found}, not {wanted}")
            arrays = {spec.name: _read_member(archive, spec) for spec in known.arrays}
        verify(arrays, known)
    except OSError:
        raise
    # Damage surfaces in zipfile, zlib, struct or NumPy, under a dozen types that all mean the same.
    except Exception as error:
        message = f"`{path}` is not the data set '{known.name}', or is damaged: {error}."
        raise DamagedFileError(f"{message} Delete it, or replace it by a file with {known.contents}.") from error
    return arrays


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an archive; the file appears whole or not at all."""
    with replacing(path) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _read_member(archive: zipfile.ZipFile, spec: ArraySpec) -> np.ndarray:
    """Check the header of an array, before memory is taken for what it claims, and read the array."""
    with archive.open(f"{spec.name}.npy") as member:
        shape, dtype = read_header(member)
        _check_form(spec, dtype, shape)
        return read_array(member, most=prod(shape) * dtype.itemsize)


def _check_form(spec: ArraySpec, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    if (dtype, shape) != (np.dtype(spec.dtype), spec.shape):
        raise ValueError(f"`{spec.name}` is {dtype} {shape}, not {np.dtype(spec.dtype)} {spec.shape}")
