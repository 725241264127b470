"""`kimi-eagle ui`: the page on loopback, until it is interrupted."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from kimi_eagle.ui.access import LOOPBACK, TOKEN, Access
from kimi_eagle.ui.site import site

PORT = 8265


def serve(root: Path, host: str, port: int | None, announce: Callable[[str], None]) -> None:
    """Serve a root's registry until interrupted.

    Args:
        port: None: `PORT`, or any other that is free; 0: any.
        announce: is told the address with the token, once it can be opened.

    Raises: OSError: the address cannot be listened on.
    """
    listening = listen(host, port)
    bound = listening.getsockname()[1]
    token = secrets.token_urlsafe(24)
    hosts = {*LOOPBACK, host.lower()}
    if host not in LOOPBACK:
        hosts |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    app = Access(site(root), token=token, hosts=hosts, port=bound)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, ws="none", lifespan="off"
    )
    server = uvicorn.Server(config)
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104 (not bound)
    name = f"[{name}]" if ":" in name else name
    announce(f"http://{name}:{bound}/?{TOKEN}={token}")
    server.run(sockets=[listening])


def listen(host: str, port: int | None) -> socket.socket:
    """A socket that listens there; connections wait in it until they are answered.

    Raises: OSError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = [PORT, 0] if port is None else [port]
    for place, one in enumerate(ports):
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host, one))
            made.listen(128)
            return made
        except OSError as error:
            made.close()
            if place + 1 == len(ports):
                raise OSError(error.errno, error.strerror, f"{host}:{one}") from None
    raise AssertionError("a port was tried")
