"""Policies as text and back: `fcfs`, `watermark(0.05)`, `back_off(watermark(0.02))`, `module:name`.

Reads names, calls of names and literals, and evaluates nothing else. The caller passes the known
names, and the `module:name` that may be imported; this module knows no policy.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from headway.errors import ConfigError, OwnPolicyError, shorten


class _Everything:
    def __contains__(self, name: object) -> bool:
        return True


ANY: Container[str] = _Everything()  # for texts that the user typed, in a command or in Python
READY_MADE: Container[str] = frozenset()  # for texts from data: import nothing


Known = Mapping[str, Any]  # what a text may name
Inner = Mapping[str, Known]  # names that only the arguments of a policy may use, by its name


def parse_policy(
    what: str, text: str, known: Known, inner: Inner, own: Container[str] = READY_MADE
) -> Any:
    """The policy that a text names; ConfigError that lists the known names if there is none.

    `own` has the `module:name` that may be imported; OwnPolicyError for another one.
    """
    try:
        if name := own_name(text):
            if name not in own:
                raise OwnPolicyError([name])
            return _imported(
                what, text, {k: v for n in (known, *inner.values()) for k, v in n.items()}
            )
        return _evaluate(ast.parse(text.strip(), mode="eval").body, what, known, inner)
    except (SyntaxError, RecursionError, MemoryError):
        raise ConfigError(
            f"{what}: cannot parse {text[:60]!r}; write a policy name, name(arguments) or "
            "module:function"
        ) from None
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{what}: {text}: {error}") from None


def named(policies: Iterable[Any]) -> Known:
    """Policies by their names."""
    return {policy.__name__: policy for policy in policies}


def own_name(text: str) -> str:
    """The `module:name` of a text that names a user's policy; "" for other texts."""
    place = text.partition("(")[0].strip()
    return place if ":" in place else ""


def format_policy(value: Any, known: Collection[Any]) -> str:
    """The text that `parse_policy` accepts for this policy; the repr of a value without a name."""
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(
            f"{f.name}={format_policy(getattr(value, f.name), known)}" for f in fields(value)
        )
        return f"{_name(type(value), known)}({inner})"
    return _name(value, known) if callable(value) else repr(value)


def instantiate(value: Any) -> Any:
    """A policy class becomes an instance with its default numbers."""
    return value() if isinstance(value, type) else value


def check_arguments(what: str, function: Any, names: str) -> None:
    """ConfigError if a policy cannot be called with the arguments of its slot."""
    if not callable(function):
        raise ConfigError(
            f"{what} must be a name, module:function or a callable, not {shorten(function)}"
        )
    try:
        inspect.signature(function).bind(*names.split())
    except TypeError:
        raise ConfigError(
            f"{what}: {_name(function, ())} must take ({', '.join(names.split())})"
        ) from None
    except ValueError:  # a builtin without a signature
        pass


def lookup(what: str, name: str, known: Mapping[str, Any]) -> Any:
    """The value of a name; ConfigError that lists the known names and suggests the closest."""
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise ConfigError(f"unknown {what} {name!r}{hint} Known: {', '.join(known)}")


def _evaluate(node: ast.expr, what: str, known: Known, inner: Inner) -> Any:
    if isinstance(node, ast.Name):
        return instantiate(_find(node.id, what, known, inner))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        policy = _find(name := node.func.id, what, known, inner)
        scope = what, known, inner
        if name in inner:
            scope = f"argument of {what} {name}", inner[name], {}
        arguments = [_evaluate(argument, *scope) for argument in node.args]
        named = {k.arg or "**": _evaluate(k.value, *scope) for k in node.keywords}
        if not isinstance(policy, type):
            raise ConfigError(f"{what}: {policy.__name__} takes no arguments")
        try:
            return policy(*arguments, **named)
        except ConfigError as error:
            raise ConfigError(f"{what}: {error}") from None
    return ast.literal_eval(node)


def _find(name: str, what: str, known: Known, inner: Inner) -> Any:
    """The value of a name; ConfigError if it is unknown or an argument of another policy."""
    for policy in (p for p, names in inner.items() if name in names and name not in known):
        raise ConfigError(f"{what}: {name} is an argument of {policy}; write {policy}({name})")
    return lookup(what, name, known)


def _imported(what: str, text: str, known: Known) -> Any:
    """A user's policy: `module:name`, or `module:name(number)` if it is a dataclass."""
    place, bracket, rest = text.strip().partition("(")
    module, _, attribute = place.partition(":")
    try:
        value = attrgetter(attribute)(importlib.import_module(module))
    except Exception as error:  # a module may raise anything when it is imported
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what}: cannot load {text!r}: {problem}") from None
    if bracket:
        node = ast.parse(f"own({rest}", mode="eval").body
        return _evaluate(node, what, {**known, "own": value}, {})
    return instantiate(value)


def _name(value: Any, known: Collection[Any]) -> str:
    name = getattr(value, "__qualname__", None)
    if name is None:
        return repr(value)
    return str(name) if value in known else f"{value.__module__}:{name}"
