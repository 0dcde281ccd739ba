"""How the matrices of a quantised checkpoint are stored, and which of its modules are."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from specdec.errors import UnsupportedCheckpoint


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """e4m3 numbers in `weight`, scales in `weight_scale` or `weight_scale_inv` (both are multiplied by). layout: "tensor" (one, or one
    for each part of a fused projection), "channel" (one a row) or "block" (one for 128 × 128)."""

    layout: str


@dataclass(frozen=True, slots=True)
class Int4Scheme:
    """4-bit codes. packing: "awq" | "gptq" | "compressed-tensors", the layouts of `specdec.quant.repack`. group: columns that share a
    scale, -1 = all. symmetric: no zero points are stored. zero_shift: what is added to a stored zero point (1 in GPTQ's first version)."""

    packing: str
    group: int
    symmetric: bool = False
    zero_shift: int = 0


Scheme = Fp8Scheme | Int4Scheme
Matcher = Callable[[str, str], bool]  # (pattern, module name)


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules that match one of `targets` have `scheme`."""

    targets: tuple[str, ...]
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a checkpoint says of its storage. method: as its config names it. `ignored` modules are plain numbers, matched by `matches`."""

    method: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...]
    matches: Matcher

    def scheme_of(self, module: str) -> Scheme | None:
        """How a linear layer such as "model.layers.0.mlp.up_proj" is stored; None = as plain numbers."""
        if any(self.matches(pattern, module) for pattern in self.ignored):
            return None
        for named_class in (False, True):  # a name says more than the class of all linear layers
            for rule in self.rules:
                if any((target == "Linear") == named_class and (named_class or self.matches(target, module)) for target in rule.targets):
                    return rule.scheme
        return None

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return tuple(rule.scheme for rule in self.rules)

    def __str__(self) -> str:
        return f"{self.method} ({', '.join(dict.fromkeys(map(describe, self.schemes)))})"


def describe(scheme: Scheme) -> str:
    """A scheme in a few words."""
    if isinstance(scheme, Fp8Scheme):
        return f"e4m3 per {scheme.layout}"
    return f"int4 {scheme.packing}, {'one group a row' if scheme.group == -1 else f'groups of {scheme.group}'}"


def everywhere(method: str, scheme: Scheme, ignored: tuple[str, ...] = (), matches: Matcher | None = None) -> Quantization:
    """One scheme for all linear layers but the ignored."""
    return Quantization(method, (Rule(("Linear",), scheme),), ignored, matches or by_components)


def by_components(pattern: str, module: str) -> bool:
    """The pattern is a run of whole components: "mlp.gate" is in "layers.0.mlp.gate", not in "layers.0.mlp.gate_proj"."""
    return f".{pattern}." in f".{module}."


def by_substring(pattern: str, module: str) -> bool:
    """AutoAWQ's rule."""
    return pattern in module


def by_glob(pattern: str, module: str) -> bool:
    """ModelOpt's rule; a name stands for what is below it too."""
    return fnmatchcase(module, pattern) or module.startswith(pattern + ".")


def by_name_or_regex(pattern: str, module: str) -> bool:
    """compressed-tensors' rule: a name, or a regular expression (from the start) after "re:"."""
    if not pattern.startswith("re:"):
        return pattern == module
    try:
        return re.match(pattern[3:], module) is not None
    except re.error as err:
        raise UnsupportedCheckpoint(f"quantization_config: {pattern!r} is not a regular expression: {err}") from None
