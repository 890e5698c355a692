"""Arrays in archives, which are checked before memory is taken for them; nothing is unpickled."""

import os
import zipfile
from math import prod
from typing import IO, BinaryIO

import numpy as np


def read_stored_arrays(file: BinaryIO) -> dict[str, np.ndarray]:
    """Return the arrays that `np.savez` wrote, which does not compress.

    What would unpack to more than the file holds is refused before it is read.
    """
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(one.compress_type != zipfile.ZIP_STORED for one in members) or sum(m.file_size for m in members) > size:
            raise ValueError(f"it would unpack to more than its own {size:,} bytes")
        found = {}
        for one in members:
            with archive.open(one) as member:
                found[one.filename.removesuffix(".npy")] = read_array(member, most=one.file_size)
    return found


def read_header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and type that an array in NumPy's format claims, and go back to its beginning."""
    if np.lib.format.read_magic(member) != (1, 0):
        raise ValueError("an array is not in version 1.0 of NumPy's format")
    shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    member.seek(0)
    return shape, dtype


def read_array(member: IO[bytes], most: int) -> np.ndarray:
    """Return an array in NumPy's format, unless it claims more than ``most`` bytes: memory is taken for the claim."""
    shape, dtype = read_header(member)
    if prod(shape) * dtype.itemsize > most:
        raise ValueError(f"an array claims to have shape {shape}, more than is there")
    return np.lib.format.read_array(member, allow_pickle=False)
