"""Ask a real llama.cpp: `PYTHON llama_worker.py FILE.gguf < requests.jsonl`, where PYTHON has the
package xllamacpp, which brings llama.cpp's own server.

Each line is [path of the server, body]; each answer a line, on a descriptor of its own, since
llama.cpp logs to standard output. Keys and values stay in float32 in its cache.
"""

import json
import os
import sys
import urllib.request

import xllamacpp

CONTEXT = 512


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx = CONTEXT
    params.n_parallel = 1
    params.warmup = False
    params.cpuparams.n_threads = 2
    params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    for line in sys.stdin:
        path, body = json.loads(line)
        request = urllib.request.Request(
            server.listening_address + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=240) as answer:
            answers.write(json.dumps(json.load(answer)) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
