"""The server as a process: signals, exit codes, and the command line."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from specdec.config import EngineConfig, SpecConfig
from specdec.errors import ConfigError
from specdec.server import args as command_line
from specdec.server.__main__ import main
from specdec.server.listen import listen
from specdec.server.run import run
from specdec.server.service import Settings
from tests.server.fake_engine import FakeEngine
from tests.server.net import until
from tests.server.process import ROOT, process

TEXT = "/v1/completions"


def running(http: httpx.Client) -> bool:
    return "specdec_requests_running 1.0" in http.get("/metrics").text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_exits_with_0(number: int) -> None:
    with process() as server:
        server.popen.send_signal(number)
        assert server.wait() == 0


def test_a_second_signal_exits_at_once() -> None:
    with process("--step", "0.2") as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, TEXT, json={"prompt": "abc", "max_tokens": 4000})
        until(lambda: running(server.http))
        server.popen.send_signal(signal.SIGTERM)
        until(lambda: server.http.get("/ready").status_code == 503)
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
        with pytest.raises(httpx.TransportError):
            answer.result()


def test_the_drain_ends_after_its_timeout() -> None:
    with process("--step", "0.05", "--drain-timeout", "0.2") as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, TEXT, json={"prompt": "abc", "max_tokens": 4000})
        until(lambda: running(server.http))
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert answer.result().status_code == 503


@pytest.mark.parametrize("flags", [(), ("--access-log",), ("--access-log", "--log-level", "WARNING")])
def test_requests_are_logged_only_when_asked(flags: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as log, process(*flags, log=log) as server:
        assert server.http.get("/v1/models/unheard-of").status_code == 404
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    logged = [line for line in path.read_text().splitlines() if "GET /v1/models/unheard-of" in line and "404" in line]
    assert len(logged) == ("--access-log" in flags)


def test_the_start_up_log_shows_what_runs(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as log, process(log=log) as server:
        url = str(server.http.base_url)
    text = path.read_text()
    assert "dtype float32, kv bfloat16, deterministic False" in text and f"ready: {url}/v1" in text


def test_a_model_that_cannot_be_loaded_is_exit_code_1() -> None:
    with process("--engine", "broken", ready=False) as server:
        assert server.wait() == 1


def test_a_port_that_is_taken_is_exit_code_1_before_anything_is_loaded() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        done = subprocess.run([sys.executable, "-m", "tests.server.process", port], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and f"port {port}" in done.stderr
        assert "ready:" not in done.stderr and "loading" not in done.stderr and "Traceback" not in done.stderr


def test_the_model_is_not_built_when_the_port_is_taken() -> None:
    built: list[FakeEngine] = []

    def build() -> FakeEngine:
        built.append(FakeEngine())
        return built[-1]

    (held,) = listen("127.0.0.1", 0)
    with held:
        code = run(build, Settings(), host="127.0.0.1", port=held.getsockname()[1], drain_timeout=1.0)
    assert code == 1 and not built


def test_every_address_of_a_host_listens_on_one_port() -> None:
    sockets = listen("localhost", 0)
    try:
        assert len({sock.getsockname()[1] for sock in sockets}) == 1
        with socket.create_connection(("localhost", sockets[0].getsockname()[1]), 60):
            pass
    finally:
        for sock in sockets:
            sock.close()


def test_a_host_that_is_not_here_is_named() -> None:
    for host in ("203.0.113.7", "x" * 80):
        with pytest.raises(ConfigError, match=host):
            listen(host, 0)


@pytest.mark.parametrize("port", ["-1", "65536", "99999", "8000.0", "eight", ""])
def test_a_port_outside_the_range_is_refused_by_the_parser(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([f"--port={port}"])
    assert caught.value.code == 2 and "65535" in capsys.readouterr().err


def test_flags_become_arguments_of_llm() -> None:
    flags = "--model m --speculation draft_model --draft-model D --nodes 32 --depth 6 --width 4 --policy fixed --max-model-len 100"
    args = command_line.parser().parse_args(
        [*flags.split(), "--deterministic", "--enforce-eager", "--no-enable-prefix-caching", "--max-queue", "7"]
    )
    options = command_line.llm_arguments(args)
    assert options == {
        "model": "m",
        "speculation": SpecConfig(method="draft_model", model="D", nodes=32, depth=6, width=4, policy="fixed"),
        "max_model_len": 100,
        "deterministic": True,
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }
    EngineConfig(**options)
    assert command_line.settings(args).max_queue == 7


def test_the_help_tells_what_bounds_the_queue() -> None:
    text = " ".join(command_line.parser().format_help().split())
    assert "unfinished sequences (prompts × n) held beyond the --max-num-seqs that can run" in text


def test_defaults_are_those_of_the_engine() -> None:
    options = command_line.llm_arguments(command_line.parser().parse_args([]))
    assert EngineConfig(**options) == EngineConfig(speculation=SpecConfig())
    assert command_line.settings(command_line.parser().parse_args(["--api-key", "k", "--strict"])).api_key == "k"


IMPOSSIBLE = [
    (["--nodes", "1"], "nodes"),
    (["--max-queue", "-3"], "--max-queue"),
    (["--max-queue", "many"], "--max-queue"),
    (["--speculation", "ngram", "--head", "H"], "head"),
    (["--speculation", "off", "--draft-quantization", "int8"], "draft_quantization"),
    (["--speculation", "draft_model"], "--draft-model"),
    (["--dtype", "int3"], "float32"),
    (["--kv-dtype", "int3"], "float32"),
    (["--device", "tpu"], "cuda"),
    (["--max-body-bytes", "0"], "--max-body-bytes"),
    (["--max-body-bytes", "-1"], "--max-body-bytes"),
    (["--drain-timeout", "nan"], "--drain-timeout"),
    (["--drain-timeout", "inf"], "--drain-timeout"),
    (["--drain-timeout=-1"], "--drain-timeout"),
    (["--tensor-parallel-size", "2"], "tensor_parallel_size"),
    (["--load-format", "odd"], "load_format"),
    (["--act-dtype", "int8"], "act_dtype"),
    (["--max-num-seqs", "0"], "max_num_seqs"),
    (["--gpu-memory-utilization", "nan"], "gpu_memory_utilization"),
]


@pytest.mark.parametrize(("flags", "named"), IMPOSSIBLE)
def test_settings_that_cannot_work_are_exit_code_2(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_anyway(*args: object, **options: object) -> int:
        raise AssertionError("these settings must not get as far as the port")

    monkeypatch.setattr("specdec.server.__main__.run", run_anyway)
    try:
        code = main(flags)
    except SystemExit as exit:
        code = exit.code  # type: ignore[assignment]  # argparse exits with a number
    assert code == 2 and named in capsys.readouterr().err


def test_settings_are_judged_without_torch() -> None:
    script = "import sys; from specdec.server.__main__ import main; code = main(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    for flags in (["--nodes", "1"], ["--speculation", "draft_model"], ["--max-num-seqs", "0"]):
        done = subprocess.run([sys.executable, "-c", script, *flags], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.stdout.split() == ["2", "False"], done.stderr


@pytest.mark.parametrize("key", ["", " ", "\t", "a key", " key", "schlüssel", "k\n"])
def test_a_key_that_no_client_could_send_is_refused_by_the_parser(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([f"--api-key={key}"])
    assert caught.value.code == 2 and "--api-key" in capsys.readouterr().err
