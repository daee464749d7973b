"""Where clients have Pathways read and write: absolute paths of this machine, and Cloud Storage.

What stands in for Cloud Storage is named by STORAGE_EMULATOR_HOST, as for Google's own clients.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, Final

from pathways_runtime.emulator.status import StatusError

_BUCKET_URL: Final = re.compile(r"gs://([a-z0-9][a-z0-9._-]{1,61}[a-z0-9])(?:/(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Place:
    """A folder or file. `bucket` is "" on this machine; `path` does not end with a slash."""

    bucket: str
    path: str

    @classmethod
    def parse(cls, text: str) -> Place:
        """StatusError for what is neither an absolute path nor a `gs://` URL."""
        bucket = _BUCKET_URL.fullmatch(text)
        if bucket is not None:
            return cls(bucket[1], (bucket[2] or "").strip("/"))
        if "://" in text or "\0" in text or not os.path.isabs(text):
            raise StatusError("INVALID_ARGUMENT", f"{text!r} is neither an absolute path nor gs://BUCKET/FOLDER")
        return cls("", text.rstrip("/"))

    def __truediv__(self, name: str) -> Place:
        """What has this name in the folder. StatusError for a name that leads out of it."""
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise StatusError("INVALID_ARGUMENT", f"{name!r} is not the name of a file in {self}")
        return Place(self.bucket, f"{self.path}/{name}" if self.path or not self.bucket else name)

    def __str__(self) -> str:
        return f"gs://{self.bucket}/{self.path}" if self.bucket else self.path or "/"

    @property
    def kvstore(self) -> dict[str, Any]:
        """The place as a folder, as tensorstore names it."""
        path = f"{self.path}/" if self.path or not self.bucket else ""
        return (
            {"driver": "gcs", "bucket": self.bucket, "path": path} if self.bucket else {"driver": "file", "path": path}
        )

    def write_file(self, name: str, contents: bytes) -> None:
        """Puts a file into the folder, all at once; makes the folder. Raises what tensorstore raises."""
        import tensorstore

        tensorstore.KvStore.open(self.kvstore).result().write(name, contents).result()


def _follow_emulator_host() -> None:
    host = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if host:
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", host if "://" in host else f"http://{host}")


_follow_emulator_host()
