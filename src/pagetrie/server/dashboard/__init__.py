"""The dashboard's page: static files beside this module, served with headers that let them load nothing else."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pagetrie.server.context import HttpError

FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "app.js": ("app.js", "text/javascript; charset=utf-8"),
    "feed.js": ("feed.js", "text/javascript; charset=utf-8"),
    "draw.js": ("draw.js", "text/javascript; charset=utf-8"),
    "style.css": ("style.css", "text/css; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def serve_file(name: str) -> Response:
    """One of the page's files.

    Raises:
        HttpError: 404, no such file.
    """
    if name not in FILES:
        raise HttpError(404, "There is no such file.")
    file, media_type = FILES[name]
    return Response(files(__name__).joinpath(file).read_bytes(), media_type=media_type, headers=HEADERS)


def check_local(http: HttpRequest) -> None:
    """Without API keys: let in only who sits at this machine, since the view shows what others asked.

    Raises:
        HttpError: 403, from another machine, or through a name that a web page may have made up to get here.
    """
    client = http.client.host if http.client else ""
    host = (http.url.hostname or "").lower()
    by_number = host.replace(".", "").isdigit() or ":" in host
    if client not in ("127.0.0.1", "::1") or not (by_number or "." not in host or host.endswith(".localhost")):
        raise HttpError(403, "Without API keys this is only for clients on the server's own machine; see --api-keys.")
