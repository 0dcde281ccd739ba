"""The listening sockets, bound before anything is loaded, so that a taken port costs no model."""

from __future__ import annotations

import contextlib
import errno
import socket

from specdec.errors import ConfigError

BACKLOG = 2048  # connections that wait for the event loop; the kernel may cap it


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of `host`, all on one port (0 = any free one).

    They listen at once: under SO_REUSEADDR two programs can bind a port, and only listening tells that it is taken.
    Raises ConfigError when the host is unknown or the port cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(f"cannot resolve host {host!r}: {error}; give --host an address of this machine", param="host") from None
    with contextlib.ExitStack() as opened:
        sockets: list[socket.socket] = []
        for family, _, _, _, address in dict.fromkeys(found):
            if sockets:  # with port 0 the first address draws the port for all
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            try:
                sockets.append(opened.enter_context(_listening(family, address)))
            except OSError as error:
                if family == socket.AF_INET6 and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    continue  # IPv6 is switched off here; the other addresses serve
                text = f"cannot listen on {host} port {port}: {error.strerror}; stop what uses it or choose another --host or --port"
                raise ConfigError(text, param="port") from None
        if not sockets:
            raise ConfigError(f"host {host!r} has no address that can be listened on; give --host another one", param="host")
        opened.pop_all()
        return sockets


def _listening(family: int, address: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
