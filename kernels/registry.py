"""Ops and their backends: a printable table, chosen per call by device and a predicate.

An op is a name with an ordered list of backends; the first one that accepts the arguments runs. A backend is a plain
function. Choices can be narrowed for a block of code (`Registry.override`, `Registry.deterministic`), never globally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from specdec.errors import ConfigError, KernelUnavailable

_NO_CHOICE: dict[str, str] = {}
_FIXED = "fixed order only"  # key beside op names in a choice; no op is called that


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of an op.

    fn: the implementation; same signature for every backend of the op.
    devices: device types of the op's first tensor it can run on.
    rejects: called with the op's arguments, returns None (can run) or the reason why not.
    fixed_order: result bits of a row do not depend on the number of rows, on other rows, or on the thread count.
    missing: why it cannot be used in this process at all (for example: extension not built); None = usable.
    covers: ops whose work it does itself; it steps back where an override asks for another backend of one of them.
    """

    name: str
    fn: Callable[..., Any]
    devices: tuple[str, ...] = ("cpu", "cuda")
    rejects: Callable[..., str | None] | None = None
    fixed_order: bool = True
    missing: str | None = None
    covers: tuple[str, ...] = ()

    def bypasses(self, chosen: dict[str, str]) -> str | None:
        """The override of a covered op that running this backend would ignore, or None."""
        return next((f"{op} is overridden" for op in self.covers if chosen.get(op, self.name) != self.name), None)


@dataclass(slots=True, eq=False)
class Op:
    """A named op with backends in order of preference. Calling it dispatches."""

    name: str
    choice: ContextVar[dict[str, str]]
    backends: list[Backend] = field(default_factory=list)
    usable: dict[str, list[Backend]] = field(default_factory=dict)  # device type -> usable backends

    def add(self, backend: Backend) -> None:
        """Append a backend, less preferred than those already there."""
        self.backends.append(backend)
        if backend.missing is None:
            for device in backend.devices:
                self.usable.setdefault(device, []).append(backend)

    def find(self, name: str) -> Backend:
        """The backend called `name`; ConfigError when the op has none, KernelUnavailable when it is not usable here."""
        for backend in self.backends:
            if backend.name == name:
                if backend.missing is not None:
                    raise KernelUnavailable(f"{self.name}: backend {name!r} is not usable here: {backend.missing}")
                return backend
        raise ConfigError(f"{self.name} has no backend {name!r}; it has {', '.join(b.name for b in self.backends)}", param="backend")

    def select(self, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Backend:
        """First usable backend that accepts the arguments and the choice in force; KernelUnavailable lists every refusal."""
        chosen = self.choice.get()
        fixed_order, reasons = _FIXED in chosen, []
        for backend in self.usable.get(device, ()):
            reason = backend.bypasses(chosen) or (None if backend.rejects is None else backend.rejects(*args, **kwargs))
            if reason is None and (backend.fixed_order or not fixed_order):
                return backend
            reasons.append(f"{backend.name}: {reason or 'no fixed order'}")
        raise KernelUnavailable(f"{self.name} on {device}: no backend can run this ({'; '.join(reasons) or 'none registered'})")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chosen = self.choice.get()
        first = args[0] if not isinstance(args[0], (list, tuple)) else args[0][0]
        device = "cpu" if first.is_cpu else first.device.type
        if chosen:
            name = chosen.get(self.name)
            backend = self.select(device, args, kwargs) if name is None else self.find(name)
            return backend.fn(*args, **kwargs)
        for backend in self.usable.get(device, ()):
            if backend.rejects is None or backend.rejects(*args, **kwargs) is None:
                return backend.fn(*args, **kwargs)
        return self.select(device, args, kwargs).fn(*args, **kwargs)  # raises, with the reasons


class Registry:
    """All ops of the process, in order of registration."""

    def __init__(self) -> None:
        self.ops: dict[str, Op] = {}
        self._choice: ContextVar[dict[str, str]] = ContextVar("specdec_backend_choice", default=_NO_CHOICE)

    def op(self, name: str) -> Op:
        """The op called `name`, created empty on first use."""
        if name not in self.ops:
            self.ops[name] = Op(name, self._choice)
        return self.ops[name]

    @contextmanager
    def override(self, op: str, backend: str) -> Iterator[None]:
        """Within the block (and this thread or task only), `op` runs `backend`, whatever the predicates say."""
        if op not in self.ops:
            raise ConfigError(f"no op {op!r}; there are {', '.join(self.ops)}", param="op")
        self.ops[op].find(backend)
        token = self._choice.set({**self._choice.get(), op: backend})
        try:
            yield
        finally:
            self._choice.reset(token)

    @contextmanager
    def deterministic(self, device: str) -> Iterator[None]:
        """Within the block only backends whose bits do not depend on the batch may run; an `override` still wins."""
        for name, op in self.ops.items():
            if not any(b.fixed_order for b in op.usable.get(device, ())):
                raise KernelUnavailable(f"{name} has no backend with a fixed order of reduction on {device}; turn deterministic off")
        token = self._choice.set({**self._choice.get(), _FIXED: ""})
        try:
            yield
        finally:
            self._choice.reset(token)

    def explain(self, device: str) -> dict[str, str]:
        """Per op: the preferred usable backend on `device`, and why better ones are not used."""
        table = {}
        for name, op in self.ops.items():
            usable = op.usable.get(device, [])
            skipped = [f"{b.name}: {b.missing}" for b in op.backends if b.missing is not None and device in b.devices]
            text = usable[0].name if usable else "none"
            if usable and usable[0].fixed_order and not isinstance(usable[0].fn, Op):  # of an op, its own line tells
                text += ", fixed order"
            table[name] = text + (f" ({'; '.join(skipped)})" if skipped else "")
        return table
