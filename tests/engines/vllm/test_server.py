"""`kvant serve` as clients meet it: a process that listens, the official client, many of them at once, some of whom leave."""

from __future__ import annotations

import argparse
import asyncio
import json
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvant.cli import main
from tests.engines.vllm.engines import needs_vllm, tiny_model

pytestmark = needs_vllm
KEY = "one-key"


class Server:
    """A server of a process of its own."""

    def __init__(self, log: Path, *arguments: str, key: str | None = None) -> None:
        self.key = key
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [
            sys.executable,
            "-c",
            "import sys; from kvant.cli import main; sys.exit(main())",
            "serve",
            *arguments,
            "--unfit-anyway",  # the model is a random one
        ]
        self.log = log
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **({} if key is None else {"KVANT_API_KEY": key}),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "VLLM_LOGGING_LEVEL": "INFO",
                "OMP_NUM_THREADS": "1",
            },
        )

    def wait(self) -> None:
        for _ in range(1500):
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                self.get("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.3)
            else:
                return
        raise AssertionError("the server does not listen: " + self.log.read_text()[-4000:])

    def get(self, path: str, data: bytes | None = None, key: str | None = None) -> str:
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        return sum(
            float(value)
            for value in re.findall(
                rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self.get("/metrics", key=self.key), re.M
            )
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
        "--served-model-name",
        "tiny",
        "--max-num-seqs",
        "16",
        "--block-size",
        "64",
    )
    options += ("--max-model-len", "512", "--kv-cache-memory-bytes", str(1 << 21), "--enforce-eager")
    options += ("--allowed-origins", '["https://example.org"]')  # vLLM's default is none
    made = Server(tmp_path_factory.mktemp("log") / "log", served, *options, key=KEY)
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


def test_no_path_but_health_is_open(server: Server) -> None:
    """vLLM guards some prefixes only; /invocations computes completions too. And the key is in no command line."""
    asked = b'{"model": "tiny", "prompt": "Once", "max_tokens": 2}'
    places = [
        "/invocations",
        "/v1/completions",
        "/tokenize",
        "/metrics",
        "/version",
        "/openapi.json",
        "/docs",
        "//health",
    ]
    for path in places:
        for key in (None, "another", KEY + "x", ""):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                server.get(path, asked if path not in ("/metrics", "/version") else None, key)
    assert "choices" in server.get("/invocations", asked, KEY)
    assert "vllm:" in server.get("/metrics", key=KEY)
    server.get("/health")
    listed = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=False).stdout
    assert str(server.port) in listed and KEY not in listed


def test_options_show_no_figures_and_a_browser_may_ask_what_it_may_send(server: Server) -> None:
    place = f"http://127.0.0.1:{server.port}/metrics"
    browser = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    for method in ("OPTIONS", "HEAD", "POST", "DELETE", "PATCH"):
        for headers in ({}, {"Origin": "https://example.org"}, *([browser] if method != "OPTIONS" else [])):
            with pytest.raises(urllib.error.HTTPError, match="401") as refused:
                urllib.request.urlopen(urllib.request.Request(place, None, headers, method=method), timeout=60)
            assert b"vllm:" not in refused.value.read()
    foreign = {**browser, "Origin": "https://example.com"}
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        urllib.request.urlopen(urllib.request.Request(place, None, foreign, method="OPTIONS"), timeout=60)
    assert "Access-Control-Allow-Origin" not in refused.value.headers and b"vllm:" not in refused.value.read()
    asked = {**browser, "Access-Control-Request-Headers": "authorization"}
    with urllib.request.urlopen(urllib.request.Request(place, None, asked, method="OPTIONS"), timeout=60) as answer:
        assert answer.read() == b"OK"
        assert answer.headers["Access-Control-Allow-Origin"] == "https://example.org"
        assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        assert answer.headers["Access-Control-Allow-Headers"] == "authorization"


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
        (["--recipe", "kitty:k.recent=8"], "recipe kitty:k.recent=8 cannot be served inside vLLM"),
        (["--recipe", "oscar", "--artifact", "/nowhere"], "artifact '/nowhere': no such file or directory"),
        (["--recipe", "int4", "--artifact", "/nowhere"], "recipe int4 takes no artifact"),
        (["--recipe", "int4", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype is set by kvant"),
        (["--recipe", "int4", "--attention-back", "X"], "--attention-back is set by kvant"),
        (["--recipe", "int4", "--api-key", "secret"], "set the environment variable KVANT_API_KEY, or give a file"),
        (["--recipe", "int4", "--api_key=secret"], "set the environment variable KVANT_API_KEY, or give a file"),
        (["--recipe", "int4", "--api-key-file", "/nowhere"], "--api-key-file '/nowhere': there is no such file"),
        (["--recipe", "int4", "--api-key-file", "/dev/null"], "expected a key of printable ASCII characters"),
        (["--layers", "{0: 1}"], "--layers: expected JSON"),
        (["--recipe", "int4", "--prot", "1"], "vLLM does not take these options: unrecognized arguments: --prot"),
        (["--recipe", "int4", "--port", "99999"], "--port must be a number from 1 to 65535, got '99999'"),
        (["--recipe", "int4", "--draft-recipe", "kvant-2"], "recipe kvant-2 cannot be given to the layers of a draft"),
    ],
)
def test_what_is_wrong_is_said_before_anything_listens(
    arguments: list[str], message: str, served: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "execve", lambda *command: pytest.fail(f"vLLM was started: {command}"))
    assert main(["serve", served, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_refused_before_anything_is_fitted(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["serve", served, "--recipe", "kvant-2", "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_the_model_comes_first(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--port", "8000", served])
    assert "the model comes before options of vLLM: kvant serve MODEL --port" in capsys.readouterr().err


def test_a_wrong_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--recipe", "int4"]) == 2
    assert "the directory has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    assert main(["serve", str(tmp_path), "--recipe", "int4"]) == 2
    assert "expected a Hugging Face directory" in capsys.readouterr().err


def test_an_artifact_of_another_model_is_refused(
    served: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from kvant import models, recipes
    from kvant.artifact import Artifact
    from tests.fitted import made_up_tensors

    recipe = recipes.get("oscar")
    torch.manual_seed(0)
    tensors = {layer: made_up_tensors(recipe, 2, 64) for layer in range(4)}
    monkeypatch.setattr(models, "load", lambda *args: pytest.fail("the model was loaded"))
    Artifact(recipe, 2, 64, 4, tensors, {"fingerprint": "0" * 64, "fingerprint_scheme": 2}).save(tmp_path)
    assert main(["serve", served, "--recipe", "oscar", "--artifact", str(tmp_path)]) == 2
    assert "the artifact was fitted to another model of the same shape" in capsys.readouterr().err


class Started(Exception):
    pass


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[list[str], dict[str, str]]]:
    """Runs kvant serve up to where it would become vLLM: -> the command line and the environment. Nothing is measured: the model
    is a random one."""
    monkeypatch.setattr("kvant.cli.serve.require_fit", lambda *args: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("KVANT_API_KEY", "VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)

    def started(path: str, command: list[str], environment: dict[str, str]) -> None:
        raise Started(command, environment)

    monkeypatch.setattr(os, "execve", started)

    def run(*arguments: str) -> tuple[list[str], dict[str, str]]:
        with pytest.raises(Started) as found:
            main(["serve", *arguments])
        return found.value.args[0], found.value.args[1]

    return run


def after(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_vllm_is_given_what_it_needs(served: str, start: Any) -> None:
    command, _ = start(served, "--recipe", "int4", "--port", "8001", "--host", "::1")
    assert command[3:5] == ["--model", served]
    assert after(command, "--host") == "::1" and command[-2:] == ["--port", "8001"]
    assert after(command, "--additional-config") == '{"kvant": {"recipe": "int4"}}'
    assert "--middleware" not in command and "--no-enable-prefix-caching" not in command
    command, _ = start(served, "--recipe", "int4", "--draft-recipe", "saw-int4")
    assert json.loads(after(command, "--additional-config")) == {"kvant": {"recipe": "int4", "draft": "saw-int4"}}


def test_a_hybrid_model_is_fitted_and_handed_over(start: Any, tmp_path: Path) -> None:
    """Its layers with attention alone: their tensors, and their overlays."""
    from kvant.artifact import Artifact
    from kvant.cli import serve
    from tests.cli.test_cli import save_tokenizer
    from tests.engines.vllm.engines import lfm2_like

    path, text = lfm2_like(tmp_path / "model"), tmp_path / "text.txt"
    save_tokenizer(path)
    text.write_text("To be fitted on. " * 40)
    command, _ = start(str(path), "--recipe", "kvant-2", "--calibration-text", str(text))
    kvant = json.loads(after(command, "--additional-config"))["kvant"]
    artifact = Artifact.load(kvant["artifact"][0])
    assert tuple(artifact.tensors) == (2, 5) and artifact.layers == 6
    assert serve.overlay_bytes(str(path), kvant) == 2 * 2 * (4 + 192) * 64 * (2 + 1)


def test_a_recipe_that_is_fitted_on_the_prompt_shares_nothing(served: str, start: Any) -> None:
    command, _ = start(served, "--recipe", "squat", "--unfit-anyway")
    assert {"--no-enable-prefix-caching", "--no-enable-chunked-prefill"} <= {*command}
    # the engine refuses it
    command, _ = start(served, "--recipe", "squat", "--unfit-anyway", "--enable-chunked-prefill")
    assert "--no-enable-prefix-caching" in command and "--no-enable-chunked-prefill" not in command


def test_an_artifact_with_a_recipe_for_every_layer_is_handed_over(
    served: str, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's processes read the layers' recipes from the artifact; its overlays are counted like any other's."""
    import torch

    from kvant import models, recipes
    from kvant.artifact import Artifact
    from kvant.cli import serve
    from kvant.recipe import MixedRecipe
    from tests.fitted import made_up_tensors

    monkeypatch.setattr(models, "load", lambda *args: pytest.fail("the model was loaded"))
    each = [recipes.get(name) for name in ("kvant-2", "kvant-2:v.bits=3", "kvant-2", "kvant-2:k.bits=4")]
    mixed = MixedRecipe.of("tuned", each[0], each)
    torch.manual_seed(0)
    tensors = {layer: made_up_tensors(recipe, 2, 64) for layer, recipe in enumerate(each)}
    Artifact(mixed, 2, 64, 4, tensors).save(tmp_path / "tuned")
    command, _ = start(served, "--artifact", str(tmp_path / "tuned"))
    kvant = json.loads(after(command, "--additional-config"))["kvant"]
    assert kvant == {"artifact": [str(tmp_path / "tuned")]}
    assert serve.overlay_bytes(served, kvant) == 4 * 2 * (4 + 192) * 64 * (2 + 1)
    layers = {layer: made_up_tensors(recipe, 2, 64) for layer, recipe in enumerate(each[:2])}
    Artifact(MixedRecipe.of("tuned", each[0], each[:2]), 2, 64, 2, layers).save(tmp_path / "other")
    with pytest.raises(ValueError, match="the model has 4"):
        serve.overlay_bytes(served, {"artifact": [str(tmp_path / "other")]})


def test_the_key_goes_by_the_environment(
    served: str, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("from-a-file\n")
    command, environment = start(served, "--recipe", "int4", "--api-key-file", str(tmp_path / "key"))
    assert environment["VLLM_API_KEY"] == "from-a-file" and not any("from-a-file" in each for each in command)
    assert after(command, "--middleware") == "kvant.engines.vllm.guard.Guard"
    monkeypatch.setenv("KVANT_API_KEY", "from-outside")
    command, environment = start(served, "--recipe", "int4")
    assert environment["VLLM_API_KEY"] == "from-outside" and "KVANT_API_KEY" not in environment
    assert "--middleware" in command


def test_a_model_has_the_name_that_was_typed(served: str, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvant import models

    monkeypatch.setattr(models, "smollm2_directory", lambda say: Path(served))
    command, _ = start("smollm2", "--recipe", "int4")
    assert after(command, "--model") == served and after(command, "--served-model-name") == "smollm2"
    command, _ = start("smollm2", "--recipe", "int4", "--served-model-name", "mine")
    assert command.count("--served-model-name") == 1 and after(command, "--served-model-name") == "mine"


def test_a_cpu_is_not_asked_for_nearly_all_of_its_memory(
    served: str, start: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvant.cli import serve

    for free, expected in ((100 << 30, 4 << 30), (8 << 30, 2 << 30)):
        monkeypatch.setattr(serve, "_free_memory", lambda free=free: free)
        command, _ = start(served, "--recipe", "int4")
        assert after(command, "--kv-cache-memory-bytes") == str(expected)
        assert f"--kv-cache-memory-bytes {expected}" in capsys.readouterr().err
    for own in (["--gpu-memory-utilization", "0.5"], ["--kv_cache_memory_bytes=9"]):
        command, _ = start(served, "--recipe", "int4", *own)
        assert "--kv-cache-memory-bytes" not in command


def test_the_model_is_loaded_only_to_fit_it(
    served: str, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fitted once; then the checkpoint's files name the model. A text of one's own is fitted apart. Where nothing can be kept,
    vLLM finds the artifact in a temporary directory."""
    from kvant import models
    from kvant.artifact import Artifact

    loaded: list[tuple[Any, ...]] = []
    original = models.load
    monkeypatch.setattr(models, "load", lambda *args: loaded.append(args) or original(*args))
    text = tmp_path / "text"
    text.write_text("The keeper lit the lamp and wrote the names of the ships into a green book. " * 20)
    recipe = "oscar:sink=4,recent=16"
    command, _ = start(served, "--recipe", recipe, "--calibration-text", str(text))
    assert [args[1:3] for args in loaded] == [("float32", "cpu")]
    (path,) = json.loads(after(command, "--additional-config"))["kvant"]["artifact"]
    assert path.startswith(str(tmp_path / "cache")) and Artifact.load(path).source["text"] == "given"
    again, _ = start(served, "--recipe", recipe, "--calibration-text", str(text))
    assert after(again, "--additional-config") == after(command, "--additional-config") and len(loaded) == 1

    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command, _ = start(served, "--recipe", recipe, "--calibration-text", str(text))
    (other,) = json.loads(after(command, "--additional-config"))["kvant"]["artifact"]
    assert (
        other.startswith(str(tmp_path / "kvant-artifact-"))
        and Artifact.load(other).digest == Artifact.load(path).digest
    )
    assert "kvant: not cached: [Errno 20] Not a directory" in capsys.readouterr().err


def test_windows_are_not_for_more_sequences_than_memory_bears(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The served model has 4 layers with 2 KV heads of 64: 1 KiB a token and layer in 16 bits."""
    from kvant.cli import serve

    monkeypatch.setattr(serve, "_on_cpu", lambda: False)
    args = argparse.Namespace(
        model=served,
        recipe="int2:sink=4,recent=60",
        layers=None,
        artifact=[],
        host="127.0.0.1",
        sliding=None,
        draft_recipe=None,
    )
    args.unfit_anyway, args.no_fold = True, False
    assert serve.overlay_bytes(served, {"recipe": "int2:sink=4,recent=60"}) == 4 * 2 * 2 * 64 * 64 * 2
    assert serve.overlay_bytes(served, {"recipe": "int2"}) == 0
    for room, expected in ((4 << 30, "256"), (100 * 4 * 2 * 2 * 64 * 64 * 2, "100"), (1, "16")):
        monkeypatch.setattr(serve, "OVERLAYS", room)
        command = serve.command_for(args, [])
        assert command[command.index("--max-num-seqs") + 1] == expected
        assert serve.command_for(args, ["--max-num-seqs=7"])[-1] == "--max-num-seqs=7"
        assert serve.command_for(args, ["--kv-cache-dtype=bfloat16"])[-1] == "--kv-cache-dtype=bfloat16"
    args.recipe = "int2"
    assert "--max-num-seqs" not in serve.command_for(args, [])
    for args.no_fold, wanted in ((False, {}), (True, {"fold": False})):
        command = serve.command_for(args, [])
        given = json.loads(command[command.index("--additional-config") + 1])["kvant"]
        assert given == {"recipe": "int2", "unfit_anyway": True, **wanted}
