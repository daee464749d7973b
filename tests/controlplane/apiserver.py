"""A small Kubernetes API server in memory, for the real client to talk to over HTTP on loopback.

It keeps objects, versions and watches as the API server does, checks JobSets as the CRD and its webhook do, serves pod
logs as a kubelet does, and misbehaves on demand: see `Fault`. It runs no controllers; `cluster.py` plays them.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.controlplane import podlogs, websocket_server

Json = dict[str, Any]

TOKEN = "secret-of-the-test"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_ANY: Json = {"x-kubernetes-preserve-unknown-fields": True}
_TEXT: Json = {"type": "string"}


def _fields(**properties: Json) -> Json:
    return {"type": "object", "properties": properties}


JOBSET_CRD: Json = {
    "metadata": {"name": "jobsets.jobset.x-k8s.io"},
    "spec": {
        "versions": [
            {
                "name": "v1alpha2",
                "served": True,
                "schema": {
                    "openAPIV3Schema": _fields(
                        spec=_fields(
                            coordinator=_fields(replicatedJob=_TEXT, jobIndex=_ANY, podIndex=_ANY),
                            failurePolicy=_fields(
                                maxRestarts=_ANY,
                                restartStrategy={"type": "string", "enum": ["Recreate", "BlockingRecreate"]},
                                rules=_ANY,
                            ),
                            managedBy=_TEXT,
                            network=_fields(enableDNSHostnames=_ANY, publishNotReadyAddresses=_ANY, subdomain=_TEXT),
                            replicatedJobs={
                                "type": "array",
                                "items": _fields(
                                    name=_TEXT, groupName=_TEXT, replicas=_ANY, template=_ANY, dependsOn=_ANY
                                ),
                            },
                            startupPolicy=_fields(startupPolicyOrder=_TEXT),
                            successPolicy=_fields(operator=_TEXT, targetReplicatedJobs=_ANY),
                            suspend=_ANY,
                            ttlSecondsAfterFinished=_ANY,
                        )
                    )
                },
            }
        ]
    },
}


@dataclass
class Fault:
    """What goes wrong with the next `times` requests that match.

    With `code` the server answers with that status and `message`. Otherwise a watch or log stream is cut after `after`
    events or lines, in the middle of the next one; with `gone` a watch says 410 instead, and what changed until then
    is in no watch any more.
    """

    method: str
    path: str
    code: int = 0
    message: str = ""
    after: int = 0
    gone: bool = False
    times: int = 1


@dataclass
class Event:
    version: int
    kind: str
    collection: str
    item: Json


@dataclass
class Store:
    """Objects by collection path and name, and every change to them."""

    objects: dict[str, dict[str, Json]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    version: int = 100
    changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, collection: str, item: Json) -> Json:
        with self.changed:
            items = self.objects.setdefault(collection, {})
            metadata = item.setdefault("metadata", {})
            kind = "MODIFIED" if metadata["name"] in items else "ADDED"
            self.version += 1
            now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata.setdefault("creationTimestamp", now)
            metadata["resourceVersion"] = str(self.version)
            items[metadata["name"]] = item
            self._tell(kind, collection, item)
            return item

    def remove(self, collection: str, name: str) -> Json | None:
        with self.changed:
            item = self.objects.get(collection, {}).pop(name, None)
            if item is not None:
                self.version += 1
                item["metadata"]["resourceVersion"] = str(self.version)
                self._tell("DELETED", collection, item)
            return item

    def _tell(self, kind: str, collection: str, item: Json) -> None:
        self.events.append(Event(self.version, kind, collection, copy.deepcopy(item)))
        self.changed.notify_all()


class ApiServer:
    """The server. `requests` lists each request as "METHOD path?query"; `faults` are used up in order."""

    def __init__(self) -> None:
        self.store = Store()
        self.logs = podlogs.PodLogs()
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.port_targets: dict[tuple[str, int], tuple[str, int]] = {}
        self.stopped = threading.Event()
        self.on_change: Callable[[str, Json], None] = lambda collection, item: None
        self.store.put(CRDS, copy.deepcopy(JOBSET_CRD))
        server = self

        class Handler(_Handler):
            api = server

        self._http = _Http(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05})

    def start(self) -> str:
        """Starts to serve; gives the URL."""
        self._thread.start()
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def stop(self) -> None:
        self.stopped.set()
        with self.store.changed:
            self.store.changed.notify_all()
        self.logs.wake()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def await_request(self, pattern: str, timeout_s: float = 20.0) -> None:
        """Returns once a request that matches has come."""
        with self.store.changed:
            come = self.store.changed.wait_for(
                lambda: any(re.search(pattern, request) for request in self.requests), timeout_s
            )
        assert come, f"no request {pattern!r} in {self.requests}"

    def fault_of(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.method == method and re.search(fault.path, path):
                fault.times -= 1
                if not fault.times:
                    self.faults.remove(fault)
                return fault
        return None


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # with the default of 5 a burst of connections waits for seconds


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes
    api: ApiServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PATCH(self) -> None:
        self._serve("PATCH")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def _serve(self, method: str) -> None:
        with self.api.store.changed:
            self.api.requests.append(f"{method} {self.path}")
            self.api.store.changed.notify_all()
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        fault = self.api.fault_of(method, self.path)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if fault is not None and fault.code:
                self._status(fault.code, fault.message)
            elif self.headers.get("authorization") != f"Bearer {TOKEN}":
                self._status(401, "Unauthorized")
            elif url.path.endswith("/portforward"):
                websocket_server.forward(self, self.api.port_targets, url.path.split("/")[-2], int(query["ports"]))
            elif url.path.endswith("/log"):
                self._log(url.path, query, fault)
            elif query.get("watch") == "true":
                self._watch(url.path, query, fault)
            else:
                self._object(method, url.path, query, body)

    def _object(self, method: str, path: str, query: dict[str, str], body: Json) -> None:
        collection, name = _split(path)
        items = self.api.store.objects.get(collection, {})
        if method == "POST":
            self._create(collection, query, body)
        elif not name:
            found = [item for item in items.values() if _selected(item, query)]
            self._send({"items": found, "metadata": {"resourceVersion": str(self.api.store.version)}})
        elif name not in items:
            if collection.startswith("/apis/kueue"):
                self._raw(404, b"404 page not found\n")
            else:
                self._status(404, f'{collection.split("/")[-1]} "{name}" not found', name)
        elif method == "GET":
            self._send(items[name])
        elif method == "PATCH":
            self._changed(collection, self.api.store.put(collection, _merged(items[name], body)))
        else:
            item = items[name]
            item["metadata"]["deletionTimestamp"] = datetime.now(UTC).isoformat(timespec="seconds")
            if "gracePeriodSeconds" in body:
                item["metadata"]["deletionGracePeriodSeconds"] = body["gracePeriodSeconds"]
            self._changed(collection, self.api.store.put(collection, item))

    def _create(self, collection: str, query: dict[str, str], body: Json) -> None:
        name = body["metadata"]["name"]
        if name in self.api.store.objects.get(collection, {}):
            self._status(409, f'jobsets.jobset.x-k8s.io "{name}" already exists', name)
            return
        problem = _jobset_problem(body, self.api.store) if collection.endswith("/jobsets") else ""
        if problem:
            self._status(422, f'JobSet.jobset.x-k8s.io "{name}" is invalid: {problem}', name)
        elif query.get("dryRun"):
            self._send(body, 201)
        else:
            body["metadata"].setdefault("namespace", collection.split("/")[-2])
            self._changed(collection, self.api.store.put(collection, body), 201)

    def _changed(self, collection: str, item: Json, code: int = 200) -> None:
        self._send(item, code)
        self.api.on_change(collection, item)

    def _watch(self, path: str, query: dict[str, str], fault: Fault | None) -> None:
        self._begin_stream()
        for count, event in enumerate(self._events(path, int(query["resourceVersion"]), query)):
            line = json.dumps({"type": event.kind, "object": event.item}).encode() + b"\n"
            if fault is not None and count == fault.after:
                if fault.gone:
                    self.api.store.events.clear()
                    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                    self._chunk(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
                    break
                self._cut(line)
                return
            self._chunk(line)
        self._chunk(b"")

    def _events(self, path: str, version: int, query: dict[str, str]) -> Iterator[Event]:
        store = self.api.store
        limit_s = float(query.get("timeoutSeconds", "300"))
        while not self.api.stopped.is_set():
            with store.changed:
                new = [event for event in store.events if event.version > version and event.collection == path]
                if not new and not store.changed.wait(limit_s):
                    return
            for event in new:
                version = event.version
                if _selected(event.item, query):
                    yield event

    def _log(self, path: str, query: dict[str, str], fault: Fault | None) -> None:
        parts = path.split("/")
        pod = self.api.store.objects.get("/".join(parts[:-2]), {}).get(parts[-2])
        if pod is None:
            self._status(404, f'pods "{parts[-2]}" not found', parts[-2])
            return
        lines = self.api.logs.read(pod, query, self.api.stopped)
        if lines is None:
            self._status(400, f'container "{query["container"]}" in pod "{parts[-2]}" has no such log')
            return
        self._begin_stream("text/plain")
        for count, line in enumerate(lines):
            if fault is not None and count == fault.after:
                self._cut(line)
                return
            self._chunk(line)
        self._chunk(b"")

    def _begin_stream(self, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _cut(self, line: bytes) -> None:
        """Half of a line, and then the connection is gone."""
        half = line[: len(line) // 2]
        self.wfile.write(f"{len(half):x}\r\n".encode() + half + b"\r\n")
        self.close_connection = True

    def _send(self, item: Json, code: int = 200) -> None:
        self._raw(code, json.dumps(item).encode())

    def _status(self, code: int, message: str, name: str = "") -> None:
        self._send({"kind": "Status", "code": code, "message": message, "details": {"name": name}}, code)

    def _raw(self, code: int, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _split(path: str) -> tuple[str, str]:
    """The collection and the name in a path; the name is empty for a collection."""
    parts = path.removesuffix("/status").split("/")
    fixed = 4 if parts[1] == "apis" else 3  # /apis/GROUP/VERSION or /api/VERSION
    rest = parts[fixed:]
    named = len(rest) == (4 if rest and rest[0] == "namespaces" else 2) or path.count("/") == 2
    return ("/".join(parts[:-1]), parts[-1]) if named else ("/".join(parts), "")


def _selected(item: Json, query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    for term in filter(None, query.get("labelSelector", "").split(",")):
        name, _, value = term.partition("=")
        if labels.get(name) != value:
            return False
    wanted = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return not wanted or item["metadata"]["name"] == wanted


def _merged(item: Json, patch: Json) -> Json:
    """JSON merge patch (RFC 7386) of a copy."""
    merged = copy.deepcopy(item)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = _merged(merged[name], value)
        else:
            merged[name] = value
    return merged


def _jobset_problem(jobset: Json, store: Store) -> str:
    """What the CRD in strict mode and JobSet's webhook have against a JobSet, "" for nothing."""
    crd = store.objects[CRDS]["jobsets.jobset.x-k8s.io"]
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    unknown = _unknown_field(jobset["spec"], schema, "spec")
    if unknown:
        return f'strict decoding error: unknown field "{unknown}"'
    name = jobset["metadata"]["name"]
    coordinator = jobset["spec"]["coordinator"]["replicatedJob"]
    label = f"{name}-{coordinator}-0-0.{jobset['spec'].get('network', {}).get('subdomain') or name}"
    return "spec.coordinator: the label value is longer than 63 characters" if len(label) > 63 else ""


def _unknown_field(value: Any, schema: Json, path: str) -> str:
    if isinstance(value, list):
        return next(filter(None, (_unknown_field(item, schema.get("items", _ANY), path) for item in value)), "")
    if not isinstance(value, dict) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return ""
    for name, item in value.items():
        if name not in schema["properties"]:
            return f"{path}.{name}"
        found = _unknown_field(item, schema["properties"][name], f"{path}.{name}")
        if found:
            return found
    return ""
