"""Ranks of a tensor-parallel replica on several machines: a placement group with a bundle for each.

The replica is rank 0, in the first bundle. In each other bundle an actor is the parent of a rank's
process. Ray ends the actors with the replica, and the processes end with them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util import get_current_placement_group, get_node_ip_address
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headway.on_ray.options import FleetOptions
from headway.parallel.launch import Invitation, RankLauncher, start_invited


def placement(options: FleetOptions) -> dict[str, Any]:
    """The resources of a replica, as arguments of its Serve deployment."""
    cpus, gpus = (each / options.num_ranks for each in (options.num_cpus, options.num_gpus))
    own = {"ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus}}
    if options.num_ranks == 1:
        return own
    bundle = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
    return own | {
        "placement_group_bundles": [bundle] * options.num_ranks,
        "placement_group_strategy": options.rank_strategy,
    }


class RankParent:
    """An actor that starts a rank in its bundle."""

    def __init__(self, invitation: bytes) -> None:
        self._process = start_invited(msgspec.msgpack.decode(invitation, type=Invitation))

    async def wait(self) -> int:
        return await asyncio.to_thread(self._process.wait)

    async def kill(self) -> None:
        self._process.kill()


class RayRank:
    """A rank that has been started, as its replica sees it."""

    def __init__(self, invitation: Invitation) -> None:
        group = get_current_placement_group()
        bundle = group.bundle_specs[invitation.rank]
        parent = ray.remote(RankParent).options(
            num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, invitation.rank),
        )  # fmt: skip
        self._parent = parent.remote(msgspec.msgpack.encode(invitation))
        self._ended = self._parent.wait.remote()

    def poll(self) -> int | None:
        ready, _ = ray.wait([self._ended], timeout=0)
        try:
            return int(ray.get(ready[0])) if ready else None
        except RayError:  # its machine is gone
            return 1

    def kill(self) -> None:
        self._parent.kill.remote()


LAUNCHER = RankLauncher(get_node_ip_address, RayRank)
