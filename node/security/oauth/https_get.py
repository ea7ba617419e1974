"""One GET over HTTPS, on the loop: bounded in time and size as a whole, without redirects.

The address comes from a setting; where it leads to is said by that alone, so an answer other than
200 is an error, also one that names another address. Proxies are not asked.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final
from urllib.parse import urlsplit

import h11

from kept.client.security.tls_errors import tls_failure

MAX_HEAD_BYTES: Final = 16 * 1024
READ_BYTES: Final = 64 * 1024


class FetchFailed(Exception):
    """Nothing was got; the message says why, without the address."""


async def https_get(url: str, tls: ssl.SSLContext, *, most_bytes: int, timeout_s: float) -> bytes:
    """The body of what is at ``url``. Raises FetchFailed."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 443
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = [
        ("Host", parts.netloc),
        ("Accept", "application/json"),
        ("Accept-Encoding", "identity"),
        ("Connection", "close"),
    ]
    try:
        request = h11.Request(method="GET", target=target, headers=headers)
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
            try:
                return await _exchange(reader, writer, request, most_bytes)
            finally:
                writer.transport.abort()
    except TimeoutError:
        raise FetchFailed(f"no whole answer within {timeout_s:g} s") from None
    except ssl.SSLError as error:
        raise FetchFailed(tls_failure(error, has_certificate=False).why) from None
    except OSError as error:
        raise FetchFailed(error.strerror or str(error) or type(error).__name__) from None
    except h11.ProtocolError as error:
        raise FetchFailed(f"not a whole answer of HTTP: {error}") from None


async def _exchange(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    request: h11.Request,
    most_bytes: int,
) -> bytes:
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
    writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.Response):
            if event.status_code != 200:
                raise FetchFailed(f"it answered with status {event.status_code}, not 200")
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > most_bytes:
                raise FetchFailed(f"more than {most_bytes} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return bytes(body)
        elif isinstance(event, h11.ConnectionClosed):
            raise FetchFailed("it ended the connection before the end of its answer")
