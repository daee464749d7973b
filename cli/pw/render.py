"""From a JobSpec to the JobSet that both backends run: pure, through `templates/pathways_jobset.yaml.j2`."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, cast

import jinja2
import yaml

from pathways_runtime import _contract
from pathways_runtime._tpus import SliceShape
from pw import manifest_parts as parts
from pw import mounts as mounted
from pw.expansion import escape
from pw.specs import JobSpec

TEMPLATE = "pathways_jobset.yaml.j2"
# What a list of jobs is found by, and what its lines say of them.
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "pw"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
COMPUTE_TYPE_ANNOTATION = "pathways-launcher/compute-type"
# Characters that YAML reads otherwise than JSON: line breaks of its own, what it calls not printable, surrogate pairs.
_NOT_IN_YAML = re.compile("[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd]")
_PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9./-]*[A-Za-z]")
_KEYWORDS = frozenset({"yes", "no", "on", "off", "true", "false", "null"})


def render(
    spec: JobSpec,
    *,
    head_node_pool: str = "",
    jax_version: str | None = None,
    shape: SliceShape | None = None,
) -> dict[str, Any]:
    """The JobSet of `spec` as plain data.

    `head_node_pool` is the pool that a cluster has for the head where the user names none; `shape` the one that its
    node pools decide on; `jax_version` picks the images' tag, by default that of the installed JAX.
    """
    text = _environment().get_template(TEMPLATE).render(_values(spec, head_node_pool, jax_version, shape))
    return cast(dict[str, Any], yaml.load(text, Loader=_Loader))


def _values(spec: JobSpec, head_node_pool: str, jax_version: str | None, shape: SliceShape | None) -> dict[str, Any]:
    shape = shape or spec.slice_shape
    volumes, mounts = mounted.volumes(spec.mount)
    return {
        "c": _contract,
        "name": spec.name,
        "subdomain": spec.subdomain,
        "labels": {MANAGED_BY_LABEL: MANAGED_BY} | ({QUEUE_LABEL: spec.queue} if spec.queue else {}),
        "annotations": {COMPUTE_TYPE_ANNOTATION: spec.compute_type},
        "shape": shape,
        "num_slices": spec.num_slices,
        "headless": spec.pathways_headless,
        "elastic_slices": spec.pathways_elastic_slices,
        "max_restarts": spec.restarts,
        "restart_exit_codes": sorted(set(spec.restart_on_exit_codes)),
        "ttl_s": spec.ttl_after_finished_s,
        "grace_period_s": spec.grace_period_s,
        "images": parts.images(spec, jax_version),
        "run_command": escape(parts.RUN_COMMAND),
        "command": escape(spec.command),
        "scratch": escape(spec.gcs_scratch_location.rstrip("/")),
        "resource_manager_flag": parts.RESOURCE_MANAGER_FLAG,
        "proxy_args": [escape(argument) for argument in spec.pathways_proxy_args],
        "server_args": [escape(argument) for argument in spec.pathways_server_args],
        "worker_args": [escape(argument) for argument in spec.pathways_worker_args],
        "user_env": parts.user_env(spec),
        "proxy_env": parts.proxy_env(spec),
        "server_env": parts.server_env(spec),
        "worker_env": parts.worker_env(spec),
        "user_memory": parts.user_memory(spec),
        "shared_memory": {"medium": "Memory"} | ({"sizeLimit": spec.shm_size} if spec.shm_size else {}),
        "sidecar_directory": parts.SIDECAR_DIRECTORY,
        "volumes": volumes,
        "mounts": mounts,
        "pod_annotations": parts.pod_annotations(spec),
        "pod_settings": parts.pod_settings(spec),
        "head_node_pool": spec.pathways_head_np or head_node_pool,
        "worker_node_selector": parts.worker_node_selector(spec, shape),
        "worker_affinity": parts.worker_affinity(spec),
        "worker_backoff_limit": parts.worker_backoff_limit(spec, shape),
        "on_spot": spec.spot or spec.gke_nap_provisioning == "spot",
    }


def template_root() -> Path:
    """Where the templates are: beside this module in a wheel, at the top level in a checkout."""
    packaged = Path(__file__).with_name("templates")
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "templates"


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_root()),
        undefined=jinja2.StrictUndefined,
        finalize=as_yaml,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )


def as_yaml(value: Any) -> str:
    """`value` as JSON that YAML reads alike, on one line. Raises UndefinedError for a name the template lacks."""
    if isinstance(value, jinja2.Undefined):
        return str(value)
    return _NOT_IN_YAML.sub(_escaped, json.dumps(value, ensure_ascii=False))


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def to_yaml(manifest: Any) -> str:
    """`manifest` as YAML: mappings in blocks and in their order, every string in double quotes.

    Go's YAML reads some plain words as booleans and numbers that others do not (`y`, `1e-5`, `0o17`); a quoted
    string is a string to all of them.
    """
    return yaml.dump(
        _with_plain_keys(manifest),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=2**31 - 1,
    )


class _Key(str):
    """A key that every YAML reads as a string without quotes."""


def _with_plain_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {_key(key): _with_plain_keys(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_plain_keys(item) for item in value]
    return value


def _key(key: str) -> str:
    return _Key(key) if _PLAIN_KEY.fullmatch(key) and key.lower() not in _KEYWORDS else key


# libyaml where PyYAML was built with it: five times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BaseDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_BaseDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True


_STRING_TAG = "tag:yaml.org,2002:str"
_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar(_STRING_TAG, text, style='"'))
_Dumper.add_representer(_Key, lambda dumper, text: dumper.represent_scalar(_STRING_TAG, str(text)))
