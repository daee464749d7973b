"""Places that data lives in, as they are typed: gs:// locations and the sources of mounts. What they mean in a pod."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any

from pw.errors import SpecError
from pw.fields import Mount

# Each label of a bucket's name; with dots a name is a domain and may be longer (Cloud Storage, "Bucket names").
_BUCKET_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9])?")
_ADDRESS = re.compile(r"[0-9]+(?:\.[0-9]+){3}")
_DNS_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
# Legal in an object's name, but read otherwise by gcloud (wildcards), by URLs or by a shell.
_UNFIT_IN_FOLDER = re.compile(r"[*?\[\]#]|\$\(")
_BLANK = re.compile(r"[\s\x00-\x1f\x7f]")
# Directories that a container cannot have from elsewhere.
_SYSTEM = ("/", "/dev", "/proc", "/sys")


def check_gs(what: str, location: str) -> None:
    """Raises SpecError unless `location` is gs://BUCKET or gs://BUCKET/FOLDER; one slash at its end is allowed."""
    bucket, _, folder = location.removeprefix("gs://").partition("/")
    if not location.startswith("gs://"):
        reason = "it does not begin with gs://"
    elif _BLANK.search(location):
        reason = "it has white space in it"
    elif not bucket:
        reason = "it names no bucket"
    elif not _is_bucket(bucket):
        reason = (
            f"{bucket!r} is not the name of a bucket: 3 to 63 lower-case letters, digits, dashes, underscores, dots"
        )
    elif folder.startswith("/") or "//" in folder:
        reason = "a doubled slash makes a folder without a name"
    elif unfit := _UNFIT_IN_FOLDER.search(folder):
        reason = f"{unfit[0]!r} in a folder's name means something else to most tools"
    elif {".", ".."} & set(folder.split("/")):
        reason = "Cloud Storage has no folders '.' and '..'"
    else:
        return
    raise SpecError(f"{what} {location!r} is not a gs:// location: {reason}; want gs://BUCKET/FOLDER")


def _is_bucket(name: str) -> bool:
    if not 3 <= len(name) <= (222 if "." in name else 63) or _ADDRESS.fullmatch(name):
        return False
    return all(_BUCKET_LABEL.fullmatch(label) for label in name.split("."))


def check_scratch(what: str, location: str) -> None:
    """Raises SpecError unless `location` is a gs:// location or an absolute path."""
    if location.startswith("/"):
        if re.search(r"[\x00-\x1f\x7f]", location):
            raise SpecError(f"{what} {location!r} has a control character in it; want gs://BUCKET/FOLDER or /FOLDER")
        return
    check_gs(what, location)


def is_dns_name(name: str) -> bool:
    """Whether Kubernetes takes `name` for most of its objects (RFC 1123 subdomain)."""
    return len(name) <= 253 and _DNS_NAME.fullmatch(name) is not None


def split_source(source: str) -> tuple[str, str]:
    """The kind of a mount's source (gs, filestore, pvc, host) and the rest of it."""
    scheme, separator, rest = source.partition("://")
    if separator:
        return scheme, rest
    return ("host", source) if source.startswith("/") else ("pvc", source)


def check_mounts(mounts: Sequence[Mount], taken: Iterable[str]) -> None:
    """Raises SpecError for a mount that no pod can have. `taken` are the targets of pw's own volumes."""
    seen: dict[str, Mount | None] = dict.fromkeys(taken)
    for mount in mounts:
        _check_source(mount)
        target = _checked_target(mount)
        if target in seen:
            other = seen[target]
            whose = f"that of mount {str(other)!r}" if other else "where pw mounts a volume of its own"
            raise SpecError(f"mount {str(mount)!r}: its target is {whose}; choose another directory")
        seen[target] = mount


def _checked_target(mount: Mount) -> str:
    path = PurePosixPath(mount.target)
    if not path.is_absolute() or ".." in path.parts or ":" in mount.target or _BLANK.search(mount.target):
        raise SpecError(f"mount {str(mount)!r}: {mount.target!r} is not an absolute path without '..', ':' and spaces")
    # POSIX keeps two leading slashes apart; Kubernetes does not.
    target = "/" + str(path).lstrip("/")
    if target in _SYSTEM or target.startswith(("/proc/", "/sys/")):
        raise SpecError(f"mount {str(mount)!r}: nothing can be mounted at {target!r}; choose another directory")
    return target


def _check_source(mount: Mount) -> None:
    kind, rest = split_source(mount.source)
    what = f"mount {str(mount)!r}:"
    if kind == "gs":
        check_gs(f"{what} source", mount.source)
        if "," in rest:
            raise SpecError(f"{what} Cloud Storage FUSE cannot mount a folder with a comma in its name")
    elif kind == "filestore":
        server, _, share = rest.partition("/")
        if not server or not share.strip("/") or _BLANK.search(rest) or ".." in share.split("/"):
            raise SpecError(f"{what} {mount.source!r} names no share; want filestore://ADDRESS/SHARE")
    elif kind == "pvc":
        if not is_dns_name(rest):
            raise SpecError(f"{what} {rest!r} is not the name of a claim; {_WANTED}")
    elif kind == "host":
        if ".." in PurePosixPath(rest).parts:
            raise SpecError(f"{what} Kubernetes refuses '..' in a host path; write it out")
    else:
        raise SpecError(f"{what} {kind + '://'!r} is unknown; {_WANTED}")


_WANTED = "want gs://BUCKET[/FOLDER], pvc://CLAIM, CLAIM, filestore://ADDRESS/SHARE or a host path"


def volume(mount: Mount, name: str) -> dict[str, Any]:
    """The pod's volume behind a mount: Cloud Storage FUSE, NFS, a claim or a directory of the host.

    Filestore is NFS: its server is given by address, because only the cloud knows the address behind a name.
    """
    kind, rest = split_source(mount.source)
    head, _, path = rest.partition("/")
    if kind == "gs":
        folder = path.strip("/")
        options = "implicit-dirs" + (f",only-dir={folder}" if folder else "")
        attributes = {"bucketName": head, "mountOptions": options}
        csi = {"driver": "gcsfuse.csi.storage.gke.io", "readOnly": mount.read_only, "volumeAttributes": attributes}
        return {"name": name, "csi": csi}
    if kind == "filestore":
        return {"name": name, "nfs": {"server": head, "path": f"/{path.strip('/')}", "readOnly": mount.read_only}}
    if kind == "host":
        return {"name": name, "hostPath": {"path": rest}}
    return {"name": name, "persistentVolumeClaim": {"claimName": rest, "readOnly": mount.read_only}}


def volumes(mounts: Iterable[Mount]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The volumes of all mounts, and where a container has them."""
    named = [(f"mount-{index}", mount) for index, mount in enumerate(mounts)]
    places = [{"name": name, "mountPath": mount.target, "readOnly": mount.read_only} for name, mount in named]
    return [volume(mount, name) for name, mount in named], places
