"""Answers with calls, against what was meant, whole and cut after every character."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ftengine.conversation import ToolCallDelta, ToolCallStart, ToolSpec
from ftengine.dialect.answer.parser import AnswerParser, Grammar
from ftengine.dialect.tools import Toolbox
from tests.dialect.talk import EVERYTHING, TOOLS, answer, check_integrity, meaning

Call = tuple[str, str, dict[str, Any]]


def xml(name: str, /, **parameters: str) -> str:
    """As the template teaches it."""
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def heard(text: str, **settings: Any) -> list[tuple[Any, ...]]:
    """The answer's meaning, arguments parsed; the same in three cuts."""
    whole = answer(text, **settings)
    check_integrity(whole)
    for size in (1, 3, 7):
        pieces = answer(text, range(size, len(text), size), **settings)
        check_integrity(pieces)
        assert meaning(pieces) == meaning(whole)
    return [(*item[:2], json.loads(item[2])) if item[0] == "call" else item for item in meaning(whole)]


EXAMPLE = xml("read_file", path="example.txt")
CLOSING = "</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    "content",
    [
        "plain",
        "",
        "\n",
        "    indented first line\nsecond",
        "\n\nblank lines\n\n",
        "trailing spaces  \n ",
        "a </parameter> b",
        "</parameter>",
        "</parameter>\nnext line",
        "</function> and </tool_call>",
        "x = '</parameter></function>'",
        "</parameter>\n</function>\nmore",
        f"before\n{CLOSING}\nafter",
        "<tool_call>",
        "<tool_call> and <function=read_file> and <parameter=path>",
        'if text.startswith("<parameter="): pass',
        EXAMPLE,
        f"Call it so:\n\n{EXAMPLE}\n\nand so:\n{EXAMPLE}\nDone.",
        hermes("status", {}),
        "line\n<parameter=other>\nx\n</parameter>\nrest",
        "half a tag </para",
        "a <",
        'quotes " and \\ and é and 😀 and \x00 and \u2028',
        "<|im_end|>",
        '{"looks": "like JSON"}',
        "12",
        "true",
        "null",
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_text_parameter_comes_back_as_written(content: str, last: bool) -> None:
    """Round trip through the form the template teaches, with the text as the last and as the first parameter."""
    parameters = {"path": "a.py", "content": content} if last else {"content": content, "mode": "4", "path": "a.py"}
    meant: dict[str, Any] = dict(parameters)
    if not last:
        meant["mode"] = 4
    assert heard(xml("write_file", **parameters)) == [("call", "write_file", meant)]


def test_opening_of_a_parameter_that_was_given_is_text() -> None:
    """One that is still to come, on a line of its own, is taken for a missing closing: nothing tells them apart."""
    content = "<parameter=path>\nnot closed"
    expected = {"path": "a.py", "content": content}
    assert heard(xml("write_file", path="a.py", content=content)) == [("call", "write_file", expected)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("Hello.\n", [("text", "Hello.\n")], id="no call"),
        pytest.param(
            f"I look.\n\n{EXAMPLE}",
            [("text", "I look."), ("call", "read_file", {"path": "example.txt"})],
            id="text before",
        ),
        pytest.param(
            f"{EXAMPLE}\n\nThat was it.",
            [("call", "read_file", {"path": "example.txt"}), ("text", "That was it.")],
            id="text after",
        ),
        pytest.param(
            f"One:\n{EXAMPLE}\n\ntwo:\n{xml('status')}\n",
            [
                ("text", "One:"),
                ("call", "read_file", {"path": "example.txt"}),
                ("text", "\n\ntwo:"),
                ("call", "status", {}),
            ],
            id="text between",
        ),
        pytest.param(
            f"{EXAMPLE}\n{EXAMPLE}\n\n \n{xml('status')}\n",
            [("call", "read_file", {"path": "example.txt"})] * 2 + [("call", "status", {})],
            id="parallel",
        ),
        pytest.param(
            f"<think>\nFirst {EXAMPLE} no, rather:\n</think>\n\n{xml('status')}",
            [("reasoning", f"First {EXAMPLE} no, rather:"), ("call", "status", {})],
            id="drafted in thinking",
        ),
        pytest.param(
            "`<tool_call>` opens a call, <function=read_file> names it, </tool_call> closes.",
            [("text", "`<tool_call>` opens a call, <function=read_file> names it, </tool_call> closes.")],
            id="named in prose",
        ),
        pytest.param(
            "Use\n<function=frobnicate>\n<parameter=x>\n1\n</parameter>\n</function>",
            [("text", "Use\n<function=frobnicate>\n<parameter=x>\n1\n</parameter>\n</function>")],
            id="unknown without wrapper",
        ),
        pytest.param(xml("frobnicate", x="1"), [("call", "frobnicate", {"x": 1})], id="unknown in wrapper"),
        pytest.param(
            f"Like this:\n```xml\n{EXAMPLE}\n```\nSee?",
            [("text", f"Like this:\n```xml\n{EXAMPLE}\n```\nSee?")],
            id="in a fence",
        ),
        pytest.param(
            f"```\nforgotten\n\n{EXAMPLE}",
            [("text", "```\nforgotten"), ("call", "read_file", {"path": "example.txt"})],
            id="after a fence that never ends",
        ),
        pytest.param(
            f"~~~~\n~~~\n{EXAMPLE}\n~~~~\n````\n```\n{EXAMPLE}\n````",
            [("text", f"~~~~\n~~~\n{EXAMPLE}\n~~~~\n````\n```\n{EXAMPLE}\n````")],
            id="in longer fences",
        ),
        pytest.param(
            f"```\ncode\n```\n{EXAMPLE}",
            [("text", "```\ncode\n```"), ("call", "read_file", {"path": "example.txt"})],
            id="after a fence",
        ),
        pytest.param(
            "Inline `<tool_call><function=status></function></tool_call>` here",
            [("text", "Inline `<tool_call><function=status></function></tool_call>` here")],
            id="inline code",
        ),
        pytest.param(
            "<tool_call>\n<tool_call>\n<function=status>\n</function>\n</tool_call>",
            [("text", "<tool_call>"), ("call", "status", {})],
            id="opened twice",
        ),
        pytest.param("<tool_call>\n", [("text", "<tool_call>\n")], id="only an opening"),
        pytest.param("a <tool", [("text", "a <tool")], id="half an opening"),
    ],
)
def test_xml_answers(text: str, expected: list[Any]) -> None:
    assert heard(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("<function=read_file>\n<parameter=path>\na\n</parameter>\n</function>", {"path": "a"}, id="bare"),
        pytest.param(
            "<tool_call>\n<function=read_file>\n<parameter=path>\na\n</parameter>\n", {"path": "a"}, id="cut 1"
        ),
        pytest.param("<tool_call>\n<function=read_file>\n<parameter=path>\na", {"path": "a"}, id="cut 2"),
        pytest.param("<tool_call>\n<function=read_file>\n<parameter=path>\na\n</param", {"path": "a"}, id="cut 3"),
        pytest.param(f"{EXAMPLE[:-20]}", {"path": "example.txt"}, id="cut 4"),
        pytest.param(
            "<tool_call>\n<function=read_file>\n<parameter=path>\na\n</function>\n</tool_call>",
            {"path": "a"},
            id="no parameter end",
        ),
        pytest.param(
            "<tool_call>\n<function=read_file>\n<parameter=path>\na\n</tool_call>", {"path": "a"}, id="no function end"
        ),
        pytest.param(
            "<tool_call><function=read_file><parameter=path>a</parameter></function></tool_call>",
            {"path": "a"},
            id="one line",
        ),
        pytest.param(
            '<tool_call>\n<function="read_file">\n<parameter="path">\na\n</parameter>\n</function>\n</tool_call>',
            {"path": "a"},
            id="quoted names",
        ),
    ],
)
def test_damaged_xml_call_is_completed(text: str, expected: dict[str, Any]) -> None:
    assert heard(text) == [("call", "read_file", expected)]


def test_missing_ends_before_the_next_call_and_parameter() -> None:
    text = (
        "<tool_call>\n<function=read_file>\n<parameter=path>\na\n</parameter>\n"
        "<tool_call>\n<function=write_file>\n<parameter=path>\nb\n<parameter=content>\nc\n</parameter>\n</function>"
    )
    assert heard(text) == [("call", "read_file", {"path": "a"}), ("call", "write_file", {"path": "b", "content": "c"})]


def test_truncated_opening_stays_text_unless_the_call_needs_nothing_more() -> None:
    assert heard("<tool_call>\n<function=read_file>\n") == [("text", "<tool_call>\n<function=read_file>\n")]
    assert heard("<tool_call>\n<function=status>\n") == [("call", "status", {})]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(hermes("read_file", {"path": "a"}), [("call", "read_file", {"path": "a"})], id="plain"),
        pytest.param(
            f"So.\n{hermes('read_file', {'path': 'a'})}\n{hermes('status', {})}\nDone",
            [("text", "So."), ("call", "read_file", {"path": "a"}), ("call", "status", {}), ("text", "\nDone")],
            id="parallel",
        ),
        pytest.param(
            hermes("write_file", {"path": "a", "content": "</tool_call> and <tool_call>\n{} \"'\\ é😀\ud83d"}),
            [("call", "write_file", {"path": "a", "content": "</tool_call> and <tool_call>\n{} \"'\\ é😀\ufffd"})],
            id="tags in a string",
        ),
        pytest.param(
            '<tool_call>\n{"arguments": {"path": "a"}, "id": 3, "name": "read_file"}\n</tool_call>',
            [("call", "read_file", {"path": "a"})],
            id="arguments first",
        ),
        pytest.param(
            '<tool_call>\n{"name": "read_file", "parameters": "{\\"path\\": \\"a\\"}"}</tool_call>',
            [("call", "read_file", {"path": "a"})],
            id="encoded twice",
        ),
        pytest.param(
            '<tool_call>\n{"name": "status", "arguments": null}</tool_call>', [("call", "status", {})], id="null"
        ),
        pytest.param('<tool_call>\n{"name": "status"}', [("call", "status", {})], id="no arguments"),
        pytest.param(
            '<tool_call>\n{"name": "read_file", "arguments": "a.txt"}',
            [("call", "read_file", {"path": "a.txt"})],
            id="bare string",
        ),
        pytest.param(
            '<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}}}\n</tool_call>ok',
            [("call", "read_file", {"path": "a"}), ("text", "ok")],
            id="brace too many",
        ),
        pytest.param(
            '<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}\n</tool_call>ok',
            [("call", "read_file", {"path": "a"}), ("text", "ok")],
            id="brace missing",
        ),
        pytest.param(
            '<tool_call>\n{"name": "status"}\n{"name": "read_file", "arguments": {"path": "b"}}\n</tool_call>',
            [("call", "status", {}), ("call", "read_file", {"path": "b"})],
            id="two in one wrapper",
        ),
        pytest.param(
            '<tool_call>\n{"name": "read_file", "arguments": {"path": "say "hi" now"}}\n</tool_call>',
            [("call", "read_file", {"path": 'say "hi" now'})],
            id="unescaped quotes",
        ),
        pytest.param(
            '<tool_call>\n{"name": "write_file", "arguments": {\'path\': \'it\', "content": "a\nb\\d", "mode": None,}}'
            "\n</tool_call>",
            [("call", "write_file", {"path": "it", "content": "a\nb\\d", "mode": None})],
            id="Python and raw newlines",
        ),
        pytest.param(
            '<tool_call>\n{"name": "write_file", "arguments": {"path": "a", "content": "cut he',
            [("call", "write_file", {"path": "a", "content": "cut he"})],
            id="cut in a string",
        ),
        pytest.param(
            '<tool_call>\n{"name": "write_file", "arguments": {"path": "a", "cont',
            [("call", "write_file", {"path": "a"})],
            id="cut in a key",
        ),
        pytest.param(
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
            [("text", '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>')],
            id="the template's own example",
        ),
        pytest.param(
            '<tool_call>{"path": 1}</tool_call>', [("text", '<tool_call>{"path": 1}</tool_call>')], id="no name"
        ),
        pytest.param('<tool_call>{"name": "rea', [("text", '<tool_call>{"name": "rea')], id="cut in the name"),
        pytest.param(
            '<tool_call>{"name": "frobnicate", "arguments": {"x": 1}}</tool_call>',
            [("call", "frobnicate", {"x": 1})],
            id="unknown tool",
        ),
    ],
)
def test_hermes_answers(text: str, expected: list[Any]) -> None:
    assert heard(text, grammar=Grammar(json_calls=True, reasoning=True)) == expected


@pytest.mark.parametrize("settings", [{"tools": ()}, {"grammar": Grammar(reasoning=True)}])
def test_calls_stay_text_without_tools(settings: dict[str, Any]) -> None:
    """No tools in the request, or a model whose calls are not known: not a character is lost."""
    text = f" A\n\n{EXAMPLE}\n{hermes('status', {})} "
    assert heard(text, **settings) == [("text", text)]


def test_freeform_tool_has_one_text() -> None:
    patch = "*** Begin Patch\n-  a\n+  {\n*** End Patch"
    assert heard(xml("apply_patch", input=patch)) == [("call", "apply_patch", {"input": patch})]
    assert heard(hermes("apply_patch", {"input": patch})) == [("call", "apply_patch", {"input": patch})]


def test_bare_function_is_not_read_where_the_template_teaches_json() -> None:
    text = "<function=status>\n</function>"
    assert heard(text, grammar=Grammar(json_calls=True)) == [("text", text)]


@pytest.mark.parametrize(
    ("text", "in_reasoning", "expected"),
    [
        ("\n\nSo\nit is. \n</think>\n\nYes", True, [("reasoning", "So\nit is."), ("text", "Yes")]),
        ("<think>\nagain\n</think>\nYes", True, [("reasoning", "again"), ("text", "Yes")]),
        ("<think></think>\n\nYes", False, [("text", "Yes")]),
        ("never closed <tool_call>", True, [("reasoning", "never closed <tool_call>")]),
        ("Say <think> aloud", False, [("text", "Say <think> aloud")]),
        ("half </thin", True, [("reasoning", "half </thin")]),
        ("  indented", False, [("text", "  indented")]),
    ],
)
def test_reasoning(text: str, in_reasoning: bool, expected: list[Any]) -> None:
    assert heard(text, in_reasoning=in_reasoning) == expected


@pytest.mark.parametrize(
    ("prefilled", "text", "expected"),
    [
        (
            "<tool_call>\n<function=",
            "read_file>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>",
            [("call", "read_file", {"path": "a"})],
        ),
        ("<tool_call>\n<function=status>\n", "</function>\n</tool_call>", [("call", "status", {})]),
        ('<tool_call>\n{"name": "', 'status", "arguments": {}}\n</tool_call>', [("call", "status", {})]),
        ('<tool_call>\n{"name": "status", "arguments": ', "{}}\n</tool_call>", [("call", "status", {})]),
        ("<tool_call>\n<function=", " I cannot.", [("text", " I cannot.")]),
    ],
)
def test_answer_continues_what_the_prompt_prefilled(prefilled: str, text: str, expected: list[Any]) -> None:
    assert heard(text, prefilled=prefilled) == expected


def test_string_arguments_come_while_they_are_written() -> None:
    """Every character of a text parameter, and of a JSON string, is given out at most a few characters later."""
    for opening in (
        "<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>\n<parameter=content>\n",
        '<tool_call>\n{"name": "write_file", "arguments": {"path": "a", "content": "',
    ):
        parser = AnswerParser(EVERYTHING, Toolbox(TOOLS))
        assert any(isinstance(event, ToolCallStart) for event in parser.feed(opening))
        given = ""
        for position in range(100):
            given += "".join(event.fragment for event in parser.feed("x") if isinstance(event, ToolCallDelta))
            assert given.count("x") >= position


def test_arguments_of_a_large_call_take_linear_time() -> None:
    """A 2 MB parameter full of tags, token by token."""
    line = 'print("</parameter>") # <tool_call>\n'
    text = xml("write_file", path="a", content=line * (400_000 // len(line)))
    assert heard_once(text)[0][2].count("tool_call") > 10_000


def heard_once(text: str) -> list[tuple[str, ...]]:
    return meaning(answer(text, range(5, len(text), 5)))


def test_types_follow_the_schema() -> None:
    tool = ToolSpec(
        "t", parameters={"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}
    )
    assert heard(xml("t", n="7", s="7"), tools=[tool]) == [("call", "t", {"n": 7, "s": "7"})]
