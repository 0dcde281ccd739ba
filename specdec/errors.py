"""Typed errors. Each says what is wrong and what to change; the server maps them to HTTP by `status` and `code`.

Errors the user caused are 4xx, everything else 5xx. `param` names the offending request or configuration field.
"""

from __future__ import annotations


class SpecdecError(Exception):
    """Base of every error specdec raises on purpose."""

    status: int = 500
    code: str = "internal_error"

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(SpecdecError, ValueError):
    """A request or argument that can never be served: unknown field, value out of range, token id out of range."""

    status = 400
    code = "invalid_request"


class RequestTooLong(InvalidRequest):
    """Prompt leaves no room for one output token inside `max_model_len`, or can never fit the KV pool."""

    code = "context_length_exceeded"


class ConfigError(SpecdecError, ValueError):
    """Engine or speculation settings that cannot work together; raised at start-up."""

    code = "invalid_config"


class ModelNotFound(SpecdecError):
    """No such model name, directory, file or hub id, or it could not be fetched."""

    status = 404
    code = "model_not_found"


class UnsupportedCheckpoint(SpecdecError):
    """The checkpoint is corrupt, truncated, incomplete, or of an architecture or format specdec does not know."""

    code = "unsupported_checkpoint"


class KernelUnavailable(SpecdecError):
    """No backend of an op can run these arguments on this device."""

    code = "kernel_unavailable"


class OutOfBlocks(SpecdecError):
    """The KV pool has no free block left; the scheduler answers by preempting."""

    code = "out_of_blocks"


class QueueFull(SpecdecError):
    """The bounded admission queue is full; try again after `retry_after` seconds."""

    status = 429
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


class Draining(SpecdecError):
    """The server is shutting down and takes no new work."""

    status = 503
    code = "draining"


class EngineDead(SpecdecError):
    """The engine thread died; the message carries the original error."""

    status = 500
    code = "engine_dead"
