"""A walker for the few words of JSON Schema that `jobset_schema.json` uses; jsonschema costs more than all of pw."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

Schema = dict[str, Any]


@cache
def jobset_schema() -> Schema:
    """The schema of the JobSets that pw makes."""
    return cast(Schema, json.loads(Path(__file__).with_name("jobset_schema.json").read_text(encoding="utf-8")))


def problems(value: Any, schema: Schema, *, root: Schema | None = None, path: str = "") -> Iterator[str]:
    """What of `value` breaks `schema`, each with its place. Raises ValueError for a word that it does not know."""
    root = root if root is not None else schema
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    if unknown := schema.keys() - _RULES.keys() - _STRUCTURE:
        raise ValueError(f"the schema at {path!r} uses {sorted(unknown)}, which this walker does not know")
    if "type" in schema and not _is(value, schema["type"]):
        yield f"{path or '.'}: {value!r} is not of type {schema['type']}"
        return
    for word, broken in _RULES.items():
        if word in schema and broken(value, schema[word]):
            yield f"{path or '.'}: {value!r} breaks {word} {schema[word]!r}"
    if isinstance(value, dict):
        yield from _of_object(value, schema, root, path)
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from problems(item, schema["items"], root=root, path=f"{path}[{index}]")


def _of_object(value: dict[str, Any], schema: Schema, root: Schema, path: str) -> Iterator[str]:
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name}: it is missing"
    for name, item in value.items():
        rest = known.get(name, schema.get("additionalProperties", True))
        if rest is False:
            yield f"{path}.{name}: JobSet has no such field"
        elif rest is not True:
            yield from problems(item, rest, root=root, path=f"{path}.{name}")


_TYPES: dict[str, type] = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])


_STRUCTURE = {"$comment", "$defs", "$ref", "type", "properties", "required", "additionalProperties", "items"}
_RULES: dict[str, Callable[[Any, Any], bool]] = {
    "enum": lambda value, known: value not in known,
    "minimum": lambda value, least: value < least,
    "maximum": lambda value, most: value > most,
    "minLength": lambda value, least: len(value) < least,
    "maxLength": lambda value, most: len(value) > most,
    "minItems": lambda value, least: len(value) < least,
    "maxItems": lambda value, most: len(value) > most,
    "uniqueItems": lambda value, _: len(value) != len(set(value)),
    # `$` of Python also matches before a last newline; Go's and JSON Schema's do not.
    "pattern": lambda value, pattern: re.search(pattern.replace("$", r"\Z"), value) is None,
}
