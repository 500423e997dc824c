#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only
"""The guest driver on a real kernel, without a VMM.

What has to hold: a host whose registers make no sense is refused, with a
message that says which check failed; requests reach the register of the
policy's CPU with every governor; the scheduler sees the speed that cur_perf
tells; a policy's maximum is what the host allows; hotplug, suspend and removal
withdraw requests and leave the system as it was; a second load works; an
energy model is there if and only if the device tree's OPPs are the host's
levels; whatever a host tells, and when, is bounded.

usage: test_driver.py [--x86_64 | --served SOCKET] KERNEL FOLDER MODULE.ko [FAKEHOST.ko FREQ_SCALE.ko]
Both options take a kernel for x86-64. The real server waits at SOCKET. FOLDER is for the
guest's memory and images, emptied afterwards. Needs dtc, cpio, and of the guest's architecture
a qemu-system and a static busybox, at the path that guest.py has.
"""

import re
import sys
import time
import traceback

import pci_device
import served
import tree_memory
from checks import (CPUFREQ, MAX, busy, expect, expect_calm, expect_said, expect_speed, governor,
                    has_model, suspend, until)
from guest import (CPUS, CUR_PERF, PERF_DOMAIN, PERFTBL_LEN, PERFTBL_RD, REGS_BASE, SET_PERF,
                   STRIDE, Guest)

FAKE = "/sys/module/vcpufreq_fakehost/parameters"
# VCPUFREQ_FEATURE_...
ANY_CPU, PERF_CAP, CEILING, SHARED_PAGES = 1, 2, 4, 8

# Page, bytes of the region, registers of each CPU, the driver's message.
# A register that isn't given is 0, but perf_domain is the CPU's number.
WRONG_HOSTS = [
    (0x10, 0x1000, {}, "register region has 0x0*1000 bytes, 3 CPUs need 0x0*3000"),
    (0x20, 0x3000, {PERFTBL_LEN: 0}, "CPU0: performance table has 0 entries, expected 1 to 64"),
    (0x30, 0x3000, {PERFTBL_LEN: 65, PERFTBL_RD: 1}, "CPU0: performance table has 65 entries"),
    (0x40, 0x3000, {PERFTBL_LEN: 2**32 - 1}, "CPU0: performance table has 4294967295 entries"),
    (0x50, 0x3000, {PERFTBL_LEN: 1}, "CPU0: performance table entry 0 is 0"),
    (0x60, 0x3000, {PERFTBL_LEN: 1, PERFTBL_RD: 2**32 - 1},
     "CPU0: performance table entry 0 is 4294967295, above 4294967293"),
    (0x70, 0x3000, {PERFTBL_LEN: 2, PERFTBL_RD: MAX},
     "CPU0: performance table entry 1 is 2000000, not above entry 0, which is 2000000"),
]
MISMATCH = 0x80
GOOD = 0x90
OPPS = """
    / {{ opps: opp-table {{ compatible = "operating-points-v2"; {opps} }}; }};
    &{{/cpus/cpu@0}} {{ operating-points-v2 = <&opps>; }};
    &{{/cpus/cpu@1}} {{ operating-points-v2 = <&opps>; }};
    &{{/cpus/cpu@2}} {{ operating-points-v2 = <&opps>; }};
"""


def node(page, size):
    base = REGS_BASE + page * STRIDE
    return f"""/ {{ cpufreq@{base:x} {{
        compatible = "qemu,virtual-cpufreq"; reg = <0 {base:#x} 0 {size:#x}>; }}; }};"""


def opps(power):
    """An OPP table from {khz: µW}; a power of 0 is left out."""
    text = ""
    for khz, uw in power.items():
        microwatt = f"opp-microwatt = <{uw}>;" if uw else ""
        text += f"""opp-{khz} {{ opp-hz = /bits/ 64 <{khz * 1000}>;
            opp-microvolt = <800000>; {microwatt} }};"""
    return OPPS.format(opps=text)


def fill(guest, page, registers):
    for cpu in range(CPUS):
        for register, value in {PERF_DOMAIN: cpu, **registers}.items():
            guest.page(page + cpu)[register] = value


def good_host(guest):
    fill(guest, GOOD, {PERFTBL_LEN: 1, PERFTBL_RD: MAX, CUR_PERF: MAX})


def set_perf(guest, cpu):
    return guest.page(GOOD + cpu)[SET_PERF]


def wrong_hosts_are_refused(args):
    nodes = "".join(node(page, size) for page, size, _, _ in WRONG_HOSTS)
    nodes += node(MISMATCH, 0x3000)
    nodes += f"""/ {{ cpufreq-none {{ compatible = "qemu,virtual-cpufreq"; }};
        cpufreq-odd {{ compatible = "qemu,virtual-cpufreq";
            reg = <0 {REGS_BASE + 0xA0800:#x} 0 0x3000>; }}; }};"""
    with Guest(args.kernel, args.modules, args.folder, nodes) as guest:
        for page, _, registers, _ in WRONG_HOSTS:
            fill(guest, page, registers)
        fill(guest, MISMATCH, {PERFTBL_LEN: 1, PERFTBL_RD: MAX, PERF_DOMAIN: 7})
        guest.page(MISMATCH + 2)[PERFTBL_RD] = MAX + 1
        guest.run("busybox insmod /vcpufreq_guest.ko")
        log = expect_calm(guest)
        for page, _, _, text in WRONG_HOSTS:
            expect_said(log, f"{REGS_BASE + page * STRIDE:x}.cpufreq: error -EINVAL: {text}")
        expect_said(log, "domain 7: performance table entry 0 is 2000000 for CPU0, 2000001 for CPU2")
        expect_said(log, "cpufreq-none: error -EINVAL: cannot map the register region")
        expect_said(log, "register region at 0x0*4f0a0800 isn't aligned to 4096")
        expect("policies", guest.run(f"echo {CPUFREQ}/*"), f"{CPUFREQ}/*")
        guest.run("busybox rmmod vcpufreq_guest")
        expect_calm(guest)


def requests_and_speed_without_table(args):
    with Guest(args.kernel, args.modules, args.folder, node(GOOD, 0x3000) + node(0xB0, 0x3000)) as guest:
        good_host(guest)
        fill(guest, 0xB0, {PERFTBL_LEN: 1, PERFTBL_RD: MAX})
        guest.run("busybox insmod /vcpufreq_guest.ko")
        log = expect_calm(guest)
        expect_said(log, "4f0b0000.cpufreq: error -EEXIST: the cpufreq driver vcpufreq-guest is in use")
        # The performance governor asks once, so the first request must get through.
        expect("first requests", [set_perf(guest, cpu) for cpu in range(CPUS)], [MAX] * CPUS)
        governors(guest)
        speed(guest)
        hotplug(guest)
        suspend(guest, lambda cpu: set_perf(guest, cpu))
        removal(guest)
        expect_calm(guest)


def governors(guest):
    for cpu in range(CPUS):
        governor(guest, cpu, "performance")
        until("performance asks for the maximum", lambda: set_perf(guest, cpu) == MAX)
    limits = f"{CPUFREQ}/policy1"
    governor(guest, 1, "performance")
    guest.run(f"echo 777777 > {limits}/scaling_max_freq")
    until("request at the limit", lambda: set_perf(guest, 1) == 777777)
    guest.run(f"echo {MAX} > {limits}/scaling_max_freq")
    until("request without limit", lambda: set_perf(guest, 1) == MAX)
    expect("least", guest.run(f"busybox cat {limits}/cpuinfo_min_freq"), "1")
    governor(guest, 2, "schedutil")
    busy(guest, 2)
    until("schedutil slows down when idle", lambda: set_perf(guest, 2) < MAX)
    guest.page(GOOD)[CUR_PERF] = 123456
    expect("host_cur_freq", guest.run(f"busybox cat {CPUFREQ}/policy0/host_cur_freq"), "123456")
    guest.page(GOOD)[CUR_PERF] = MAX


def speed(guest):
    for khz, share in [(MAX // 2, 0.5), (MAX // 4, 0.25), (2**32 - 1, 1), (MAX // 4, 0.25)]:
        guest.page(GOOD + 1)[CUR_PERF] = khz
        expect_speed(guest, 1, share)
    # 0 is no answer: the last one stays in force.
    guest.page(GOOD + 1)[CUR_PERF] = 0
    expect_speed(guest, 1, 0.25)


def hotplug(guest):
    for cpu in (1, 2):
        governor(guest, cpu, "performance")
        expect("before", set_perf(guest, cpu), MAX)
        guest.run(f"echo 0 > /sys/devices/system/cpu/cpu{cpu}/online")
        expect("withdrawn when offline", set_perf(guest, cpu), 0)
        guest.run(f"echo 1 > /sys/devices/system/cpu/cpu{cpu}/online")
        expect("renewed when online", set_perf(guest, cpu), MAX)


def removal(guest):
    guest.page(GOOD + 1)[CUR_PERF] = MAX // 4
    for _ in range(2):
        guest.run("busybox rmmod vcpufreq_guest")
        expect("requests", [set_perf(guest, cpu) for cpu in range(CPUS)], [0] * CPUS)
        expect("no policy", guest.fails(f"busybox ls -d {CPUFREQ}/policy*"), True)
        expect_speed(guest, 1, 1)
        guest.run("busybox insmod /vcpufreq_guest.ko")
        expect_speed(guest, 1, 0.25)
    guest.run("echo 0 > /sys/devices/system/cpu/cpu2/online")
    guest.run("busybox rmmod vcpufreq_guest")
    guest.run("echo 1 > /sys/devices/system/cpu/cpu2/online")
    expect_speed(guest, 1, 1)


def energy_model_without_table(args):
    """OPPs up to the host's highest level; then a host with another one."""
    tree = node(GOOD, 0x3000) + opps({1_000_000: 100_000, MAX: 400_000})
    with Guest(args.kernel, args.modules, args.folder, tree) as guest:
        good_host(guest)
        for _ in range(2):
            guest.run("busybox insmod /vcpufreq_guest.ko")
            expect("energy models", [has_model(guest, cpu) for cpu in range(CPUS)], [True] * CPUS)
            guest.run("busybox rmmod vcpufreq_guest")
            expect("OPPs left", guest.run("busybox ls /sys/kernel/debug/opp"), "")
            expect("no word of it", "energy model" in expect_calm(guest), False)
        fill(guest, GOOD, {PERFTBL_RD: MAX + 1000})
        guest.run("busybox insmod /vcpufreq_guest.ko")
        log = expect_calm(guest)
        expect_said(log, "cpu0: no energy model: its highest OPP is 2000000 kHz, "
                         "the host's highest level 2001000 kHz")
        expect_said(log, "cpu0: the energy model registered earlier has other CPUs or frequencies")


def opps_that_are_of_no_use(args):
    """Without power, and with other frequencies than the host's table."""
    table = "table_khz=600000,1000000,2000000 domain=0,0,1"
    with Guest(args.kernel, args.modules, args.folder, opps({600_000: 0, 1_000_000: 0, MAX: 0})) as guest:
        guest.run(f"busybox insmod /vcpufreq_fakehost.ko {table}")
        expect("energy model", has_model(guest, 0), False)
        expect_said(expect_calm(guest), "cpu0: no energy model: -EINVAL; it needs opp-microwatt")
    for power, text in [
        ({600_000: 1000, MAX: 4000}, "cpu0: no energy model: it has 2 OPPs, the host 3 levels"),
        ({600_000: 1000, 1_100_000: 2000, MAX: 4000},
         "cpu0: no energy model: no OPP has the host's level 1000000 kHz"),
    ]:
        with Guest(args.kernel, args.modules, args.folder, opps(power)) as guest:
            guest.run(f"busybox insmod /vcpufreq_fakehost.ko {table}")
            expect("energy model", has_model(guest, 0), False)
            expect_said(expect_calm(guest), text)


def fake(guest, parameter):
    values = guest.run(f"busybox cat {FAKE}/{parameter}").split(",")
    return [int(value) for value in values]


def tables_and_domains(args):
    """A table with a level that costs more than the next: it has to be skipped."""
    tree = opps({600_000: 400_000, 1_000_000: 410_000, MAX: 2_000_000})
    table = "table_khz=600000,1000000,2000000"
    with Guest(args.kernel, args.modules, args.folder, tree) as guest:
        expect("one table entry less for CPU1",
               guest.fails(f"busybox insmod /vcpufreq_fakehost.ko {table} domain=0,0,1 short_cpu=1"),
               True)
        expect_said(expect_calm(guest),
                    "domain 0: CPU0 has 3 performance levels, CPU1 has 2")
        for features in (0, ANY_CPU | PERF_CAP | CEILING):
            guest.run(f"busybox insmod /vcpufreq_fakehost.ko {table} domain=0,0,1 "
                      f"cur_khz=2000000,2000000,2000000 features={features}")
            two_policies(guest)
            if features:
                inefficient_level(guest)
                domain_hotplug(guest)
            moved_tasks(guest, features & ANY_CPU > 0)
            outside = fake(guest, "asked_outside")[0]
            expect("written from outside of the domain", outside > 0, features & ANY_CPU > 0)
            ceilings(guest, features & CEILING > 0)
            caps(guest, features & PERF_CAP > 0)
            guest.run("busybox rmmod vcpufreq_fakehost")
            expect_calm(guest)


def two_policies(guest):
    expect("policies", guest.run(f"echo {CPUFREQ}/policy*"), f"{CPUFREQ}/policy0 {CPUFREQ}/policy2")
    expect("CPUs", guest.run(f"busybox cat {CPUFREQ}/policy0/related_cpus"), "0 1")
    expect("levels", guest.run(f"busybox cat {CPUFREQ}/policy0/scaling_available_frequencies"),
           "600000 1000000 2000000")
    expect("energy model", guest.run("busybox cat /sys/kernel/debug/energy_model/cpu0/cpus"), "0-1")
    # Each governor, set by a program on a CPU of the other policy.
    for name in ("schedutil", "performance"):
        guest.run(f"busybox taskset 4 sh -c 'echo {name} > {CPUFREQ}/policy0/scaling_governor'")
    expect("asked", fake(guest, "asked_khz")[0], MAX)
    for limit, level in [(1_500_000, 1_000_000), (600_000, 600_000), (MAX, MAX)]:
        guest.run(f"busybox taskset 4 sh -c 'echo {limit} > {CPUFREQ}/policy0/scaling_max_freq'")
        until(f"{level} kHz asked", lambda: fake(guest, "asked_khz")[0] == level)
    total = int(guest.run(f"busybox cat {CPUFREQ}/policy0/stats/total_trans"))
    expect("transitions counted", total >= 3, True)
    guest.run(f"echo 1 > {CPUFREQ}/policy0/stats/reset")


def inefficient_level(guest):
    governor(guest, 0, "schedutil")
    guest.run(f"echo {MAX},{MAX},{MAX} > {FAKE}/asked_least_khz")
    busy(guest, 0)
    guest.run("busybox sleep 1")
    expect("least that schedutil asks for", fake(guest, "asked_least_khz")[0], 1_000_000)


def moved_tasks(guest, any_cpu):
    """A busy task goes to the other policy's CPU: the CPU that it leaves moves it. Where that CPU may
    request for the other, it does at some move or other."""
    governor(guest, 0, "schedutil")
    governor(guest, 2, "schedutil")
    for _ in range(50 if any_cpu else 3):
        guest.run("busybox taskset 1 busybox sh -c 'while :; do :; done' & echo $! > /pid; "
                  "busybox sleep 0.1")
        guest.run("busybox taskset -p 4 $(busybox cat /pid)")
        guest.run("busybox sleep 0.1; kill $(busybox cat /pid)")
        if any_cpu and fake(guest, "asked_outside")[0] > 0:
            break


def domain_hotplug(guest):
    """The policy's CPU goes: the next request is in the other one's register."""
    governor(guest, 0, "performance")
    expect("asked by the policy's CPU alone", fake(guest, "asked_khz")[:2], [MAX, 0])
    guest.run("echo 0 > /sys/devices/system/cpu/cpu0/online")
    expect("CPUs", guest.run(f"busybox cat {CPUFREQ}/policy0/affected_cpus"), "1")
    # What is in force stays so: it is the domain's, and nothing was taken back.
    expect("one CPU left", fake(guest, "asked_khz")[0], MAX)
    for limit in (600_000, MAX):
        guest.run(f"echo {limit} > {CPUFREQ}/policy0/scaling_max_freq")
        until("the other one asks", lambda: fake(guest, "asked_khz")[:2] == [MAX, limit])
    guest.run("echo 1 > /sys/devices/system/cpu/cpu0/online")
    expect("CPUs", guest.run(f"busybox cat {CPUFREQ}/policy0/affected_cpus"), "0 1")
    for cpu in (1, 0):
        guest.run(f"echo 0 > /sys/devices/system/cpu/cpu{cpu}/online")
    expect("withdrawn with the last one", fake(guest, "asked_khz")[0], 0)
    for cpu in (0, 1):
        guest.run(f"echo 1 > /sys/devices/system/cpu/cpu{cpu}/online")
    guest.run("echo 0 > /sys/devices/system/cpu/cpu2/online")
    expect("withdrawn", fake(guest, "asked_khz")[2], 0)
    guest.run("echo 1 > /sys/devices/system/cpu/cpu2/online")
    expect("renewed", fake(guest, "asked_khz")[2] > 0, True)


def ceilings(guest, known):
    """While a guest holds its tasks down, requests are ceilings, written again and again."""
    governor(guest, 0, "schedutil")

    def ceilings_while_busy():
        """Ceilings of a domain, and how many of them renew one, while its CPU 0 is busy for 0.2 s."""
        count = f"busybox cat {FAKE}/asked_ceilings {FAKE}/asked_renewals"
        loop = "busybox timeout 0.2 sh -c 'while :; do :; done'"
        # In one command: between two, time passes as it likes.
        text = guest.run(f"busybox sleep 0.1; {count}; busybox taskset 1 {loop}; {count}")
        # The shell may say that the loop was ended.
        counts = [line for line in text.splitlines() if re.fullmatch("[0-9,]+", line)]
        counts = [sum(int(n) for n in line.split(",")[:2]) for line in counts]
        return counts[2] - counts[0], counts[3] - counts[1]

    def renewals_of_two_cpus():
        """Renewals of a domain's ceiling while both of its CPUs are busy, and 4 ms that passed."""
        uptime = "busybox cut -d ' ' -f 1 /proc/uptime"
        count = f"busybox cat {FAKE}/asked_renewals"
        loop = "busybox timeout 0.4 sh -c 'while :; do :; done'"
        # In one command: between two, time passes as it likes.
        text = guest.run(f"{uptime}; {count}; busybox taskset 1 {loop} & busybox taskset 2 {loop}; "
                         f"wait; {count}; {uptime}")
        # The shell says that the loops were ended.
        start, before, *_, after, end = text.splitlines()
        before, after = (sum(int(n) for n in of.split(",")[:2]) for of in (before, after))
        return after - before, (float(end) - float(start)) * 250

    # The system's maximum can't be below its minimum.
    guest.run("echo 0 > /proc/sys/kernel/sched_util_clamp_min")
    for limit, file in [(1_000_000, f"{CPUFREQ}/policy0/scaling_max_freq"),
                        (200, "/proc/sys/kernel/sched_util_clamp_max")]:
        expect("ceilings of a guest without limits", ceilings_while_busy()[0], 0)
        before = guest.run(f"busybox cat {file}")
        guest.run(f"echo {limit} > {file}")
        # The governor's own requests are other ones. At most one each tick is renewed: one that comes
        # before jiffies advance renews none.
        ceilings, renewals = ceilings_while_busy()
        expect(f"ceilings under {file}, {renewals} of {ceilings} renewed", renewals > 2, known)
        if known:
            renewals, ticks = renewals_of_two_cpus()
            # The clock that was read has 10 ms.
            expect(f"one CPU renews the domain's, {renewals} times in {ticks:.0f} ticks",
                   renewals <= ticks + 3, True)
        guest.run(f"echo {before} > {file}")


def caps(guest, known):
    """What the host allows the first policy at most is its maximum, and its requests keep to it."""
    governor(guest, 0, "performance")

    def capped(cap, level):
        guest.run(f"echo {cap},{cap},0 > {FAKE}/cap_khz")
        until(f"{level} kHz asked under a cap of {cap}", lambda: asked_after_ticks() == level)
        maxima = guest.run(f"busybox cat {CPUFREQ}/policy*/scaling_max_freq").split()
        expect("maxima", maxima, [str(level), str(MAX)])

    def asked_after_ticks():
        # Of a CPU that isn't capped.
        busy(guest, 2)
        return fake(guest, "asked_khz")[0]

    if not known:
        guest.run(f"echo 600000,600000,0 > {FAKE}/cap_khz; busybox sleep 0.3")
        expect("asked on a host without caps", asked_after_ticks(), MAX)
        return
    before = fake(guest, "asked_ceilings")
    # A level is asked for; 0, and what is above the table, is no cap.
    for cap, level in [(1_500_000, 1_000_000), (1, 600_000), (0, MAX), (600_000, 600_000),
                       (2**32 - 1, MAX)]:
        capped(cap, level)
        busy(guest, 0)
    expect("a host's cap is no limit of the guest's", fake(guest, "asked_ceilings"), before)
    # A user's own limit stays.
    guest.run(f"echo 1000000 > {CPUFREQ}/policy0/scaling_max_freq")
    capped(600_000, 600_000)
    capped(0, 1_000_000)
    # The driver is removed under a cap.
    capped(600_000, 600_000)


def lies(args):
    """A host may make the guest slow, and no more; what it tells later counts again."""
    table = "table_khz=600000,1000000,2000000"
    known = ANY_CPU | PERF_CAP | CEILING
    with Guest(args.kernel, args.modules, args.folder, "") as guest:
        for features in (known, known | SHARED_PAGES):
            guest.run(f"busybox insmod /vcpufreq_fakehost.ko {table} domain=0,0,1 "
                      f"cur_khz=1000000,1000000,1000000 features={features}")
            guest.run(f"echo 1 > {FAKE}/lies")
            told_lies(guest)
            guest.run(f"echo 0 > {FAKE}/lies")
            for cpu in range(CPUS):
                expect_speed(guest, cpu, 1 / 2)
            until("no cap", lambda: guest.run(
                f"busybox cat {CPUFREQ}/policy*/scaling_max_freq").split() == [str(MAX)] * 2)
            guest.run(f"echo 1 > {FAKE}/lies; busybox rmmod vcpufreq_fakehost")
            expect_calm(guest)
        # Nothing is fixed: nearly all of these hosts are refused.
        guest.run("for i in $(busybox seq 100); do "
                  "busybox insmod /vcpufreq_fakehost.ko lies=2 2>/dev/null && "
                  "busybox rmmod vcpufreq_fakehost; done; true")
        expect("policies", guest.run(f"echo {CPUFREQ}/*"), f"{CPUFREQ}/*")
        expect_calm(guest)


def told_lies(guest):
    """All that reads what a host tells, at once."""
    levels = {"600000", "1000000", str(MAX)}
    for name in ("schedutil", "performance"):
        for policy in (0, 2):
            governor(guest, policy, name)
        for cpu in range(CPUS):
            busy(guest, cpu)
        guest.run("[ -e /sys/module/freq_scale ] || busybox insmod /freq_scale.ko")
        scales = guest.run("busybox cat /sys/module/freq_scale/parameters/scale").split()
        expect(f"scales {scales}", all(1 <= int(scale) <= 1024 for scale in scales), True)
        maxima = set(guest.run(f"busybox cat {CPUFREQ}/policy*/scaling_max_freq").split())
        expect(f"maxima {maxima}", maxima <= levels, True)
        guest.run(f"busybox cat {CPUFREQ}/policy*/host_cur_freq")
        for cpu in (2, 1):
            guest.run(f"echo 0 > /sys/devices/system/cpu/cpu{cpu}/online")
            guest.run(f"echo 1 > /sys/devices/system/cpu/cpu{cpu}/online")
    expect_calm(guest)


TESTS = [
    wrong_hosts_are_refused,
    requests_and_speed_without_table,
    energy_model_without_table,
    opps_that_are_of_no_use,
    tables_and_domains,
    lies,
    pci_device.memories_that_are_refused,
    pci_device.memory_and_doorbell,
    pci_device.domain_in_one_page,
    tree_memory.nodes_that_are_refused,
    tree_memory.memory_of_the_device_tree,
]
# Of a kernel for x86-64.
TESTS_X86_64 = [pci_device.on_x86_64]
TESTS_SERVED = [served.requests_are_answered]


class Arguments:
    def __init__(self, argv):
        self.tests, words = TESTS, argv[1:]
        if words[:1] == ["--x86_64"]:
            self.tests, words = TESTS_X86_64, words[1:]
        elif words[:1] == ["--served"]:
            self.tests, self.socket, words = TESTS_SERVED, "".join(words[1:2]), words[2:]
        if len(words) < 3:
            print(__doc__, file=sys.stderr)
            sys.exit(2)
        self.kernel, self.folder, *self.modules = words


def main():
    args = Arguments(sys.argv)
    failed = 0
    for test in args.tests:
        began = time.monotonic()
        try:
            test(args)
            verdict = "ok"
        except (AssertionError, RuntimeError):
            failed += 1
            verdict = f"FAILED\n{traceback.format_exc()}"
        name = test.__name__.replace("_", " ")
        print(f"{name} ({time.monotonic() - began:.0f} s): {verdict}", flush=True)
    print(f"{len(args.tests)} tests, {failed} failed, 0 skipped")
    return 1 if failed or not args.tests else 0


if __name__ == "__main__":
    sys.exit(main())
