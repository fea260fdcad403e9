"""`kvant serve` as clients meet it: a process that listens, the official client, many of them at once, some of whom leave."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvant.cli import main
from tests.engines.vllm.engines import needs_vllm, tiny_model

pytestmark = needs_vllm
KEY = "one-key"


class Server:
    """A server of a process of its own."""

    def __init__(self, log: Path, *arguments: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [
            sys.executable,
            "-c",
            "import sys; from kvant.cli import main; sys.exit(main())",
            "serve",
            *arguments,
        ]
        self.log = log
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "VLLM_LOGGING_LEVEL": "INFO",
                "OMP_NUM_THREADS": "1",
            },
        )

    def wait(self) -> None:
        for _ in range(600):
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                self.get("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.3)
            else:
                return
        raise AssertionError("the server does not listen: " + self.log.read_text()[-4000:])

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        return sum(
            float(value) for value in re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self.get("/metrics"), re.M)
        )

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that speaks bytes."""
    from tests.engines.vllm.engines import byte_tokenizer

    directory = tiny_model(tmp_path_factory.mktemp("served"), vocab=260)
    byte_tokenizer(directory)
    return str(directory)


@pytest.fixture(scope="module")
def server(served: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    recipe = "saw-int4:sink=4,recent=32"
    options = (
        "--recipe",
        recipe,
        "--api-key",
        KEY,
        "--served-model-name",
        "tiny",
        "--max-num-seqs",
        "16",
        "--block-size",
        "64",
    )
    options += ("--max-model-len", "512", "--kv-cache-memory-bytes", str(1 << 21), "--enforce-eager")
    made = Server(tmp_path_factory.mktemp("log") / "log", served, *options)
    try:
        made.wait()
        yield made
    finally:
        made.stop()


def client(server: Server, **options: Any) -> Any:
    import openai

    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0, **options)


def test_it_listens_on_loopback_and_wants_the_key(server: Server) -> None:
    import openai

    listening = subprocess.run(["ss", "-ltn"], capture_output=True, text=True, check=False).stdout
    if listening:
        places = [line.split()[3] for line in listening.splitlines() if f":{server.port} " in line + " "]
        assert places == [f"127.0.0.1:{server.port}"], places
    wrong = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="another", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    log = server.log.read_text()
    assert re.search(
        r"kvant serves 4 layers with recipe saw-int4:sink=4,recent=32: 4\.500 bits per element, artifact none", log
    )
    assert log.count("kvant serves") == 1


def test_chat_completion_streaming_and_log_probabilities(server: Server) -> None:
    async def talk() -> None:
        api = client(server)
        assert [model.id for model in (await api.models.list()).data] == ["tiny"]
        said = await api.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=5, logprobs=True, top_logprobs=2
        )
        assert said.usage.completion_tokens == 5
        assert len(said.choices[0].logprobs.content) == 5 and len(said.choices[0].logprobs.content[0].top_logprobs) == 2
        asked = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0.0}
        whole = await api.completions.create(**asked, logprobs=1)
        assert whole.usage.completion_tokens == 40 == len(whole.choices[0].logprobs.token_logprobs)
        pieces = [
            chunk.choices[0].text async for chunk in await api.completions.create(**asked, stream=True) if chunk.choices
        ]
        assert len(pieces) > 5 and "".join(pieces) == whole.choices[0].text

    asyncio.run(talk())


@pytest.mark.slow
def test_many_clients_of_whom_some_hang_up(server: Server) -> None:
    """64 at once, of random lengths, a fifth of which leave midway: the others lose nothing, and all pages are free at the end."""
    draw = random.Random(0)

    async def one(api: Any, leaves: bool) -> int:
        count = draw.randrange(30, 120)
        stream = await api.completions.create(
            model="tiny",
            prompt="".join(draw.choice("abcdefgh ") for _ in range(draw.randrange(1, 300))),
            max_tokens=count,
            stream=True,
            temperature=1.0,
            extra_body={"ignore_eos": True, "min_tokens": count},
            stream_options={"include_usage": True},
        )
        seen, used = 0, None
        async for chunk in stream:
            seen += len(chunk.choices)
            used = chunk.usage or used
            if leaves and seen > count // 3:
                await stream.close()
                return -1
        assert used is not None and used.completion_tokens == count, (used, count)
        return count

    async def crowd() -> list[int]:
        api = client(server, timeout=300)
        leaving = set(draw.sample(range(64), 13))
        return list(await asyncio.gather(*(one(api, i in leaving) for i in range(64))))

    counts = asyncio.run(crowd())
    assert sum(count < 0 for count in counts) == 13 and sum(count > 0 for count in counts) == 51
    for _ in range(100):
        if server.metric("vllm:num_requests_running") == 0 == server.metric("vllm:num_requests_waiting"):
            break
        time.sleep(0.1)
    assert server.metric("vllm:num_requests_running") == 0 == server.metric("vllm:num_requests_waiting")
    assert server.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "int5"], "unknown recipe 'int5'"),
        (["--recipe", "kitty"], "recipe kitty cannot be served inside vLLM"),
        (["--recipe", "oscar", "--artifact", "/nowhere"], "artifact '/nowhere': no such file or directory"),
        (["--recipe", "int4", "--artifact", "/nowhere"], "recipe int4 takes no artifact"),
        (["--recipe", "int4", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype is kvant's to choose"),
        (["--layers", "{0: 1}"], "--layers: expected JSON"),
    ],
)
def test_what_is_wrong_is_said_before_anything_listens(
    arguments: list[str], message: str, served: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "execv", lambda *command: pytest.fail(f"vLLM was started: {command}"))
    assert main(["serve", served, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_wrong_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--recipe", "int4"]) == 2
    assert "the directory has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    assert main(["serve", str(tmp_path), "--recipe", "int4"]) == 2
    assert "expected a Hugging Face directory" in capsys.readouterr().err


def test_an_artifact_of_another_model_is_refused(
    served: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from kvant import recipes
    from kvant.artifact import Artifact
    from tests.fitted import made_up_tensors

    recipe = recipes.get("oscar")
    torch.manual_seed(0)
    tensors = {layer: made_up_tensors(recipe, 2, 64) for layer in range(4)}
    Artifact(recipe, 2, 64, 4, tensors, {"fingerprint": "0" * 64}).save(tmp_path)
    assert main(["serve", served, "--recipe", "oscar", "--artifact", str(tmp_path)]) == 2
    assert "the artifact was fitted to another model of the same shape" in capsys.readouterr().err


def test_vllm_is_given_what_it_needs(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def started(path: str, command: list[str]) -> None:
        raise Started(command)

    monkeypatch.setattr(os, "execv", started)
    with pytest.raises(Started) as found:
        main(["serve", served, "--recipe", "int4", "--port", "8001", "--host", "::1", "--api-key", "x"])
    command = found.value.args[0]
    assert command[3:5] == ["--model", served]
    assert command[command.index("--host") + 1] == "::1" and command[-4:] == ["--port", "8001", "--api-key", "x"]
    assert command[command.index("--additional-config") + 1] == '{"kvant": {"recipe": "int4"}}'


def test_windows_are_not_for_more_sequences_than_memory_bears(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The served model has 4 layers with 2 KV heads of 64: 1 KiB a token and layer in 16 bits."""
    from kvant.cli import serve

    monkeypatch.setattr(serve, "_on_cpu", lambda: False)
    args = argparse.Namespace(model=served, recipe="int2:sink=4,recent=60", layers=None, artifact=[], host="127.0.0.1")
    assert serve.window_bytes(served, {"recipe": "int2:sink=4,recent=60"}) == 4 * 2 * 2 * 64 * 64 * 2
    assert serve.window_bytes(served, {"recipe": "int2"}) == 0
    for room, expected in ((4 << 30, "256"), (100 * 4 * 2 * 2 * 64 * 64 * 2, "100"), (1, "16")):
        monkeypatch.setattr(serve, "WINDOWS", room)
        command = serve.command_for(args, [])
        assert command[command.index("--max-num-seqs") + 1] == expected
        assert serve.command_for(args, ["--max-num-seqs=7"])[-1] == "--max-num-seqs=7"
    args.recipe = "int2"
    assert "--max-num-seqs" not in serve.command_for(args, [])
