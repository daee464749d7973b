"""The kubelet's expansion. The table is Kubernetes' own cases, restated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pw.expansion import escape, expand, references

VARIABLES = {"A": "a", "B": "b", "REF": "$(A)", "EMPTY": "", "A B": "spaces"}
PIECES = st.sampled_from(["$", "$$", "(", ")", "$(", "$(A)", "$$(A)", "A", "é", "😀", "\n", " ", "{{", "\u2028", "x"])


@pytest.mark.parametrize(
    ("text", "arrives"),
    [
        ("", ""),
        ("$(A)", "a"),
        ("<$(A)>$(B)", "<a>b"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$a"),
        ("$$$$(A)", "$$(A)"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("$(EMPTY)", ""),
        ("$(REF)", "$(A)"),
        ("$(A B)", "spaces"),
        ("$()", "$()"),
        ("$(A", "$(A"),
        ("$((A))", "$((A))"),
        ("$A ${B} $", "$A ${B} $"),
        ("$$", "$"),
        ("$$$", "$$"),
        ("cost: 5$", "cost: 5$"),
        ("$(A$(B))", "$(A$(B))"),
        ("$\n$(A)", "$\na"),
        ("$é", "$Ã\ufffd"),
    ],
)
def test_text_arrives_as_the_kubelet_hands_it_on(text: str, arrives: str) -> None:
    assert expand(text, VARIABLES) == arrives


@given(st.lists(PIECES).map("".join) | st.text())
def test_escaped_text_arrives_as_it_was_typed(text: str) -> None:
    assert expand(escape(text), VARIABLES) == text
    assert references(escape(text)) == []


@given(st.lists(PIECES).map("".join), st.lists(PIECES).map("".join))
def test_our_own_reference_expands_beside_escaped_text(before: str, after: str) -> None:
    assert expand(f"{escape(before)} $(A) {escape(after)}", VARIABLES) == f"{before} a {after}"


def test_references_are_the_names_that_are_looked_up() -> None:
    assert references("$(A) $$(B) $(A) $(C") == ["A", "A"]
    assert references("$$$(A)") == ["A"]
