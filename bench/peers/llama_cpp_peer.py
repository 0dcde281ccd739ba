"""llama.cpp (through llama-cpp-python) as a peer: greedy decoding of a GGUF file.

argv: gguf path, threads, "off" | "lookup" (its prompt-lookup drafting).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from bench.peers.worker import serve


def main() -> None:
    path, threads, mode = sys.argv[1:4]
    draft = LlamaPromptLookupDecoding(num_pred_tokens=4) if mode == "lookup" else None
    options = {"n_ctx": 4096, "n_threads": int(threads), "n_threads_batch": int(threads), "verbose": False}
    # with a draft model it keeps the logits of every position, but makes room for them only when told to
    llm = llama_cpp.Llama(path, draft_model=draft, logits_all=draft is not None, **options)

    def tokens_of(ids: list[int], max_tokens: int) -> Iterator[int]:
        llm.reset()
        for i, token in enumerate(llm.generate(ids, temp=0.0, reset=True), start=1):
            yield int(token)
            if i == max_tokens:
                return

    serve({"llama_cpp": llama_cpp.__version__, "mode": mode}, tokens_of)


if __name__ == "__main__":
    main()
