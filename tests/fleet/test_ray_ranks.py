"""A tensor-parallel replica on a Ray cluster with two machines, each of which has one rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.fleet.streams import command, descendants, fleet_server, served, streams_during
from headway.on_ray.options import CLUSTER_ENVIRONMENT
from headway.server.process.serve import restored_signal_handlers
from tests.fleet.test_ray import PATIENT, SERVE, answer, run
from tests.support import real
from tests.support.waiting import LIMIT, wait_until

pytestmark = [
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed: pip install 'headway[ray]'"
    ),
    pytest.mark.skipif(
        not os.environ.get("HEADWAY_TEST_DEPLOY"), reason="takes a minute: make test-deploy"
    ),
]
MACHINES = """
import sys, ray
from ray.util import placement_group_table
ray.init(sys.argv[1], log_to_driver=False, configure_logging=False)
for each in placement_group_table().values():
    if each["state"] == "CREATED":
        print(*each["bundles_to_node_id"].values())
"""
NUM_TOKENS = 800  # more than a replica generates until one of its ranks is killed


@contextmanager
def two_machines() -> Iterator[str]:
    """A Ray cluster with two nodes of one CPU each, on this machine; yields its address."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch, restored_signal_handlers():
        for name, value in CLUSTER_ENVIRONMENT.items():
            patch.setenv(name, value)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        try:
            cluster.add_node(num_cpus=1)
            cluster.wait_for_nodes(LIMIT)
            yield cluster.address
        finally:
            cluster.shutdown()


def ranks() -> list[int]:
    """The processes of ranks other than 0, below those of the cluster."""
    found = descendants(os.getpid())
    return [pid for pid in found if "headway.parallel.worker" in command(pid)]


def test_a_lost_rank_replaces_its_replica_and_streams_are_those_of_one_process(
    tmp_path: Path,
) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    model = str(real.write_tiny(tmp_path, hidden_size=96, max_position_embeddings=2048, **heads))
    flags = ("--device", "cpu", "--dtype", "float32", "--quantization", "none", "--threads", "1")
    sent = [
        {"model": "smollm2-135m", "prompt": [7, 9, number], "stream": True, "ignore_eos": True,
         "max_tokens": NUM_TOKENS, "seed": number, "temperature": number % 2}
        for number in range(1, 5)
    ]  # fmt: skip
    with fleet_server(*flags, program=served(model)) as server:
        alone = [answer(server, body) for body in sent]
    with two_machines() as address:
        fleet = ("--replicas", "1", "--tensor-parallel-size", "2", "--ray-address", address)
        program = (*SERVE, *served(model)[2:], *PATIENT)
        with fleet_server(*flags, *fleet, program=program) as server:
            (first,) = ranks()
            assert len(set(run("-c", MACHINES, address, environment={}).split())) == 2
            streams = streams_during(server.url, sent, partial(os.kill, first, signal.SIGKILL), 8)
            assert [stream.error for stream in streams if stream.error] == []
            assert [stream.choices for stream in streams] == alone
            assert server.metric("headway_fleet:moves_total") > 0
            (second,) = ranks()
            assert second != first
            assert any(
                "rank 1 at" in line and "closed its connection" in line for line in server.lines
            )
        wait_until(lambda: not ranks())
