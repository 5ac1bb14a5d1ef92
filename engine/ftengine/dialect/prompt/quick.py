"""Short ways through jinja2's sandbox for what chat templates do thousands of times, with the same outcome.

The sandbox asks of every attribute and every call whether it is safe. For the plain types that messages are made of the
answer depends on the type and the name alone, so it is worked out once, by the sandbox's own rules.
"""

from __future__ import annotations

from types import BuiltinMethodType
from typing import Any

from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable
from jinja2.utils import Namespace

_PLAIN = frozenset({str, int, bool, float, dict, type(None)})
_WRAPPED = ("format", "format_map")  # of text: the sandbox gives its own
_DICT_NAMES = frozenset(dir(dict))
_METHODS: dict[type, frozenset[str]] = {
    kind: frozenset(
        name
        for name in dir(kind)
        if not name.startswith("_") and name not in _WRAPPED and not modifies_known_mutable(kind(), name)
    )
    for kind in (str, dict)
}


class QuickEnvironment(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_NAMES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if kind in _METHODS:
            if attribute in _METHODS[kind]:
                return getattr(obj, attribute)
        elif kind in (LoopContext, Namespace) and not attribute.startswith("_"):
            value = getattr(obj, attribute, self)
            if type(value) in _PLAIN:
                return value
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """The names as in the base class: a template's keyword arguments may have any other."""
        kind = type(__obj)
        if kind is Macro:
            kwargs.pop("_block_vars", None)
            kwargs.pop("_loop_vars", None)
            return __obj(__context.eval_ctx, *args, **kwargs)
        if kind is BuiltinMethodType and type(__obj.__self__) in _METHODS:
            kwargs.pop("_block_vars", None)
            kwargs.pop("_loop_vars", None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)
