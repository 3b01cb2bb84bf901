"""The package data, the extras and the lock file agree with the code."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from headway.cli.options.packages import EXTRAS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCKED = {
    each.name.lower().replace("_", "-"): next(iter(each.specifier)).version
    for each in map(Requirement, (ROOT / "requirements.lock").read_text().splitlines())
}
NOT_LOCKED = {"matplotlib", "optuna"}  # only plots and a benchmark need them


def requirements() -> list[Requirement]:
    project = PROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(text) for group in groups for text in group]


def test_every_data_file_is_in_the_package_data() -> None:
    package = ROOT / "headway"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["headway"]
    packaged = {path for pattern in patterns for path in package.glob(pattern)}
    found = {path for path in package.rglob("*") if path.is_file() and path.suffix != ".py"}
    own = {path for path in found if "__pycache__" not in path.parts}
    assert own - packaged == set()


def test_locked_versions_satisfy_the_declared_ranges() -> None:
    for requirement in requirements():
        name = requirement.name.lower().replace("_", "-")
        if name not in NOT_LOCKED:
            assert Version(LOCKED[name]) in requirement.specifier, requirement


def test_users_can_keep_their_torch() -> None:
    (torch,) = (r for r in requirements() if r.name == "torch")
    assert [Version(v) in torch.specifier for v in ("2.7.1", "2.8.0", "2.8.0+cu128", "3.0")] == [
        False, True, True, True,
    ]  # fmt: skip


def test_packages_that_commands_ask_for_are_in_their_extra() -> None:
    optional = PROJECT["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        declared = {Requirement(text).name.replace("-", "_") for text in optional[extra]}
        assert set(packages) <= declared
