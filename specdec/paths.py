"""What a record may say of the machine it was made on: no folders."""

from __future__ import annotations

from pathlib import Path


def without_path(arg: str) -> str:
    """An argument with what is a path of this machine cut to its last part, also behind `name=`."""
    name, equals, value = arg.partition("=")
    if not equals:
        name, value = "", arg
    return name + equals + Path(value).name if value.startswith(("/", "~")) else arg
