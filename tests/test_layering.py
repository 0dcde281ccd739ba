"""Imports point one way: server → llm → boot → engine → {scheduler, spec, runner, …} → models → layers → ops → kernels."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Higher may import lower or equal. Packages not listed by file take their folder's rank.
RANKS = {
    "kernels": 0,
    "errors": 0,
    "files": 0,
    "check": 1,
    "version": 0,
    "config": 1,
    "types": 1,
    "ops": 1,
    "memory": 1,
    "transfer": 1,
    "paths": 0,
    "quant": 2,
    "layers": 3,
    "cache": 4,
    "sequence": 4,
    "models": 5,
    "tokenizer": 5,
    "rng": 5,
    "output": 6,
    "rows": 6,
    "truncation": 6,
    "penalties": 6,
    "sampling": 6,
    "logprobs": 6,
    "request": 7,
    "spec": 7,
    "admission": 7,
    "budget": 7,
    "planning": 7,
    "scheduler": 7,
    "runner": 7,
    "batch": 8,
    "trace": 8,
    "commit": 8,
    "overlap": 8,
    "behind": 8,
    "live_heads": 8,
    "metrics": 8,
    "engine": 9,
    "boot": 10,
    "llm": 11,
    "selftest": 12,
    "cli_pull": 12,
    "server": 13,
    "train": 13,
    "cli": 14,
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def layer(module: str) -> str:
    """specdec.spec.tree → spec; kernels.noise.reference → kernels; specdec.server.app → server."""
    parts = module.split(".")
    return parts[1] if parts[0] == "specdec" and len(parts) > 1 else parts[0]


def sources() -> list[Path]:
    files = [p for folder in ("specdec", "kernels", "server") for p in sorted((ROOT / folder).rglob("*.py"))]
    return [p for p in files if not any(parent.is_symlink() for parent in p.parents) and p.name != "__init__.py"]


def imports(path: Path) -> set[str]:
    """Modules of ours that `path` imports when it runs; imports under `if TYPE_CHECKING` only serve annotations."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" if node.module == "specdec" else node.module for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return {m for m in found if m.split(".")[0] in ("specdec", "kernels", "server")}


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_point_down(path: Path) -> None:
    own = layer(module_of(path))
    assert own in RANKS, f"give {own} a rank in {Path(__file__).name}"
    for module in imports(path):
        target = layer(module)
        if module in ("specdec", "specdec._C"):
            continue
        assert target in RANKS, f"{module_of(path)} imports {module}, which has no rank"
        assert RANKS[target] <= RANKS[own], f"{module_of(path)} ({own}) imports {module} ({target}), which lies above it"


@pytest.mark.parametrize("name", ["errors", "types"])
def test_the_base_imports_nothing_of_ours(name: str) -> None:
    assert imports(ROOT / "specdec" / f"{name}.py") == set()


def test_kernels_import_nothing_above_them() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        above = {m for m in imports(path) if layer(m) not in ("kernels", "errors") and m != "specdec._C" and m != "specdec"}
        assert not above, f"{path} imports {above}"


def test_sizes() -> None:
    """Small files and short functions; kernels may be longer."""
    for path in sources():
        text = path.read_text(encoding="utf-8")
        limit = 500 if "kernels" in path.parts else 560 if path.name == "ops.py" else 310  # ops.py: a paragraph for every op there is
        assert text.count("\n") <= limit, f"{path} has {text.count(chr(10))} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 60, f"{path}: {node.name} has {length} lines"
