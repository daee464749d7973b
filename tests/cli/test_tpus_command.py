from __future__ import annotations

import json

import pytest

from pw import tpus
from pw.__main__ import main


def test_the_shapes_of_a_generation_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tpus", "v6e"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "NAME"
    assert [line.split() for line in lines[3:5]] == [
        ["v6e:2x4", "2x4", "8", "2", "ct6e-standard-4t", "8", "tpuv6e:2x4"],
        ["v6e:4x4", "4x4", "16", "4", "ct6e-standard-4t", "16", "tpuv6e:4x4"],
    ]
    assert lines[-1].split() == ["ct6e-standard-8t:2x4", "2x4", "8", "1", "ct6e-standard-8t", "8", "tpuv6e1t:2x4"]
    assert len(lines) == 10


@pytest.mark.parametrize("generation", ["trillium", "V6E"])
def test_a_generation_has_its_other_names(generation: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tpus", generation]) == 0
    assert "tpuv6e:16x16" in capsys.readouterr().out


def test_every_listed_name_is_one_that_a_job_can_ask_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tpus", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert len(records) == 346
    for record in records:
        shape = tpus.resolve(record["name"]).shape
        assert (shape.instance_type, shape.hosts) == (record["instance_type"], record["hosts"])


def test_an_unknown_generation_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tpus", "v6f"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == (
        "error: TPU generation 'v6f' is unknown: did you mean 'v6e'? want one of v4, v5e, v5p, v6e, tpu7x (pw tpus)\n"
    )
