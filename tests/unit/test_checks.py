"""What a job refuses before anything is sent, and what the refusal says."""

from __future__ import annotations

from typing import Any

import pytest

from pw import checks
from pw.errors import SpecError
from pw.fields import Mount
from pw.specs import JobSpec

BASIC: dict[str, Any] = {"name": "digits", "command": "python train.py", "compute_type": "v6e-16", "num_slices": 2}
ON_GKE: dict[str, Any] = BASIC | {"image": "gcr.io/team/train:1", "gcs_scratch_location": "gs://bucket/scratch"}


def refused(**changes: Any) -> str:
    with pytest.raises(SpecError) as caught:
        JobSpec(**BASIC | changes)
    assert caught.value.exit_code == 2
    return caught.value.message


@pytest.mark.parametrize("command", ["", " ", "\n\t"])
def test_a_command_that_is_empty_is_refused(command: str) -> None:
    assert "is empty: say what to run with --command" in refused(command=command)


def test_a_command_that_bash_takes_for_an_option_is_refused() -> None:
    assert "its own option" in refused(command="-x train.py")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"command": "", "env": (("A", "1"),)},
        {"command": "", "shm_size": "1Gi"},
        {"command": "", "restart_on_exit_codes": (42,)},
    ],
)
def test_a_headless_job_has_nothing_of_a_command(changes: dict[str, Any]) -> None:
    assert "with --pathways-headless" in refused(pathways_headless=True, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pathways_elastic_slices": 3}, "--pathways-elastic-slices 3 is more than the job has"),
        ({"gke_nap_provisioning": "preemptible"}, "'preemptible' is unknown: want on-demand, spot, reservation"),
        ({"gke_nap_provisioning": "reservation"}, "add --gke-nap-reservation NAME"),
        ({"gke_nap_reservation": "mine"}, "only used with --gke-nap-provisioning reservation"),
        ({"gke_nap_reservation": "mine", "gke_nap_provisioning": "spot"}, "it is 'spot'"),
        ({"spot": True, "gke_nap_provisioning": "on-demand"}, "--spot contradicts"),
        ({"spot": True, "gke_nap_provisioning": "reservation", "gke_nap_reservation": "mine"}, "--spot contradicts"),
        ({"restart_on_exit_codes": (0,)}, "0 is out of range"),
        ({"restart_on_exit_codes": (256,)}, "256 is out of range"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(changes: dict[str, Any], said: str) -> None:
    assert said in refused(**changes)


@pytest.mark.parametrize(
    "reservation", ["a b", "projects/p/reservations", "zones/z/reservations/r", "r/reservationBlocks", "/", "-r"]
)
def test_a_reservation_is_a_name_or_its_path(reservation: str) -> None:
    message = refused(gke_nap_provisioning="reservation", gke_nap_reservation=reservation)
    assert f"{reservation!r} is not a reservation" in message


@pytest.mark.parametrize(
    "reservation",
    ["r", "projects/p/reservations/r", "r/reservationBlocks/b", "projects/p/reservations/r/reservationBlocks/b"],
)
def test_each_form_of_a_reservation_is_taken(reservation: str) -> None:
    JobSpec(**BASIC, gke_nap_provisioning="reservation", gke_nap_reservation=reservation)


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("b/x", "does not begin with gs://"),
        ("bucket", "does not begin with gs://"),
        ("s3://bucket/x", "does not begin with gs://"),
        ("gs:/bucket/x", "does not begin with gs://"),
        ("GS://bucket/x", "does not begin with gs://"),
        ("gs://", "names no bucket"),
        ("gs:///x", "names no bucket"),
        ("gs://bucket//x", "doubled slash"),
        ("gs://bucket/x//y", "doubled slash"),
        ("gs://bucket/x --server_port=1", "white space"),
        ("gs://bucket/x\n", "white space"),
        ("gs://bucket/x #y", "white space"),
        ("gs://bucket/../x", "no folders"),
        ("gs://bucket/$(date)", "'$(' in a folder's name"),
        *((f"gs://bucket/a{char}b", f"{char!r} in a folder's name") for char in "*?[]#"),
        ("gs://Bucket/x", "not the name of a bucket"),
        ("gs://ab/x", "not the name of a bucket"),
        ("gs://-bucket/x", "not the name of a bucket"),
        ("gs://10.0.0.1/x", "not the name of a bucket"),
        ("gs://a..b/x", "not the name of a bucket"),
        (f"gs://{'b' * 64}/x", "not the name of a bucket"),
        ("/tmp/a\nb", "control character"),
    ],
)
def test_a_broken_location_is_refused(location: str, said: str) -> None:
    message = refused(gcs_scratch_location=location)
    assert said in message
    assert repr(location) in message
    assert "want gs://BUCKET/FOLDER" in message


@pytest.mark.parametrize(
    "location",
    ["gs://bucket", "gs://bucket/", "gs://bucket/a/b/", "gs://a.b.example.com/x", "gs://a_b-c/x y"[:-2], "/d e"],
)
def test_a_location_may_be_a_bucket_a_folder_or_a_local_path(location: str) -> None:
    JobSpec(**BASIC, gcs_scratch_location=location)


@pytest.mark.parametrize("flag", ["pathways_proxy_args", "pathways_server_args", "pathways_worker_args"])
@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("--server_port=1", "drop it"),
        ("--server_port", "drop it"),
        ("-server_port=1", "drop it"),
        ("--server-port=1", "drop it"),
        ("--resource_manager_address=x:1", "drop it"),
        ("--node_type=worker", "drop it"),
        ("--gcs_scratch_location=gs://b", "use --gcs-scratch-location"),
        ("--instance_count=3", "use --num-slices"),
        ("--instance_type=tpuv6e:2x2", "use --compute-type"),
        ("--num_elastic_slices=1", "use --pathways-elastic-slices"),
        ("--sidecar_name=external", "use --pathways-colocated-python-sidecar-image"),
    ],
)
def test_an_argument_that_pw_gives_itself_is_refused(flag: str, argument: str, instead: str) -> None:
    message = refused(**{flag: ("--xla_ok=1", argument)})
    assert repr(argument) in message
    assert instead in message
    assert f"--{flag.replace('_', '-')}" in message


def test_an_argument_that_only_mentions_such_a_flag_is_taken() -> None:
    JobSpec(**BASIC, pathways_proxy_args=("--xla_note=--server_port=1", "server_port=1", "--server_ports=1"))


ENVIRONMENTS = ["env", "pathways_proxy_env", "pathways_server_env", "pathways_worker_env"]


@pytest.mark.parametrize("flag", ENVIRONMENTS)
@pytest.mark.parametrize("name", ["", "2X", "A-B", "A B", "A.B", "é", "A\n"])
def test_a_name_that_no_shell_takes_is_refused(flag: str, name: str) -> None:
    assert f"{name!r} is not the name of a variable" in refused(**{flag: ((name, "1"),)})


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("env", "JAX_BACKEND_TARGET"),
        ("env", "PATHWAYS_HEAD"),
        ("pathways_proxy_env", "PATHWAYS_HEAD"),
        ("pathways_server_env", "HOST_ADDRESS"),
        ("pathways_worker_env", "MEGASCALE_SLICE_ID"),
        ("pathways_worker_env", "JOB_COMPLETION_INDEX"),
    ],
)
def test_a_variable_that_says_where_a_pod_stands_is_refused(flag: str, name: str) -> None:
    assert f"{name!r} is set by pw" in refused(**{flag: ((name, "1"),)})


@pytest.mark.parametrize(
    ("mount", "said"),
    [
        (Mount("gs://b//x", "/data"), "not the name of a bucket"),
        (Mount("gs://bucket/a,b", "/data"), "comma"),
        (Mount("s3://bucket", "/data"), "'s3://' is unknown"),
        (Mount("My_Claim", "/data"), "not the name of a claim"),
        (Mount("pvc://", "/data"), "not the name of a claim"),
        (Mount("filestore://instance", "/data"), "names no share"),
        (Mount("/a/../b", "/data"), "refuses '..'"),
        (Mount("claim", "data"), "not an absolute path"),
        (Mount("claim", "/a/../b"), "not an absolute path"),
        (Mount("claim", "/a:b"), "not an absolute path"),
        (Mount("claim", "/"), "nothing can be mounted at '/'"),
        (Mount("claim", "/proc/x"), "nothing can be mounted"),
        (Mount("claim", "/tmp"), "a volume of its own"),
        (Mount("claim", "//dev//shm/"), "a volume of its own"),
    ],
)
def test_a_mount_that_no_pod_can_have_is_refused(mount: Mount, said: str) -> None:
    assert said in refused(mount=(mount,))


def test_two_mounts_at_one_place_are_refused() -> None:
    message = refused(mount=(Mount("one", "/data"), Mount("two", "/data/")))
    assert "mount 'two:/data/:ro': its target is that of mount 'one:/data:ro'" in message


def test_one_source_may_be_mounted_twice() -> None:
    JobSpec(**BASIC, mount=(Mount("gs://bucket/a", "/a"), Mount("gs://bucket/b", "/b"), Mount("gs://bucket/a", "/c")))


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        ((("a b", "1"),), "is not the key of a label"),
        ((("Upper.example/x", "1"),), "is not the key of a label"),
        ((("team", "a b"),), "is not the value of a label"),
        ((("team", "a||b"),), "is not the value of a label"),
        ((("team", ""),), "is not the value of a label"),
        ((("team", "a"), ("team", "b")), "want KEY=A|B"),
        ((("cloud.google.com/gke-tpu-topology", "4x4"),), "use --topology"),
        ((("cloud.google.com/gke-spot", "true"),), "use --spot"),
        ((("cloud.google.com/reservation-name", "r"),), "use --gke-nap-reservation"),
    ],
)
def test_a_node_constraint_that_no_node_meets_is_refused(constraint: tuple[tuple[str, str], ...], said: str) -> None:
    assert said in refused(node_constraint=constraint)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", "Very_High"),
        ("queue", "user queue"),
        ("queue", "q" * 64),
        ("service_account", "me@project"),
        ("image_pull_secret", ("ok", "Not_ok")),
        ("pathways_head_np", "cpu np"),
        ("placement_policy", "a/b"),
        ("gke_scheduler", "two words"),
        ("shm_size", "100K"),
        ("shm_size", "1.5Gi"),
        ("shm_size", "0"),
        ("image", "an image"),
        ("image", "gcr.io//x"),
        ("pathways_worker_image", "gcr.io/x y"),
    ],
)
def test_a_name_that_kubernetes_refuses_is_refused(field: str, value: Any) -> None:
    message = refused(**{field: value})
    assert f"--{field.replace('_', '-')}" in message
    assert repr(value[-1] if isinstance(value, tuple) else value) in message


def test_images_of_two_jax_versions_are_refused() -> None:
    message = refused(
        pathways_proxy_server_image="gcr.io/x/proxy:jax-0.10.0",
        pathways_colocated_python_sidecar_image="gcr.io/x/sidecar:20260423-python_3.12-jax_0.9.2",
    )
    assert "must be of one JAX version" in message
    assert "jax-0.10.0" in message
    assert "jax_0.9.2" in message


def test_text_that_is_too_long_for_a_process_is_refused() -> None:
    assert "put it into a file" in refused(command="echo " + "x" * 2**17)
    assert "put it into a file" in refused(env=(("A", "é" * 2**16),))
    JobSpec(**BASIC | {"command": "echo " + "x" * 2**16})


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b"])
@pytest.mark.parametrize("where", ["command", "env", "pathways_proxy_args", "mount"])
def test_text_that_no_process_can_be_given_is_refused(where: str, text: str) -> None:
    value: Any = {"env": (("A", text),), "pathways_proxy_args": (text,), "mount": (Mount(f"/{text}", "/a"),)}.get(
        where, text
    )
    assert where in refused(**{where: value})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image": ""}, "add --image"),
        ({"image": "my_base_image"}, "names no registry"),
        ({"image": "python:3.12"}, "docker.io/library/python:3.12"),
        ({"image": "team/train:1"}, "docker.io/team/train:1"),
        ({"pathways_worker_image": "worker"}, "--pathways-worker-image 'worker' names no registry"),
        ({"gcs_scratch_location": ""}, "add --gcs-scratch-location"),
        ({"gcs_scratch_location": "/tmp/scratch"}, "does not begin with gs://"),
        ({"mount": (Mount("filestore://instance/share", "/a"),)}, "gcloud filestore instances describe instance"),
    ],
)
def test_a_job_that_only_runs_here_is_refused_on_gke(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        checks.check_gke(JobSpec(**ON_GKE | changes))
    assert said in caught.value.message


@pytest.mark.parametrize(
    "changes",
    [{}, {"image": "localhost:5000/x"}, {"pathways_headless": True, "command": "", "image": ""}],
)
def test_a_whole_job_is_taken_on_gke(changes: dict[str, Any]) -> None:
    checks.check_gke(JobSpec(**ON_GKE | changes))
