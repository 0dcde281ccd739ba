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
    llm = llama_cpp.Llama(path, n_ctx=4096, n_threads=int(threads), n_threads_batch=int(threads), draft_model=draft, verbose=False)

    def tokens_of(ids: list[int], max_tokens: int) -> Iterator[int]:
        llm.reset()
        for i, token in enumerate(llm.generate(ids, temp=0.0, reset=True), start=1):
            yield int(token)
            if i == max_tokens:
                return

    serve({"llama_cpp": llama_cpp.__version__, "mode": mode}, tokens_of)


if __name__ == "__main__":
    main()
