# SPDX-License-Identifier: GPL-2.0-only
"""The driver on ivshmem-doorbell of the emulator, with the test as server.

What has to hold: another program's ivshmem is left alone without a word; a
memory that makes no sense is refused, with a message that says why; features
that the driver does not know are ignored; a request is a store and a ring for
the policy's CPU; cur_perf, capacity and power of the device reach the
scheduler, and go with the driver.
"""

import contextlib
import re

from checks import (CPUFREQ, MAX, expect, expect_calm, expect_said, expect_speed, governor,
                    has_model, suspend, until)
from guest import ARM64, CPUS, CUR_PERF, PERF_DOMAIN, PERFTBL_LEN, SET_PERF, X86_64, Guest
from ivshmem import CAPACITY, FEATURES, MAGIC, PEER, PERFTBL, SIZE, VCPUS, VERSION, Memory

BAR = 0x8000
GONE = 2**32 - 1
ALL_FEATURES = 2**32 - 1
LEVELS = [600_000, 1_000_000, MAX]
POWER = [100_000, 200_000, 900_000]
CAPACITIES = [512, 512, 1024]
DEVICE = "/sys/bus/pci/devices/0000:00:08.0"

# Header, registers of each CPU, the driver's message.
REFUSED = [
    ({VERSION: 2}, {}, "the memory has layout 2, this driver knows layout 1"),
    ({VERSION: 0}, {}, "the memory has layout 0, this driver knows layout 1"),
    ({VCPUS: 2}, {}, "register region has 0x0*2000 bytes, 3 CPUs need 0x0*3000"),
    ({VCPUS: 0}, {}, "register region has 0x0* bytes, 3 CPUs need 0x0*3000"),
    ({SIZE: BAR + 1}, {}, "the memory's header has 32769 bytes, the memory has 0x0*8000"),
    ({SIZE: GONE}, {}, "the memory's header has 4294967295 bytes, the memory has 0x0*8000"),
    ({SIZE: 0x3FFF}, {}, "the memory's header has 16383 bytes, its 3 vCPUs need 16384"),
    ({VCPUS: GONE}, {}, "its 4294967295 vCPUs need 17592186044416"),
    ({PEER: 0x10000}, {}, "the memory's header has peer 65536, above 65535"),
    ({}, {PERFTBL_LEN: 0}, "CPU0: performance table has 0 entries, expected 1 to 64"),
    ({}, {PERFTBL_LEN: GONE}, "CPU0: performance table has 4294967295 entries"),
    ({}, {PERFTBL + 4: 0}, "CPU0: performance table entry 1 is 0"),
    ({}, {PERFTBL + 8: 999_999},
     "CPU0: performance table entry 2 is 999999, not above entry 1, which is 1000000"),
    ({}, {CAPACITY: 1025}, "CPU0: capacity is 1025, above 1024"),
]
FIRST_SLOT = 8


def memories_that_are_refused(args):
    memories = []
    for slot, (header, registers, _) in enumerate(REFUSED, FIRST_SLOT):
        memory = Memory(args.folder, slot, BAR, header)
        memories.append(memory)
        for cpu in range(CPUS):
            memory.table(cpu, LEVELS)
            for offset, value in registers.items():
                memory.page(cpu)[offset] = value
    # Other programs' memory.
    others = range(FIRST_SLOT + len(REFUSED), FIRST_SLOT + len(REFUSED) + 3)
    for slot, size, plain in zip(others, (BAR, 0x1000, BAR), (False, False, True)):
        memories.append(Memory(args.folder, slot, size, {MAGIC: 0}, plain))
    # Without the pages that its header has.
    memories.append(Memory(args.folder, others.stop, 0x1000, {}))
    with Guest(args.kernel, args.modules, args.folder, "", memories) as guest:
        guest.dmesg()
        guest.run("busybox insmod /vcpufreq_guest.ko")
        log = expect_calm(guest)
        for slot, (_, _, text) in enumerate(REFUSED, FIRST_SLOT):
            expect_said(log, f"0000:00:{slot:02x}.0: error -EINVAL: .*{text}")
            said = re.findall(f"vcpufreq-guest 0000:00:{slot:02x}.0: error", log)
            expect(f"messages of {slot:02x}.0", len(said), 1)
        expect_said(log, f"0000:00:{others.stop:02x}.0: error -EINVAL: "
                         "the memory's header has 16384 bytes, the memory has 0x0*1000")
        for slot in others:
            expect_alone(guest, log, f"0000:00:{slot:02x}.0")
        bound = guest.run("busybox ls /sys/bus/pci/drivers/vcpufreq-guest")
        expect("bound", re.findall("0000:.*", bound), [])
        expect("policies", guest.run(f"echo {CPUFREQ}/*"), f"{CPUFREQ}/*")
        guest.run("busybox rmmod vcpufreq_guest")
        expect_calm(guest)
        expect("rings", [memory.rings(cpu) for memory in memories for cpu in range(CPUS)],
               [0] * CPUS * len(memories))


def expect_alone(guest, log, name):
    device = f"/sys/bus/pci/devices/{name}"
    expect(f"id of {name}", guest.run(f"busybox cat {device}/device"), "0x1110")
    expect(f"words on {name}", re.findall(f"vcpufreq.*{name}.*", log), [])


def memory_and_doorbell(args):
    with bound(args, ARM64) as (guest, memory):
        topology(guest)
        speed(guest, memory)
        hotplug(guest, memory)
        suspend(guest, lambda cpu: asked(memory)[cpu])
        for removed in removals(guest, memory):
            expect("capacities", capacities(guest), [1024] * CPUS if removed else CAPACITIES)
            expect_speed(guest, 2, 1 if removed else 0.5)


def domain_in_one_page(args):
    """Whichever of its CPUs is online."""
    memory = Memory(args.folder, FIRST_SLOT, BAR, {})
    for cpu in range(CPUS):
        memory.table(cpu, LEVELS)
    memory.page(1)[PERF_DOMAIN] = 0
    with Guest(args.kernel, args.modules, args.folder, "", [memory]) as guest:
        guest.run("busybox insmod /vcpufreq_guest.ko")
        expect("first requests", asked(memory), [MAX, 0, MAX])
        guest.run("echo 0 > /sys/devices/system/cpu/cpu0/online")
        guest.run(f"echo 600000 > {CPUFREQ}/policy0/scaling_max_freq")
        until("600000 kHz asked", lambda: asked(memory) == [600_000, 0, MAX])
        guest.run("echo 0 > /sys/devices/system/cpu/cpu1/online")
        expect("withdrawn", asked(memory), [0, 0, MAX])
        expect_calm(guest)


def on_x86_64(args):
    """An energy model; no capacity, and no speed of a CPU for the scheduler: the architecture's are
    the guest's."""
    with bound(args, X86_64) as (guest, memory):
        expect("energy models", [has_model(guest, cpu) for cpu in range(CPUS)], [True] * CPUS)
        shown(guest, memory)
        hotplug(guest, memory)
        suspend(guest, lambda cpu: asked(memory)[cpu])
        for _ in removals(guest, memory):
            pass


@contextlib.contextmanager
def bound(args, machine):
    """A guest whose driver has bound, and requests what its governors say. The driver does not know
    the device's features."""
    memory = Memory(args.folder, FIRST_SLOT, BAR, {FEATURES: ALL_FEATURES})
    for cpu in range(CPUS):
        memory.table(cpu, LEVELS, POWER)
        memory.page(cpu)[CUR_PERF] = MAX
        memory.page(cpu)[CAPACITY] = CAPACITIES[cpu]
    with Guest(args.kernel, args.modules, args.folder, "", [memory], machine) as guest:
        guest.run("busybox insmod /vcpufreq_guest.ko")
        expect("words", re.findall(".*vcpufreq.*(?:rror|no energy).*", expect_calm(guest)), [])
        expect("first requests", asked(memory), [MAX] * CPUS)
        expect("rings", [memory.rings(cpu) > 0 for cpu in range(CPUS)], [True] * CPUS)
        levels(guest, memory)
        yield guest, memory
        expect_calm(guest)


def asked(memory):
    return [memory.page(cpu)[SET_PERF] for cpu in range(CPUS)]


def levels(guest, memory):
    limits = f"{CPUFREQ}/policy1/scaling_max_freq"
    for cpu in range(CPUS):
        governor(guest, cpu, "performance")
        memory.rings(cpu)
    for limit, level in [(1_500_000, 1_000_000), (600_000, 600_000), (MAX, MAX)]:
        guest.run(f"echo {limit} > {limits}")
        # A work item of the guest's makes the request, and rings after that.
        rings = [0] * CPUS

        def rung():
            for cpu in range(CPUS):
                rings[cpu] += memory.rings(cpu)
            return rings[1] > 0

        until(f"a ring for {level} kHz", rung)
        expect("asked", asked(memory), [MAX, level, MAX])
        expect("rings", rings, [0, 1, 0])


def capacities(guest):
    return [int(guest.run(f"busybox cat /sys/devices/system/cpu/cpu{cpu}/cpu_capacity"))
            for cpu in range(CPUS)]


def topology(guest):
    """The energy model has each level's power, and performance of 1024."""
    expect("capacities", capacities(guest), CAPACITIES)
    for cpu, capacity in enumerate(CAPACITIES):
        for khz, microwatts in zip(LEVELS, POWER):
            state = f"/sys/kernel/debug/energy_model/cpu{cpu}/ps:{khz}"
            expect("power", int(guest.run(f"busybox cat {state}/power")), microwatts)
            expect("performance", int(guest.run(f"busybox cat {state}/performance")),
                   capacity * khz // MAX)


def speed(guest, memory):
    # The server has gone: as without a driver.
    for khz, share in [(MAX // 4, 0.25), (GONE, 1), (MAX // 2, 0.5)]:
        memory.page(2)[CUR_PERF] = khz
        expect_speed(guest, 2, share)
    shown(guest, memory)


def shown(guest, memory):
    for khz, text in [(1_234_567, "1234567"), (GONE, "0"), (0, "0")]:
        memory.page(0)[CUR_PERF] = khz
        expect("host_cur_freq", guest.run(f"busybox cat {CPUFREQ}/policy0/host_cur_freq"), text)


def hotplug(guest, memory):
    guest.run("echo 0 > /sys/devices/system/cpu/cpu2/online")
    expect("withdrawn when offline", asked(memory), [MAX, MAX, 0])
    expect("rung", memory.rings(2) > 0, True)
    guest.run("echo 1 > /sys/devices/system/cpu/cpu2/online")
    expect("renewed when online", asked(memory), [MAX] * CPUS)


def removals(guest, memory):
    """By the module, and as if the device were unplugged; yields after each step whether it is
    gone."""
    for leave, enter in [
        ("busybox rmmod vcpufreq_guest", "busybox insmod /vcpufreq_guest.ko"),
        (f"echo 1 > {DEVICE}/remove", "echo 1 > /sys/bus/pci/rescan"),
    ]:
        guest.run(leave)
        expect("requests", asked(memory), [0] * CPUS)
        expect("rung", memory.rings(2) > 0, True)
        expect("no policy", guest.fails(f"busybox ls -d {CPUFREQ}/policy*"), True)
        yield True
        guest.run(enter)
        expect("requests", asked(memory), [MAX] * CPUS)
        yield False
