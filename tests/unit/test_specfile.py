from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pw import specfile
from pw.errors import SpecError
from pw.fields import Mount
from pw.specs import JobSpec, options

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
LOOK_ALIKES = st.sampled_from(
    ["y", "no", "~", "null", "1e-5", "0o17", "0x1f", "1_000", "1:30", "2024-01-01", ".inf", "="]
)
HOSTILE = st.sampled_from(
    ["a: b", "# x", "a #b", "{{ x }}", "$(X)", "'", '"', "\\", "- a", "*a", "&a", "!!int 1", "|", ">", "%"]
)
TEXTS = ANY_TEXT | LOOK_ALIKES | HOSTILE
PAIRS = st.lists(st.tuples(st.from_regex(r"U_[A-Z0-9_]{0,8}", fullmatch=True), TEXTS), max_size=3).map(tuple)
ARGUMENTS = st.lists(TEXTS, max_size=3).map(tuple)


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    """Specs with hostile text wherever a user's text is taken as it is."""
    return JobSpec(
        name=draw(st.from_regex(r"[a-z][a-z0-9]{0,20}", fullmatch=True)),
        command=draw(st.sampled_from(["x", " x", "\n\tx"])) + draw(TEXTS),
        compute_type=draw(st.sampled_from(["v6e-16", "v5p:2x2x2", "ct6e-standard-8t"])),
        num_slices=draw(st.integers(1, 64)),
        env=draw(PAIRS),
        mount=draw(st.sampled_from([(), (Mount("/data", "/data"), Mount("gs://bucket/a", "/b", read_only=False))])),
        restart_on_exit_codes=draw(st.sets(st.integers(1, 255), max_size=5).map(lambda codes: tuple(sorted(codes)))),
        ttl_after_finished_s=draw(st.integers(0, 10**6)),
        verbose=draw(st.booleans()),
        pathways_proxy_args=draw(ARGUMENTS),
        pathways_worker_args=draw(ARGUMENTS),
        pathways_worker_env=draw(PAIRS),
    )


def _read(folder: Path, text: str) -> dict[str, object]:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return specfile.read(path)


def _refusal(folder: Path, text: str) -> str:
    with pytest.raises(SpecError) as caught:
        _read(folder, text)
    return str(caught.value).removeprefix(str(folder / "job.yaml"))


@given(specs())
@example(JobSpec(name="a", compute_type="v6e-16", command="x", pathways_worker_args=("\x85",)))
@example(
    JobSpec(name="a", compute_type="v6e-16", command="\n a\r\n\tb \u2028\x85\ufeff\x7f \n\n", env=(("A", "1e-5"),))
)
def test_a_written_spec_reads_as_an_equal_one(spec: JobSpec) -> None:
    with TemporaryDirectory() as folder:
        assert JobSpec(**specfile.read(_written(Path(folder), specfile.write(spec)))) == spec


def _written(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_bytes(text.encode())
    return path


def test_a_command_of_several_lines_stays_readable() -> None:
    spec = JobSpec(name="a", compute_type="v6e-16", command="set -e\npython train.py  # {{ x }}\n")
    assert "command: |\n  set -e\n  python train.py  # {{ x }}\n" in specfile.write(spec)


def test_only_what_differs_from_its_default_is_written() -> None:
    spec = JobSpec(
        name="digits",
        command="python train.py",
        compute_type="v6e-8",
        num_slices=2,
        env=(("LR", "1e-5"), ("DEBUG", "y")),
        grace_period_s=90,
        verbose=True,
    )
    assert specfile.write(spec) == (
        "name: digits\n"
        "command: python train.py\n"
        "env:\n- LR=1e-5\n- DEBUG=y\n"
        "verbose: true\n"
        "compute_type: v6e-8\n"
        "num_slices: 2\n"
        "grace_period: 1m30s\n"
    )


def test_every_option_has_a_key_of_its_own() -> None:
    assert len({option.key for option in options()}) == len(options())


def test_scalars_are_the_text_that_stands_in_the_file(tmp_path: Path) -> None:
    found = _read(
        tmp_path,
        """
        name: on
        command: |
          echo 1e-5
          echo "y"
        env: {LR: 1e-5, MODE: 0o17, YES: y, EMPTY: "", TILDE: "~", TIME: 12:30:45, DATE: 2024-01-01}
        num_slices: 2
        verbose: true
        gke_ttl_after_finished: 1h30m
        pathways_proxy_args: --a=1 '--b=2 3'
        image_pull_secret: [one, "two,three"]
        restart_on_exit_codes: 42,128-130
        """,
    )
    assert found == {
        "name": "on",
        "command": 'echo 1e-5\necho "y"\n',
        "env": (
            ("LR", "1e-5"),
            ("MODE", "0o17"),
            ("YES", "y"),
            ("EMPTY", ""),
            ("TILDE", "~"),
            ("TIME", "12:30:45"),
            ("DATE", "2024-01-01"),
        ),
        "num_slices": 2,
        "verbose": True,
        "ttl_after_finished_s": 5400,
        "pathways_proxy_args": ("--a=1", "--b=2 3"),
        "image_pull_secret": ("one", "two", "three"),
        "restart_on_exit_codes": (42, 128, 129, 130),
    }


def test_arguments_are_split_in_a_string_and_one_each_in_a_list(tmp_path: Path) -> None:
    found = _read(tmp_path, """pathways_worker_args: --a=1 --b='2 3'\npathways_server_args: [--a=1, "--b='2 3' 4"]\n""")
    assert found == {
        "pathways_worker_args": ("--a=1", "--b=2 3"),
        "pathways_server_args": ("--a=1", "--b='2 3' 4"),
    }
    spec = JobSpec(name="a", command="x", compute_type="v6e-16", pathways_worker_args=("--a=1", "--b=2 3"))
    assert specfile.write(spec).endswith("pathways_worker_args:\n- --a=1\n- --b=2 3\n")


def test_an_empty_file_gives_nothing_and_a_key_without_a_value_neither(tmp_path: Path) -> None:
    assert _read(tmp_path, "") == {}
    assert _read(tmp_path, "# a job\nnum_slices:\nenv:\ncommand: null\nimage: ~\n") == {}
    assert _read(tmp_path, "command: 'null'\nimage: ''\n") == {"command": "null", "image": ""}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nnum_slice: 2\n", ", line 2: key 'num_slice' is unknown: did you mean 'num_slices'?"),
        ("num-slices: 2\n", ", line 1: key 'num-slices' is unknown: did you mean 'num_slices'?"),
        ("pathways_gcs_location: gs://b\n", ", line 1: key 'pathways_gcs_location' is unknown: did you mean "),
        ("zzzzz: 1\n", ", line 1: key 'zzzzz' is unknown: pw job submit --help has the flags"),
        ("pathways_arg: a\n", ", line 1: key 'pathways_arg' is unknown: did you mean 'pathways_"),
        ("env: {A: }\n", ", line 1: env: '' is no value: want one in quotes if that is meant"),
        ("env: {A: null}\n", ", line 1: env: 'null' is no value: want one in quotes if that is meant"),
        ("image_pull_secret: [a, ~]\n", ", line 1: image_pull_secret: '~' is no value"),
        ("name: a\nname: b\n", ", line 2: key 'name' is given twice"),
        ("num_slices: two\n", ", line 1: num_slices: want a whole number"),
        ("num_slices: 0x10\n", ", line 1: num_slices: want a whole number"),
        ("verbose: yes\n", ", line 1: verbose: want true or false"),
        ("name: [a, b]\n", ", line 1: name: want one value"),
        ("mount: {a: /b}\n", ", line 1: mount: want a value or a list of values"),
        ("env: [[A=1]]\n", ", line 1: env: want plain values, not lists or mappings inside"),
        ("env: {A: [1]}\n", ", line 1: env: want plain values, not lists or mappings inside"),
        ("env: {A=B: c}\n", ", line 1: env: name 'A=B' has an equals sign"),
        ("env: [A]\n", ", line 1: env: want NAME=VALUE, got 'A'"),
        ("[a]: b\n", ", line 1: a key is a word, such as num_slices"),
        ("- name\n", ", line 1: want keys such as name and compute_type, each with its value"),
        ("just text\n", ", line 1: want keys such as name and compute_type, each with its value"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    assert _refusal(tmp_path, text).startswith(message)


@pytest.mark.parametrize(
    "text",
    ["a: [", "a: b: c", "a: 1\n---\nb: 2\n", "a: *unknown", "\tname: a", "name: \x01", "[" * 9999],
    ids=lambda text: text[:9],
)
def test_a_file_that_is_no_yaml_is_refused(tmp_path: Path, text: str) -> None:
    assert "is not YAML: " in _refusal(tmp_path, text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    with pytest.raises(SpecError, match=r"spec file '.*none\.yaml' cannot be read: "):
        specfile.read(missing)
    missing.write_bytes(b"name: \xff")
    with pytest.raises(SpecError, match=r"spec file '.*none\.yaml' cannot be read: "):
        specfile.read(missing)


def test_tags_and_anchors_make_no_objects(tmp_path: Path) -> None:
    found = _read(tmp_path, "command: &c !!python/name:os.system x\nimage: *c\n")
    assert found == {"command": "x", "image": "x"}
