"""Files that appear whole or not at all."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write to, which takes the place of ``path`` when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{uuid.uuid4().hex}.part")  # readers of the folder pass it over
    try:
        with hidden.open("xb") as file:
            yield cast(BinaryIO, file)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
