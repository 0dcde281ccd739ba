"""Start the installed server as a user would, ask it one question, stop it with SIGTERM. CI runs this on the wheel.

Only the standard library is used here: everything else must come from the environment under test.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(url: str, server: subprocess.Popen[bytes], tries: int = 600) -> None:
    for _ in range(tries):
        if server.poll() is not None:
            raise SystemExit(f"the server exited with code {server.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise SystemExit("the server did not become ready")


def ask(url: str) -> str:
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def main() -> None:
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "specdec.server", "--port", str(port)])
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, server)
        answer = ask(url)
        print("answer:", answer)
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=120)
    finally:
        server.kill()
    if "Paris" not in answer or code != 0:
        raise SystemExit(f"expected an answer with Paris and exit code 0, got {answer!r} and {code}")


if __name__ == "__main__":
    main()
