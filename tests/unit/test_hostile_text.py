"""Whatever text a user gives, it arrives byte for byte: through the template, YAML as Go reads it, and the kubelet.

The reader of YAML here is the test's own: every scalar that is a string must stand in quotes, so that no rule of any
reader about plain words can apply to it.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pw import manifest_parts as parts
from pw import proof, render
from pw.expansion import expand
from pw.fields import Mount
from pw.specs import JobSpec

TYPED = (
    r"""' " \ \n \x41 \u0041 \N \L { } {{ }} {{x}} {% %} {%endif%} {# #} ${HOME} $HOME $(PATHWAYS_HEAD) $$(A) $(A"""
    r""" $(A) $ $$ $$$ # #x - -x : :x , [ ] & * &a *a ! !!int ? | > % @ ` ~ = << y n yes no on off true null NaN .inf"""
    r""" 0 00 0o17 0x1F 017 1_000 1e-5 1e3 +1 1. .5 12:30:45 2026-01-01 --- ... --server_port=1 </x>"""
)
CHARACTERS = " \n\t\r\x01\x1b\x7f\x80\x85\xa0\u2028\u2029\u202e\ufeff\ufffe\uffffé日😀"
FRAGMENTS = st.sampled_from([*TYPED.split(), *CHARACTERS, "  ", "\r\n", "\n ", "\n- a: b", "\n# x", "x" * 200])
ANY = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
TEXT = st.lists(FRAGMENTS, max_size=6).map("".join) | ANY
NAME = st.sampled_from(["y", "no", "NULL", "A", "HOME", "_", "e3", "X_1"])
PAIRS = st.lists(st.tuples(NAME, TEXT), max_size=3).map(tuple)
ARGUMENT = TEXT.map("--x={}".format) | TEXT.filter(lambda text: not text.startswith("-"))
ARGUMENTS = st.lists(ARGUMENT, max_size=3).map(tuple)
COMMAND = TEXT.filter(lambda text: text.strip() and not text.startswith(("-", "+")))
PATH = TEXT.map(lambda text: "/p" + re.sub(r"[\s:\x00-\x1f\x7f]|\.\.", "", text))
LOCATION = TEXT.map(lambda text: "/p" + re.sub(r"[\x00-\x1f\x7f]", "", text))
LABEL = st.sampled_from(["y", "n", "no", "1e-5", "0o17", "0x1F", "1_000", "NaN", "true", "null", "2026-01-01", "a"])
CONSTRAINTS = st.dictionaries(LABEL, LABEL | st.just("y|1e3"), max_size=3).map(lambda labels: tuple(labels.items()))
KUBERNETES_NAME = st.sampled_from(["y", "no", "1e3", "0", "2026-01-01", "true"])

JOBS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["y", "no", "on", "null", "true"]),
        "subdomain": st.sampled_from(["y", "no", "on", "null", "true"]),
        "command": COMMAND,
        "image": st.sampled_from(["y", "1e3", "0x1F", "registry/no:1.0"]),
        "image_pull_secret": st.lists(KUBERNETES_NAME, max_size=2).map(tuple),
        "env": PAIRS,
        "mount": st.lists(st.builds(Mount, PATH, PATH), max_size=1).map(tuple),
        "service_account": KUBERNETES_NAME,
        "queue": KUBERNETES_NAME,
        "priority": KUBERNETES_NAME,
        "gke_scheduler": LABEL,
        "node_constraint": CONSTRAINTS,
        "placement_policy": LABEL,
        "gke_nap_provisioning": st.just("reservation"),
        "gke_nap_reservation": LABEL,
        "gcs_scratch_location": LOCATION,
        "pathways_proxy_args": ARGUMENTS,
        "pathways_server_args": ARGUMENTS,
        "pathways_worker_args": ARGUMENTS,
        "pathways_proxy_env": PAIRS,
        "pathways_server_env": PAIRS,
        "pathways_worker_env": PAIRS,
        "pathways_head_np": LABEL,
    }
)


def read(text: str) -> Any:
    """The document with every scalar as its text; fails where a string could be taken for something else."""

    def walk(node: Any) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.style != '"':
                    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9./-]+[A-Za-z]", key.value)
                    assert key.value.lower() not in {"yes", "off", "true", "false", "null"}
                walk(value)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                walk(item)
        elif node.style != '"':
            assert re.fullmatch(r"0|[1-9][0-9]*|true|false", node.value)

    walk(yaml.compose(text, Loader=yaml.SafeLoader))
    return yaml.load(text, Loader=yaml.BaseLoader)


def as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_text(item) for item in value]
    return str(value).lower() if isinstance(value, bool) else str(value)


def received(container: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The words and variables of the process, where the cluster has values for names that the text may mention."""
    variables: dict[str, str] = {"A": "hostile", "HOME": "hostile"}
    for entry in container["env"]:
        variables[entry["name"]] = expand(entry["value"], variables) if "value" in entry else "head.digits"
    words = [*container.get("command", ()), *container.get("args", ())]
    return [expand(word, variables) for word in words], variables


@settings(deadline=None, max_examples=50)
@given(JOBS)
@example({"command": "\n#\u0085{{ 7*7 }}{% raw %}'\"\\", "env": (("y", "n"),)})
def test_all_that_a_user_types_arrives_as_it_was_typed(fields: dict[str, Any]) -> None:
    spec = JobSpec(**{"name": "digits", "compute_type": "v6e-16"} | fields)
    manifest = render.render(spec)
    proof.prove(manifest, spec)
    document = read(render.to_yaml(manifest))
    assert document == as_text(manifest)

    head, workers = (each["template"]["spec"]["template"]["spec"] for each in document["spec"]["replicatedJobs"])
    server, proxy = head["initContainers"]
    (user,), (worker,) = head["containers"], workers["containers"]
    words, variables = received(user)
    assert words == ["bash", "-c", parts.RUN_COMMAND, "main", spec.command]
    assert variables["JAX_BACKEND_TARGET"] == "grpc://head.digits:29000"
    assert variables.items() >= dict(spec.env).items()
    for container, arguments, env in (
        (proxy, spec.pathways_proxy_args, spec.pathways_proxy_env),
        (server, spec.pathways_server_args, spec.pathways_server_env),
        (worker, spec.pathways_worker_args, spec.pathways_worker_env),
    ):
        words, variables = received(container)
        assert words[len(words) - len(arguments) :] == list(arguments)
        assert variables.items() >= dict(env).items()
        assert f"--gcs_scratch_location={spec.gcs_scratch_location.rstrip('/')}" in words
    asked = {key: value for key, value in spec.node_constraint if "|" not in value}
    assert workers["nodeSelector"].items() >= asked.items()
    for mount in spec.mount:
        places = {place["mountPath"]: place["name"] for place in worker["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in workers["volumes"]}
        assert volumes[places[mount.target]]["hostPath"] == {"path": mount.source}
