"""Optional packages of commands, and the command that installs the missing ones."""

from __future__ import annotations

from importlib.util import find_spec

from headway.errors import ConfigError

# Packages by extra, the main one first.
EXTRAS = {
    "torch": ("torch", "tokenizers", "safetensors", "gguf", "jinja2"),
    "ray": ("ray",),
    "server": ("fastapi", "uvicorn", "httptools", "pydantic", "prometheus_client"),
}


def is_optional(name: str | None) -> bool:
    """Whether an extra contains this package."""
    return any(name in packages for packages in EXTRAS.values())


def check_extras(purpose: str, *extras: str) -> None:
    """ConfigError with the missing packages and the command that installs them."""
    missing = [name for extra in extras for name in EXTRAS[extra] if not _is_installed(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"{purpose} needs {', '.join(missing)}, which {verb} not installed: {install(*extras)}"
        )


def install(*extras: str) -> str:
    """The pip command for these extras."""
    return f"pip install '.[{','.join(extras)}]' in Headway's folder"


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # marked as missing in sys.modules
        return False
