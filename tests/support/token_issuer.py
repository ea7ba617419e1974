"""An OAuth server for tests: keys, their JSON Web Key Set, tokens, and where they are served."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

ISSUER = "https://issuer.test"
AUDIENCE = "kafka"
CLIENT, SECRET = "a client", "a secret: it is"
EC_CURVES = {"ES256": ec.SECP256R1, "ES384": ec.SECP384R1, "ES512": ec.SECP521R1}


class Issuer:
    """``keys`` are its private keys and their algorithms, by name."""

    def __init__(self, *key_ids: str) -> None:
        self.keys: dict[str, tuple[Any, str]] = {}
        for key_id in key_ids or ("k1",):
            self.add_key(key_id)

    def add_key(self, key_id: str, algorithm: str = "ES256") -> None:
        key: Any = None
        if algorithm in EC_CURVES:
            key = ec.generate_private_key(EC_CURVES[algorithm]())
        elif algorithm == "EdDSA":
            key = ed25519.Ed25519PrivateKey.generate()
        else:
            key = rsa.generate_private_key(65537, 2048)
        self.keys[key_id] = key, algorithm

    def key_set(self) -> dict[str, Any]:
        """What everybody may know."""
        return {"keys": [self.public(key_id) for key_id in self.keys]}

    def public(self, key_id: str) -> dict[str, Any]:
        key, algorithm = self.keys[key_id]
        maker: Any = jwt.get_algorithm_by_name(algorithm)
        return {**maker.to_jwk(key.public_key(), as_dict=True), "kid": key_id}

    def write(self, path: Path) -> str:
        """The set as a file; its URL."""
        path.write_text(json.dumps(self.key_set()))
        return path.as_uri()

    def token(
        self,
        user: str = "ada",
        *,
        key_id: str = "",
        life_s: float = 300,
        headers: dict[str, Any] | None = None,
        algorithm: str = "",
        **claims: Any,
    ) -> str:
        """A token; claims that are None are left out."""
        key_id = key_id or next(iter(self.keys))
        key, own = self.keys[key_id]
        now = time.time()
        said = {
            "sub": user,
            "iss": ISSUER,
            "aud": AUDIENCE,
            "iat": int(now),
            "exp": now + life_s,
        } | claims
        given = {"kid": key_id} | (headers or {})
        claimed = {name: value for name, value in said.items() if value is not None}
        return jwt.PyJWS().encode(  # which does not look at them, as jwt.encode does
            json.dumps(claimed).encode(),
            key,
            algorithm or own,
            headers={n: v for n, v in given.items() if v is not None},
        )


@contextmanager
def fresh_token(
    path: Path, issuer: Issuer, user: str = "ada", life_s: float = 300
) -> Iterator[Path]:
    """A file that has a token of so long a life, made anew twice a second."""
    over = threading.Event()

    def write() -> None:
        beside = path.with_name(f"{path.name}.next")
        beside.write_text(issuer.token(user, life_s=life_s))
        beside.replace(path)

    def go_on() -> None:
        while not over.wait(0.5):
            write()

    write()
    writer = threading.Thread(target=go_on)
    writer.start()
    try:
        yield path
    finally:
        over.set()
        writer.join()


class Endpoint:
    """What its address answers: ``key_set`` for GET, tokens for POST with the client's secret.
    ``respond`` may be replaced: it is given the method, and returns status, headers and body.
    """

    def __init__(self, issuer: Issuer, life_s: float = 300) -> None:
        self.issuer = issuer
        self.life_s = life_s
        self.user = "ada"
        self.requests: list[str] = []
        self.url = ""

    def respond(self, method: str, headers: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if method == "GET":
            return 200, {}, json.dumps(self.issuer.key_set()).encode()
        basic = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        if headers["Authorization"] != f"Basic {basic}":
            return 401, {}, b'{"error": "invalid_client"}'
        form = parse_qs(body.decode())
        assert form["grant_type"] == ["client_credentials"]
        token = self.issuer.token(self.user, life_s=self.life_s, scope=" ".join(form["scope"]))
        answer = {"access_token": token, "token_type": "Bearer", "expires_in": self.life_s}
        return 200, {}, json.dumps(answer).encode()


class _Handler(BaseHTTPRequestHandler):
    endpoint: Endpoint

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.endpoint.requests.append(self.command)
        status, headers, answer = self.endpoint.respond(self.command, self.headers, body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        try:
            self.wfile.write(answer)
        except OSError:  # nobody waits for more
            self.close_connection = True

    do_GET = do_POST = _serve

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(endpoint: Endpoint, key_store: str = "", host: str = "localhost") -> Iterator[Endpoint]:
    """Serve it; by HTTPS with the key and the certificate in the file ``key_store``."""
    handler = type("Handler", (_Handler,), {"endpoint": endpoint})
    server = ThreadingHTTPServer((host, 0), handler)
    server.daemon_threads = True
    if key_store:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(key_store)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    endpoint.url = f"http{'s' * bool(key_store)}://{host}:{server.server_port}/oauth"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
