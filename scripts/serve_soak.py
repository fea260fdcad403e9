"""A soak of `kvant serve`: requests of two tenants over HTTP, of which a fifth hang up.

    python scripts/serve_soak.py --model smollm2 --recipe kvant-2 --requests 1000 --json soak.json
    python scripts/serve_soak.py --requests 50 --concurrency 8 -- --enforce-eager      on a CPU

Options of `kvant serve` and of vLLM come after `--`.

Requests are greedy and streamed. Each begins with one of its tenant's prefixes, which repeat a number that is the
prefix's own. Tenants are told apart by `cache_salt` alone, and half of the prefixes of both have the same text. What
has to hold:

    a tenant who has never sent a prefix finds nothing of it in the cache (`cached_tokens` of the answer is 0)
    no answer has a number of the other tenant's, but for those that both have; most have their own: the model repeats
    every answer that was not given up has all of its tokens
    at the end no request runs or waits, and no page is in use
    memory of the server's processes, and of the device, grows by no more than --slack MiB after the first quarter

What does not hold is printed, and the exit status is 1. Tokens per second are over HTTP, with one client for all; they
are no benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

TENANTS = ("A", "B")
PREFIXES = 6  # of each tenant, of which half have the text of the other tenant's
REPEATS = 24  # times that a prefix says its number
LONGEST = 64  # tokens of an answer, at most
LEAVING = 0.2  # share of requests that hang up
OWN_SHARE = 0.5  # of the answers that have room for it, at least, say the number of their prefix


@dataclasses.dataclass(frozen=True)
class Prefix:
    tenant: str
    number: int  # of the prefix
    secret: str  # the number that it repeats
    shared: bool  # the other tenant has the same

    @property
    def text(self) -> str:
        return f"The code of box {self.number} is {self.secret}.\n" * REPEATS


@dataclasses.dataclass
class Request:
    prefix: Prefix
    tail: str
    tokens: int
    leaves: bool
    text: str = ""
    seen: int = 0  # tokens that came
    cached: int | None = None
    first: bool = False  # no request of the tenant with this prefix was sent before
    error: str = ""
    wait: float = 0.0  # seconds to the first token


def prefixes(draw: random.Random) -> list[Prefix]:
    def secret() -> str:
        return "".join(draw.choice("123456789") for _ in range(7))

    both = [secret() for _ in range(PREFIXES // 2)]
    return [
        Prefix(tenant, i, both[i] if i < len(both) else secret(), i < len(both))
        for tenant in TENANTS
        for i in range(PREFIXES)
    ]


def plan(count: int, seed: int) -> list[Request]:
    """The first request of every prefix comes when the other tenant may have been there long before."""
    draw = random.Random(seed)
    known = prefixes(draw)
    leaving = {*draw.sample(range(count), int(count * LEAVING))}
    out = []
    for i in range(count):
        prefix = draw.choice(known)
        ask = f"Shelf {draw.randrange(1000)}.\n" * draw.randrange(3)
        out.append(
            Request(prefix, f"{ask}The code of box {prefix.number} is", draw.randrange(16, LONGEST + 1), i in leaving)
        )
    return out


# --- the server ------------------------------------------------------------------------------------------------------


class Server:
    """`kvant serve` in a process group of its own."""

    def __init__(self, args: argparse.Namespace, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port, self.log = free.getsockname()[1], log
        command = [
            sys.executable,
            "-c",
            "import sys; from kvant.cli import main; sys.exit(main())",
            "serve",
            args.model,
        ]
        command += ["--recipe", args.recipe, "--unfit-anyway", "--port", str(self.port), "--max-model-len", "2048"]
        command += ["--served-model-name", "soak", "--enable-prompt-tokens-details", *args.server]
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.3)
        raise SystemExit(f"the server does not listen:\n{self.log.read_text()[-6000:]}")

    def metric(self, name: str) -> float:
        return sum(float(x) for x in re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self.get("/metrics"), re.M))

    def memory(self) -> dict[str, float]:
        """MiB of the server's processes, and of the whole device where there is one."""
        found = {"host": 0.0}
        for status in Path("/proc").glob("[0-9]*/status"):
            try:
                if os.getpgid(int(status.parent.name)) != self.process.pid:
                    continue
                match = re.search(r"^RssAnon:\s+(\d+) kB", status.read_text(), re.M)
            except (OSError, ValueError):
                continue
            found["host"] += int(match[1]) / 1024 if match else 0.0
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            done = subprocess.run(query, capture_output=True, text=True, check=False)
            if done.returncode == 0 and done.stdout.split():
                found["device"] = float(done.stdout.split()[0])
        return found

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # its own group: start_new_session
            self.process.wait()


# --- the clients -----------------------------------------------------------------------------------------------------


async def send(request: Request, port: int) -> None:
    """One request, over a connection of its own. One that leaves closes it when a third of the tokens have come."""
    body = {
        "model": "soak",
        "prompt": request.prefix.text + request.tail,
        "max_tokens": request.tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": request.prefix.tenant,
    }
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + data)
        await writer.drain()
        status = await reader.readline()
        if b" 200 " not in status:
            request.error = (status + await reader.read(2000)).decode(errors="replace")
            return
        async for line in reader:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                request.error = str(event["error"])
                return
            for choice in event.get("choices", ()):
                request.wait = request.wait or time.perf_counter() - begin
                request.text += choice["text"]
                request.seen += 1
            if usage := event.get("usage"):
                request.seen = usage["completion_tokens"]
                request.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if request.leaves and request.seen > request.tokens // 3:
                return
    except (OSError, json.JSONDecodeError) as error:
        request.error = f"{type(error).__name__}: {error}"
    finally:
        writer.close()


async def crowd(
    requests: list[Request], port: int, concurrency: int, known: dict[tuple[str, int], asyncio.Event]
) -> None:
    """All requests, so many at once. `known`: the prefixes that a tenant has sent, and whether that was answered: until
    then no other request of the tenant has it, so that nothing is found there but what is another tenant's."""
    gate = asyncio.Semaphore(concurrency)

    async def one(request: Request) -> None:
        key = (request.prefix.tenant, request.prefix.number)
        request.first = key not in known
        if request.first:
            known[key] = asyncio.Event()
        else:
            await known[key].wait()
        async with gate:
            await send(request, port)
        known[key].set()

    await asyncio.gather(*(one(request) for request in requests))


async def soak(requests: list[Request], server: Server, concurrency: int) -> dict[str, float]:
    """All requests; the memory after a quarter of them."""
    quarter = len(requests) // 4
    known: dict[tuple[str, int], asyncio.Event] = {}
    await crowd(requests[:quarter], server.port, concurrency, known)
    before = server.memory()
    await crowd(requests[quarter:], server.port, concurrency, known)
    return before


# --- what has to hold ------------------------------------------------------------------------------------------------


def faults(requests: list[Request], repeats: bool = True) -> list[str]:
    """What is wrong with the answers. `repeats`: the model is one that repeats what it has read."""
    out = [f"an error: {request.error[:300]}" for request in requests if request.error][:5]
    done = [request for request in requests if not request.error and not request.leaves]
    short = [request for request in done if request.seen != request.tokens]
    if short:
        out.append(f"{len(short)} answers are short, such as one of {short[0].seen} tokens for {short[0].tokens}")
    if any(request.cached is None for request in done):
        out.append("the server does not say how many tokens were cached")
    for request in done:
        if request.first and request.cached:
            out.append(
                f"tenant {request.prefix.tenant} found {request.cached} tokens of a prefix that it had never sent"
            )
    known = {request.prefix for request in requests}
    for request in requests:
        own = {prefix.secret for prefix in known if prefix.tenant == request.prefix.tenant}
        others = {prefix.secret for prefix in known} - own
        if told := [secret for secret in others if secret in request.text]:
            out.append(f"an answer to tenant {request.prefix.tenant} has {told[0]}, a number of the other tenant's")
    if repeats and done:
        share = own_share(done)
        if share < OWN_SHARE:
            out.append(
                f"only {share:.0%} of the answers have their own number: the model does not repeat, nothing is shown"
            )
    if done and not any(request.cached for request in done):
        out.append("no prefix was ever hit: nothing was shared")
    return out


def own_share(done: list[Request]) -> float:
    return sum(request.prefix.secret in request.text for request in done) / len(done)


def grown(before: dict[str, float], after: dict[str, float], slack: float) -> list[str]:
    return [
        f"{where} memory grew from {before[where]:.0f} to {after[where]:.0f} MiB, by more than {slack:g}"
        for where in before
        if after.get(where, 0.0) > before[where] + slack
    ]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a small model that repeats what it reads (default smollm2)")
    parser.add_argument("--recipe", default="kvant-2", metavar="R")
    parser.add_argument("--requests", type=int, default=1000, metavar="N")
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="requests in flight")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slack", type=float, default=256.0, metavar="MIB", help="memory that may come (default 256)")
    parser.add_argument("--random-model", action="store_true", help="the model has random weights: it need not repeat")
    parser.add_argument("--start-limit", type=float, default=600.0, metavar="S", help="for the server to listen")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("server", nargs="*", metavar="-- OPTION", help="options of kvant serve and of vLLM")
    return parser


def main() -> int:
    args = arguments().parse_args()
    if args.requests < 40:
        raise SystemExit(f"--requests must be at least 40, so that each tenant has prefixes again: got {args.requests}")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise SystemExit(f"--json: there is no directory {Path(args.json).absolute().parent}")
    requests = plan(args.requests, args.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends, too
    with tempfile.TemporaryDirectory(prefix="serve_soak_") as folder:
        server = Server(args, Path(folder) / "log")
        try:
            begin = time.perf_counter()
            server.wait(args.start_limit)
            start = time.perf_counter() - begin
            print(f"the server listens after {start:.1f} s", flush=True)
            begin = time.perf_counter()
            before = asyncio.run(soak(requests, server, args.concurrency))
            seconds = time.perf_counter() - begin
            wrong = faults(requests, not args.random_model)
            deadline, open_requests = time.monotonic() + 20, 1.0
            while open_requests and time.monotonic() < deadline:
                open_requests = sum(server.metric(f"vllm:num_requests_{state}") for state in ("running", "waiting"))
                time.sleep(0.2)
            used = server.metric("vllm:kv_cache_usage_perc")
            after = server.memory()
            preempted = server.metric("vllm:num_preemptions_total")
            if open_requests:
                wrong.append(f"{open_requests:g} requests still run or wait")
            if used:
                wrong.append(f"pages are still in use: {used:.4%}")
            wrong += grown(before, after, args.slack)
            if server.process.poll() is not None:
                wrong.append("the server has ended")
        except BaseException:
            print(server.log.read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            server.stop()
    done = [request for request in requests if not request.leaves and not request.error]
    waits = [request.wait for request in requests if request.wait]
    made = sum(request.seen for request in requests)
    found: dict[str, Any] = {
        "requests": len(requests),
        "answered": len(done),
        "hung_up": sum(request.leaves for request in requests),
        "seconds": round(seconds, 1),
        "output_tokens_per_second": round(made / seconds, 1),
        "median_ttft_s": round(statistics.median(waits), 3) if waits else None,
        "cached_tokens": sum(request.cached or 0 for request in done),
        "answers_with_their_own_number": round(own_share(done), 3) if done else None,
        "pages_in_use": used,
        "preemptions": preempted,
        "memory_mib": {"after_a_quarter": before, "at_the_end": after},
        "start_seconds": round(start, 1),
        "wrong": wrong,
    }
    print(json.dumps(found, indent=2))
    if args.json:
        from kvant.files import replacing

        with replacing(Path(args.json)) as temporary:
            temporary.write_text(json.dumps(found, indent=2) + "\n")
    for text, count in Counter(wrong).items():
        print(f"wrong ({count} times): {text}")
    print("all holds" if not wrong else "something does not hold")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
