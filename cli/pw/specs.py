"""The values that the layers hand each other: frozen, and valid once made.

`JobSpec` is the one table of what a job can ask for: each field carries its flags, help, panel and text form, and
from them come the options of `pw job submit`, the keys of a spec file and the reference in the documentation. The rest
of this module is what comes back: `JobRef`, `JobStatus` and its parts, `LogQuery`, `LogLine`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pathways_runtime._tpus import SliceShape
from pw import checks, fields, names, tpus
from pw.fields import Mount, Pairs, row

JOB = "Job"
SHAPE = "TPU slices"
QUEUE = "Queue and nodes"
LIFETIME = "Lifetime"
PATHWAYS = "Pathways"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """All that a user asks of one Pathways job. Making one raises SpecError with the value that is refused.

    Durations are whole seconds. `env` and its like keep the order in which they were given; of a name given twice the
    last value counts.
    """

    name: str = row("--name", "-n", text=fields.TEXT, panel=JOB, help="Name of the job, and of its JobSet.")
    command: str = row(
        "--command",
        "-e",
        text=fields.TEXT,
        default="",
        panel=JOB,
        help="Shell command of the head container, run by bash as it is typed.",
    )
    image: str = row(
        "--image",
        "-i",
        text=fields.TEXT,
        default="",
        panel=JOB,
        help="Full path of the image that the command runs in. Not needed locally.",
    )
    image_pull_secret: tuple[str, ...] = row(
        "--image-pull-secret",
        text=fields.COMMA_LIST,
        default=(),
        panel=JOB,
        help="Secrets to pull images with, on head and workers.",
    )
    env: Pairs = row(
        "--env",
        text=fields.PAIRS,
        default=(),
        panel=JOB,
        help="Variable of the head container, NAME=VALUE.",
    )
    mount: tuple[Mount, ...] = row(
        "--mount",
        text=fields.MOUNTS,
        default=(),
        panel=JOB,
        help="SOURCE:TARGET[:ro|rw] in head and workers; SOURCE is gs://BUCKET or gs://BUCKET/PATH, pvc://CLAIM, "
        "a claim's name, filestore://INSTANCE/SHARE or a host path.",
    )
    shm_size: str = row(
        "--shm-size",
        text=fields.QUANTITY,
        default="",
        panel=JOB,
        help="Size of the head container's /dev/shm in memory, such as 100Gi.",
    )
    service_account: str = row(
        "--service-account",
        text=fields.TEXT,
        default="",
        panel=JOB,
        help="Kubernetes service account of the pods.",
    )
    subdomain: str = row(
        "--subdomain",
        text=fields.TEXT,
        default="",
        panel=JOB,
        help="Short DNS subdomain of the pods, which lets the name be longer than 22 characters.",
    )
    verbose: bool = row(
        "--verbose",
        text=fields.FLAG,
        default=False,
        panel=JOB,
        help="Have the TPU workers log everything.",
    )

    compute_type: str = row(
        "--compute-type",
        text=fields.TEXT,
        panel=SHAPE,
        help="TPU of each slice: v6e-16, v5litepod-32, v6e:4x4 or a machine type with --topology.",
    )
    topology: str = row(
        "--topology",
        text=fields.TEXT,
        default="",
        panel=SHAPE,
        help="Chips of each slice by axis, such as 4x4.",
    )
    num_slices: int = row("--num-slices", text=fields.INTEGER, default=1, panel=SHAPE, help="Number of slices.")

    queue: str = row("--queue", "-q", text=fields.TEXT, default="", panel=QUEUE, help="Kueue LocalQueue.")
    priority: str = row(
        "--priority",
        text=fields.TEXT,
        default="",
        panel=QUEUE,
        help="PriorityClass of head and workers.",
    )
    gke_scheduler: str = row(
        "--gke-scheduler",
        text=fields.TEXT,
        default="",
        panel=QUEUE,
        help="Scheduler of the pods.",
    )
    node_constraint: Pairs = row(
        "--node-constraint",
        text=fields.PAIRS,
        default=(),
        panel=QUEUE,
        help="Label that worker nodes must have, KEY=VALUE or KEY=A|B.",
    )
    placement_policy: str = row(
        "--placement-policy",
        text=fields.TEXT,
        default="",
        panel=QUEUE,
        help="Placement policy of the worker nodes.",
    )
    spot: bool = row("--spot", text=fields.FLAG, default=False, panel=QUEUE, help="Run the workers on Spot nodes.")
    gke_nap_provisioning: str = row(
        "--gke-nap-provisioning",
        text=fields.TEXT,
        default="",
        panel=QUEUE,
        help="How node auto-provisioning gets nodes: on-demand, spot or reservation.",
    )
    gke_nap_reservation: str = row(
        "--gke-nap-reservation",
        text=fields.TEXT,
        default="",
        panel=QUEUE,
        help="Reservation to take nodes from: its name, URI or block path.",
    )

    restarts: int = row(
        "--restarts",
        text=fields.INTEGER,
        default=1,
        panel=LIFETIME,
        help="Times the whole job may be started again.",
    )
    restart_on_exit_codes: tuple[int, ...] = row(
        "--restart-on-exit-codes",
        text=fields.EXIT_CODES,
        default=(),
        panel=LIFETIME,
        help="Exit codes of the command after which it restarts without counting, such as 42,128-255.",
    )
    ttl_after_finished_s: int = row(
        "--gke-ttl-after-finished",
        text=fields.DURATION,
        default=3600,
        panel=LIFETIME,
        help="How long a finished job is kept.",
    )
    grace_period_s: int = row(
        "--grace-period",
        text=fields.DURATION,
        default=30,
        panel=LIFETIME,
        help="Time between SIGTERM and SIGKILL, on head and workers.",
    )

    gcs_scratch_location: str = row(
        "--gcs-scratch-location",
        "--pathways-gcs-location",
        text=fields.TEXT,
        default="",
        panel=PATHWAYS,
        help="gs:// folder of Pathways' compile cache and snapshots; locally a folder will do.",
    )
    pathways_proxy_server_image: str = row(
        "--pathways-proxy-server-image",
        text=fields.TEXT,
        default="",
        panel=PATHWAYS,
        help="Image of the proxy; by default the tag of the installed JAX.",
    )
    pathways_server_image: str = row(
        "--pathways-server-image",
        text=fields.TEXT,
        default="",
        panel=PATHWAYS,
        help="Image of the resource manager; by default the proxy's tag.",
    )
    pathways_worker_image: str = row(
        "--pathways-worker-image",
        text=fields.TEXT,
        default="",
        panel=PATHWAYS,
        help="Image of the workers; by default the resource manager's.",
    )
    pathways_proxy_args: tuple[str, ...] = row(
        "--pathways-proxy-args",
        single="--pathways-proxy-arg",
        text=fields.ARGUMENTS,
        default=(),
        panel=PATHWAYS,
        help="More arguments of the proxy, where XLA flags belong.",
    )
    pathways_server_args: tuple[str, ...] = row(
        "--pathways-server-args",
        single="--pathways-server-arg",
        text=fields.ARGUMENTS,
        default=(),
        panel=PATHWAYS,
        help="More arguments of the resource manager.",
    )
    pathways_worker_args: tuple[str, ...] = row(
        "--pathways-worker-args",
        single="--pathways-worker-arg",
        text=fields.ARGUMENTS,
        default=(),
        panel=PATHWAYS,
        help="More arguments of the workers, where megascale flags belong.",
    )
    pathways_proxy_env: Pairs = row(
        "--pathways-proxy-env",
        text=fields.PAIRS,
        default=(),
        panel=PATHWAYS,
        help="Variable of the proxy.",
    )
    pathways_server_env: Pairs = row(
        "--pathways-server-env",
        text=fields.PAIRS,
        default=(),
        panel=PATHWAYS,
        help="Variable of the resource manager.",
    )
    pathways_worker_env: Pairs = row(
        "--pathways-worker-env",
        text=fields.PAIRS,
        default=(),
        panel=PATHWAYS,
        help="Variable of the workers.",
    )
    pathways_head_np: str = row(
        "--pathways-head-np",
        text=fields.TEXT,
        default="",
        panel=PATHWAYS,
        help="Node pool of the head, 64 vCPU and 256 GB; by default found by that size on the cluster.",
    )
    pathways_headless: bool = row(
        "--pathways-headless",
        text=fields.FLAG,
        default=False,
        panel=PATHWAYS,
        help="Start Pathways only, for a client elsewhere; no command.",
    )
    pathways_elastic_slices: int = row(
        "--pathways-elastic-slices",
        text=fields.INTEGER,
        default=0,
        panel=PATHWAYS,
        help="Slices that may be lost while the job goes on.",
    )
    pathways_max_slice_restarts: int = row(
        "--pathways-max-slice-restarts",
        text=fields.INTEGER,
        default=1,
        panel=PATHWAYS,
        help="Times each host of an elastic slice may come back.",
    )
    pathways_colocated_python_sidecar_image: str = row(
        "--pathways-colocated-python-sidecar-image",
        text=fields.TEXT,
        default="",
        panel=PATHWAYS,
        help="Image that runs colocated Python beside each worker.",
    )

    def __post_init__(self) -> None:
        names.check(self.name, subdomain=self.subdomain)
        fields.check_counts(self, at_least_1=("num_slices",), at_least_0=("restarts", "ttl_after_finished_s"))
        fields.check_counts(
            self, at_least_0=("grace_period_s", "pathways_elastic_slices", "pathways_max_slice_restarts")
        )
        checks.check_job(self)
        tpus.resolve(self.compute_type, self.topology)

    @property
    def slice_shape(self) -> SliceShape:
        """The shape of each slice, as `compute_type` and `topology` name it."""
        return tpus.resolve(self.compute_type, self.topology).shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `submit` will send: the JobSet manifest as plain data, and what the user should know about it (`notes`)."""

    backend: str
    spec: JobSpec
    manifest: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def options() -> tuple[fields.Option, ...]:
    """The rows of the table, in the order in which help and spec files show them."""
    return tuple(fields.option_of(field) for field in dataclasses.fields(JobSpec))
