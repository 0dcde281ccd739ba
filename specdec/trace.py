"""`Trace`: what happened to one request, step by step — draft trees, accepted paths, tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

from specdec.errors import ConfigError

if TYPE_CHECKING:
    from specdec.sequence import Sequence
    from specdec.tokenizer import Tokenizer
    from specdec.types import DraftTree, StepStats, Verdict

_TIMES = ("draft_seconds", "forward_seconds", "verify_seconds", "step_seconds")


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step of one sequence. `tokens[i]`, `parents[i]` describe node i (0 = root); `path` the accepted nodes.

    The times are those of the whole step, all sequences together, as in StepStats.
    """

    step: int
    choice: int
    position: int  # absolute position of the root
    drafter: str | None
    tokens: list[int]
    parents: list[int]
    path: list[int]
    committed: list[int]
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    step_seconds: float = 0.0


class Trace:
    """Steps of a request. `frame()` needs pandas; `str()` draws trees as text; notebooks show the widest tree as SVG."""

    def __init__(self, tokenizer: Tokenizer):
        self.steps: list[TracedStep] = []
        self._tokenizer = tokenizer

    def add(self, step: int, seq: Sequence, tree: DraftTree, verdict: Verdict, b: int) -> None:
        """Record sequence number `b` of the step; call after its tokens were appended."""
        drafted, decided = tree.host, verdict.host
        nodes, accepted, count = drafted.num_nodes[b], decided.num_accepted[b], decided.num_committed[b]
        self.steps.append(
            TracedStep(
                step=step,
                choice=seq.choice,
                position=len(seq.tokens) - count - 1,
                drafter=tree.drafters[b] if tree.drafters else None,
                tokens=drafted.tokens[b][:nodes],
                parents=drafted.parents[b][:nodes],
                path=decided.path[b][:accepted],
                committed=decided.committed[b][:count],
            )
        )

    def close_step(self, stats: StepStats) -> None:
        """Give the records of this step their times; call when the step is over."""
        times = {name: getattr(stats, name) for name in _TIMES}
        for i in range(len(self.steps) - 1, -1, -1):
            if self.steps[i].step != stats.step:
                break
            self.steps[i] = replace(self.steps[i], **times)

    def frame(self) -> Any:
        """One row per step as a pandas DataFrame, times included. ConfigError without pandas."""
        try:
            import pandas
        except ImportError:
            raise ConfigError("Trace.frame() needs pandas: pip install pandas (print(trace) does without)", param="trace") from None
        rows = [asdict(s) | {"nodes": len(s.tokens), "accepted": len(s.path), "text": self._text(s.committed)} for s in self.steps]
        return pandas.DataFrame(rows)

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def __str__(self) -> str:
        return "\n".join(self._draw(step) for step in self.steps)

    def _draw(self, step: TracedStep) -> str:
        """One tree, a node a line, indented by depth; accepted nodes are marked with a star."""
        kept = {0, *step.path}
        head = f"step {step.step} @{step.position} {step.drafter or 'off'}: +{len(step.committed)} {self._text(step.committed)!r}"
        depth, lines = [0] * len(step.tokens), [head]
        for i, (token, parent) in enumerate(zip(step.tokens, step.parents, strict=True)):
            depth[i] = 0 if parent < 0 else depth[parent] + 1
            if i:
                lines.append(f"  {'  ' * depth[i]}{'*' if i in kept else '·'} {self._text([token])!r}")
        return "\n".join(lines)

    def _repr_svg_(self) -> str:
        """The widest tree of the trace, accepted path highlighted."""
        if not self.steps:
            return "<svg xmlns='http://www.w3.org/2000/svg'/>"
        return self.svg(max(self.steps, key=lambda s: len(s.tokens)))

    def svg(self, step: TracedStep) -> str:
        """One tree as SVG: columns are depths, rows are nodes."""
        kept, depth = {0, *step.path}, [0] * len(step.tokens)
        shapes: list[str] = []
        for i, (token, parent) in enumerate(zip(step.tokens, step.parents, strict=True)):
            depth[i] = 0 if parent < 0 else depth[parent] + 1
            x, y, color = 10 + 110 * depth[i], 20 + 22 * i, "#176b3a" if i in kept else "#999999"
            if parent >= 0:
                shapes.append(f"<line x1='{15 + 110 * depth[parent]}' y1='{20 + 22 * parent}' x2='{x}' y2='{y}' stroke='{color}'/>")
            shapes.append(f"<circle cx='{x}' cy='{y}' r='4' fill='{color}'/>")
            label = escape(self._text([token]).replace("\n", "⏎"))
            shapes.append(f"<text x='{x + 8}' y='{y + 4}' font-size='12' font-family='monospace' fill='{color}'>{label}</text>")
        width, height = 160 + 110 * max(depth, default=0), 30 + 22 * len(step.tokens)
        return f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}'>{''.join(shapes)}</svg>"
