"""Names that the launcher, the runtime and the emulator share. Standard library only.

A Pathways container, flag, port or variable is spelled here and nowhere else, so that the manifest that `pw`
renders, the process that the local backend starts and the server that answers cannot drift apart.
"""

from __future__ import annotations

from typing import Final

# Ports of the Pathways containers, as every tool and the images' own defaults have them.
PROXY_PORT: Final = 29000
RESOURCE_MANAGER_PORT: Final = 29001
RESOURCE_MANAGER_DATA_PORT: Final = 29002
WORKER_PORT: Final = 29005
WORKER_DATA_PORT: Final = 29006
TPU_RUNTIME_PORT: Final = 8471
MEGASCALE_PORT: Final = 8080
SIDECAR_PORT: Final = 50051

# Replicated jobs of the JobSet, and the containers in their pods.
HEAD_JOB: Final = "pathways-head"
WORKER_JOB: Final = "worker"
PROXY_CONTAINER: Final = "pathways-proxy"
RESOURCE_MANAGER_CONTAINER: Final = "pathways-rm"
WORKER_CONTAINER: Final = "pathways-worker"
SIDECAR_CONTAINER: Final = "colocated-python-sidecar"
USER_CONTAINER: Final = "main"

# Public image repositories; tags are `jax-<version>`.
IMAGE_REPOSITORY: Final = "us-docker.pkg.dev/cloud-tpu-v2-images/pathways"
PROXY_IMAGE: Final = f"{IMAGE_REPOSITORY}/proxy_server"
SERVER_IMAGE: Final = f"{IMAGE_REPOSITORY}/server"
SIDECAR_IMAGE: Final = "us-docker.pkg.dev/cloud-tpu-v2-images/pathways-colocated-python/sidecar"
# The image that a job without one names: the programs of the shell that submitted it (local backend only).
SHELL_IMAGE: Final = "pw.local/shell:none"

# Environment of the user's container.
JAX_PLATFORMS: Final = "JAX_PLATFORMS"
JAX_BACKEND_TARGET: Final = "JAX_BACKEND_TARGET"
PROXY_PLATFORM: Final = "proxy"
# The client speaks ALTS unless this says exactly "true"; the server in the next container has no ALTS.
INSECURE_CREDENTIALS: Final = "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"
CONNECTION_TIMEOUT_S: Final = "PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS"
# What a proxy that was given a --token_file asks for, and the entry of the client's initialization data that holds it:
# the client can send no header.
PROXY_TOKEN: Final = "PATHWAYS_PROXY_TOKEN"
TOKEN_ATTRIBUTE: Final = "pathways_runtime_token"

# Environment of the Pathways containers.
PATHWAYS_HEAD: Final = "PATHWAYS_HEAD"
MEGASCALE_COORDINATOR: Final = "MEGASCALE_COORDINATOR_ADDRESS"
MEGASCALE_NUM_SLICES: Final = "MEGASCALE_NUM_SLICES"
MEGASCALE_SLICE_ID: Final = "MEGASCALE_SLICE_ID"
JOB_COMPLETION_INDEX: Final = "JOB_COMPLETION_INDEX"  # set by Kubernetes in each pod of an Indexed Job: the host

# Flags of the Pathways binaries (underscores, as the images spell them).
FLAG_SERVER_PORT: Final = "server_port"
FLAG_RESOURCE_MANAGER: Final = "resource_manager_address"
FLAG_SCRATCH: Final = "gcs_scratch_location"
FLAG_NODE_TYPE: Final = "node_type"
FLAG_INSTANCE_COUNT: Final = "instance_count"
FLAG_INSTANCE_TYPE: Final = "instance_type"
FLAG_ELASTIC_SLICES: Final = "num_elastic_slices"
FLAG_SIDECAR_NAME: Final = "sidecar_name"
FLAG_SIDECAR_SHM: Final = "cloud_pathways_sidecar_shm_directory"
NODE_TYPE_RESOURCE_MANAGER: Final = "resource_manager"

# Lines that people and tools look for in Pathways' logs.
LOG_PROXY_READY: Final = "IFRT proxy server started with status OK"
LOG_SERVER_READY: Final = "Pathways Server serving on [::]:{port}"
LOG_SLICES_READY: Final = "*** {ready}/{total} Pathways Slices Now Ready ***"

# How an emulator process tells who started it that it listens: it writes `{"port": N}\n` to this inherited file
# descriptor and closes it. End of file without that line means that it died first.
READY_FD: Final = "PW_READY_FD"
# Set in every process of a local job, and inherited by what it starts: how strays are found and ended.
LOCAL_JOB_UID: Final = "PW_LOCAL_JOB_UID"

# How an emulator process ends. Ended by SIGTERM or SIGINT: 128 + signal and never 0, as Kubernetes takes 0 for a job
# that is finished, and would neither restart the worker nor fail the job.
EXIT_BAD_FLAGS: Final = 2  # a flag or variable is wrong; nothing was started
EXIT_RESOURCE_MANAGER_LOST: Final = 69  # it cannot be reached, is gone, or refused: a restart may help

# What a proxy's `GetVersion`/`Init` answers name themselves by; the client prefixes "proxy/".
RUNTIME_TYPE: Final = "pathways"
