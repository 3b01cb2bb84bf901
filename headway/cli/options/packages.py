"""Which optional packages a command needs, and how to install those that are missing."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from headway.errors import ConfigError

# By extra, the most telling package first.
EXTRAS = {
    "torch": ("torch", "tokenizers", "safetensors", "gguf", "jinja2"),
    "server": ("fastapi", "uvicorn", "httptools", "pydantic", "prometheus_client"),
}


def is_optional(name: str | None) -> bool:
    """Whether a package belongs to an extra."""
    return any(name in packages for packages in EXTRAS.values())


def check_extras(purpose: str, *extras: str) -> None:
    """ConfigError that names the missing packages and the command that installs them."""
    missing = [name for extra in extras for name in EXTRAS[extra] if not _is_there(name)]
    if missing:
        raise ConfigError(f"{purpose} needs {_listed(missing)}: {install(*extras)}")


def install(*extras: str) -> str:
    """The command that installs extras."""
    return f"pip install 'headway[{','.join(extras)}]'"


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # marked as missing in sys.modules
        return False


def _listed(names: Sequence[str]) -> str:
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(names)}, which {verb} not installed"
