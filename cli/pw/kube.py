"""The connection to one Kubernetes cluster, and all use of the `kubernetes` package.

That package reads the kubeconfig, keeps tokens fresh and verifies TLS; objects go over the connection as plain JSON, so
that a field which the package does not model (a CRD's, `sinceTime` of logs) is not lost. What goes wrong is translated
here and nowhere else: `AuthError`, `BackendUnavailableError`, and `ApiError` for an answer that says no.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlencode

from pw.errors import AuthError, BackendError, BackendUnavailableError, ConfigError

Json = dict[str, Any]

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
PAGE_SIZE = 500
# Answers that a second try may turn: too many requests, and a server or gateway that restarts.
_TRANSIENT = (429, 500, 502, 503, 504)
_CONNECTIONS = 64


class ApiError(BackendError):
    """The API server refused a request. `code` is the HTTP status; `object_name` the object it speaks of, or ""."""

    def __init__(self, message: str, *, code: int, object_name: str = "", hints: tuple[str, ...] = ()) -> None:
        super().__init__(message, hints=hints)
        self.code = code
        self.object_name = object_name

    @property
    def transient(self) -> bool:
        """Whether the same request may pass a moment later."""
        return self.code in _TRANSIENT


class ForbiddenError(AuthError):
    """The user is known and may not do this."""


class StreamDroppedError(BackendUnavailableError):
    """A stream ended before the server said that it was over."""


class Stream:
    """Lines of one answer, as they arrive. Iterating raises StreamDroppedError when the connection breaks; the line
    that was cut by that is not given. `close` may be called from any thread and ends the iteration."""

    def __init__(self, response: Any, context: str) -> None:
        self._response = response
        self._context = context
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        try:
            with _reaching(self._context, StreamDroppedError):
                for block in self._response.stream(2**16):
                    if self._closed:  # what has arrived can still be read, and more may arrive
                        return
                    *lines, rest = (rest + block).split(b"\n")
                    yield from lines
            if rest and not self._closed:
                yield rest
        except StreamDroppedError:
            if not self._closed:
                raise
        finally:
            self._response.close()

    def close(self) -> None:
        self._closed = True
        # Only the reader may close the response, which is not made for two threads: this ends its read.
        with suppress(OSError, ValueError, RuntimeError):
            self._response.shutdown()


class Kube:
    """Requests to the cluster of one kubeconfig context. Paths are the API's, and `namespace` is where jobs are."""

    def __init__(self, api: Any, *, context: str, namespace: str) -> None:
        self._api = api
        self.context = context
        self.namespace = namespace

    def get(self, path: str, **query: str) -> Json:
        """The object at `path`. Raises ApiError with code 404 where there is none."""
        return self._send("GET", path, query=query)

    def create(self, path: str, body: Mapping[str, Any], *, dry_run: bool = False) -> Json:
        """The object as the server has it. Unknown fields are refused; `dry_run` checks it and keeps nothing."""
        query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return self._send("POST", path, query=query, body=body)

    def patch(self, path: str, body: Mapping[str, Any]) -> Json:
        """The object after the merge patch `body`."""
        return self._send("PATCH", path, body=body, content_type="application/merge-patch+json")

    def delete(self, path: str, *, grace_s: int | None = None) -> None:
        """Asks for the deletion of the object and then of what it owns; it is gone once a `get` gives 404. `grace_s`
        replaces a pod's own grace period; 0 kills it at once."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Foreground"}
        self._send("DELETE", path, body=options | ({} if grace_s is None else {"gracePeriodSeconds": grace_s}))

    def list(self, path: str, **query: str) -> tuple[list[Json], str]:
        """All objects under `path`, and the resource version from which a watch goes on. Read in pages."""
        items: list[Json] = []
        query = {**query, "limit": str(PAGE_SIZE)}
        while True:
            page = self._send("GET", path, query=query)
            items.extend(page.get("items") or [])
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return items, str(metadata.get("resourceVersion", ""))
            query = {**query, "continue": metadata["continue"]}

    def stream(self, path: str, *, read_timeout_s: float = READ_TIMEOUT_S, **query: str) -> Stream:
        """The lines of an answer that may go on for long; silence of `read_timeout_s` counts as a broken stream."""
        response = self._request("GET", path, query=query, read_timeout_s=read_timeout_s)
        if response.status >= 300:
            raise self._refusal(response.status, response.read())
        return Stream(response, self.context)

    def open_port(self, pod: str, port: int) -> Any:
        """A WebSocket of the package's kind to `port` of a pod of the namespace, speaking v4.channel.k8s.io.

        Raises BackendUnavailableError when the server does not open it.
        """
        from kubernetes.stream import ws_client as untyped
        from websocket import WebSocketException

        ws_client: Any = untyped
        configuration = self._api.configuration
        path = f"/api/v1/namespaces/{path_segment(self.namespace)}/pods/{path_segment(pod)}/portforward"
        url = ws_client.get_websocket_url(f"{configuration.host}{path}", [("ports", str(port))])
        try:
            return ws_client.create_websocket(configuration, url, _headers(configuration, None))
        except (OSError, WebSocketException) as exc:
            raise BackendUnavailableError(f"port {port} of pod {pod!r} cannot be reached: {exc}") from exc

    def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Json:
        with _reaching(self.context):
            response = self._request(method, path, query=query or {}, body=body, content_type=content_type)
            data = response.read()
        if response.status >= 300:
            raise self._refusal(response.status, data)
        return cast(Json, json.loads(data))

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> Any:
        import urllib3

        configuration = self._api.configuration
        retries = urllib3.Retry(
            total=2 if method == "GET" else 0,
            status_forcelist=_TRANSIENT,
            backoff_factor=0.2,
            redirect=0,
            raise_on_status=False,
            respect_retry_after_header=True,
        )
        with _reaching(self.context):
            return self._api.rest_client.pool_manager.request(
                method,
                f"{configuration.host}{path}" + (f"?{urlencode(query)}" if query else ""),
                headers=_headers(configuration, content_type if body is not None else None),
                body=None if body is None else json.dumps(body).encode(),
                timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=read_timeout_s),
                retries=retries,
                preload_content=False,
            )

    def _refusal(self, code: int, data: bytes) -> BackendError:
        """The error that an answer of status `code` means."""
        message, name = _status_message(data)
        said = message or f"HTTP status {code}"
        if code == 401:
            return AuthError(
                f"cluster {self.context!r} does not accept the credentials: {said}",
                hints=("log in: gcloud auth login", "the plugin must be installed: gke-gcloud-auth-plugin --version"),
            )
        # Webhooks refuse with 403 as well, and then it is the object, not the user.
        if code == 403 and "admission webhook" not in said:
            return ForbiddenError(
                f"cluster {self.context!r} does not allow this: {said}",
                hints=("ask for the role roles/container.developer, or check: kubectl auth can-i create jobsets",),
            )
        return ApiError(f"cluster {self.context!r} refused: {said}", code=code, object_name=name)


def connect(context: str | None, namespace: str = "", *, how: str) -> Kube:
    """The cluster of kubeconfig context `context`, or of the current one. `namespace` is by default the context's.

    Nothing is sent yet. Raises ConfigError where the kubeconfig does not have the context; `how` is the command that
    adds it.
    """
    file = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    if not any(Path(part).is_file() for part in file.split(os.pathsep) if part):
        raise ConfigError(f"there is no kubeconfig {file!r}", hints=(how,))

    from kubernetes import client
    from kubernetes import config as untyped_config

    config: Any = untyped_config
    contexts, current = _contexts(config, file)
    name = context or current
    if name not in contexts:
        missing = f"has no context {name!r}" if name else "names no current context"
        known = f": it has {', '.join(sorted(contexts))}" if contexts else ""
        raise ConfigError(f"kubeconfig {file!r} {missing}{known}", hints=(how,))
    configuration = client.Configuration()
    configuration.connection_pool_maxsize = _CONNECTIONS
    try:
        api = config.new_client_from_config(file, name, persist_config=False, client_configuration=configuration)
    except (config.ConfigException, OSError, ValueError) as exc:
        raise ConfigError(f"kubeconfig {file!r} cannot be used for context {name!r}: {exc}", hints=(how,)) from exc
    return Kube(api, context=name, namespace=namespace or contexts[name] or "default")


def path_segment(text: str) -> str:
    """`text` as one segment of a URL's path."""
    return quote(text, safe="")


def _contexts(config: Any, file: str) -> tuple[dict[str, str], str]:
    """The contexts of a kubeconfig with their namespaces, and the name of the current one; empty where it is absent."""
    from kubernetes.config import kube_config as untyped

    try:
        merged = cast(Any, untyped).KubeConfigMerger(file).config
        value = _plain(merged) or {}
        found = {entry["name"]: (entry.get("context") or {}).get("namespace", "") for entry in value["contexts"] or ()}
    except (config.ConfigException, OSError, KeyError, TypeError):
        return {}, ""
    return found, value.get("current-context") or ""


def _plain(node: Any) -> Any:
    """The data in the package's wrappers, which keep the path of each value."""
    node = getattr(node, "value", node)
    if isinstance(node, dict):
        return {key: _plain(item) for key, item in node.items()}
    return [_plain(item) for item in node] if isinstance(node, list) else node


def _headers(configuration: Any, content_type: str | None) -> dict[str, str]:
    headers = {"Accept": "application/json", "User-Agent": "pw"}
    if content_type:
        headers["Content-Type"] = content_type
    for setting in configuration.auth_settings().values():
        if setting["in"] == "header" and setting["value"]:
            headers[setting["key"]] = setting["value"]
    return headers


def _status_message(data: bytes) -> tuple[str, str]:
    """The message of a Kubernetes Status object and the name of the object it speaks of; text where it is none."""
    try:
        status = json.loads(data)
        return str(status.get("message", "")), str((status.get("details") or {}).get("name", ""))
    except (ValueError, AttributeError):
        return data.decode(errors="replace").strip()[:500], ""


@contextmanager
def _reaching(context: str, error: type[BackendUnavailableError] = BackendUnavailableError) -> Iterator[None]:
    """Translates what urllib3 and sockets raise."""
    import urllib3

    try:
        yield
    except (urllib3.exceptions.HTTPError, OSError) as exc:
        reason = getattr(exc, "reason", None) or exc
        raise error(
            f"cluster {context!r} cannot be reached: {reason}",
            hints=(f"check it: kubectl --context={context} version",),
        ) from exc
