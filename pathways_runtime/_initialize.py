"""Make the Pathways proxy JAX's backend: where it listens, how to reach it, and whether both sides fit together."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import logging
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from pathways_runtime import _contract

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jaxlib import _jax

_logger = logging.getLogger("pathways_runtime")

# JAX's own client gives up after as long; it retries errors that cannot pass as well, which is why we retry ourselves.
_DEFAULT_TIMEOUT_S: Final = 120
# The client makes one attempt, then pauses for a second.
_ONE_ATTEMPT_S: Final = 1
# What no further attempt will change: a client that is refused, and how a server words that versions do not fit.
_FINAL_STATUSES: Final = ("INVALID_ARGUMENT", "UNIMPLEMENTED", "UNAUTHENTICATED", "PERMISSION_DENIED")
_VERSIONS: Final = "protocol version"

# `jax_logging_level` where nobody chose one.
_NO_LEVEL: Final = "NOTSET"

_lock = threading.Lock()
_initialized = False


class PathwaysError(RuntimeError):
    """Pathways cannot be used as it is set up; the message says what is wrong and what to do."""

    __module__ = "pathways_runtime"


class VersionMismatchError(PathwaysError):
    """The client of this JAX and the proxy share no version of the protocol."""

    __module__ = "pathways_runtime"


def initialize() -> bool:
    """True once JAX's devices are those of Pathways, False where `JAX_PLATFORMS` names no proxy.

    Without a proxy (plain CPU, a TPU VM) it changes nothing and says so in one warning, so the same script runs there.
    With one it connects to `JAX_BACKEND_TARGET`, checks that the versions fit, and turns off JAX's own compilation
    cache, since Pathways keeps one. A server of another JAX version that still speaks a common protocol is a warning.

    Call it before anything asks JAX for devices. A second call does nothing; after a failed call, call it again.
    Where `PATHWAYS_PROXY_TOKEN` is set, the proxy gets it as the token that it asks for; otherwise it gets none.
    It waits for the proxy for `PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS` (120 by default), then for its slices.

    Raises `VersionMismatchError` when client and server share no protocol version, and `PathwaysError` when it is
    called too late, when the target is missing, malformed or unreachable, and when the time-out is not a number.
    """
    from pathways_runtime import _callbacks

    global _initialized
    with _lock:
        if _initialized:
            return True
        if not is_pathways():
            _warn_of_no_proxy()
            return False
        _warn_of_another_default()
        if not _proxy_is_in_use():
            target, timeout_s = _target(), _connection_timeout_s()
            _register(target, timeout_s)
            _callbacks.install(functools.partial(_connect, target, timeout_s))
        _jax_config().update("jax_enable_compilation_cache", False)
        atexit.register(_end_quietly)
        _initialized = True
        return True


def is_pathways() -> bool:
    """Whether JAX is configured for Pathways: `proxy` is one of the platforms in `JAX_PLATFORMS`."""
    return _contract.PROXY_PLATFORM in _platforms().split(",")


def _platforms() -> str:
    return _jax_config().jax_platforms or ""


def _jax_config() -> Any:
    """`jax.config`, whose options jax declares to no type checker."""
    import jax

    return jax.config


def _end_quietly() -> None:
    """Spares a script that ends well what the client says then, with C++ stack traces: that its session was cancelled,
    and that programs could not be released over it."""
    if _is_client_log_as_jax_left_it():
        _jax_config().update("jax_logging_level", "CRITICAL")


def _is_client_log_as_jax_left_it() -> bool:
    """Whether the user chose no level; JAX itself has the client log warnings, as 1 means."""
    return _jax_config().jax_logging_level == _NO_LEVEL and os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1"


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Spares a client of loopback the warning, at each attempt to connect, that its credentials are insecure."""
    if not _is_client_log_as_jax_left_it():
        yield
        return
    _jax_config().update("jax_logging_level", "ERROR")
    try:
        yield
    finally:
        # No level means none to JAX's own loggers, and no change to the client's: it goes back to warnings first.
        _jax_config().update("jax_logging_level", "WARNING")
        _jax_config().update("jax_logging_level", _NO_LEVEL)


@functools.cache
def _warn_of_no_proxy() -> None:
    """One warning in the life of the process, however often a library calls `initialize()`."""
    platforms, variable = _platforms(), os.environ.get(_contract.JAX_PLATFORMS, "")
    if _contract.PROXY_PLATFORM in variable.split(","):
        advice = f"; {_contract.JAX_PLATFORMS}={variable} was set too late: set it before jax is imported"
    else:
        advice = f"; to use it, set {_contract.JAX_PLATFORMS}={_contract.PROXY_PLATFORM} or run under `pw job submit`"
    _logger.warning("not on Pathways: JAX's platforms are %r, without a proxy%s", platforms or "(automatic)", advice)


def _warn_of_another_default() -> None:
    platforms = _platforms()
    if not platforms.startswith(_contract.PROXY_PLATFORM):
        _logger.warning(
            "JAX computes on the first of its platforms (%s) unless told otherwise: put %s first",
            platforms,
            _contract.PROXY_PLATFORM,
        )


def _proxy_is_in_use() -> bool:
    """Whether JAX already talks to a proxy, as after `pathwaysutils.initialize()` and a first computation."""
    import jax.extend.backend

    from pathways_runtime import _compat

    if not _compat.backends_are_initialized():
        return False
    if _contract.PROXY_PLATFORM in jax.extend.backend.backends():
        return True
    raise PathwaysError(
        "JAX already made its devices, without Pathways. Call pathways_runtime.initialize() before jax.devices(), "
        "before the first array, and before importing modules that make arrays"
    )


def _target() -> str:
    """`JAX_BACKEND_TARGET`, or what `jax.config` was given for it, checked to be `grpc://HOST:PORT`."""
    target: str = _jax_config().read("jax_backend_target") or os.environ.get(_contract.JAX_BACKEND_TARGET, "")
    example = f"grpc://127.0.0.1:{_contract.PROXY_PORT}"
    if not target:
        raise PathwaysError(
            f"{_contract.JAX_PLATFORMS}={_platforms()} asks for Pathways, but {_contract.JAX_BACKEND_TARGET} is not "
            f"set: set it to the proxy's address, such as {example}"
        )
    if not _is_address(target):
        raise PathwaysError(f"{_contract.JAX_BACKEND_TARGET}={target!r} is not grpc://HOST:PORT, such as {example}")
    return target


def _is_address(target: str) -> bool:
    try:
        parts = urlsplit(target)
        return parts.scheme == "grpc" and bool(parts.hostname) and bool(parts.port) and target.endswith(parts.netloc)
    except ValueError:  # a port out of range, or a broken IPv6 address
        return False


def _connection_timeout_s() -> int:
    text = os.environ.get(_contract.CONNECTION_TIMEOUT_S, "") or str(_DEFAULT_TIMEOUT_S)
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise PathwaysError(f"{_contract.CONNECTION_TIMEOUT_S}={text!r} is not a whole number of seconds above 0")
    return int(text)


def _register(target: str, timeout_s: int) -> None:
    import jax.extend.backend

    _choose_credentials(target)
    factory = _ClientFactory(functools.partial(_connect, target, timeout_s))
    jax.extend.backend.register_backend_factory(_contract.PROXY_PLATFORM, factory, priority=-1)


def _choose_credentials(target: str) -> None:
    """No ALTS where none can be: on loopback the proxy is our own container or a port-forward. What is set stays."""
    if _is_loopback(target):
        os.environ.setdefault(_contract.INSECURE_CREDENTIALS, "true")


def _is_loopback(target: str) -> bool:
    return bool(re.fullmatch(r"localhost|127(\.\d+){3}|::1", urlsplit(target).hostname or ""))


class _ClientFactory:
    """Gives JAX the client that `initialize()` connected, and a new one after `clear_backends()`.

    Pathways serves one session at a time. When another factory takes this one's place before JAX asked (so does
    `pathwaysutils.initialize()`), the session must end; clients sit in reference cycles, hence the collection.
    """

    def __init__(self, connect: Callable[[], _jax.Client]) -> None:
        self._connect = connect
        self._client: _jax.Client | None = connect()

    def __call__(self) -> _jax.Client:
        client, self._client = self._client, None
        return client if client is not None else self._connect()

    def __del__(self) -> None:
        if self.__dict__.pop("_client", None) is not None:
            gc.collect()


def _connect(target: str, timeout_s: int) -> _jax.Client:
    """A client whose server fits; waits for a proxy that is not up yet."""
    deadline = time.monotonic() + timeout_s
    told = ""
    while True:
        try:
            client = _attempt(target)
        except Exception as error:
            if _is_final(error):
                raise _refusal(error, target) from error
            if time.monotonic() >= deadline:
                raise _silence(error, target, timeout_s) from error
            if _detail(error) != told:
                told = _detail(error)
                _logger.warning("waiting up to %d s for the Pathways proxy at %s: %s", timeout_s, target, told)
        else:
            _check_server(client)
            return client


def _attempt(target: str) -> _jax.Client:
    from jax.extend.backend import ifrt_proxy

    options = ifrt_proxy.ClientConnectionOptions()
    options.connection_timeout_in_seconds = _ONE_ATTEMPT_S
    token = os.environ.get(_contract.PROXY_TOKEN, "").strip()
    if token:
        options.initialization_data = {_contract.TOKEN_ATTRIBUTE: token.encode()}
    with _without_warnings() if _is_loopback(target) else contextlib.nullcontext():
        return ifrt_proxy.get_client(target, options)


def _detail(error: Exception) -> str:
    """A connection error without what the client writes before each."""
    return str(error).rpartition("detailed error: ")[2].rstrip(".")


def _is_final(error: Exception) -> bool:
    return str(error).startswith(_FINAL_STATUSES) or _VERSIONS in str(error)


def _refusal(error: Exception, target: str) -> PathwaysError:
    """What to do about a proxy that answers, but not to this client."""
    text = _detail(error)
    if _VERSIONS in text:
        return VersionMismatchError(
            f"the Pathways proxy at {target} and this client (jax {_jax_version()}) share no {_VERSIONS}: {text}. "
            f"Use images tagged jax-{_jax_version()}, or install the jax that the proxy's image is tagged with"
        )
    if _contract.PROXY_TOKEN in text:
        advice = ""
    elif "credentials" in text.lower():
        advice = f". Set {_contract.INSECURE_CREDENTIALS}=true if the network to it is trusted: it speaks plain gRPC"
    else:
        advice = f". See whether {_contract.JAX_BACKEND_TARGET} is the proxy's port, and the proxy's log"
    return PathwaysError(f"the Pathways proxy at {target} refused this client: {text}{advice}")


def _silence(error: Exception, target: str, timeout_s: int) -> PathwaysError:
    """What to do about a proxy that never answered."""
    return PathwaysError(
        f"no Pathways proxy answers at {target} ({_contract.JAX_BACKEND_TARGET}) within {timeout_s} s "
        f"({_contract.CONNECTION_TIMEOUT_S}): {_detail(error)}. See whether the proxy runs and that the port is its own"
    )


def _check_server(client: _jax.Client) -> None:
    """Warn of a server built from another JAX; Pathways supports the same version on both sides."""
    described = str(client.platform_version)
    found = re.search(r"\bjax[-_ =/]v?(\d+(?:\.\d+)+)", described)
    if found and found.group(1) != _jax_version():
        _logger.warning(
            "the Pathways proxy is of jax %s, this client of jax %s: it may work, but use images tagged jax-%s (%s)",
            found.group(1),
            _jax_version(),
            _jax_version(),
            described,
        )


def _jax_version() -> str:
    import jax

    return jax.__version__
