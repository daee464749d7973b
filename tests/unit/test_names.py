from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pw import names
from pw.errors import SpecError

LABELS = st.from_regex(r"[a-z](?:[-a-z0-9]{0,45}[a-z0-9])?", fullmatch=True)


def _refusal(name: str, subdomain: str = "") -> str:
    with pytest.raises(SpecError) as caught:
        names.check(name, subdomain=subdomain)
    return str(caught.value)


def test_derived_names() -> None:
    assert names.job_name("digits", "worker", 1) == "digits-worker-1"
    assert names.head_pod("digits") == "digits-pathways-head-0-0"
    assert names.worker_pod("digits", 1, 3) == "digits-worker-1-3"
    assert names.coordinator("digits") == "digits-pathways-head-0-0.digits"
    assert names.coordinator("digits", "d") == "digits-pathways-head-0-0.d"


@pytest.mark.parametrize(
    ("name", "subdomain"),
    [
        ("a", ""),
        ("digits", ""),
        ("a-1", ""),
        ("a" * 22, ""),
        ("a" * 23, "b" * 21),
        ("a" * 39, "b" * 5),
        ("a", "b" * 43),
    ],
)
def test_names_that_hold(name: str, subdomain: str) -> None:
    names.check(name, subdomain=subdomain)


@given(LABELS, st.just("") | LABELS)
def test_a_name_holds_exactly_if_all_names_derived_from_it_do(name: str, subdomain: str) -> None:
    derived = (names.coordinator(name, subdomain), names.head_pod(name) + "-x4k2p", names.worker_pod(name, 999, 9999))
    if max(map(len, derived)) <= 63:
        names.check(name, subdomain=subdomain)
    else:
        assert re.search(r"'([^']+)' has [0-9]+ characters and may have 63", _refusal(name, subdomain))


def test_a_name_of_23_characters_breaks_the_coordinator_label() -> None:
    name = "exp-llama-sft-2026-09-a"
    assert _refusal(name) == (
        f"job name {name!r} is too long: the label of its coordinator '{name}-pathways-head-0-0.{name}' has 65 "
        "characters and may have 63; want a name of at most 22 characters, such as 'exp-llama-sft-2026-09', or a "
        "--subdomain of at most 21, such as 'exp-llam'"
    )


def test_a_long_subdomain_breaks_the_coordinator_label() -> None:
    message = _refusal("a" * 30, "b" * 20)
    assert f"'{'a' * 30}-pathways-head-0-0.{'b' * 20}' has 69 characters" in message
    assert message.endswith(
        "want a name of at most 24 characters, such as 'aaaaaaaaaaaaaaaaaaaaaaaa', or a --subdomain of at most 14, "
        "such as 'bbbbbbbb'"
    )
    assert _refusal("a", "b" * 50).endswith("; want a --subdomain of at most 43, such as 'bbbbbbbb'")
    assert _refusal("a" * 45, "b" * 50).endswith(f"; want no --subdomain and a name such as '{'a' * 22}'")


def test_a_name_of_40_characters_breaks_the_pod_whatever_the_subdomain() -> None:
    message = _refusal("a" * 40, "b")
    assert f"the name of its head pod '{'a' * 40}-pathways-head-0-0-xxxxx' has 64 characters" in message
    assert "subdomain" not in message


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("Digits", "digits"),
        ("my_job", "my-job"),
        ("my.job", "my-job"),
        ("-job", "job"),
        ("job-", "job"),
        ("2slices", "job-2slices"),
        ("job\n", "job"),
        ("größe", "gr-e"),
        ("___", "job"),
        ("Exp_Llama_SFT_2026_09_A", "exp-llama-sft-2026-09"),
    ],
)
def test_a_name_that_is_no_label_is_refused_with_one_that_is(name: str, suggestion: str) -> None:
    assert _refusal(name).startswith(f"job name {name!r} is not valid: want lower-case letters, digits and dashes")
    assert _refusal(name).endswith(f"such as {suggestion!r}")
    names.check(suggestion)


def test_a_subdomain_is_checked_like_a_name() -> None:
    assert _refusal("digits", "Sub_Domain").startswith("subdomain 'Sub_Domain' is not valid")
    assert _refusal("digits", "b" * 64).startswith(f"subdomain '{'b' * 64}' has 64 characters")
    assert _refusal("") == "job name is empty: want lower-case letters, digits and dashes"


@pytest.mark.parametrize(
    ("command", "stem"),
    [
        ("python examples/train_digits.py --steps 3", "train-digits"),
        ("PYTHONPATH=. python -u train.py", "train"),
        ("bash run_all.sh", "run-all"),
        ("python -m maxtext.train config.yml", "train"),
        ("/opt/bin/serve --port 1", "serve"),
        ("python 'my script.py'", "my-script"),
        ("python a_very_long_name_of_a_script.py", "a-very-long-name"),
        ("echo 'unbalanced", "echo"),
        ("", "job"),
        ("A=1", "job"),
        ("python 3d.py", "job-3d"),
    ],
)
def test_a_generated_name_tells_what_runs(command: str, stem: str) -> None:
    name = names.generate(command, random.Random(7))
    assert re.fullmatch(re.escape(stem) + r"-[bcdfghjklmnpqrstvwxz2-9]{4}", name)
    names.check(name)


@given(st.text())
def test_a_generated_name_is_always_valid(command: str) -> None:
    names.check(names.generate(command, random.Random(7)))


def test_generated_names_differ() -> None:
    assert len({names.generate("python train.py") for _ in range(20)}) > 1
