"""The state machine of elastic jobs, in a world of virtual time that has a truth of its own."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hvdkit.launch.elastic import membership
from hvdkit.launch.elastic.actions import Limits
from hvdkit.launch.elastic.membership import Membership
from hvdkit.launch.elastic.slots import ProcessSlot, Slots
from tests.launch.elastic_world import Plan, Proc, World

SEEDS = range(8)
TWO_HOSTS = {"a": 2, "b": 2}


def world(seed: int, *, start: int = 4, least: int = 1, most: int = 4, hosts=None, plan=None, **limits) -> World:
    return World(seed, Limits(start, least, most, **limits), hosts or TWO_HOSTS, plan or Plan())


def check_success(job: World) -> None:
    job.run(seconds=3600)
    assert job.reason == "", job.reason
    assert all(job.ends.get(number) for number in job.forms[-1].workers)
    assert job.newest == job.plan.steps


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_without_faults_has_one_generation(seed):
    job = world(seed)
    check_success(job)
    assert [form.workers for form in job.forms] == [(0, 1, 2, 3)]
    assert job.forms[0].needs_sync
    assert not job.killed_reasons


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_grows_from_np_to_max_np_in_one_generation(seed):
    job = world(seed, start=1, plan=Plan(steps=60))
    check_success(job)
    assert [len(form.workers) for form in job.forms] == [1, 4]
    assert job.forms[1].needs_sync  # three ranks lack the state


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_never_has_more_ranks_than_max_np(seed):
    job = world(seed, start=2, most=3)
    check_success(job)
    assert len(job.processes) == 3


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_rank_is_replaced_on_its_slot_after_a_pause(seed):
    job = world(seed, plan=Plan(steps=80))
    job.run(job.trains(4))
    lost = job.random.choice(job.training())
    at = job.now
    job.kill(lost)
    job.run(job.trains(3))
    assert len(job.forms) == 2
    job.run(job.trains(4))
    assert len(job.forms) == 3
    start = job.starts[4]
    assert start.slot == ProcessSlot(lost.host, lost.slot)
    assert len(job.starts) == 5
    assert job.now > at + 1
    check_success(job)
    assert set(job.killed_reasons) == set()


@pytest.mark.parametrize("seed", SEEDS)
def test_three_failures_close_a_slot_and_the_job_goes_on(seed):
    job = world(seed, plan=Plan(steps=400, load_seconds=(0.5, 1.0)))
    for _ in range(3):
        job.run(job.trains(4))
        [process] = [each for each in job.training() if (each.host, each.slot) == ("b", 1)]
        job.kill(process)
        steps = job.newest
        job.run(lambda steps=steps: job.newest > steps + 1)
    assert Counter(start.slot for start in job.starts)[ProcessSlot("b", 1)] == 3
    check_success(job)
    assert len(job.starts) == 6  # it was not started a fourth time
    assert len(job.forms[-1].workers) == 3


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_that_fails_on_every_rank_ends_the_job_after_three_failures(seed):
    job = world(seed, plan=Plan(fails_at_step=7))
    job.run(seconds=3600)
    assert job.reason == "3 failures after step 6: the data or the program is at fault"
    assert sum(not succeeded for succeeded in job.ends.values()) == 3


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_that_fails_before_it_is_ready_ends_the_job_soon(seed):
    job = world(seed, plan=Plan(fails_while_loading=lambda process: True))
    job.run(seconds=3600)
    assert job.reason == "3 processes failed before any of them was ready"
    assert job.now < 10


@pytest.mark.parametrize("seed", SEEDS)
def test_a_host_where_no_process_becomes_ready_does_not_end_the_job(seed):
    plan = Plan(steps=200, load_seconds=(0.5, 1.0), fails_while_loading=lambda process: process.host == "b")
    job = world(seed, start=2, plan=plan)
    check_success(job)
    assert Counter(start.slot.host for start in job.starts) == {"a": 2, "b": 6}  # three times in each slot


@pytest.mark.parametrize("seed", SEEDS)
def test_a_host_that_the_others_cannot_connect_does_not_end_the_job(seed):
    job = world(seed, start=2, plan=Plan(steps=300, unreachable={"b"}, load_seconds=(0.5, 1.0)))
    check_success(job)
    assert {job.processes[number].host for number in job.forms[-1].workers} == {"a"}
    assert set(job.killed_reasons.values()) == {"it could not connect to the others"}
    assert {job.processes[number].host for number in job.killed_reasons} == {"b"}


@pytest.mark.parametrize("seed", SEEDS)
def test_when_all_hosts_are_replaced_new_ranks_join_before_the_old_ones_leave(seed):
    job = world(seed, start=2, least=2, most=2, hosts={"a": 2}, plan=Plan(steps=60), hosts_may_change=True)
    job.run(job.trains(2))
    job.find({"b": 2})
    job.run(lambda: len(job.forms) == 2 and job.trains(len(job.members()))())
    hosts = [job.processes[number].host for number in job.forms[1].workers]
    assert "a" in hosts
    assert "b" in hosts
    check_success(job)
    assert {job.processes[number].host for number in job.forms[-1].workers} == {"b"}
    assert all(job.ends.values())  # they left with success


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_of_a_host_that_is_not_listed_any_more_leave_and_come_back_with_it(seed):
    job = world(seed, plan=Plan(steps=150), hosts_may_change=True)
    job.run(job.trains(4))
    job.find({"a": 2})
    job.run(job.trains(2))
    assert not job.forms[-1].needs_sync  # the ranks that are left hold the same state
    job.find(TWO_HOSTS)
    job.run(job.trains(4))
    check_success(job)
    assert not job.killed_reasons


@pytest.mark.parametrize("hosts", [{}, {"a": 1}], ids=["none", "one slot"])
def test_ranks_stay_where_the_others_would_be_too_few(hosts):
    job = world(1, least=2, plan=Plan(steps=40), hosts_may_change=True)
    job.run(job.trains(4))
    job.find(hosts)
    check_success(job)
    assert len(job.forms[-1].workers) >= 2


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lost_host_costs_its_ranks_alone_and_is_tried_again(seed):
    job = world(seed, plan=Plan(steps=200))
    job.run(job.trains(4))
    job.lose_host("b")
    at = job.now
    job.run(job.trains(2))
    job.run(job.trains(4))
    assert job.now > at + 10
    check_success(job)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_member_that_is_stopped_is_killed_and_replaced(seed):
    job = world(seed, plan=Plan(steps=100))
    job.run(job.trains(4))
    stopped = job.training()[seed % 4]
    job.stop(stopped)
    at = job.now
    job.run(job.trains(3))
    assert job.now < at + 12
    assert set(job.killed_reasons) == {stopped.number}
    check_success(job)


def test_too_few_ranks_end_the_job_after_the_timeout():
    job = world(1, least=3, hosts={"a": 2}, seconds=100, hosts_may_change=True)
    job.run(seconds=3600)
    assert job.reason == "only 2 of at least 3 ranks for 100 s"
    assert job.now == 100


def test_a_job_begins_with_fewer_ranks_than_np_after_the_timeout():
    job = world(1, least=2, hosts={"a": 2}, seconds=50, hosts_may_change=True)
    check_success(job)
    assert job.form_times[0] == 50


def test_a_process_that_hangs_while_it_loads_is_killed_and_its_slot_closed():
    plan = Plan(steps=600, hangs_while_loading=lambda process: (process.host, process.slot) == ("b", 1))
    job = world(1, start=3, seconds=20, plan=plan)
    check_success(job)
    assert Counter(start.slot for start in job.starts)[ProcessSlot("b", 1)] == 3
    assert set(job.killed_reasons.values()) == {"it was not ready within 20 s"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_whose_ranks_are_all_lost_ends(seed):
    job = world(seed)
    job.run(job.trains(4))
    for process in job.training():
        job.kill(process)
    job.run(seconds=3600)
    assert job.reason == "no rank with the state of the job is left"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_newcomer_that_never_got_the_state_does_not_stand_for_it(seed):
    """The holders die while a newcomer receives the state: a job that went on would begin from nothing."""
    job = world(seed, start=1, most=2, hosts={"a": 2}, plan=Plan(steps=60))
    job.run(job.trains(1))
    job.run(lambda: len(job.forms) == 2)
    [holder] = [process for process in job.members() if process.steps is not None]
    job.kill(holder)
    job.run(seconds=3600)
    assert job.reason == "no rank with the state of the job is left"


def ask_all(machine: Membership, now: float, numbers, **report) -> list:
    return [action for number in numbers for action in machine.asked(now, number, **report)]


def started(start: int = 2, least: int = 1, most: int = 2, **limits) -> Membership:
    """Return a machine whose first generation of ``start`` ranks trains on one host."""
    machine = Membership(Limits(start, least, most, **limits))
    machine.hosts_found(0.0, {"a": most})
    ask_all(machine, 1.0, range(start))
    return machine


def kinds(actions: list) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_after_the_first_success_nobody_is_started_and_a_failure_of_the_last_rank_is_that_of_the_job():
    machine = started()
    assert machine.ended(2.0, 0, succeeded=True) == []
    actions = machine.ended(3.0, 1, succeeded=False)
    assert kinds(actions) == ["EndJob"]
    assert actions[0].reason == "a rank failed while others finished"


def test_a_rank_that_fails_while_others_finish_may_be_replaced_by_those_that_are_left():
    machine = started(3, most=3)
    machine.ended(2.0, 0, succeeded=True)
    machine.ended(2.0, 1, succeeded=False)
    actions = machine.asked(2.1, 2, steps=5, failed=True)
    assert kinds(actions) == ["Form"]
    assert actions[0].workers == (2,)
    assert machine.ended(3.0, 2, succeeded=True)[-1].reason == ""


def test_newcomers_are_dismissed_once_a_rank_has_succeeded():
    machine = started(1, most=2)
    machine.ended(2.0, 0, succeeded=False)  # nothing is left: the job ends
    machine = started(2, most=3)
    machine.ended(2.0, 0, succeeded=True)
    actions = machine.asked(3.0, 2)
    assert kinds(actions) == ["Dismiss"]
    assert machine.ended(3.5, 2, succeeded=False) == []  # its end tells nothing
    assert machine.ended(4.0, 1, succeeded=True)[-1].reason == ""


def test_a_newcomer_that_waits_when_a_rank_succeeds_is_no_member_any_more():
    machine = started(2, most=3)
    machine.asked(2.0, 2)
    machine.asked(2.1, 1, steps=4)
    actions = machine.ended(2.2, 0, succeeded=True)
    assert [action.workers for action in actions if kinds([action]) == ["Form"]] == [(1,)]
    assert [action.worker for action in actions if kinds([action]) == ["Dismiss"]] == [2]


def test_ranks_that_finish_may_be_fewer_than_min_np():
    machine = started(3, least=3, most=3)
    machine.ended(2.0, 0, succeeded=True)
    assert machine.asked(2.0, 1, steps=4, failed=True)[0].workers == (2,)  # an interrupt, also while others finish
    actions = machine.ended(2.1, 2, succeeded=False)
    assert [(type(action).__name__, action.workers) for action in actions] == [("Form", (1,))]


def test_nobody_has_to_leave_while_the_job_finishes():
    machine = Membership(Limits(3, 1, 3))
    machine.hosts_found(0.0, {"a": 1, "b": 1, "c": 1})
    ask_all(machine, 1.0, range(3))
    machine.ended(2.0, 0, succeeded=True)
    assert machine.hosts_found(2.5, {"a": 1, "c": 1}) == []


def test_a_newcomer_whose_host_has_gone_is_dismissed():
    machine = Membership(Limits(1, 1, 2))
    machine.hosts_found(0.0, {"a": 1, "b": 1})
    assert kinds(machine.asked(1.0, 0)) == ["Form", "Start"]
    machine.hosts_found(1.5, {"a": 1})
    assert [(type(action).__name__, action.worker) for action in machine.asked(2.0, 1)] == [("Dismiss", 1)]


def test_nothing_is_started_on_a_host_that_will_be_taken_away():
    machine = Membership(Limits(1, 1, 2))
    machine.hosts_found(0.0, {"a": 1, "b": 1})
    machine.host_leaves(0.5, "b")
    assert kinds(machine.asked(1.0, 0)) == ["Form"]
    machine.hosts_found(2.0, {"a": 1})
    assert kinds(machine.hosts_found(3.0, {"a": 1, "b": 1})) == ["Start"]  # it has come back


def test_of_several_newcomers_only_those_are_dropped_that_most_ranks_miss():
    machine = Membership(Limits(1, 1, 3))
    machine.hosts_found(0.0, {"a": 1, "b": 1, "c": 1})
    machine.asked(1.0, 0)
    ask_all(machine, 2.0, [1, 2])
    assert kinds(machine.asked(2.5, 0, steps=9)) == ["Form"]
    for number, lost in ((0, 2), (2, 1)):
        machine.asked(3.0, number, steps=9 if number == 0 else None, failed=True, lost=lost)
    actions = machine.asked(3.0, 1, failed=True, lost=2)
    assert [action.worker for action in actions if kinds([action]) == ["Kill"]] == [2]
    assert [action.workers for action in actions if kinds([action]) == ["Form"]] == [(0, 1)]


def test_the_ask_of_a_member_that_is_being_killed_counts_no_more():
    machine = started()
    machine.asked(2.0, 0, steps=3, failed=True, lost=1)
    assert kinds(machine.time_passed(8.0)) == ["Kill"]
    assert machine.asked(8.1, 1, steps=3, failed=True) == []
    assert machine.ended(8.2, 1, succeeded=False)[0].workers == (0,)


def test_a_job_with_too_few_ranks_does_not_wait_where_no_slot_will_open():
    machine, now, number = started(2, least=2), 2.0, 1
    for failures in range(3):
        actions = machine.ended(now, number, succeeded=False)
        if failures == 2:
            break
        machine.asked(now + 0.1, 0, steps=int(now), failed=True)
        now = machine.wakes_at()
        actions = machine.time_passed(now)
        assert kinds(actions) == ["Start"]
        number = actions[0].worker
        machine.asked(now + 1, number)
        now += 30
    actions = machine.asked(now + 0.1, 0, steps=int(now), failed=True)
    assert actions[-1].reason == "only 1 of at least 2 ranks, and no slot in which another may be started"


def test_a_dismissed_process_that_does_not_end_is_killed():
    machine = started(2, most=3)
    machine.ended(2.0, 0, succeeded=True)
    machine.asked(3.0, 2)
    assert machine.wakes_at() == 3.0 + membership.ENDING_SECONDS
    actions = machine.time_passed(machine.wakes_at())
    assert [(type(action).__name__, action.worker) for action in actions] == [("Kill", 2)]
    assert machine.time_passed(100.0) == []  # once


def test_a_script_that_never_asks_succeeds_if_all_its_processes_do():
    for last, reason in ((True, ""), (False, "a rank failed while others finished")):
        machine = Membership(Limits(2, 1, 2))
        machine.hosts_found(0.0, {"a": 2})
        assert machine.ended(1.0, 0, succeeded=True) == []
        assert machine.ended(2.0, 1, succeeded=last)[-1].reason == reason


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_the_reset_limit_counts_generations_after_the_first(limit):
    machine = started(4, least=1, most=4, resets=limit)
    now, number = 2.0, 0
    while True:
        machine.ended(now, number, succeeded=False)
        number += 1
        actions = ask_all(machine, now + 0.1, range(number, 4), steps=int(now), failed=True)
        now += 0.5
        if "EndJob" in kinds(actions):
            break
    assert number == limit + 1
    assert actions[-1].reason == f"reset count {limit} has exceeded limit {limit}"


def test_a_blamed_member_that_asks_itself_is_not_killed():
    machine = started()
    machine.asked(2.0, 0, steps=3, failed=True, lost=1)
    assert machine.wakes_at() == 2.0 + membership.BLAMED_SECONDS
    actions = machine.asked(3.0, 1, steps=3, failed=True)
    assert kinds(actions) == ["Form"]
    assert kinds(machine.time_passed(60.0)) == []


def test_the_ask_of_a_member_interrupts_the_others():
    machine = started(3, most=3)
    actions = machine.asked(2.0, 1, steps=3)
    assert [(type(action).__name__, action.workers) for action in actions] == [("Interrupt", (0, 2))]
    assert machine.asked(2.1, 0, steps=3) == []  # once


def test_rank_0_has_the_newest_state_and_a_host_s_ranks_are_neighbours():
    machine = Membership(Limits(4, 1, 4))
    machine.hosts_found(0.0, {"a": 2, "b": 2})
    ask_all(machine, 1.0, range(4))
    for number, steps in ((0, 4), (1, 4), (2, 4)):
        machine.asked(2.0, number, steps=steps, failed=True)
    actions = machine.asked(2.0, 3, steps=5, failed=True)
    assert actions[0].workers == (3, 2, 0, 1)
    assert actions[0].needs_sync


def test_a_cool_down_closes_the_whole_host_once_for_an_incident_and_twice_as_long_the_next_time():
    slots = Slots((10.0, 35.0))
    slots.found({"a": 2, "b": 1})
    now, opens = 0.0, []
    for _ in range(2000):
        for number in (0, 1):
            slots.fail(ProcessSlot("a", number), now)
        assert slots.open(now, []) == [ProcessSlot("b", 0)]
        opens.append(slots.next_opening(now) - now)
        now = slots.next_opening(now)
        assert len(slots.open(now, [])) == 3
    assert opens[:4] == [10.0, 20.0, 35.0, 35.0]
    assert max(opens) == 35.0


def test_slots_pause_longer_after_each_failure_and_forget_old_failures_after_a_success():
    slots, slot = Slots(None), ProcessSlot("a", 0)
    slots.found({"a": 1})
    slots.fail(slot, 0.0)
    assert slots.next_opening(0.0) == 1.0
    slots.fail(slot, 100.0)
    assert slots.next_opening(100.0) == 102.0
    slots.succeed(slot, 650.0)  # the first failure is more than ten minutes ago
    slots.fail(slot, 660.0)
    assert slots.next_opening(660.0) == 662.0
    slots.fail(slot, 670.0)
    assert slots.open(1e9, []) == []
    slots.found({})
    slots.found({"a": 1})  # a host that comes back has no history
    assert slots.open(671.0, []) == [slot]
    for now in (700.0, 800.0, 900.0):
        slots.lose_host("a", now)
    assert slots.open(1e9, []) == []
    slots.found({})
    slots.found({"a": 1})
    assert slots.open(901.0, []) == [slot]


def random_fault(job: World, choose: random.Random) -> None:
    """Do harm to a job that trains, or change its hosts."""
    alive = job.alive()
    fault = choose.choice(["kill", "kill", "stop", "host", "hosts", "warn", "flap", "several", "none"])
    if fault in ("kill", "stop", "several") and alive:
        for process in choose.sample(alive, min(len(alive), choose.randrange(1, 4) if fault == "several" else 1)):
            (job.stop if fault == "stop" else job.kill)(process)
    elif fault == "host":
        job.lose_host(choose.choice(["a", "b", "c"]))
    elif fault == "hosts":
        job.find({host: choose.randrange(1, 4) for host in "abc" if choose.random() < 0.7})
    elif fault == "warn":
        job.warn(choose.choice("abc"))
    elif fault == "flap":
        hosts = job.hosts
        job.find({})
        job.find(hosts)


def run_with_faults(seed: int) -> World:
    choose = random.Random(seed)
    most = choose.randrange(1, 6)
    start = choose.randrange(1, most + 1)
    limits = Limits(
        start, choose.randrange(1, start + 1), most, choose.choice([30.0, 600.0]),
        cooldown=choose.choice([None, None, (1.0, 8.0)]), hosts_may_change=True,
    )  # fmt: skip
    plan = Plan(
        steps=choose.randrange(1, 60),
        unreachable=set(choose.choice(["", "", "c"])),
        fails_at_step=choose.choice([None, None, None, 5]),
        fails_while_loading=lambda process: choose.random() < 0.05,
        hangs_while_loading=lambda process: choose.random() < 0.03,
    )
    job = World(seed, limits, {"a": 2, "b": 2, "c": 1}, plan)
    for _ in range(choose.randrange(12)):
        job.run(seconds=choose.choice([0.05, 0.5, 3.0, 20.0]))
        if job.reason is not None:
            break
        random_fault(job, choose)
    if job.reason is None:
        job.find({"a": 3, "b": 3, "d": 3})
    job.run(seconds=20_000)
    return job


def check_verdict(job: World, seed: int) -> None:
    """Check that the job has ended, and that its reason is true."""
    if job.reason is None:  # a stopped rank that nobody is left to miss looks as one that computes
        assert any(process.is_stopped for process in job.alive() if process in job.members()), "it goes on for ever"
        return
    reason = job.reason
    last = job.forms[-1].workers if job.forms else ()
    if reason == "":
        assert last, seed
        assert [job.ends.get(number) for number in last] == [True] * len(last), seed
        assert job.newest == job.plan.steps, f"seed {seed}: {job.newest}"
    elif reason == "no rank with the state of the job is left":
        left = [
            each for each in job.alive() if each.steps is not None and not each.is_stopped and not each.is_dismissed
        ]
        assert not [each for each in left if each.number in last or each.asked_at is not None], f"seed {seed}: {left}"
    elif "cannot connect" in reason:
        assert any(job.processes[number].host in job.plan.unreachable for number in last), seed
    elif "failures" in reason:
        # A generation that could not connect counts too.
        assert sum(not succeeded for succeeded in job.ends.values()) >= 3 or job.plan.unreachable, seed
    elif reason.startswith("only "):
        assert job.now - (job.form_times[-1] if job.forms else 0.0) >= job.limits.seconds, seed
    else:
        assert reason in (
            "a rank failed while others finished",
            f"{reason.split()[0]} processes failed before any of them was ready",
        ), reason
    healthy = [number for number in job.killed_reasons if number not in job.harmed]
    allowed = "it could not connect", "it was not ready within", "it was dismissed"
    for number in healthy:
        process: Proc = job.processes[number]
        is_allowed = job.killed_reasons[number].startswith(allowed) or process.host in job.plan.unreachable
        assert is_allowed, f"seed {seed}: {process} was killed: {job.killed_reasons[number]}"


@pytest.mark.parametrize(
    "seeds", [[*range(3000), 45522], pytest.param(range(3000, 100_000), marks=pytest.mark.thorough)]
)
def test_whatever_happens_a_job_ends_with_a_true_verdict(seeds):
    reasons: Counter[str] = Counter()
    for seed in seeds:
        try:
            job = run_with_faults(seed)
            check_verdict(job, seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        reasons[(job.reason or "success").translate(str.maketrans("", "", "0123456789."))] += 1
    assert reasons["success"] > len(seeds) / 4, reasons
    assert len(reasons) >= 4, reasons
