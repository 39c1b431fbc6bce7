"""HTTP server of the live page: on loopback, read-only, and only for a browser that has the address.

Three checks protect it. The token in the address keeps out other users of the machine and web pages that guess the
port. The check of `Host` stops DNS rebinding, where a web page points its own name at this machine: its requests carry
that name. Every method but GET is refused.
"""

from __future__ import annotations

import secrets
import socket
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.errors import BadInput
from quorate.reporting.live.watcher import Watcher

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    _missing = (error.name or "").partition(".")[0]
    raise BadInput(
        f"the page needs {_missing}, which is not installed; type: pip install starlette uvicorn "
        f"(or look in the terminal: --terminal)"
    ) from error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ADDRESS = "127.0.0.1"
_HERE = Path(__file__).parent / "page"
_SHARED = Path(__file__).parent.parent / "assets"
_FILES = {
    "": (_HERE / "index.html", "text/html; charset=utf-8"),
    "watch.css": (_HERE / "watch.css", "text/css; charset=utf-8"),
    "watch.js": (_HERE / "watch.js", "text/javascript; charset=utf-8"),
    "charts.js": (_HERE / "charts.js", "text/javascript; charset=utf-8"),
    "texts.js": (_HERE / "texts.js", "text/javascript; charset=utf-8"),
    "elements.js": (_SHARED / "elements.js", "text/javascript; charset=utf-8"),
    "icon.svg": (_HERE / "icon.svg", "image/svg+xml"),
    "uPlot.js": (_SHARED / "uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "uPlot.css": (_SHARED / "uPlot.min.css", "text/css; charset=utf-8"),
}
_SECURITY = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class RequestFilter:
    """Passes only GET requests to the names of this machine, and adds the security headers to every response."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._hosts = {f"{name}:{port}" for name in (ADDRESS, "localhost", "[::1]")}
        self._origins = {f"http://{host}" for host in self._hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_SECURITY)
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return PlainTextResponse("this page answers to its own address only\n", status_code=403)
        if any(origin.lower() not in self._origins for origin in origins):
            return PlainTextResponse("this page answers to itself only\n", status_code=403)
        if scope["method"] != "GET":
            return PlainTextResponse("there is nothing to change here\n", status_code=405, headers={"allow": "GET"})
        return None


@cache
def _content(path: Path) -> bytes:
    return path.read_bytes()


def make_app(watcher: Watcher, token: str, port: int) -> ASGIApp:
    """The application: the page, its assets and the newest snapshot, all below the token."""

    async def answer(request: Request) -> Response:
        if not secrets.compare_digest(str(request.path_params["token"]).encode(), token.encode()):
            return await forbidden(request)
        name = request.path_params["name"]
        if name == "state":
            newest = watcher.published
            is_known = request.query_params.get("seen") == str(newest.state_number)
            return Response(newest.body_without_state if is_known else newest.body, media_type="application/json")
        found = _FILES.get(name)
        if found is None:
            return PlainTextResponse("there is no such file\n", status_code=404)
        return Response(_content(found[0]), media_type=found[1])

    async def forbidden(_: Request) -> Response:
        return PlainTextResponse("open the address that quorate watch printed; it holds a token\n", status_code=403)

    routes = [Route("/{token}/{name:path}", answer), Route("/{rest:path}", forbidden)]
    return RequestFilter(Starlette(routes=routes), port)


class Server:
    """Serves the page of one watcher, from construction until `close`."""

    def __init__(self, watcher: Watcher, port: int = 0) -> None:
        self._socket = _listening(port)
        self.port: int = self._socket.getsockname()[1]
        self.token = secrets.token_urlsafe(24)
        self.url = f"http://{ADDRESS}:{self.port}/{self.token}/"
        self._server = uvicorn.Server(
            uvicorn.Config(
                make_app(watcher, self.token, self.port),
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # malformed requests must not fill the terminal
                proxy_headers=False,
                access_log=False,  # it would print the token
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )

    def run(self) -> None:
        """Serve until a signal comes or `stop` is called; a signal is raised again afterwards."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _listening(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((ADDRESS, port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise BadInput(f"port {port} cannot be used: {error.strerror}; leave --port out to get a free one") from error
    return listener
