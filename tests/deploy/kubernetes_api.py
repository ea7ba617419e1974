"""As much of a Kubernetes API server as helm needs to install, upgrade and roll back a release.

It keeps objects, and does nothing with them but run a Job to its end as it is made: ``run_job``
says whether it succeeds. Patches are merged without the rules of strategic merges, which say how
items of lists are matched: a list is replaced by what the patch has of it.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]
PROTOBUF: Final = b"k8s\0"

KINDS: Final = {
    "v1": {
        "Secret": "secrets",
        "ConfigMap": "configmaps",
        "Service": "services",
        "ServiceAccount": "serviceaccounts",
    },
    "apps/v1": {"StatefulSet": "statefulsets"},
    "batch/v1": {"Job": "jobs"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "rbac.authorization.k8s.io/v1": {
        "ClusterRole": "clusterroles",
        "ClusterRoleBinding": "clusterrolebindings",
    },
}


class Api:
    """The objects, by their paths."""

    def __init__(self, run_job: Callable[[Object], bool]) -> None:
        self.objects: dict[str, Object] = {}
        self.closing = threading.Event()
        self._run_job = run_job
        self._version = 0
        self._lock = threading.Lock()

    def get(self, path: str, query: dict[str, str]) -> Object | None:
        """An object, a list of them, or what there is; None where there is nothing."""
        if path in self.objects:
            return self.objects[path]
        if (found := _discovered(path)) is not None:
            return found
        folder, _, plural = path.rpartition("/")
        kind = next((k for kinds in KINDS.values() for k in kinds if kinds[k] == plural), None)
        if kind is None:
            return None
        items = [o for p, o in self.objects.items() if p.rpartition("/")[0] == path]
        return {
            "kind": f"{kind}List",
            "apiVersion": folder.removeprefix("/apis/")
            .removeprefix("/api/")
            .split("/namespaces")[0],
            "metadata": {"resourceVersion": str(self._version)},
            "items": [item for item in items if _selected(item, query)],
        }

    def create(self, folder: str, made: Object) -> Object | None:
        """Keep an object; None where one of the name is there."""
        path = f"{folder}/{made['metadata']['name']}"
        if path in self.objects:
            return None
        if made["kind"] == "Job":
            end = "Complete" if self._run_job(made) else "Failed"
            made["status"] = {"conditions": [{"type": end, "status": "True", "reason": "Ended"}]}
        return self.put(path, made)

    def put(self, path: str, made: Object) -> Object:
        """Keep an object in place of the one that is there."""
        with self._lock:
            self._version += 1
            made["metadata"] |= {"resourceVersion": str(self._version), "uid": path}
            self.objects[path] = made
        return made

    def of_kind(self, kind: str) -> list[Object]:
        """The objects of a kind."""
        return [found for found in self.objects.values() if found["kind"] == kind]


def _discovered(path: str) -> Object | None:
    """What a client asks before it knows what there is."""
    if path == "/version":
        return {"major": "1", "minor": "32", "gitVersion": "v1.32.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = [
            {"groupVersion": name, "version": name.partition("/")[2]}
            for name in KINDS
            if "/" in name
        ]
        groups = [
            {
                "name": version["groupVersion"].partition("/")[0],
                "versions": [version],
                "preferredVersion": version,
            }
            for version in versions
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "/openapi/v3":
        paths = {
            _folder(name): {"serverRelativeURL": f"/openapi/v3/{_folder(name)}"} for name in KINDS
        }
        return {"paths": paths}
    if path.startswith("/openapi/v3/"):
        return _validates(path.removeprefix("/openapi/v3/"))
    name = path.removeprefix("/apis/").removeprefix("/api/")
    if name not in KINDS:
        return None
    resources = [
        {
            "name": plural,
            "singularName": kind.lower(),
            "namespaced": not kind.startswith("Cluster"),
            "kind": kind,
            "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
        }
        for kind, plural in KINDS[name].items()
    ]
    return {"kind": "APIResourceList", "groupVersion": name, "resources": resources}


def _folder(name: str) -> str:
    return f"apis/{name}" if "/" in name else f"api/{name}"


def _validates(folder: str) -> Object:
    """The API of a group, as far as it says that the server checks the fields of what it gets."""
    name = folder.removeprefix("apis/").removeprefix("api/")
    group, _, version = name.rpartition("/")
    paths = {
        f"/{folder}/{plural}": {
            "patch": {
                "parameters": [{"name": "fieldValidation", "in": "query"}],
                "x-kubernetes-group-version-kind": {
                    "group": group,
                    "version": version,
                    "kind": kind,
                },
            }
        }
        for kind, plural in KINDS[name].items()
    }
    return {"openapi": "3.0.0", "info": {"title": "kept", "version": "1"}, "paths": paths}


def _selected(item: Object, query: dict[str, str]) -> bool:
    metadata = item["metadata"]
    labels = {**metadata.get("labels", {}), "metadata.name": metadata["name"]}
    wanted = f"{query.get('labelSelector', '')},{query.get('fieldSelector', '')}"
    pairs = [pair.partition("=") for pair in wanted.split(",") if pair]
    return all(labels.get(name) == value for name, _, value in pairs)


def _merged(old: Object, patch: Object) -> Object:
    made = dict(old)
    for name, value in patch.items():
        if name.startswith("$"):
            continue  # an instruction of a strategic merge
        if value is None:
            made.pop(name, None)
        elif isinstance(value, dict):
            made[name] = _merged(made.get(name) or {}, value)
        else:
            made[name] = value
    return made


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each field of a message of protobuf that is text, bytes or a message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 2:
            size = varint()
            yield number, message[at : at + size]
            at += size
        else:
            varint()


def _secret(envelope: bytes) -> Object:
    """A Secret, which is how helm keeps its releases, as JSON would have it."""
    secret = dict(_fields(envelope))[2]
    metadata = next(value for number, value in _fields(secret) if number == 1)
    entries = [dict(_fields(value)) for number, value in _fields(secret) if number == 2]
    labels = [dict(_fields(value)) for number, value in _fields(metadata) if number == 11]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": dict(_fields(metadata))[1].decode(),
            "labels": {label[1].decode(): label[2].decode() for label in labels},
        },
        "data": {one[1].decode(): base64.b64encode(one[2]).decode() for one in entries},
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: Api

    def do_GET(self) -> None:
        query = self._query()
        if query.get("watch") in ("true", "1"):
            self._watch()
        else:
            self._answer(200, self.api.get(self._path(), query))

    def do_POST(self) -> None:
        made = self.api.create(self._path(), self._body())
        self._answer(201, made, "AlreadyExists", 409)

    def do_PUT(self) -> None:
        self._answer(200, self.api.put(self._path(), self._body()))

    def do_PATCH(self) -> None:
        path, patch = self._path(), self._body()
        old = self.api.objects.get(path)
        self._answer(200, None if old is None else self.api.put(path, _merged(old, patch)))

    def do_DELETE(self) -> None:
        self._body()
        gone = self.api.objects.pop(self._path(), None)
        self._answer(200, gone and {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _path(self) -> str:
        return urlsplit(self.path).path

    def _query(self) -> dict[str, str]:
        return {name: values[-1] for name, values in parse_qs(urlsplit(self.path).query).items()}

    def _body(self) -> Object:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if body.startswith(PROTOBUF):
            return _secret(body.removeprefix(PROTOBUF))
        found: Object = json.loads(body) if body else {}
        return found

    def _watch(self) -> None:
        """Nothing happens to an object that is listed already."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.api.closing.wait()

    def _answer(
        self, status: int, found: Object | None, reason: str = "NotFound", code: int = 404
    ) -> None:
        if not found:
            status = code
            found = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
            found |= {"reason": reason, "code": code, "message": f"{self.path}: {reason}"}
        text = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(run_job: Callable[[Object], bool]) -> Iterator[tuple[Api, str]]:
    """An API server on this machine, and its address."""
    api = Api(run_job)
    handler = type("Handler", (_Handler,), {"api": api})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield api, f"http://127.0.0.1:{server.server_port}"
    finally:
        api.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
