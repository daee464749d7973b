"""Profiles of what the server does, taken by jax.profiler in its own process.

All emulated devices compute there, so there is one file for all hosts of Pathways, beside that of the client.
"""

from __future__ import annotations

import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pathways_runtime.emulator.status import StatusError
from pathways_runtime.emulator.storage import Place

_FILE: Final = "pathways-proxy.xplane.pb"
_RUN_NAME: Final = "%Y_%m_%d_%H_%M_%S"


class Profile:
    """One trace, from `start` to `stop`. `request` is the body of a `profileRequest`.

    StatusError for a place that is none. KeyError and others where the request is malformed.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        options = request.get("xprofTraceOptions") or {}
        self._options = {
            "host_tracer_level": int(options.get("hostTraceLevel", 2)),
            "python_tracer_level": int(bool((options.get("pwTraceOptions") or {}).get("enablePythonTracer"))),
        }
        self._longest_s = float(request.get("maxDurationSecs", 0))
        run = str(options.get("traceSessionName") or time.strftime(_RUN_NAME))
        self.folder = Place.parse(str(request["traceLocation"])) / "plugins" / "profile" / run
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        """Starts the trace. StatusError (FAILED_PRECONDITION) while another is being taken."""
        _recorder.start(self, self._options)
        if self._longest_s > 0:
            self._timer = threading.Timer(self._longest_s, self.stop)
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        """Ends the trace and writes its file; does nothing when it has ended."""
        if self._timer is not None:
            self._timer.cancel()
        contents = _recorder.stop(self)
        if contents is not None:
            self.folder.write_file(_FILE, contents)


class _Recorder:
    """The process's one profiler."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: weakref.ref[Profile] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self, owner: Profile, options: Mapping[str, int]) -> None:
        import jax

        with self._lock:
            if self._owner is not None:
                if self._owner() is not None:
                    raise StatusError("FAILED_PRECONDITION", "a profile is being taken; only one can be at a time")
                self._end()  # that of a client that has vanished
            profiler_options = jax.profiler.ProfileOptions()
            for name, value in options.items():
                setattr(profiler_options, name, value)
            self._folder = tempfile.TemporaryDirectory(prefix="profile-")
            jax.profiler.start_trace(self._folder.name, profiler_options=profiler_options)
            self._owner = weakref.ref(owner)

    def stop(self, owner: Profile) -> bytes | None:
        """The file of the trace, or None where this owner has none."""
        with self._lock:
            if self._owner is None or self._owner() is not owner:
                return None
            return self._end()

    def _end(self) -> bytes:
        import jax

        assert self._folder is not None
        self._owner = None
        with self._folder as folder:
            jax.profiler.stop_trace()
            [path] = Path(folder).rglob("*.xplane.pb")
            return path.read_bytes()


_recorder: Final = _Recorder()
