"""Log-probabilities of emitted and prompt tokens.

"raw": log-softmax of the target row that produced the token, before any processing. "processed": of its scores, after all
of it (at temperature 0 after penalties and masks). Only the rows of the accepted path are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from specdec.config import SamplingParams
from specdec.sequence import Sequence
from specdec.types import StepPlan, TokenLogprobs, Verdict


def of_rows(rows: Tensor, tokens: Seq[int], alternatives: int) -> list[TokenLogprobs]:
    """One entry per row. rows [P, V] f32 logits or scores; tokens: the P tokens; alternatives: how many top tokens to list.

    rank = 1 + the number of strictly likelier tokens; alternatives by falling probability, then rising id; impossible
    tokens (-inf) are not listed.
    """
    if not len(tokens):
        return []
    ids = torch.tensor(tokens, dtype=torch.int64, device=rows.device)[:, None]
    log_p = rows.log_softmax(dim=-1)
    own = log_p.gather(1, ids)[:, 0].tolist()
    rank = ((rows > rows.gather(1, ids)).sum(dim=1) + 1).tolist()
    values, where = log_p.topk(min(alternatives, rows.shape[1]), dim=-1)
    result = []
    for i, (top_values, top_ids) in enumerate(zip(values.tolist(), where.tolist(), strict=True)):
        top = sorted(((t, v) for t, v in zip(top_ids, top_values, strict=True) if v > -torch.inf), key=lambda pair: (-pair[1], pair[0]))
        result.append(TokenLogprobs(int(tokens[i]), own[i], rank[i], tuple(top)))
    return result


def token_logprobs(
    logits: Tensor, scores: Tensor, verdict: Verdict, params: Seq[SamplingParams]
) -> tuple[tuple[TokenLogprobs, ...], ...] | None:
    """Per sequence, one entry per committed token where `params[b].logprobs` asks for it, else (); None if nobody asks.

    logits, scores [R, V] f32, as verification saw them. Synchronises with the host when somebody asks.
    """
    if all(p.logprobs is None for p in params):
        return None
    rows, tokens, counts = verdict.rows.tolist(), verdict.committed.tolist(), verdict.num_committed.tolist()
    result: list[tuple[TokenLogprobs, ...]] = []
    for b, p in enumerate(params):
        if p.logprobs is None:
            result.append(())
            continue
        source = logits if p.logprobs_mode == "raw" else scores
        result.append(tuple(of_rows(source[rows[b][: counts[b]]], tokens[b][: counts[b]], p.logprobs)))
    return tuple(result)


def prompt_logprobs(plan: StepPlan, rows: Tensor) -> Iterator[tuple[Sequence, int, list[TokenLogprobs]]]:
    """(sequence, prompt position of the first entry, entries) for every share with prompt rows. Before the step is committed.

    rows [P, V] f32: raw target logits of the plan's prompt rows; the row at position p predicts the token at p + 1.
    """
    first = 0
    for share in plan.scheduled:
        count, seq, start = share.prompt_rows, share.seq, share.seq.num_computed + 1
        if count:
            assert seq.params.prompt_logprobs is not None
            yield seq, start, of_rows(rows[first : first + count], seq.tokens[start : start + count], seq.params.prompt_logprobs)
            first += count
