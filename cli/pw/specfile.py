"""Jobs kept in files: the fields of a JobSpec in YAML, under the names of their flags in snake case.

Every scalar is the text that stands in the file, whatever YAML would make of it, and is read as the flag would read it:
`1e-5`, `0o17` and `y` stay what they are. A key without a value, or with YAML's null, is not given. Of the arguments of
a Pathways server, a string is split as a shell would, and of a list each item is one argument.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pw import fields, specs
from pw.errors import SpecError
from pw.fields import Option

if TYPE_CHECKING:
    import yaml

_NULLS = ("", "~", "null", "Null", "NULL")


def read(path: Path) -> dict[str, Any]:
    """The fields that the file gives, parsed, as `JobSpec` takes them. Raises SpecError with file and line."""
    root = _root(path)
    options = {option.key: option for option in specs.options()}
    found: dict[str, Any] = {}
    for key, value in _items(root, path) if root else ():
        if key.value not in options:
            raise SpecError(f"{_place(path, key)}: key {key.value!r} is unknown: {_nearest(key.value, options)}")
        option = options[key.value]
        if option.name in found:
            raise SpecError(f"{_place(path, key)}: key {key.value!r} is given twice")
        try:
            if not _is_null(value):
                found[option.name] = _value(option, value)
        except ValueError as exc:
            raise SpecError(f"{_place(path, key)}: {key.value}: {exc}") from exc
    return found


def write(spec: specs.JobSpec) -> str:
    """A file from which `read` gives the fields of an equal spec. Fields that have their default are left out."""
    import yaml

    items = [
        (_text_node(option.key), _node(option, getattr(spec, option.name)))
        for option in specs.options()
        if option.required or getattr(spec, option.name) != option.default
    ]
    root = yaml.MappingNode("tag:yaml.org,2002:map", items, flow_style=False)
    return yaml.serialize(root, Dumper=yaml.SafeDumper, allow_unicode=True, width=10**9)


def _node(option: Option, value: Any) -> yaml.Node:
    import yaml

    texts = value if _one_each(option) else option.text.write(value)
    if option.text.repeatable:
        return yaml.SequenceNode("tag:yaml.org,2002:seq", [_text_node(text) for text in texts], flow_style=False)
    if option.text.kind in (int, bool):
        return yaml.ScalarNode(f"tag:yaml.org,2002:{option.text.kind.__name__}", texts[0])
    return _text_node(texts[0])


def _text_node(text: str) -> yaml.ScalarNode:
    import yaml

    # PyYAML writes some characters, such as U+0085, as they are and reads them as others, unless they are escaped.
    plain = text.replace("\n", "").isprintable()
    style = '"' if not plain else "|" if "\n" in text else None
    return yaml.ScalarNode("tag:yaml.org,2002:str", text, style=style)


def _root(path: Path) -> yaml.MappingNode | None:
    import yaml

    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError) as exc:
        raise SpecError(f"spec file {str(path)!r} cannot be read: {exc}") from exc
    except (yaml.YAMLError, RecursionError) as exc:
        raise SpecError(f"spec file {str(path)!r} is not YAML: {exc}") from exc
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise SpecError(f"{_place(path, root)}: want keys such as name and compute_type, each with its value")
    return root


def _items(root: yaml.MappingNode, path: Path) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    import yaml

    for key, _ in root.value:
        if not isinstance(key, yaml.ScalarNode):
            raise SpecError(f"{_place(path, key)}: a key is a word, such as num_slices")
    items: list[tuple[yaml.ScalarNode, yaml.Node]] = root.value
    return items


def _place(path: Path, node: yaml.Node) -> str:
    return f"{path}, line {node.start_mark.line + 1}"


def _nearest(key: str, options: dict[str, Option]) -> str:
    names = {flag.lstrip("-").replace("-", "_"): name for name, option in options.items() for flag in option.flags}
    near = list(dict.fromkeys(names[name] for name in difflib.get_close_matches(key.replace("-", "_"), names, n=3)))
    known = "pw job submit --help has the flags, whose names in snake case are the keys"
    return f"did you mean {' or '.join(map(repr, near))}?" if near else known


def _value(option: Option, node: yaml.Node) -> Any:
    import yaml

    texts = _texts(option, node)
    if _one_each(option) and isinstance(node, yaml.SequenceNode):
        return tuple(texts)
    return option.text.read(texts)


def _one_each(option: Option) -> bool:
    """Whether a list of this option's holds what its flag for a single argument takes, item by item."""
    return option.single is not None


def _is_null(node: yaml.Node) -> bool:
    """Whether YAML has no value here: nothing, `~` or an unquoted null."""
    import yaml

    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _NULLS


def _texts(option: Option, node: yaml.Node) -> list[str]:
    """What would have been typed, one string for each time the flag is given."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return [node.value]
    if not option.text.repeatable:
        raise ValueError("want one value")
    if isinstance(node, yaml.SequenceNode):
        return [_scalar(item) for item in node.value]
    if option.text is not fields.PAIRS:
        raise ValueError("want a value or a list of values")
    return [_pair(_scalar(name), _scalar(value)) for name, value in node.value]


def _scalar(node: yaml.Node) -> str:
    import yaml

    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("want plain values, not lists or mappings inside")
    if _is_null(node):
        raise ValueError(f"{node.value!r} is no value: want one in quotes if that is meant, such as ''")
    return str(node.value)


def _pair(name: str, value: str) -> str:
    if "=" in name:
        raise ValueError(f"name {name!r} has an equals sign")
    return f"{name}={value}"
