"""Serve the pages of `ttrl ui` on the loopback."""

import asyncio
import contextlib
import functools
import importlib
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ttrl.errors import TtrlError, UserError
from ttrl.monitoring.followed_runs import Runs
from ttrl.report.page import css
from ttrl.ui.compare_view import compare_page
from ttrl.ui.guard import Guard, new_key
from ttrl.ui.pages import NotFoundError, View, message_page
from ttrl.ui.run_views import home, iteration_page, run_page
from ttrl.ui.sample_views import pack_page, rows_page, sample_page, samples_page

HOST = "127.0.0.1"
_HERE = Path(__file__).parent
_PACK_POLICY = re.compile(r"""http-equiv="Content-Security-Policy" content="([^"]*)\"""")


def make_app(runs: Runs, key: str) -> ASGIApp:
    """Return the application; every request needs the key (`ttrl.ui.guard`)."""

    pages: dict[str, Callable[..., View]] = {
        "/": home,
        "/compare": compare_page,
        "/run/{name}": run_page,
        "/run/{name}/iteration/{number:int}": iteration_page,
        "/run/{name}/samples": samples_page,
        "/run/{name}/sample/{place}": sample_page,
        "/run/{name}/rows/{number:int}": rows_page,
        "/run/{name}/pack/{number:int}": pack_page,
    }
    routes = [
        *(_route(path, runs, view) for path, view in pages.items()),
        Route("/ui.css", functools.partial(_file, "ui.css", "text/css")),
        Route("/ui.js", functools.partial(_file, "ui.js", "text/javascript")),
    ]
    app = Starlette(routes=routes, exception_handlers={404: _no_page}, lifespan=_warm)
    return Guard(app, key)


@contextlib.asynccontextmanager
async def _warm(app: Starlette) -> AsyncIterator[None]:
    """Load PyTorch in a thread: the first page with tokens would wait for it."""
    thread = threading.Thread(
        target=importlib.import_module, args=("ttrl.report.plan_table",), daemon=True
    )
    thread.start()
    yield


def serve(folders: Sequence[Path], port: int, say: Callable[[str], None]) -> None:
    """Serve runs until Ctrl-C. say: gets the address, with the key.

    Raises UserError for a missing folder or a port in use.
    """
    runs = Runs(folders)
    key = new_key()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"port {port} of {HOST} cannot be used ({error}); choose another one with --port, "
                "or leave it out for a free one"
            ) from error
        listener.listen()  # so the address works once it is printed
        say(f"http://{HOST}:{listener.getsockname()[1]}/?key={key}")
        config = uvicorn.Config(
            make_app(runs, key),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
            uvicorn.Server(config).run(sockets=[listener])


def _route(path: str, runs: Runs, make: Callable[..., View]) -> Route:
    """make: gets the runs, the parts of the path in order, and the query."""

    def answer(request: Request) -> Response:
        try:
            view = make(runs, *request.path_params.values(), request.query_params)
            etag = f'"{view.stamp}"'
            if request.headers.get("if-none-match") == etag:
                return Response(status_code=304, headers={"ETag": etag})
            html = view.render()
        except NotFoundError as error:
            return HTMLResponse(message_page("Nothing here", str(error)), 404)
        except TtrlError as error:
            return HTMLResponse(message_page("This cannot be shown", str(error)), 422)
        headers = {"ETag": etag}
        # A page with a script of its own has a policy for exactly that script.
        policy = _PACK_POLICY.search(html[:2000])
        if policy:
            headers["Content-Security-Policy"] = policy[1].replace("&#39;", "'")
        return HTMLResponse(html, headers=headers)

    return Route(path, answer)


async def _file(name: str, kind: str, request: Request) -> Response:
    text = (_HERE / name).read_text(encoding="utf-8")
    if name == "ui.css":
        text = css() + text
    return Response(text, media_type=kind)


async def _no_page(request: Request, error: Exception) -> Response:
    return HTMLResponse(message_page("Nothing here", "There is no such page."), 404)
