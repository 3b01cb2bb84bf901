"""`gc_freeze` collects and freezes once, however deep it is nested, and ends with its first block."""

from __future__ import annotations

import pytest

from headway.engine import gc_freeze as module


def test_a_nested_block_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Recorded:
        """Stands in for the module gc."""

        def __getattr__(self, name: str) -> object:
            return lambda: calls.append(name)

    monkeypatch.setattr(module, "gc", Recorded())
    monkeypatch.setattr(module, "_is_frozen", False)
    for _ in range(2):
        with pytest.raises(KeyError), module.gc_freeze():
            with module.gc_freeze():
                pass
            assert calls == ["collect", "freeze"]
            raise KeyError
        assert calls == ["collect", "freeze", "unfreeze"]
        calls.clear()
