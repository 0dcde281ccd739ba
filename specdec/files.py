"""Writing files: whole or not at all, and readable by whom the user's umask lets."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new, empty file beside `path`. It takes that name when the block ends, and is removed when the block fails.

    Readers see the old file or the new one, never a part. tempfile's files would be for their owner only, and the umask cannot
    be read without setting it for all threads, so the name is drawn here and the mode left to `open`. Raises OSError.
    """
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    part.open("xb").close()
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write `path` through `replacing`. Raises OSError."""
    with replacing(path) as part:
        part.write_bytes(content)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file through `replacing`. Raises OSError, SafetensorError."""
    from safetensors.torch import save_file

    with replacing(path) as part:
        mode = stat.S_IMODE(part.stat().st_mode)
        save_file(dict(tensors), part, metadata=dict(metadata))  # some versions put a file of mode 0600 in the place of the given one
        part.chmod(mode)
