"""Where replicas announce themselves: Ray's key-value store, which outlives replicas and gateways."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from typing import Any, cast

from ray.experimental import internal_kv

from headway.fleet.discovery import Announced
from headway.on_ray.options import FleetOptions
from headway.remote.auth import Address, Identity

NAMESPACE = "headway"


@dataclass(frozen=True, slots=True)
class RayDirectory:
    """The replicas of one application, in Ray's key-value store.

    Deployments of the same application share it, so that requests move from old replicas to new
    ones. Model info and errors are those of one deployment.
    """

    app: str  # name
    deployment: str  # id

    @classmethod
    def of(cls, options: FleetOptions) -> RayDirectory:
        return cls(options.name, options.id)

    def read(self) -> Announced:
        prefix = f"{self.app}/replica/"
        found: dict[str, tuple[str, int]] = {}
        for key in internal_kv._internal_kv_list(prefix, namespace=NAMESPACE):
            value = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
            if value is not None:
                host, port = json.loads(value)
                found[key.decode().removeprefix(prefix)] = (host, port)
        return Announced(replicas=found)

    def num_announced(self) -> int:
        return len(self.read().replicas)

    def forget(self, name: str) -> None:
        internal_kv._internal_kv_del(f"{self.app}/replica/{name}", namespace=NAMESPACE)

    def announce(self, name: str, address: Address) -> None:
        self._put(f"replica/{name}", json.dumps(address).encode())

    def shared_key(self, new: bytes) -> bytes:
        """The key of all deployments of the application; the first one sets it."""
        self._put("key", new, overwrite=False)
        return self._get("key") or new

    @property
    def info(self) -> tuple[Any, Identity] | None:
        """Model info and identity of the replicas; None before one is ready."""
        stored = self._get(f"info/{self.deployment}")
        return None if stored is None else pickle.loads(stored)

    def put_info(self, info: Any, identity: Identity) -> None:
        self._put(f"info/{self.deployment}", pickle.dumps((info, identity)))

    @property
    def error(self) -> str | None:
        """Why a replica could not start."""
        stored = self._get(f"error/{self.deployment}")
        return None if stored is None else stored.decode()

    def put_error(self, text: str) -> None:
        self._put(f"error/{self.deployment}", text.encode())

    def clear(self) -> None:
        internal_kv._internal_kv_del(f"{self.app}/", del_by_prefix=True, namespace=NAMESPACE)

    def _put(self, key: str, value: bytes, overwrite: bool = True) -> None:
        name = f"{self.app}/{key}"
        internal_kv._internal_kv_put(name, value, overwrite, namespace=NAMESPACE)

    def _get(self, key: str) -> bytes | None:
        value = internal_kv._internal_kv_get(f"{self.app}/{key}", namespace=NAMESPACE)
        return cast("bytes | None", value)
