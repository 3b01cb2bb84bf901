"""Where replicas announce themselves: a named actor, which outlives replicas and gateways."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from headway.on_ray.gateway import Published
from headway.on_ray.options import FleetOptions

NAMESPACE = "headway"
LEASE_SECONDS = 20.0  # after which a replica that does not announce itself again is dropped
START_SECONDS = 120.0  # for the actor
CALL_SECONDS = 5.0


@dataclass(slots=True)
class DirectoryActor:
    """The replicas of one application.

    Deployments of the same application share it, so that requests move from old replicas to new
    ones. Model info and errors are those of one deployment. If the actor's process ends, Ray starts
    it again with the same key, and the replicas announce themselves again.
    """

    # Of all deployments; the first one sets it. Ray logs the representation of an actor.
    key: bytes = field(repr=False)
    now: Callable[[], float] = time.monotonic
    # By name: end of the lease, and the address; None while the replica starts.
    announced: dict[str, tuple[float, tuple[str, int] | None]] = field(default_factory=dict)
    # Pickled, by deployment: model info, which contains a tokenizer, and identity.
    models: dict[str, bytes] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # by deployment

    def shared_key(self) -> bytes:
        return self.key

    def announce(self, name: str, address: tuple[str, int] | None) -> int:
        """Add a replica for LEASE_SECONDS; returns how many are starting."""
        self.announced[name] = self.now() + LEASE_SECONDS, address
        return self.read("").num_starting

    def forget(self, name: str) -> None:
        self.announced.pop(name, None)

    def put_model(self, deployment: str, model: bytes) -> None:
        self.models[deployment] = model

    def model(self, deployment: str) -> bytes | None:
        """None before a replica is ready."""
        return self.models.get(deployment)

    def fail(self, deployment: str, error: str) -> None:
        self.errors[deployment] = error

    def read(self, deployment: str) -> Published:
        now = self.now()
        valid = {name: address for name, (end, address) in self.announced.items() if end > now}
        found = {name: address for name, address in valid.items() if address is not None}
        return Published(
            replicas=found, num_starting=len(valid) - len(found), error=self.errors.get(deployment)
        )


@dataclass(frozen=True, slots=True)
class RayDirectory:
    """The directory of one application as one of its deployments uses it. Calls block."""

    deployment: str  # id
    actor: Any
    key: bytes  # of all deployments of the application

    @classmethod
    def of(cls, options: FleetOptions) -> RayDirectory:
        """The directory, which is started if there is none."""
        kind = ray.remote(DirectoryActor).options(
            name=f"{options.name}-directory", namespace=NAMESPACE, lifetime="detached",
            get_if_exists=True, num_cpus=0, max_restarts=-1,
        )  # fmt: skip
        actor = kind.remote(options.key)
        key = ray.get(actor.shared_key.remote(), timeout=START_SECONDS)
        return cls(options.id, actor, key)

    def read(self) -> Published:
        found: Published = self.call(self.actor.read, self.deployment)
        return found

    def model(self) -> bytes | None:
        found: bytes | None = self.call(self.actor.model, self.deployment)
        return found

    def call(self, method: Any, *arguments: Any) -> Any:
        """The result of a method of the actor; an exception if it does not answer."""
        return ray.get(method.remote(*arguments), timeout=CALL_SECONDS)
