"""API key authentication for every path of vLLM's server.

vLLM checks its API key only under some prefixes such as /v1. Other paths are open: /invocations computes completions, and /metrics
shows figures about other users' requests. `kvant serve` with a key adds this middleware, which checks all paths except /health.

A request without the key never reaches the application. It is answered by a copy of vLLM's CORS middleware with a refusal behind it:
a browser's preflight, which carries no key, gets its Access-Control headers; anything else gets 401.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

KEY = "VLLM_API_KEY"  # environment variable with the API key; vLLM reads the same one
OPEN = ("/health",)  # paths that need no key
PATH = f"{__name__}.Guard"  # argument of vLLM's --middleware

App = Callable[[Any, Any, Any], Awaitable[None]]


class Guard:
    """ASGI middleware that answers 401 to requests without the header `Authorization: Bearer KEY`."""

    def __init__(self, app: App, key: str | None = None) -> None:
        key = os.environ.get(KEY) if key is None else key
        if not key:
            raise ValueError(f"{KEY} must be set to a key")
        self.app, self._digest = app, hashlib.sha256(key.encode()).digest()
        self._outside = _with_cors_of(app, _refuse)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or self._lets_in(scope):
            await self.app(scope, receive, send)
        else:
            await self._outside(scope, receive, send)

    def _lets_in(self, scope: Any) -> bool:
        if scope["path"].removeprefix(scope.get("root_path", "")) in OPEN:
            return True
        found = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if len(found) != 1:
            return False
        scheme, _, key = found[0].partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(hashlib.sha256(key).digest(), self._digest)


async def _refuse(scope: Any, receive: Any, send: Any) -> None:
    """The application for requests without the key."""
    if scope["type"] == "websocket":
        await receive()  # the request to connect
        await send({"type": "websocket.close", "code": 1008, "reason": "Unauthorized"})
        return
    body = json.dumps({"error": "Unauthorized"}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _with_cors_of(app: Any, inner: App) -> App:
    """`inner` behind a copy of the CORS middleware that an application has; alone where it has none."""
    while app is not None:
        if hasattr(app, "preflight_response"):  # Starlette's CORSMiddleware
            outer = copy.copy(app)
            outer.app = inner
            return outer  # type: ignore[no-any-return]
        app = getattr(app, "app", None)
    return inner
