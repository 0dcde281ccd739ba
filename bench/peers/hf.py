"""transformers as a peer: greedy decoding with its KV cache in a bare loop, the fastest way to run it.

argv: directory, dtype (float32 | bfloat16), threads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, __version__

from bench.peers.worker import serve


def main() -> None:
    directory, dtype, threads = sys.argv[1:4]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def tokens_of(ids: list[int], max_tokens: int) -> Iterator[int]:
        step, cache = torch.tensor([ids]), None
        for _ in range(max_tokens):
            out = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, step = out.past_key_values, out.logits[:, -1:].argmax(-1)
            yield int(step)

    serve({"transformers": __version__, "torch": torch.__version__, "dtype": dtype}, tokens_of)


if __name__ == "__main__":
    main()
