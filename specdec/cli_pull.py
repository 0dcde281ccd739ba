"""`specdec pull NAME [--convert DIR]`: fetch a model into the cache, and write it in Hugging Face layout if asked."""

from __future__ import annotations

from pathlib import Path


def run_pull(name: str, *, convert: str | None = None, dtype: str = "float32", progress: bool = True) -> Path:
    """Where the model is now: the fetched file or directory, or the directory written by `convert`.

    A GGUF file is parsed into the cache at once, so that the first start is quick. Raises ModelNotFound,
    UnsupportedCheckpoint, ConfigError.
    """
    from specdec.models.load import find_checkpoint

    checkpoint = find_checkpoint(name, progress=progress)
    if convert is None:
        return checkpoint.path
    from specdec.models.export import export

    return export(checkpoint, Path(convert).expanduser(), dtype=dtype)
