"""Certificates that are replaced while a node runs: histories of what its files hold."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from kept.client.security.tls import client_context, tls_config
from kept.node.config.node_config import NodeConfig
from kept.node.security.listener_tls import ListenerTls, UnknownPeer
from kept.node.security.tls_reload import DAY_S, Rotation, TlsReload
from kept.storage.errors import ConfigurationError
from tests.support.certificates import DAY, Authority
from tests.support.given import Given


class Bench:
    """A listener whose key and chain are in two files, as a mounted secret has them."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self.authority = Authority(directory)
        self.path = directory / "in-use.pem"
        self.put(self.issue("node"))
        given = {name.replace("_", "."): value for name, value in settings.items()}
        config = NodeConfig(
            {
                "listeners": "SSL://localhost:9093",
                "ssl.keystore.location": str(self.path),
                "ssl.truststore.location": self.authority.ca,
                **given,
            }
        )
        self.tls = ListenerTls(config, config.listeners[0])
        self.rotation = Rotation(self.tls)
        self.before = self.tls.context

    def issue(self, name: str, host: str = "localhost", **more: Any) -> str:
        return Path(self.authority.issue(name, host, **more)).read_text()

    def put(self, text: str) -> None:
        self.path.write_text(text)

    def tick(self, now_s: float | None = None) -> None:
        try:
            read = self.tls.read()
        except ConfigurationError as error:
            self.rotation.step(error, now_s or time.time())
        else:
            self.rotation.step(read, now_s or time.time())

    @property
    def replaced(self) -> bool:
        return self.tls.context is not self.before


KEY_END = "-----END PRIVATE KEY-----\n"


def test_two_reads_that_agree_replace_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.tick()
    bench.put(bench.issue("node"))
    bench.tick()
    assert not bench.replaced
    bench.put(bench.issue("node"))  # and another one: it is being written
    bench.tick()
    assert not bench.replaced
    bench.tick()
    assert bench.replaced and not bench.rotation.failed


@pytest.mark.parametrize("first", ["key", "certificate"])
def test_half_of_a_rotation_is_not_taken(tmp_path: Path, first: str) -> None:
    bench = Bench(tmp_path)
    old, new = bench.path.read_text().split(KEY_END), bench.issue("node").split(KEY_END)
    half = (new[0], old[1]) if first == "key" else (old[0], new[1])
    bench.put(KEY_END.join(half))
    for _ in range(4):
        bench.tick()
    assert not bench.replaced and bench.rotation.failed
    bench.put(KEY_END.join(new))
    bench.tick()
    bench.tick()
    assert bench.replaced and not bench.rotation.failed


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("empty", "not PEM"),
        ("gone", "No such file"),
        ("expired", "the certificate is not valid now"),
        ("early", "the certificate is not valid now"),
        ("subject", "ssl.allow.dn.changes would allow that"),
        ("host", "does not name localhost any more"),
    ],
)
def test_what_cannot_be_used_leaves_the_old_one_in_force(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], change: str, why: str
) -> None:
    bench = Bench(tmp_path)
    old = bench.path.read_text()
    texts: dict[str, Callable[[], str]] = {
        "empty": lambda: "",
        "expired": lambda: bench.issue("node", not_before=-2 * DAY, not_after=-DAY),
        "early": lambda: bench.issue("node", not_before=DAY),
        "subject": lambda: bench.issue("other"),
        "host": lambda: bench.issue("node", "elsewhere"),
    }
    if change == "gone":
        bench.path.unlink()
    else:
        bench.put(texts[change]())
    for _ in range(5):
        bench.tick()
    assert not bench.replaced and bench.rotation.failed
    lines = "".join(capfd.readouterr())
    assert lines.count("new certificate not taken") == 1 and why in lines
    bench.put(old)
    bench.tick()
    assert not bench.replaced and not bench.rotation.failed


def test_one_that_is_not_valid_yet_is_taken_once_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The clock of whoever signs may be ahead; the files do not change again."""
    bench = Bench(tmp_path)
    now_s = time.time()
    bench.put(bench.issue("node", not_before=DAY, not_after=9 * DAY))
    for _ in range(4):
        bench.tick(now_s)
    assert not bench.replaced and bench.rotation.failed
    assert "".join(capfd.readouterr()).count("new certificate not taken") == 1
    bench.tick(now_s + DAY_S + 60)
    assert bench.replaced and not bench.rotation.failed


def test_another_subject_and_other_names_where_that_is_allowed(tmp_path: Path) -> None:
    allowed = {"ssl_allow_dn_changes": "true", "ssl_allow_san_changes": "true"}
    bench = Bench(tmp_path, **allowed)
    bench.put(bench.issue("other", "elsewhere"))
    bench.tick()
    bench.tick()
    assert bench.replaced and bench.tls.subject == "CN=other"


def test_each_warning_of_the_end_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(tmp_path)
    end = bench.tls.not_after
    said = []
    for days in (40, 31, 29.9, 20, 6.9, 3, 0.9, 0.5, -0.1, -1):
        bench.tick(end - days * DAY_S)
        said.append("".join(capfd.readouterr()).count("certificate "))
    assert said == [0, 0, 1, 0, 1, 0, 1, 0, 1, 0]


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Both sides, in memory. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = list(sides)
    for _ in range(10):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                pass
    assert not waiting
    sides[1].write(b"x")  # TLS 1.3: a client hears now that its certificate is refused
    sides[0].read(1)


def test_a_bug_of_ours_ends_the_reading_of_no_certificate(capsys: pytest.CaptureFixture) -> None:
    """It ended it for all, and nobody heard of that before the certificates were over."""

    def fail() -> None:
        raise KeyError("x")

    async def scene() -> None:
        stepped: asyncio.Queue[Any] = asyncio.Queue()
        runtime = Given(loop=asyncio.get_running_loop(), in_thread=asyncio.to_thread)
        reload = TlsReload(cast("Any", runtime), cast("Any", Given(current__tls_reload_ms=1)), [])
        reload.rotations = [
            Given(tls=Given(name="broken", read=fail)),
            Given(tls=Given(name="well", read=int), step=lambda *what: stepped.put_nowait(what)),
        ]
        reload.start()
        async with asyncio.timeout(60):
            await stepped.get()
            await stepped.get()
        await reload.stop()
        assert "listener=broken" in capsys.readouterr().err

    asyncio.run(scene())


def test_a_certificate_that_has_expired_since_says_of_nobody_who_he_is(tmp_path: Path) -> None:
    """A session of TLS 1.2 that is resumed shows the one that was valid when it was begun."""
    bench = Bench(tmp_path)

    def who(**validity: Any) -> str:
        _, _, certificate = bench.issue("ada", **validity).partition(KEY_END)
        der = ssl.PEM_cert_to_DER_cert(certificate)
        return bench.tls.principal(Given(getpeercert=lambda binary_form: der))

    assert who(not_after=DAY) == "User:CN=ada"
    with pytest.raises(UnknownPeer, match="expired"):
        who(not_before=-2 * DAY, not_after=-DAY)


def test_another_authority_together_with_the_key(tmp_path: Path) -> None:
    """Clients that trust and are signed by the new one are believed, and no others."""
    allowed = {"ssl_allow_dn_changes": "true", "ssl_client_auth": "required"}
    bench = Bench(tmp_path, **allowed)
    old, new = bench.authority, Authority(tmp_path, "new")

    def client(authority: Authority, trusted: str) -> ssl.SSLContext:
        keys = authority.issue("ada")
        stores = {"ssl.keystore.location": keys, "ssl.truststore.certificates": trusted}
        return client_context(tls_config(stores))

    old_pem, new_pem = old.ca_pem, new.ca_pem
    handshake(bench.tls.context, client(old, old_pem))
    with pytest.raises(ssl.SSLError):
        handshake(bench.tls.context, client(new, old_pem))
    Path(old.ca).write_text(old_pem + new_pem)  # first both are trusted, then the key changes
    bench.put(Path(new.issue("node", "localhost")).read_text())
    bench.tick()
    bench.tick()
    assert bench.replaced
    handshake(bench.tls.context, client(new, new_pem))
    handshake(bench.tls.context, client(old, old_pem + new_pem))
    Path(old.ca).write_text(new_pem)
    bench.tick()
    bench.tick()
    handshake(bench.tls.context, client(new, new_pem))
    for mistaken in (client(old, new_pem), client(new, old_pem)):
        with pytest.raises(ssl.SSLError):
            handshake(bench.tls.context, mistaken)
