"""Whatever is killed or stopped, no request fails but one that kills its replicas itself."""

from __future__ import annotations

from random import Random

import pytest

from headway.fleet.settings import FleetSettings
from tests.support.fleet_worlds import FaultWorld, Poison, Process

SETTINGS = FleetSettings()
NUM_WORLDS, BLOCKS = 15, range(8)
FAULT_TICKS = 120  # then nothing fails any more
END_TICKS = 1200  # more than all that is left needs
MANY = FleetSettings(max_total_losses=1000)  # a law for as many faults as there are


def victims(world: FaultWorld) -> list[Process]:
    """One process, several or all. None where a suspect is alone before its second token."""
    alive = [each for each in world.alive if not world.is_last_evidence(each)]
    number = world.random.choice((1, 1, 1, len(alive) // 2, 2 * len(alive) // 3, len(alive)))
    return world.random.sample(alive, min(number, len(alive)))


def fail_at_random(world: FaultWorld) -> None:
    chance = world.random.choice((0.02, 0.1, 0.3))
    for _ in range(FAULT_TICKS):
        if world.random.random() < chance:
            for process in victims(world):
                if world.random.random() < 0.7:
                    world.kill(process)
                elif not process.stopped_ticks:
                    world.stop(process)
        if world.random.random() < 0.2:
            world.request(world.random.randrange(1, 60), world.random.choice((1, 1, 1, 3)))
        world.tick()


@pytest.mark.parametrize("block", BLOCKS)
def test_kills_and_stops_fail_no_request_and_double_no_token(block: int) -> None:
    num_kills = num_stops = num_requests = 0
    for number in range(NUM_WORLDS):
        random = Random(f"{block}/{number}")
        world = FaultWorld(random, random.randrange(1, 7), MANY)
        for _ in range(random.randrange(1, 24)):
            world.request(random.randrange(1, 200), random.choice((1, 1, 1, 3)))
        fail_at_random(world)
        world.finish(END_TICKS)
        world.check()
        num_kills, num_stops = num_kills + world.num_kills, num_stops + world.num_stops
        num_requests += len(world.tokens)
    print(f"{NUM_WORLDS} worlds, {num_requests} requests, {num_kills} kills, {num_stops} stops")


def poison_of(random: Random) -> Poison:
    return random.choice(
        (
            Poison(),
            Poison(at_token=random.randrange(1, 5)),
            Poison(num_steps=random.randrange(1, 5)),
        )
    )


@pytest.mark.parametrize("block", BLOCKS)
def test_poison_ends_after_a_bounded_number_of_losses_and_alone(block: int) -> None:
    num_killed = 0
    for number in range(NUM_WORLDS):
        random = Random(f"poison {block}/{number}")
        world = FaultWorld(random, random.randrange(1, 7), SETTINGS)
        world.loses_messages = random.random() < 0.5
        world.request(random.randrange(1, 40))
        for _ in range(random.randrange(1, 3)):
            id = world.request(50)
            world.poisons[id] = poison_of(random)
            for _ in range(random.randrange(1, 12)):
                world.request(random.randrange(1, 40), random.choice((1, 1, 3)))
        world.finish(END_TICKS)
        world.check()
        for poison in world.poisons.values():
            assert poison.num_killed <= 2 * SETTINGS.max_total_losses
            if len(world.poisons) == 1 and not world.loses_messages and poison.num_steps < 2:
                # The loss after its last token, one more, and that of the replica where it is alone.
                assert poison.num_killed <= SETTINGS.max_replica_losses + 1
            num_killed += poison.num_killed
    print(f"{NUM_WORLDS} worlds, {num_killed} replicas killed by poison")


@pytest.mark.parametrize("seed", range(20))
def test_four_of_six_are_stopped_and_return(seed: int) -> None:
    """As with SIGSTOP and SIGCONT; what they send late is ignored."""
    world = FaultWorld(Random(seed), 6, SETTINGS)
    for _ in range(24):
        world.request(100)
    for _ in range(3):
        world.tick()
    for process in world.random.sample(world.alive, 4):
        world.stop(process)
        process.stopped_ticks = 10  # longer than `hang_seconds`
    for _ in range(20):
        world.tick()
    world.finish(END_TICKS)
    world.check()
    assert world.fleet.counters.num_losses == 4
    assert world.fleet.counters.num_failed == world.fleet.counters.num_isolated == 0


@pytest.mark.parametrize("num_killed", [2, 4, 6])
def test_a_mass_loss_isolates_nothing(num_killed: int) -> None:
    """2, 4 or 6 of 6 at once, again and again: no request becomes a suspect."""
    for seed in range(10):
        world = FaultWorld(Random(seed), 6, MANY)
        for _ in range(24):
            world.request(80)
        for _ in range(4):
            for _ in range(20):
                world.tick()
            for process in world.random.sample(world.alive, min(num_killed, len(world.alive))):
                world.kill(process)
                process.notice_ticks = 0
        world.finish(END_TICKS)
        world.check()
        assert world.fleet.counters.num_isolated == 0
