"""Test drafters: ORACLE, WRONG and MIX(p). Ordinary proposers that know the future, to exercise the machinery around them.

ORACLE drafts the target's own continuation, WRONG the token after it in the vocabulary, MIX(p) the one or the other per
position. With width > 1 the tree has `width` branches below the root: the drafter's chain in one of them (which one changes
with the position, so that accepted paths are not always numbered first), decoys in the others. All claim equal confidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from specdec.errors import ConfigError
from specdec.spec.proposer import DrafterContext, register
from specdec.spec.tree import tree_from_lists
from specdec.types import DraftTree, Forward, Scheduled, StepPlan, Verdict

if TYPE_CHECKING:
    from specdec.sampling import SamplingState
    from specdec.sequence import Sequence

CLAIM = 0.8  # confidence per token that every test drafter reports
_WORD = (1 << 64) - 1


def oracle_from(outputs: Mapping[tuple[int, ...], Seq[int]]) -> Callable[[Sequence], Seq[int]]:
    """An oracle from recorded outputs: prompt ids → output ids of a run without speculation."""
    return lambda seq: outputs.get(tuple(seq.tokens[: seq.num_prompt]), ())[seq.num_output :]


def coin(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position only (SplitMix64)."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


class TestDrafter:
    """`share`: probability that a position is drafted right (ORACLE 1, WRONG 0)."""

    __test__ = False  # not a test class, whatever pytest thinks of the name
    needs_hidden = False
    max_len: int | None = None

    def __init__(self, name: str, context: DrafterContext, share: float):
        if context.oracle is None:
            raise ConfigError(f"the test drafter {name!r} needs an oracle; give the engine one", param="method")
        self.name = name
        self.share = share
        self.vocab_size = context.vocab_size
        self._oracle = context.oracle

    def propose(self, shares: tuple[Scheduled, ...], sampling: SamplingState | None) -> DraftTree:
        """One chain, or `width` branches equally deep: `depth`, or as far as `nodes` or the oracle allows."""
        trees = [self._tree(share) for share in shares]
        return tree_from_lists(trees, [self.name if len(tokens) > 1 else None for tokens, _, _ in trees])

    def observe(self, plan: StepPlan, tree: DraftTree, forward: Forward, verdict: Verdict) -> None:
        """Nothing to learn: the future is known."""

    def reset(self, seq: Sequence) -> None:
        """Nothing is kept per sequence."""

    def _tree(self, share: Scheduled) -> tuple[list[int], list[int], list[float]]:
        seq, budget = share.seq, share.budget
        depth = min(budget.depth, seq.remaining - 1)
        future = list(self._oracle(seq)[: max(depth, 0)])
        start = len(seq.tokens)
        chain = [token if coin(seq.seed, start + i) < self.share else self._shifted(token, 1) for i, token in enumerate(future)]
        branches = min(budget.width, budget.nodes - 1, max(1, self.vocab_size - 2)) if future else 0
        right = start % branches if branches else 0
        each = (budget.nodes - 1) // branches if branches else 0
        tokens, parents, scores = [seq.tokens[-1]], [-1], [1.0]
        for branch in range(branches):
            shift = 0 if branch == right else 2 + branch  # decoys differ from the chain, from ORACLE and from WRONG
            parent, score = 0, 1.0
            for token, true in zip(chain[:each], future[:each], strict=True):
                score *= CLAIM
                tokens.append(self._shifted(true, shift) if shift else token)
                parents.append(parent)
                scores.append(score)
                parent = len(tokens) - 1
        return tokens, parents, scores

    def _shifted(self, token: int, by: int) -> int:
        return (token + by) % self.vocab_size


@register("oracle")
def oracle(context: DrafterContext) -> TestDrafter:
    """ORACLE: always right."""
    return TestDrafter("oracle", context, 1.0)


@register("wrong")
def wrong(context: DrafterContext) -> TestDrafter:
    """WRONG: always (argmax + 1) mod vocab."""
    return TestDrafter("wrong", context, 0.0)


@register("mix")
def mix(context: DrafterContext) -> TestDrafter:
    """MIX(p): right with probability `SpecConfig.mix_p` per position, the same positions in every run of a seed."""
    return TestDrafter("mix", context, context.config.mix_p)
