"""The key in front of vLLM's server, without one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvant.engines.vllm.guard import Guard


def ask(path: str, *headers: tuple[bytes, bytes], kind: str = "http", **more: Any) -> list[dict[str, Any]]:
    """What a request through the guard is answered; the application behind it says "in"."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "in"})

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
    assert ask("/v1/models", method="OPTIONS") == [{"type": "in"}]
    assert ask("/v1/models", kind="lifespan") == [{"type": "in"}]


def test_sockets_want_it_too() -> None:
    assert ask("/v1/realtime", kind="websocket")[0]["type"] == "websocket.close"
    assert ask("/v1/realtime", bearer(b"key"), kind="websocket") == [{"type": "in"}]


def test_no_key_is_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match="VLLM_API_KEY must be set"):
        Guard(lambda *args: None)  # type: ignore[arg-type,return-value]
