"""Random jobs for the state machine of elastic jobs: a program, its limits, and faults at random times."""

from __future__ import annotations

import random

from hvdkit.launch.elastic.actions import Limits
from tests.launch.elastic_checks import Driver
from tests.launch.elastic_truth import LOAD, Host, Life, Program, State, World

SETTLING = 80.0  # seconds beside those of the limits until a job uses all slots after its last fault


class RandomJob:
    """A job with random limits, hosts and faults, made from a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.choose = choose = random.Random(seed)
        self.program = self._program()
        self.limits = self._limits()
        self.world = World(seed, self.program)
        self.driver = Driver(self.world, self.limits)
        self.names = [f"h{number}" for number in range(choose.randint(1, 4))]
        share = -(-self.limits.start // len(self.names))
        self.slots = {name: choose.randint(share, share + 1) for name in self.names}
        for name in self.names:
            self.world.hosts[name] = Host(name)
        self.fault_count = 0
        self.is_calm = False  # faults have ceased
        self.calm_at = choose.choice([3.0, 15.0, 40.0])

    def _program(self) -> Program:
        choose = self.choose
        program = Program(step_seconds=choose.choice([0.5, 1.0, 2.0]))
        kind = choose.random()
        if kind < 0.04:
            program.fails_at, program.raises = choose.randint(0, 8), choose.random() < 0.5
        elif kind < 0.06:
            program.fails_loading = True
        elif kind < 0.08:
            program.never_asks = True
        elif kind < 0.35:
            program.steps = choose.randint(1, 40)
        if choose.random() < 0.2:
            program.loads_for = lambda choose: 2.0  # all are ready at about the same time
        return program

    def _limits(self) -> Limits:
        choose = self.choose
        start = choose.randint(1, 4)
        return Limits(
            start,
            choose.randint(1, start),
            start + choose.choice([0, 0, 1, 2]),
            choose.choice([12.0, 30.0]),
            resets=choose.choice([None] * 9 + [2]),
            cooldown=choose.choice([None] * 5 + [(1.0, 8.0)]),
            hosts_may_change=choose.random() < 0.8,
        )

    def run(self) -> None:
        """Run the job to its end. Raises AssertionError with the seed where the machine is wrong."""
        try:
            self._run()
        except AssertionError as error:
            raise AssertionError(f"seed {self.seed}: {error} {self.driver.story()}") from error

    def _run(self) -> None:
        choose, driver, world = self.choose, self.driver, self.world
        driver.find(self.slots)
        for _ in range(choose.choice([0, 1, 2, 3, 5, 8])):
            world.after(choose.uniform(0.0, self.calm_at), self._fault)
        driver.run(self.calm_at)
        self._calm()
        driver.run(2 * self.limits.seconds + SETTLING)
        if driver.reason is None:
            self._check_size()
            world.is_last_step = True
            driver.run(2 * self.limits.seconds + SETTLING)
        assert driver.reason is not None, "the job does not end"
        self._check_verdict(driver.reason)

    def _check_verdict(self, reason: str) -> None:
        """Check the end of a program that always fails, and of one that never does."""
        if self.program.fails_loading:
            assert reason != "", "a success of processes that all failed"
        elif self.program.fails_at is not None:
            generations = self.world.generations  # ranks whose host leaves may end early, with success
            has_passed = bool(generations) and generations[-1].life == Life.FINISHING
            assert not has_passed, "the job passed a step that always fails"
            if not self.fault_count and self.limits.resets is None:
                is_lost = not self.program.raises and reason == "no rank with the state of the job is left"
                assert is_lost or reason.startswith(f"3 failures after step {self.program.fails_at}:"), reason
        elif not self.fault_count and self.limits.resets is None:
            assert reason == "", "a job without a fault fails"

    def _calm(self) -> None:
        """Have the faults cease: hosts work, and one that never failed has all slots that are wanted."""
        world, self.is_calm = self.world, True
        for host in world.hosts.values():
            host.is_up = True
        for process in world.living():
            if process.is_hung and self.choose.random() < 0.3:
                world.resume(process)
            elif process.is_hung:  # a user finds it, where the machine waits for ever
                world.after(self.limits.seconds + 20, world.die, process)
        if self.limits.hosts_may_change:
            kept = {name: self.slots[name] for name in self.names if self.choose.random() < 0.5}
            new = {"fresh": self.limits.most}
            self.driver.find({**kept, **new} if self.choose.random() < 0.5 else {**new, **kept})
        else:
            self.driver.find(self.slots)

    def _check_size(self) -> None:
        """Check that a job which has settled uses all slots that it may."""
        driver, world = self.driver, self.world
        if self.program.never_asks or self.program.fails_loading:
            return
        members = world.generations[-1].members
        assert world.generations[-1].life in (Life.TRAINING, Life.FINISHING, Life.OVER), "the job does not train"
        if driver.is_finishing or driver.leaving or not self.limits.hosts_may_change:
            return
        if not all(process.host.is_reachable for process in members):
            return
        assert len(members) == self.limits.most, f"{len(members)} of {self.limits.most} ranks"
        others = [process for process in world.living() if process not in members and not process.is_stubborn]
        assert not [process for process in others if process.state == State.WAITING], "processes wait in vain"

    def _fault(self) -> None:
        choose, world, driver = self.choose, self.world, self.driver
        if driver.reason is not None:
            return
        self.fault_count += 1
        living = world.living()
        kind = choose.random()
        if kind < 0.3 and living:
            for process in choose.sample(living, choose.choice([1, 1, 1, min(2, len(living)), len(living)])):
                world.after(choose.choice([0.0, choose.uniform(0.0, LOAD)]), world.die, process)
        elif kind < 0.4 and living:
            process = choose.choice(living)
            world.hang(process)
            if choose.random() < 0.4:
                world.after(choose.uniform(1.0, 20.0), world.resume, process)
        elif kind < 0.45 and living:
            choose.choice(living).is_stubborn = True
        elif kind < 0.6:
            host = world.hosts[choose.choice(self.names)]
            world.lose_host(host, is_up=choose.random() < 0.7)
            world.after(choose.uniform(1.0, 20.0), setattr, host, "is_up", True)
        elif kind < 0.7:
            self._warn(choose.choice(list(world.hosts)))
        elif self.limits.hosts_may_change:
            self._find()

    def _warn(self, name: str) -> None:
        """Have a host tell that it will be taken away; processes there may end at once."""
        world, choose = self.world, self.choose
        host = world.hosts[name]
        world.send(host, "host_leaves", name)
        if choose.random() < 0.3:
            for process in world.living():
                if process.host is host:
                    world.after(choose.uniform(0.5, 2.0), world.die, process, True)
        if self.limits.hosts_may_change and choose.random() < 0.7:
            hosts = {other: slots for other, slots in self.driver.listed.items() if other != name}
            world.after(choose.uniform(0.0, 3.0), self._find_hosts, hosts)

    def _find(self) -> None:
        """Have discovery answer anew: hosts come, go, flap, or have other slots."""
        world, choose, driver = self.world, self.choose, self.driver
        kind = choose.random()
        if kind < 0.2:
            hosts = {}
        elif kind < 0.4:
            name = f"n{len(world.hosts)}"
            world.hosts[name] = Host(name, is_reachable=choose.random() < 0.5)
            hosts = {**driver.listed, name: choose.randint(1, 2)}
        elif kind < 0.6:  # all are replaced
            name = f"n{len(world.hosts)}"
            hosts = {name: self.limits.most}
        else:
            hosts = {name: choose.randint(1, 3) for name in self.names if choose.random() < 0.6}
        former = dict(driver.listed)
        driver.find(hosts)
        if choose.random() < 0.5:
            world.after(choose.uniform(0.1, 5.0), self._find_hosts, former)

    def _find_hosts(self, hosts: dict[str, int]) -> None:
        if not self.is_calm:
            self.driver.find(hosts)
