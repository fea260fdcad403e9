"""The key in front of vLLM's server, without one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvant.engines.vllm.guard import Guard

ORIGIN = (b"origin", b"https://example.org")
WANTED = (b"access-control-request-method", b"POST")


async def inside(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "in"})


def ask(
    path: str, *headers: tuple[bytes, bytes], kind: str = "http", app: Any = inside, **more: Any
) -> list[dict[str, Any]]:
    """What a request through the guard is answered; the application behind it says "in"."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": f"{kind}.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": kind, "method": "GET", "path": path, "headers": list(headers), **more}
    asyncio.run(Guard(app, "key")(scope, receive, send))
    return sent


def bearer(key: bytes, scheme: bytes = b"Bearer ") -> tuple[bytes, bytes]:
    return b"authorization", scheme + key


@pytest.mark.parametrize("path", ["/", "/invocations", "/metrics", "/v1/models", "/health/", "/healthy", "/docs"])
def test_every_path_wants_the_key(path: str) -> None:
    refused: list[tuple[tuple[bytes, bytes], ...]] = [
        (),
        (bearer(b"other"),),
        (bearer(b""),),
        (bearer(b"key", b"Basic "),),
        (bearer(b"key", b""),),
        (bearer(b"key "),),
        (bearer(b"key"), bearer(b"other")),
        ((b"x-api-key", b"key"),),
    ]
    for headers in refused:
        start, body = ask(path, *headers)
        assert start["status"] == 401 and b"Unauthorized" in body["body"], headers
    assert ask(path, bearer(b"key")) == [{"type": "in"}]
    assert ask(path, bearer(b"key", b"bearer ")) == [{"type": "in"}]


def test_what_is_open() -> None:
    assert ask("/health") == [{"type": "in"}]
    assert ask("/below/health", root_path="/below") == [{"type": "in"}]
    assert ask("/v1/models", kind="lifespan") == [{"type": "in"}]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "options", "TRACE", "QUERY"])
def test_every_method_wants_it(method: str) -> None:
    """The application of /metrics answers any method as GET. What calls itself a preflight has no application to meet, either."""
    for headers in ((), (ORIGIN,), (WANTED,), (ORIGIN, WANTED)):
        start, body = ask("/metrics", *headers, method=method)
        assert start["status"] == 401 and b"Unauthorized" in body["body"], headers
        assert ask("/metrics", *headers, bearer(b"key"), method=method) == [{"type": "in"}]


class Cors:
    """Answers preflights as Starlette's middleware does, and adds a header to the answers of others."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def preflight_response(self) -> list[dict[str, Any]]:
        return [{"type": "preflight"}]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS" and {ORIGIN, WANTED} <= set(scope["headers"]):
            for message in self.preflight_response():
                await send(message)
            return

        async def marked(message: Any) -> None:
            await send({**message, "cors": True} if scope["type"] == "http" else message)

        await self.app(scope, receive, marked)


class Other:
    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


def test_only_a_preflight_passes_without_it_and_meets_no_application() -> None:
    app = Other(Cors(Other(inside)))
    assert ask("/metrics", ORIGIN, WANTED, method="OPTIONS", app=app) == [{"type": "preflight"}]
    for method, headers in (
        ("OPTIONS", ()),
        ("OPTIONS", (ORIGIN,)),
        ("OPTIONS", (WANTED,)),
        ("GET", (ORIGIN, WANTED)),
        ("HEAD", (ORIGIN, WANTED)),
    ):
        start, body = ask("/metrics", *headers, method=method, app=app)
        assert start["status"] == 401 and start["cors"] and b"Unauthorized" in body["body"]  # which a browser may read
        assert ask("/metrics", *headers, bearer(b"key"), method=method, app=app) == [{"type": "in", "cors": True}]
    assert ask("/v1/realtime", ORIGIN, WANTED, kind="websocket", app=app)[0]["type"] == "websocket.close"


def test_starlettes_preflight_is_answered_as_configured() -> None:
    cors = pytest.importorskip("starlette.middleware.cors").CORSMiddleware
    app = Other(cors(inside, allow_origins=["https://example.org"], allow_methods=["POST"], allow_headers=["*"]))
    headers = (b"access-control-request-headers", b"authorization")
    start, body = ask("/v1/models", ORIGIN, WANTED, headers, method="OPTIONS", app=app)
    told = dict(start["headers"])
    assert start["status"] == 200 and body["body"] == b"OK"
    assert told[b"access-control-allow-origin"] == ORIGIN[1] and told[b"access-control-allow-methods"] == b"POST"
    assert told[b"access-control-allow-headers"] == b"authorization"
    foreign = (b"origin", b"https://example.com")
    start, _ = ask("/v1/models", foreign, WANTED, method="OPTIONS", app=app)
    assert start["status"] == 400 and b"access-control-allow-origin" not in dict(start["headers"])
    start, _ = ask("/v1/models", ORIGIN, app=app)
    assert start["status"] == 401 and dict(start["headers"])[b"access-control-allow-origin"] == ORIGIN[1]


def test_sockets_want_it_too() -> None:
    assert ask("/v1/realtime", kind="websocket")[0]["type"] == "websocket.close"
    assert ask("/v1/realtime", bearer(b"key"), kind="websocket") == [{"type": "in"}]


def test_no_key_is_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match="VLLM_API_KEY must be set"):
        Guard(lambda *args: None)  # type: ignore[arg-type,return-value]
