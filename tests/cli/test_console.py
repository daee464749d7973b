"""What `pw` prints, on a terminal and into a pipe."""

from __future__ import annotations

import contextlib
import io
import json
from datetime import UTC, datetime

import pytest

from pw import console
from pw.status import JobRef, LogLine

ROWS = [["digits", "[us-central1] [/tmp/x]"], ["a-much-longer-name", "x" * 300]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal with colours, 80 characters wide."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def line(pod: str, text: str) -> LogLine:
    return LogLine(datetime(2026, 1, 2, tzinfo=UTC), pod, "main", "stdout", text)


def test_a_piped_table_is_plain_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    console.table(("NAME", "WHY"), ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "WHY"]
    assert [text.split(maxsplit=1) for text in lines[1:]] == ROWS
    assert lines[1].index("[") == lines[2].index("x")


def test_a_piped_table_has_one_line_for_each_row_whatever_a_cell_holds(capsys: pytest.CaptureFixture[str]) -> None:
    console.table(("NAME", "WHY"), [["a", "first\nsecond"]])
    assert capsys.readouterr().out.splitlines()[1:] == ["a     first second"]


def test_a_table_on_a_terminal_keeps_all_text_and_takes_none_for_markup(terminal: Terminal) -> None:
    with contextlib.redirect_stdout(terminal):
        console.table(("NAME", "WHY"), ROWS)
    assert "[us-central1] [/tmp/x]" in terminal.getvalue()
    assert terminal.getvalue().count("x") >= 300
    assert "\x1b[1m" in terminal.getvalue()


def test_names_on_a_narrow_terminal_are_whole_and_in_one_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with contextlib.redirect_stdout(terminal):
        console.table(("POD", "PHASE"), [["digits-pathways-head-0-0-abcde", "Succeeded and more"]])
    assert terminal.getvalue().splitlines()[1] == "digits-pathways-head-0-0-abcde  Succeeded and more"


def test_no_color_is_honoured_on_a_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with contextlib.redirect_stdout(terminal):
        console.LogPrinter().line(line("a", "text"))
    assert terminal.getvalue() == "a/main | text\n"


def test_json_of_a_table_is_its_records(capsys: pytest.CaptureFixture[str]) -> None:
    console.table(
        ("NAME",), [["digits"]], json=True, records=[{"name": "digits", "at": datetime(2026, 1, 2, tzinfo=UTC)}]
    )
    assert json.loads(capsys.readouterr().out) == [{"name": "digits", "at": "2026-01-02T00:00:00+00:00"}]


def test_a_reference_is_text_in_json() -> None:
    assert console.json_value({"ref": JobRef("local", "digits")}) == {"ref": "local://digits"}


def test_log_lines_have_a_colour_for_each_container_and_no_markup(terminal: Terminal) -> None:
    printer = console.LogPrinter()
    with contextlib.redirect_stdout(terminal):
        for pod in ("head", "worker-0", "head"):
            printer.line(line(pod, "[/bold] [red]loss[/red]"))
    first, second, third = terminal.getvalue().splitlines()
    assert first == third
    assert first.endswith(" [/bold] [red]loss[/red]")
    assert first.split("head")[0] != second.split("worker")[0]
    assert first.startswith("\x1b[")


def test_piped_log_lines_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    console.LogPrinter().line(line("head", "\x1b[31mmine\x1b[0m"))
    assert capsys.readouterr().out == "head/main | \x1b[31mmine\x1b[0m\n"


def test_talk_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("one")
    console.warn("two")
    console.error("three", ("pw job list",))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "one\nwarning: two\nerror: three\n  pw job list\n"
