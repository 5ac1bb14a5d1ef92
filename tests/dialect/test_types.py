"""Parameters of XML calls become what the tool's schema says, as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftengine.conversation import ToolSpec
from ftengine.dialect.answer.schema import ParameterTypes


def types(schema: Any, **root: Any) -> ParameterTypes:
    return ParameterTypes(ToolSpec("t", parameters={"type": "object", "properties": {"p": schema}, **root}))


STRING, INTEGER, NUMBER, BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))
OBJECT, ARRAY = {"type": "object"}, {"type": "array"}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (STRING, "12", "12"),
        (STRING, '{"a": 1}', '{"a": 1}'),
        (STRING, " true ", " true "),
        (INTEGER, "12", 12),
        (INTEGER, " -3\n", -3),
        (INTEGER, "5.0", 5),
        (INTEGER, "5.5", 5.5),
        (INTEGER, "many", "many"),
        (INTEGER, "9" * 5000, "9" * 5000),
        (NUMBER, "1.50", 1.5),
        (NUMBER, "7", 7),
        (NUMBER, "1e3", 1000.0),
        (NUMBER, "1e999", "1e999"),
        (NUMBER, "NaN", "NaN"),
        (BOOLEAN, "true", True),
        (BOOLEAN, "False", False),
        (BOOLEAN, "yes", "yes"),
        ({"type": "null"}, "null", None),
        (OBJECT, '{"a": [1, null]}', {"a": [1, None]}),
        (OBJECT, "{'a': True, 'b': None}", {"a": True, "b": None}),
        (OBJECT, '{"a": "cut of', {"a": "cut of"}),
        (OBJECT, '{"a": "\\d"}', {"a": "\\d"}),
        (OBJECT, "no object", "no object"),
        (ARRAY, "[1, 2]", [1, 2]),
        (ARRAY, "['a', (1, 2)]", ["a", [1, 2]]),
        (ARRAY, "[1, 2", [1, 2]),
        (ARRAY, "[" * 100_000, None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["integer", "string"]}, "12", 12),
        ({"type": ["integer", "string"]}, "twelve", "twelve"),
        ({"anyOf": [STRING, INTEGER]}, "4", 4),
        ({"anyOf": [{"type": "array", "items": STRING}, STRING]}, '["a"]', ["a"]),
        ({"anyOf": [{"type": "array", "items": STRING}, STRING]}, "a", "a"),
        ({"oneOf": [BOOLEAN, {"type": "null"}]}, "None", None),
        ({"allOf": [{"description": "x"}, STRING]}, "1", "1"),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["a", None]}, "a", "a"),
        ({"enum": ["a", None]}, "null", None),
        ({"const": "5"}, "5", "5"),
        ({"$ref": "#/$defs/n"}, "3", 3),
        ({"$ref": "#/$defs/loop"}, "x", "x"),
        ({"$ref": "#/nowhere"}, "[1]", [1]),
        ({"$ref": "http://elsewhere"}, "a", "a"),
        ({"properties": {"q": STRING}}, '{"q": "1"}', {"q": "1"}),
        ({}, "12", 12),
        ({}, "words", "words"),
        (True, "[1]", [1]),
        (None, "1 2", "1 2"),
        ({"type": 5}, "x", "x"),
    ],
)
def test_text_becomes_the_schemas_type(schema: Any, text: str, expected: Any) -> None:
    known = types(schema, **{"$defs": {"n": INTEGER, "loop": {"$ref": "#/$defs/loop"}}})
    value = known.convert("p", text)
    json.dumps(value, allow_nan=False)
    if expected is not None or text in ("null", "None"):
        assert value == expected
        assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("parameters", "text", "expected"),
    [
        ({}, "1", 1),
        ({"properties": {"other": INTEGER}}, "word", "word"),
        ({"additionalProperties": STRING}, "1", "1"),
        ({"anyOf": [{"properties": {"p": STRING}}, {"properties": {"q": STRING}}]}, "1", "1"),
        ({"properties": "nonsense", "required": 3}, "1", 1),
    ],
)
def test_other_places_where_a_parameter_is_described(parameters: dict[str, Any], text: str, expected: Any) -> None:
    assert ParameterTypes(ToolSpec("t", parameters=parameters)).convert("p", text) == expected
    assert ParameterTypes(None).convert("p", "x") == "x"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(VALUES)
@settings(deadline=None)
def test_templates_way_of_writing_a_value_is_read_back(value: Any) -> None:
    """Qwen's templates write objects and lists as JSON and scalars as Python's str()."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)
    assert types({"type": names.get(type(value), "null")}).convert("p", text) == value


@given(
    st.recursive(
        st.none() | st.text() | st.integers(),
        lambda s: (
            st.lists(s)
            | st.dictionaries(
                st.sampled_from(["type", "anyOf", "$ref", "properties", "enum", "p", "allOf", "const"]), s
            )
        ),
        max_leaves=12,
    ),
    st.text(),
)
@settings(deadline=None)
def test_no_schema_and_no_text_raises(schema: Any, text: str) -> None:
    parameters = schema if isinstance(schema, dict) else {"properties": {"p": schema}}
    json.dumps(ParameterTypes(ToolSpec("t", parameters=parameters)).convert("p", text), allow_nan=False)
