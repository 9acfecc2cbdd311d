"""The state machine of elastic jobs: its behaviour in examples, and its decisions against the truth of random jobs."""

from __future__ import annotations

import math
import re

import pytest

from hvdkit.launch.elastic.actions import Action, Dismiss, EndJob, Form, Interrupt, Kill, Limits, Start
from hvdkit.launch.elastic.membership import Membership
from hvdkit.launch.elastic.newcomers import Newcomers
from hvdkit.launch.elastic.slots import ProcessSlot, Slots
from hvdkit.launch.elastic.workers import ElasticWorker, Phase
from tests.launch.elastic_checks import Driver
from tests.launch.elastic_faults import RandomJob
from tests.launch.elastic_truth import Host, Process, Program, World

FAULT = "the data or the program is at fault"


def job(hosts: dict[str, int], start: int, least: int, most: int, **options: object) -> Driver:
    """Return a job that has just started. ``options`` belong to the limits, or else to the program."""
    limits = {key: options.pop(key) for key in ("seconds", "resets", "cooldown", "hosts_may_change") if key in options}
    driver = Driver(World(0, Program(**options)), Limits(start, least, most, **limits))
    driver.find(hosts)
    return driver


def numbers(members: list[Process]) -> list[int]:
    return [process.number for process in members]


def starts_in(driver: Driver, host: str, number: int) -> int:
    return sum(start.slot == (host, number) for start in driver.starts)


# Examples in a simulated world


def test_a_job_grows_from_np_to_max_np_by_one_generation_that_gathers_newcomers():
    driver = job({"a": 3, "b": 3}, 2, 1, 5)
    assert numbers(driver.run_until(2).members) == [0, 1]
    grown = driver.run_until(5)
    assert (grown.number, grown.needs_sync, grown.newest) == (2, True, grown.newest)
    assert grown.newest > 0
    assert driver.interrupts == [Interrupt((0, 1))]
    driver.finish()
    assert not driver.kills


def test_without_faults_there_is_one_generation():
    driver = job({"a": 2, "b": 2}, 4, 2, 4)
    driver.run_until(4)
    driver.finish()
    assert len(driver.world.generations) == 1
    assert not driver.interrupts


def test_a_lost_rank_is_replaced_on_its_slot_after_pauses_that_double_until_its_slot_is_closed():
    driver = job({"a": 1, "b": 1}, 2, 1, 2, loads_for=lambda choose: 4.0)
    for _ in range(3):
        generation = driver.run_until(2)
        driver.world.die(next(process for process in generation.members if process.host.name == "b"))
        driver.run_until(1)
    driver.run(700)
    assert starts_in(driver, "b", 0) == 3
    starts = [process.started_at for process in driver.world.processes.values() if process.host.name == "b"]
    ends = driver.failures[ProcessSlot("b", 0)]
    assert [starts[1] - ends[0], starts[2] - ends[1]] == pytest.approx([1.0, 2.0])
    assert driver.announced == ["slot 0 of host b is closed after 3 failures, and 1 slot remains"]
    assert len(driver.run_until(1).members) == 1
    driver.finish()


def test_three_failures_at_one_step_end_the_job():
    driver = job({"a": 4}, 4, 1, 4, fails_at=5)
    driver.run(200)
    assert driver.reason == f"3 failures after step 5: {FAULT}"


def test_three_failures_at_one_step_count_though_no_process_ends():
    driver = job({"a": 3}, 3, 1, 3, fails_at=5, raises=True)
    driver.run(200)
    assert driver.reason == "3 failures after step 5: the ranks cannot connect, or the program is at fault"
    assert len(driver.world.generations) == 4  # the first one failed after it had trained


def test_failures_at_different_steps_do_not_end_the_job():
    driver = job({"a": 8}, 6, 1, 6)
    for size in (6, 5, 4, 3):
        generation = driver.run_until(size)
        steps = driver.world.newest
        while driver.world.newest < steps + 2:
            driver.run(0.1)
        driver.world.die(generation.members[-1])
        driver.run(0.5)
        if size > 3:
            driver.find({"a": size - 1})  # nobody takes its place
    driver.run(20)
    assert driver.reason is None


def test_all_hosts_are_replaced_and_the_new_processes_join_before_the_last_old_one_leaves():
    driver = job({"a": 2}, 2, 1, 2, hosts_may_change=True)
    driver.run_until(2)
    driver.run(10)
    steps = driver.world.newest
    driver.find({"b": 2})
    driver.run(30)
    _, second, third = driver.world.generations
    assert [process.host.name for process in second.members] == ["a", "b"]
    assert [process.host.name for process in third.members] == ["b", "b"]
    assert third.newest >= second.newest >= steps > 0
    assert set(driver.dismissed_at) == {0, 1}
    assert not driver.kills
    driver.finish()


def test_a_rank_that_max_np_leaves_nobody_to_hand_its_state_over_to_stays_though_its_host_is_not_listed():
    driver = job({"a": 1}, 1, 1, 1, hosts_may_change=True)
    driver.run_until(1)
    driver.find({"b": 1})
    driver.run(60)
    assert len(driver.world.generations) == len(driver.starts) == 1
    assert not driver.interrupts
    driver.finish()


def test_members_whose_host_is_gone_stay_while_too_few_others_are_there():
    driver = job({"a": 2, "b": 1}, 3, 2, 3, hosts_may_change=True)
    driver.run_until(3)
    driver.find({"a": 1})
    driver.run(50)
    assert len(driver.world.generations) == 1
    driver.find({"a": 1, "c": 1})
    driver.run(20)
    assert [process.host.name for process in driver.world.generations[-1].members] == ["a", "c"]


def test_an_empty_answer_of_discovery_changes_nothing_for_members():
    driver = job({"a": 2}, 2, 1, 2, hosts_may_change=True)
    driver.run_until(2)
    driver.find({})
    driver.run(30)
    driver.find({"a": 2})
    driver.run(30)
    assert len(driver.world.generations) == 1
    assert len(driver.starts) == 2
    driver.finish()


def test_a_member_that_its_peers_call_lost_is_killed_after_5_seconds():
    driver = job({"a": 3}, 3, 1, 3)
    generation = driver.run_until(3)
    stopped = generation.members[1]
    driver.world.hang(stopped)
    driver.run(20)
    assert driver.kills == {stopped.number: "others wait for it"}
    driver.run_until(3)
    driver.finish()


def test_a_host_that_is_lost_three_times_is_closed():
    driver = job({"a": 1, "b": 1}, 2, 1, 2, loads_for=lambda choose: 0.5)
    for _ in range(3):
        driver.run_until(2)
        driver.world.lose_host(driver.world.hosts["b"], is_up=True)
        driver.run(9)
    driver.run(700)
    assert starts_in(driver, "b", 0) == 3
    starts = [process.started_at for process in driver.world.processes.values() if process.host.name == "b"]
    assert starts[1] - starts[0] > 10
    assert starts[2] - starts[1] > 20
    assert driver.announced == ["host b is closed since it was lost 3 times, and 1 slot remains"]
    driver.finish()


@pytest.mark.parametrize("reach", ["b", "c"])
def test_an_unreachable_host_costs_no_healthy_newcomer_its_slot(reach):
    driver = job({"a": 1}, 1, 1, 3, hosts_may_change=True, loads_for=lambda choose: 0.5)
    driver.run_until(1)
    for name in "bc":
        driver.world.hosts[name] = Host(name, is_reachable=name == reach)
    driver.find({"a": 1, "b": 1, "c": 1})
    driver.run(120)
    assert [process.host.name for process in driver.world.generations[-1].members] == ["a", reach]
    assert {driver.world.processes[number].host.name for number in driver.kills} == {"b", "c"} - {reach}
    assert len(driver.starts) == 5  # three times on the host that is unreachable
    driver.finish()


def test_an_unreachable_host_of_the_first_generation_does_not_end_the_job():
    driver = job({"a": 2, "b": 1}, 3, 2, 3, loads_for=lambda choose: 0.5)
    driver.world.hosts["b"].is_reachable = False
    driver.run(120)
    assert [process.host.name for process in driver.world.generations[-1].members] == ["a", "a"]
    driver.finish()


def test_a_rank_that_no_newcomer_can_connect_ends_a_job_that_needs_them():
    options = {"cooldown": (1.0, 8.0), "hosts_may_change": True}
    driver = job({"a": 1, "b": 1}, 2, 2, 2, loads_for=lambda choose: 0.5, **options)
    member = driver.run_until(2).members[1]
    driver.world.hosts["a"].is_reachable = False
    driver.world.die(member)
    driver.run(600)
    assert driver.reason is not None
    assert re.fullmatch(r"3 failures after step \d+: the ranks cannot connect, or .*", driver.reason)


def test_a_program_that_fails_while_it_loads_ends_the_job_quickly():
    driver = job({"a": 4}, 2, 1, 2, fails_loading=True)
    driver.run(100)
    assert driver.reason == "3 processes failed before any of them was ready"
    assert driver.world.now < 15


def test_a_lost_host_of_many_slots_does_not_end_a_job_that_loads_elsewhere():
    driver = job({"a": 4, "b": 1}, 5, 1, 5, seconds=30.0)
    driver.world.lose_host(driver.world.hosts["a"], is_up=False)
    driver.run(40)
    assert [process.host.name for process in driver.world.generations[-1].members] == ["b"]
    driver.finish()


def test_a_program_that_never_asks_runs_to_its_end():
    driver = job({"a": 2}, 2, 1, 2, never_asks=True)
    driver.run(100)
    assert (driver.reason, len(driver.starts)) == ("", 2)


def test_a_job_whose_ranks_all_finish_on_hosts_that_leave_succeeds():
    driver = job({"a": 2}, 2, 1, 2, steps=5, hosts_may_change=True)
    driver.run_until(2)
    driver.find({})
    driver.run(60)
    assert driver.reason == ""


def test_what_a_cooldown_closes_is_announced_with_what_remains():
    driver = job({"a": 2, "b": 1}, 3, 1, 3, cooldown=(30.0, 90.0))
    driver.world.die(driver.run_until(3).members[0])
    driver.run(10)
    assert driver.announced == ["host a is closed for 30 s after a failure, and 1 slot remains"]


# The machine alone


def act(machine: Membership, actions: list[Action], kind: type[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


def ready(limits: Limits, hosts: dict[str, int], steps: int | None = None) -> Membership:
    """Return a machine whose first generation has begun at time 1; with ``steps``, they have asked again at time 2."""
    machine = Membership(limits)
    started = machine.hosts_found(0.0, hosts)
    for action in started:
        actions = machine.asked(1.0, action.worker)
    assert Form(1, tuple(action.worker for action in started), True) in actions
    if steps is not None:
        for action in started:
            actions = machine.asked(2.0, action.worker, steps)
        assert Form(2, tuple(action.worker for action in started), False) in actions
    return machine


def test_ranks_that_were_interrupted_at_one_step_need_no_synchronisation():
    machine = ready(Limits(3, 1, 3), {"a": 2, "b": 1}, steps=7)
    assert machine.host_leaves(3.0, "b") == [Interrupt((0, 1, 2))]
    for number in range(2):
        machine.asked(4.0, number, 9)
    assert machine.asked(4.0, 2, 9) == [Form(3, (0, 1), False), Dismiss(2)]


def test_rank_0_has_the_newest_state_and_the_ranks_of_a_host_are_neighbours():
    machine = ready(Limits(4, 1, 4), {"a": 2, "b": 2})
    for number, steps in enumerate((4, 4, 4)):
        machine.asked(2.0, number, steps, failed=True)
    assert act(machine, machine.asked(2.0, 3, 5, failed=True), Form) == [Form(2, (3, 2, 0, 1), True)]


def test_a_rank_that_must_leave_stays_while_its_state_is_the_newest():
    machine = ready(Limits(2, 1, 3), {"a": 1, "b": 1})
    machine.host_leaves(2.0, "b")
    machine.asked(3.0, 0, 4, failed=True)
    assert act(machine, machine.asked(3.0, 1, 5, failed=True), Form) == [Form(2, (1, 0), True)]


def test_one_rank_that_asks_has_the_others_interrupted_and_those_that_stay_silent_killed():
    machine = ready(Limits(2, 1, 2, seconds=50.0), {"a": 2})
    assert machine.asked(2.0, 0, 4, failed=True) == [Interrupt((1,), gone=(0,))]
    assert machine.wakes_at() == 7.0  # it would gather others
    assert machine.time_passed(7.0) == []
    assert machine.wakes_at() == 52.0
    assert act(machine, machine.time_passed(52.0), Kill) == [Kill(1, "others wait for it")]
    assert machine.wakes_at() == math.inf


def test_a_rank_that_asks_has_the_others_interrupted_at_once_though_a_process_loads():
    machine = ready(Limits(2, 1, 3), {"a": 3})
    assert machine.asked(2.0, 0, 4, failed=True) == [Interrupt((1,), gone=(0,))]


def test_a_rank_that_must_leave_and_asks_has_the_others_interrupted():
    machine = ready(Limits(3, 3, 3, hosts_may_change=True), {"a": 2, "b": 1})
    assert machine.host_leaves(2.0, "b") == []
    assert machine.asked(3.0, 2, 4, failed=True) == [Interrupt((0, 1), gone=(2,))]


def test_members_are_told_of_each_member_that_ends_by_a_failure():
    machine = ready(Limits(4, 1, 4), {"a": 2, "b": 2})
    assert act(machine, machine.ended(2.0, 1, succeeded=False), Interrupt) == [Interrupt((0, 2, 3), gone=(1,))]
    assert act(machine, machine.host_lost(2.0, "b"), Interrupt) == [Interrupt((0,), gone=(2, 3))]


def test_nobody_has_to_leave_while_the_job_finishes():
    machine = ready(Limits(3, 1, 3), {"a": 2, "b": 1})
    assert machine.ended(5.0, 0, succeeded=True) == []
    assert machine.host_leaves(6.0, "b") == []


def test_a_blamed_rank_that_asks_within_5_seconds_is_not_killed():
    machine = ready(Limits(2, 1, 2), {"a": 2})
    machine.asked(2.0, 0, 4, failed=True, lost=1)
    assert machine.time_passed(6.9) == []
    assert act(machine, machine.asked(6.95, 1, 4, failed=True), Form) == [Form(2, (0, 1), True)]
    assert machine.time_passed(20.0) == []


def test_a_blamed_rank_that_is_silent_is_killed_after_5_seconds():
    machine = ready(Limits(2, 1, 2), {"a": 2})
    machine.asked(2.0, 0, 4, failed=True, lost=1)
    assert machine.wakes_at() == 7.0
    assert act(machine, machine.time_passed(7.0), Kill) == [Kill(1, "others wait for it")]


def test_newcomers_are_gathered_for_5_seconds_while_others_load():
    machine = ready(Limits(1, 1, 3), {"a": 3})
    assert machine.asked(3.0, 1) == []
    assert machine.wakes_at() == 8.0
    assert machine.time_passed(7.9) == []
    assert machine.time_passed(8.0) == [Interrupt((0,))]


def test_newcomers_are_not_awaited_when_nobody_loads():
    machine = ready(Limits(1, 1, 3), {"a": 3})
    machine.asked(3.0, 1)
    assert machine.asked(4.0, 2) == [Interrupt((0,))]


def test_a_finished_rank_stops_all_starts_and_the_job_succeeds_with_the_last():
    machine = ready(Limits(2, 1, 3), {"a": 3})
    assert machine.ended(5.0, 0, succeeded=True) == []
    assert machine.asked(6.0, 2) == [Dismiss(2)]
    assert machine.ended(7.0, 1, succeeded=True) == [EndJob("")]


def test_a_rank_that_fails_while_others_finish_fails_the_job():
    machine = ready(Limits(2, 1, 2), {"a": 2})
    assert machine.ended(5.0, 0, succeeded=True) == []
    assert machine.ended(6.0, 1, succeeded=False) == [EndJob("a rank failed while others finished")]


def test_ranks_that_a_loss_kept_from_finishing_go_on_below_min_np():
    machine = ready(Limits(3, 3, 3), {"a": 3})
    machine.ended(5.0, 0, succeeded=True)
    machine.ended(5.0, 1, succeeded=False)
    assert act(machine, machine.asked(5.0, 2, 9, failed=True), Form) == [Form(2, (2,), True)]
    assert machine.ended(6.0, 2, succeeded=True) == [EndJob("")]


def test_too_few_ranks_end_the_job_after_the_elastic_timeout():
    machine = ready(Limits(2, 2, 2, seconds=60.0, hosts_may_change=True), {"a": 1, "b": 1})
    machine.host_lost(5.0, "b")
    machine.asked(6.0, 0, 4, failed=True)
    machine.hosts_found(7.0, {"a": 1})
    assert machine.time_passed(65.9) == []
    assert machine.wakes_at() == 66.0
    assert machine.time_passed(66.0) == [EndJob("only 1 of at least 2 ranks for 60 s")]


def test_the_first_generation_begins_below_np_after_the_elastic_timeout():
    machine = Membership(Limits(3, 2, 3, seconds=60.0, hosts_may_change=True))
    machine.hosts_found(0.0, {"a": 2})
    machine.asked(1.0, 0)
    machine.asked(1.0, 1)
    assert act(machine, machine.time_passed(59.9), Form) == []
    assert act(machine, machine.time_passed(60.0), Form) == [Form(1, (0, 1), True)]


def test_the_first_generation_begins_below_np_at_once_if_no_slot_is_left():
    machine = Membership(Limits(3, 2, 3))
    machine.hosts_found(0.0, {"a": 3})
    machine.asked(1.0, 0)
    machine.asked(1.0, 1)
    for number, now in ((2, 2.0), (3, 4.0), (4, 8.0)):
        assert not act(machine, machine.time_passed(now - 0.1), Form)
        actions = machine.ended(now, number, succeeded=False)
        machine.time_passed(now + 2.0)
    assert act(machine, actions, Form) == [Form(1, (0, 1), True)]


def test_the_reset_limit_counts_generations_after_the_first():
    machine = ready(Limits(2, 1, 2, resets=1), {"a": 2}, steps=3)
    machine.asked(3.0, 0, 5)
    assert machine.asked(3.0, 1, 5) == [EndJob("reset count 1 has exceeded limit 1")]


def test_a_process_that_is_not_ready_in_time_is_killed_and_another_slot_is_tried():
    machine = ready(Limits(1, 1, 2, seconds=60.0), {"a": 3})
    actions = machine.time_passed(61.0)
    assert actions == [Kill(1, "it was not ready within 60 s"), Start(2, ProcessSlot("a", 2))]


def test_a_dismissed_process_that_does_not_end_is_killed_after_30_seconds():
    machine = ready(Limits(2, 1, 2), {"a": 2}, steps=3)
    machine.hosts_found(3.0, {"a": 1})
    machine.asked(4.0, 0, 5)
    assert Dismiss(1) in machine.asked(4.0, 1, 5)
    assert machine.wakes_at() == 34.0
    assert machine.time_passed(34.0) == [Kill(1, "it did not end when it was dismissed")]


def test_spare_processes_are_dismissed_when_hosts_return():
    machine = ready(Limits(2, 1, 2, hosts_may_change=True), {"a": 2}, steps=3)
    machine.hosts_found(3.0, {"b": 2})
    machine.asked(4.0, 2)
    assert machine.hosts_found(5.0, {"a": 2, "b": 2}) == [Dismiss(2)]
    assert machine.asked(6.0, 3) == [Dismiss(3)]


def test_the_state_is_lost_with_the_last_rank_that_has_it():
    machine = ready(Limits(2, 1, 2, hosts_may_change=True), {"a": 2}, steps=3)
    machine.ended(4.0, 0, succeeded=False)
    assert machine.ended(4.0, 1, succeeded=False) == [EndJob("no rank with the state of the job is left")]


def test_an_early_end_of_a_rank_that_must_leave_does_not_finish_the_job():
    machine = ready(Limits(2, 1, 2, hosts_may_change=True), {"a": 1, "b": 1}, steps=3)
    machine.host_leaves(3.0, "b")
    machine.ended(4.0, 1, succeeded=True)
    actions = machine.asked(5.0, 0, 4, failed=True)
    assert act(machine, actions, Form) == [Form(3, (0,), True)]
    assert Start(2, ProcessSlot("c", 0)) in machine.hosts_found(6.0, {"a": 1, "c": 1})


def test_the_early_end_of_a_rank_is_not_blamed_on_newcomers():
    machine = ready(Limits(2, 1, 3, hosts_may_change=True), {"a": 1, "b": 1}, steps=3)
    machine.hosts_found(3.0, {"a": 1, "b": 1, "c": 1})
    machine.asked(4.0, 2)
    machine.asked(5.0, 0, 4)
    assert Form(3, (0, 1, 2), True) in machine.asked(5.0, 1, 4)
    machine.host_leaves(5.5, "b")
    machine.ended(6.0, 1, succeeded=True)
    machine.asked(7.0, 2, None, failed=True)
    actions = machine.asked(7.0, 0, 4, failed=True)
    assert act(machine, actions, Kill) == []
    assert act(machine, actions, Form) == [Form(4, (0, 2), True)]


def test_the_loss_of_a_host_is_no_failure_of_its_slots():
    machine = ready(Limits(2, 1, 2), {"a": 1, "b": 1}, steps=3)
    machine.host_lost(4.0, "b")
    assert act(machine, machine.asked(4.0, 0, 5, failed=True), Form) == [Form(3, (0,), True)]
    assert machine.wakes_at() == 14.0
    assert machine.time_passed(14.0) == [Start(2, ProcessSlot("b", 0))]
    machine.ended(15.0, 2, succeeded=False)
    assert machine.wakes_at() == 16.0


def test_the_early_end_of_the_last_rank_with_the_state_is_no_success_while_others_wait():
    machine = ready(Limits(1, 1, 2, hosts_may_change=True), {"a": 1, "b": 1}, steps=3)
    machine.asked(4.0, 1)
    assert Form(3, (0, 1), True) in machine.asked(5.0, 0, 4)
    machine.asked(6.0, 1, None, failed=True)
    machine.host_leaves(6.0, "a")
    assert machine.ended(7.0, 0, succeeded=True) == [EndJob("no rank with the state of the job is left")]


def test_a_process_that_asks_after_another_one_ended_without_asking_does_not_wait_for_it():
    machine = Membership(Limits(2, 2, 2, hosts_may_change=True))
    machine.hosts_found(0.0, {"a": 2})
    assert machine.ended(1.0, 0, succeeded=True) == []
    assert machine.asked(2.0, 1) == [Form(1, (1,), True)]


def test_a_newcomer_is_no_member_after_a_rank_has_succeeded():
    machine = ready(Limits(2, 1, 3), {"a": 3}, steps=3)
    machine.asked(4.0, 2)
    machine.asked(5.0, 0, 4, failed=True)
    assert machine.ended(6.0, 1, succeeded=True) == [Form(3, (0,), True), Dismiss(2)]


def test_a_rank_that_worked_for_long_forgives_its_slot_earlier_failures():
    machine = ready(Limits(2, 1, 2), {"a": 1, "b": 1}, steps=3)
    number, now, steps = 1, 10.0, 3
    for _ in range(5):
        steps += 5
        machine.ended(now, number, succeeded=False)
        machine.asked(now, 0, steps, failed=True)
        [start] = act(machine, machine.time_passed(now + 1.0), Start)
        number = start.worker
        machine.asked(now + 3.0, number)
        machine.asked(now + 4.0, 0, steps)
        now += 1000.0
    assert number == 6


def test_failures_ten_minutes_ago_are_forgotten_when_a_process_of_the_slot_asks_with_the_state():
    machine = ready(Limits(2, 1, 2), {"a": 1, "b": 1}, steps=3)
    machine.ended(10.0, 1, succeeded=False)
    machine.asked(10.0, 0, 5, failed=True)
    assert machine.time_passed(11.0) == [Start(2, ProcessSlot("b", 0))]
    machine.asked(12.0, 2)
    machine.asked(13.0, 0, 6)
    for now in (400.0, 700.0):
        machine.asked(now, 0, int(now), failed=True)
        machine.asked(now, 2, int(now), failed=True)
    machine.ended(705.0, 2, succeeded=False)
    machine.asked(705.0, 0, 705, failed=True)
    assert machine.wakes_at() == 706.0  # the pause after a first failure


@pytest.mark.parametrize(("least", "blames", "causes"), [(2, {}, None), (3, {}, [1, 2]), (2, {2: 1}, [2])])
def test_newcomers_join_host_by_host_if_the_others_are_enough_and_nobody_is_blamed(least, blames, causes):
    former = [
        ElasticWorker(number, ProcessSlot(host, 0), 0.0, Phase.WAITING, steps, generation=2)
        for number, (host, steps) in enumerate([("a", 5), ("b", None), ("c", None)])
    ]
    result = Newcomers(least).find_causes(former, has_trained=True, blames=blames)
    assert (result if result is None else [worker.number for worker in result]) == causes
    assert [worker.generation for worker in former] == ([2, 0, 0] if causes is None else [2, 2, 2])


def test_newcomers_do_not_join_host_by_host_where_min_np_needs_them_all():
    former = [
        ElasticWorker(number, ProcessSlot(host, number), 0.0, Phase.WAITING, steps, generation=2)
        for number, (host, steps) in enumerate([("a", 5), ("a", 5), ("b", None), ("c", None)])
    ]
    newcomers = Newcomers(3)
    assert newcomers.find_causes(former, has_trained=True, blames={}) is None
    assert newcomers.select(former, 3, has_trained=True) == former[:3]
    assert newcomers.select(former[1:], 3, has_trained=True) == former[1:]


def test_a_host_that_is_found_anew_has_no_history():
    slots = Slots(None)
    slots.found({"a": 1})
    for now in (1.0, 2.0, 3.0):
        slots.fail(ProcessSlot("a", 0), now)
    assert (slots.open(1e9, []), slots.next_opening(4.0)) == ([], math.inf)
    slots.found({})
    slots.found({"a": 1})
    assert slots.open(4.0, []) == [ProcessSlot("a", 0)]
    for now in (5.0, 6.0, 7.0):
        slots.lose_host("a", now)
    assert slots.open(1e9, []) == []
    slots.found({})
    slots.found({"a": 1})
    assert slots.open(8.0, []) == [ProcessSlot("a", 0)]


def test_a_cooldown_closes_the_whole_host_for_longer_each_time_and_never_overflows():
    slots = Slots((10.0, 60.0))
    slots.found({"a": 2, "b": 1})
    now, pauses = 100.0, []
    for _ in range(5000):
        slots.fail(ProcessSlot("a", 0), now)
        slots.fail(ProcessSlot("a", 1), now + 1.0)  # the same incident
        assert slots.open(now, []) == [ProcessSlot("b", 0)]
        pauses.append(slots.next_opening(now) - now)
        now = slots.next_opening(now)
        assert len(slots.open(now, [])) == 3
    assert pauses[:5] == [10.0, 20.0, 40.0, 60.0, 60.0]
    assert set(pauses[3:]) == {60.0}


def test_horovods_blacklist_closes_a_host_for_ever():
    slots = Slots((math.inf, math.inf))
    slots.found({"a": 2})
    slots.lose_host("a", 1.0)
    assert (slots.open(1e9, []), slots.next_opening(1.0)) == ([], math.inf)


# Random jobs


@pytest.mark.parametrize("first", range(0, 5000, 500))
def test_random_jobs_agree_with_the_truth(first):
    for seed in range(first, first + 500):
        RandomJob(seed).run()


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(5000, 100_000, 5000))
def test_more_random_jobs_agree_with_the_truth(first):
    for seed in range(first, first + 5000):
        RandomJob(seed).run()
