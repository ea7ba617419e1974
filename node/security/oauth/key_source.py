"""The keys of one issuer as they are now: fetched or read again and again, the last good ones kept.

They are fetched when the node starts, every ``sasl.oauthbearer.jwks.endpoint.refresh.ms``, and when
a token names a key that is not among them: the issuer may have a new one. That last is what
strangers can cause, so it happens :data:`UNKNOWN_KEY_INTERVAL_S` apart at most; whoever comes
meanwhile waits for the fetch under way, or is refused. After a failure it is tried again, first
after ``...retry.backoff.ms`` and later each time; what was got before is used for as long as that
takes. Where nothing was ever got, no token is believed.

A token that is believed is remembered by its hash until it expires or keys are got anew, since HTTP
and gRPC show it with each request, and a signature takes a fraction of a millisecond to check.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import stat
import time
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from kept.client.security.pem import Place, read_store, trust_store
from kept.client.security.tls import client_context, tls_config
from kept.node.config.sasl import JWKS_URL, TRUSTSTORE
from kept.node.runtime.logging import log
from kept.node.security.oauth.https_get import FetchFailed, https_get
from kept.node.security.oauth.json_web_keys import MAX_SET_BYTES, JsonWebKeys, parse_keys
from kept.node.security.oauth.token_verifier import AcceptedToken, read_header, verify
from kept.storage.errors import ConfigurationError, SaslAuthenticationFailed

if TYPE_CHECKING:
    import ssl

    from kept.node.config.sasl import TokenSettings
    from kept.node.runtime.runtime import Runtime

FETCH_TIMEOUT_S: Final = 5.0
"""For a whole answer."""
UNKNOWN_KEY_INTERVAL_S: Final = 10.0
"""Between two fetches for the sake of tokens that name unknown keys."""
MAX_REMEMBERED: Final = 4_096
"""Tokens that are remembered; beyond, the one that came first is forgotten."""


class KeySource:
    """Fetches the keys of one issuer, and keeps the last good ones. Used on the node's loop."""

    def __init__(self, runtime: Runtime, settings: TokenSettings) -> None:
        """Raises ConfigurationError for a file, or a trust store, that cannot be used."""
        self._runtime = runtime
        self._settings = settings
        self.keys = JsonWebKeys()
        self.failed = False
        """The last fetch failed: what was got before is in use."""
        self._fetched_at = -math.inf
        self._asked_at = -math.inf
        """When a token that names an unknown key last caused a fetch."""
        self._believed: dict[bytes, AcceptedToken] = {}
        """By hash of the token."""
        self._fetching: asyncio.Task[bool] | None = None
        self._task: asyncio.Task[None] | None = None
        self._tls: ssl.SSLContext | None = None
        if settings.jwks_path is None:
            self._tls = trust_context(settings.truststore_path)
        else:
            self._take(read_key_file(settings.jwks_path))

    def start(self) -> None:
        """Fetch from now on."""
        self._refresh()  # whoever comes first waits for it
        self._task = self._runtime.loop.create_task(self._run())

    def stop(self) -> None:
        """Fetch no more."""
        for task in (self._task, self._fetching):
            if task is not None:
                task.cancel()

    @property
    def age_s(self) -> float:
        """Seconds since the keys were got; infinite where they never were."""
        return self._runtime.loop.time() - self._fetched_at

    async def verify(self, token: str) -> AcceptedToken:
        """Whom a token names. Raises SaslAuthenticationFailed, whose message is for the log."""
        digest = hashlib.sha256(token.encode()).digest()
        believed = self._believed.get(digest)
        if believed is None or time.time() >= believed.expires_at_s + self._settings.skew_s:
            believed = await self._check(token)
            self._believed[digest] = believed
            if len(self._believed) > MAX_REMEMBERED:
                del self._believed[next(iter(self._believed))]
        return believed

    async def _check(self, token: str) -> AcceptedToken:
        header = read_header(token)
        if not self.keys.has(header.key_id):
            await self._look_for_new_keys()
        keys = self.keys.find(header.key_id, header.algorithm)
        if keys:
            return verify(token, header, keys, self._settings)
        if not self.keys.keys:
            raise SaslAuthenticationFailed(f"there are no keys yet from {JWKS_URL}")
        if header.key_id is None:
            raise SaslAuthenticationFailed("the token does not name its key, and several may fit")
        known = "does not fit the token's algorithm" if self.keys.has(header.key_id) else "is not"
        raise SaslAuthenticationFailed(f"its key {header.key_id!r} {known} in {JWKS_URL}")

    async def _look_for_new_keys(self) -> None:
        """Wait for the fetch under way, or for one more if it is time."""
        now = self._runtime.loop.time()
        if self._fetching is None:
            if now < self._asked_at + UNKNOWN_KEY_INTERVAL_S:
                return
            self._asked_at = now
        await asyncio.shield(self._refresh())

    def _refresh(self) -> asyncio.Task[bool]:
        """The fetch under way; a new one where there is none."""
        if self._fetching is None:
            self._fetching = self._runtime.loop.create_task(self._fetch())
            self._fetching.add_done_callback(self._fetched)
        return self._fetching

    def _fetched(self, task: asyncio.Task[bool]) -> None:  # noqa: ARG002
        self._fetching = None

    async def _run(self) -> None:
        settings, failures = self._settings, 0
        while True:
            if await asyncio.shield(self._refresh()):
                failures, pause_ms = 0, settings.refresh_ms
            else:
                longest_ms = settings.retry_backoff_max_ms
                # No power beyond 2^20: the longest pause is reached long before.
                pause_ms = min(settings.retry_backoff_ms << min(failures, 20), longest_ms)
                failures += 1
            await asyncio.sleep(pause_ms / 1000)

    async def _fetch(self) -> bool:
        """Get the keys once, and keep those of before where that fails."""
        path, url = self._settings.jwks_path, self._settings.jwks_url
        try:
            if path is not None:
                self._take(await self._runtime.in_thread(read_key_file, path))
                return True
            assert self._tls is not None
            data = await https_get(
                url, self._tls, most_bytes=MAX_SET_BYTES, timeout_s=FETCH_TIMEOUT_S
            )
            self._take(parse_keys(data))
        except (ConfigurationError, FetchFailed, ValueError) as error:
            if not self.failed:
                log.error("keys of tokens not fetched", url=url, error=str(error))
            self.failed = True
            return False
        except Exception as error:  # noqa: BLE001 - a bug of ours must not be the last fetch
            if not self.failed:
                log.exception("keys of tokens not fetched", error, url=url)
            self.failed = True
            return False
        return True

    def _take(self, keys: JsonWebKeys) -> None:
        changed = {key.key_id for key in keys.keys} != {key.key_id for key in self.keys.keys}
        if changed or self.failed:
            log.info(
                "keys of tokens",
                url=self._settings.jwks_url,
                keys=len(keys.keys),
                passed_over="; ".join(keys.passed_over[:3]) or "none",
            )
        self._believed.clear()
        self.keys, self.failed, self._fetched_at = keys, False, self._runtime.loop.time()


def read_key_file(path: str) -> JsonWebKeys:
    """The keys in a file. Raises ConfigurationError, which names the setting and the file."""
    place = Place(JWKS_URL, f"file://{path}")
    try:
        with open(path, "rb", opener=_open_at_once) as source:
            if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
                place.refuse("not a regular file")
            data = source.read(MAX_SET_BYTES + 1)
    except OSError as error:
        place.refuse(error.strerror or "it cannot be read")
    try:
        return parse_keys(data)
    except ValueError as error:
        place.refuse(str(error))


def _open_at_once(path: str, flags: int) -> int:
    """A pipe without a writer keeps nobody waiting."""
    return os.open(path, flags | os.O_NONBLOCK)


def trust_context(truststore_path: str | None) -> ssl.SSLContext:
    """By whose certificates an address of keys is believed. Raises ConfigurationError, which names
    the setting and the file.
    """
    config = tls_config({})
    if truststore_path is not None:
        place = Place(TRUSTSTORE, truststore_path)
        config = replace(config, trust=trust_store(read_store(place, "PEM", "truststore"), place))
    return client_context(config)


def check_keys(settings: TokenSettings) -> None:
    """Whether what the settings name on this machine can be used. Raises ConfigurationError."""
    if settings.jwks_path is None:
        trust_context(settings.truststore_path)
    else:
        read_key_file(settings.jwks_path)
