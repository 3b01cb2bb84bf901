"""Packages that commands need: those that are missing or too old, and how to install them."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib.util import find_spec

from headway.errors import ConfigError

# Packages by extra, the main one first.
EXTRAS = {
    "torch": ("torch", "tokenizers", "safetensors", "gguf", "jinja2"),
    "ray": ("ray",),
    "server": ("fastapi", "uvicorn", "httptools", "pydantic", "prometheus_client"),
}

USED = ("", *EXTRAS, "hub", "lab", "otel")  # extras whose packages commands import; "": no extra


def extra_of(name: str | None) -> str | None:
    """The extra that contains this package; None if no extra does."""
    return next((extra for extra, packages in EXTRAS.items() if name in packages), None)


def check_extras(purpose: str, *extras: str) -> None:
    """ConfigError with the missing or too old packages and the command that installs them."""
    missing = [name for extra in extras for name in EXTRAS[extra] if not _is_installed(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"{purpose} needs {', '.join(missing)}, which {verb} not installed: {install(*extras)}"
        )
    check_versions("", *extras)


def check_versions(*extras: str) -> None:
    """ConfigError with the installed packages that are older than Headway's requirements.

    Of these extras, with "" for the packages that Headway always needs. Without arguments: of all
    that commands use.
    """
    from importlib.metadata import PackageNotFoundError, requires, version

    try:
        requirements = requires("headway") or []
    except PackageNotFoundError:  # a checkout that is not installed
        return
    found, wanted = [], []
    for requirement in requirements:
        extra = re.search(r'extra == "(\w+)"', requirement)
        lowest = re.match(r"([\w.-]+).*?>=([\d.]+)", requirement)
        if lowest is None or (extra[1] if extra else "") not in (extras or USED):
            continue
        name, least = lowest.groups()
        with suppress(PackageNotFoundError):
            if _numbers(installed := version(name)) < _numbers(least):
                found.append(f"{name} {installed}")
                wanted.append(f"'{name}>={least}'")
    if found:
        raise ConfigError(
            f"{', '.join(found)} {'is' if len(found) == 1 else 'are'} too old for Headway: "
            f"pip install --upgrade {' '.join(wanted)}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, without zeros at the end: 2.8.0+cpu is 2.8."""
    release = re.match(r"[\d.]*", version)
    assert release is not None, "the pattern matches every text"
    numbers = [int(number) for number in release[0].split(".") if number]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def install(*extras: str) -> str:
    """The pip command for these extras."""
    return f"pip install '.[{','.join(extras)}]' in Headway's folder"


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # marked as missing in sys.modules
        return False
