"""The short ways through the sandbox, against jinja2's own."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import Environment, Undefined
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ftengine.dialect.prompt.quick import QuickEnvironment

QUICK, PLAIN = QuickEnvironment(), ImmutableSandboxedEnvironment()


def looped() -> LoopContext:
    loop = LoopContext([{"role": "user"}, {"role": "tool"}], Undefined)
    next(iter(loop))
    return loop


LOOP = looped()
OBJECTS = {
    "text": "a {x} b",
    "message": {"role": "user", "items": 1, "get": None, "content": "x", "__class__": 2, "_private": 3},
    "empty": {},
    "list": [1, {"a": 2}],
    "number": 7,
    "none": None,
    "namespace": Namespace(value=1, text="x", message={"a": 1}, method="x".upper),
    "loop": LOOP,
    "function": looped,
    "method": "x".upper,
    "type": str,
    "undefined": Undefined(name="x"),
}
OWN = [
    "role",
    "content",
    "value",
    "method",
    "absent",
    "_private",
    "_x",
    "__x",
    "a",
    "0",
    "previtem",
    "func_code",
    "mro",
]


def read(environment: Environment, owner: Any, name: str) -> Any:
    """What a template gets, in a form that can be compared."""
    try:
        found = environment.getattr(owner, name)
    except TemplateError as error:
        return type(error)
    if isinstance(found, Undefined):
        try:
            str(found.absent)
        except SecurityError:
            return "unsafe"
        except TemplateError as error:
            return type(error), str(error)
    if callable(found) and getattr(found, "__wrapped__", None) is not None:
        return "wrapped", found.__name__  # text's format methods, each time anew
    return found


@pytest.mark.parametrize("name", OBJECTS)
def test_attributes(name: str) -> None:
    owner = OBJECTS[name]
    for attribute in sorted({*OWN, *dir(owner), *dir(str), *dir(dict), *dir(LoopContext), *dir(Namespace)}):
        assert read(QUICK, owner, attribute) == read(PLAIN, owner, attribute), attribute


SNIPPETS = [
    "{{ 'a b'.split(' ') | length }}{{ 'x'.join(['1', '2']) }}{{ ' x '.strip(chars=' ') }}",
    "{{ '{a}'.format(a=1) }}{{ '{a.__class__}'.format(a=1) }}",
    "{{ '{0}'.format_map({'0': 1}) }}",
    "{% macro f(x, y=2) %}{{ x }}{{ y }}{{ varargs }}{{ kwargs }}{% endmacro %}"
    "{{ f(1) }}{{ f(1, 3, 4) }}{{ f(y=1, z=2) }}",
    "{% macro f() %}{{ caller(3) }}{% endmacro %}{% call(n) f() %}{{ n }}{% endcall %}",
    "{% for m in [1, 2, 3] %}{% macro g(a) %}{{ a }}{{ m }}{% endmacro %}"
    "{{ g(m) }}{{ loop.index }}{{ loop.cycle('a', 'b') }}"
    "{% endfor %}",
    "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ {'a': 1}.get('b', 5) }}"
    "{{ {'items': 3}.items is callable }}",
    "{{ {'a': 1}.update({'b': 2}) }}",
    "{{ {}.pop('a') }}",
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ 'x'.nothing }}{{ {}.nothing }}",
    "{{ 'x'.nothing.more }}",
    "{{ namespace(a=1).a }}{{ namespace(a=1).b }}{% set n = namespace(_a=1) %}{{ n._a }}",
    "{{ 'a'.startswith(('a', 'b')) }}{{ 'abc'.replace('b', 'd', 1) }}{{ 'a'.upper(1) }}",
    "{{ range(3) | list }}{{ dict(a=1).a }}",
]


@pytest.mark.parametrize("source", SNIPPETS)
def test_templates(source: str) -> None:
    def rendered(environment: Environment) -> Any:
        try:
            return environment.from_string(source).render(messages=[{"role": "user"}])
        except Exception as error:  # the same refusal
            return type(error), str(error)

    assert rendered(QUICK) == rendered(PLAIN)
