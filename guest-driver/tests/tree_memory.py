# SPDX-License-Identifier: GPL-2.0-only
"""The driver on shared memory of the device tree, with plain memory as host.

What has to hold: a node whose memory or doorbell makes no sense is refused, with
a message that says why; a request is a store and a ring for the policy's CPU;
the scheduler sees the speed that cur_perf tells; removal withdraws requests.
"""

from checks import CPUFREQ, MAX, expect, expect_calm, expect_said, expect_speed, governor, until
from guest import CPUS, CUR_PERF, PERF_DOMAIN, PERFTBL_LEN, REGS_BASE, SET_PERF, STRIDE, Guest
from ivshmem import MAGIC, MAGIC_VALUE, PEER, PERFTBL, SIZE, VCPUS, VERSION

PAGES = 1 + CPUS
BYTES = PAGES * STRIDE
DOORBELL = 0x0C
GOOD = 0x10

# First page, doorbell as in the node, header, the driver's message.
REFUSED = [
    (0x20, (0x24, 0x1000), {MAGIC: 0}, "-ENODEV: no host shares .mem 0x4f020000-0x4f023fff.*"),
    (0x30, (0x34, 0x1000), {VERSION: 2}, "-EINVAL: the memory has layout 2"),
    (0x40, (0x44, 0x1000), {SIZE: BYTES + 4},
     "-EINVAL: the memory's header has 16388 bytes, the memory has 0x0*4000"),
    (0x50, None, {}, "-EINVAL: cannot map the doorbell"),
    (0x60, (0x64, 0x0C), {}, "-EINVAL: .mem 0x4f064000-0x4f06400b.* has no doorbell"),
]


def node(first, doorbell):
    base = REGS_BASE + first * STRIDE
    reg = f"<0 {base:#x} 0 {BYTES:#x}>"
    if doorbell:
        page, size = doorbell
        reg += f", <0 {REGS_BASE + page * STRIDE:#x} 0 {size:#x}>"
    return f"""/ {{ cpufreq@{base:x} {{ compatible = "vcpufreq,shm"; reg = {reg}; }}; }};"""


def share(guest, first, header):
    good = {MAGIC: MAGIC_VALUE, VERSION: 1, VCPUS: CPUS, SIZE: BYTES, PEER: 1}
    for offset, value in {**good, **header}.items():
        guest.page(first)[offset] = value
    for cpu in range(CPUS):
        page = guest.page(first + 1 + cpu)
        page[PERF_DOMAIN], page[PERFTBL_LEN], page[CUR_PERF] = cpu, 2, MAX
        page[PERFTBL], page[PERFTBL + 4] = MAX // 2, MAX


def nodes_that_are_refused(args):
    nodes = "".join(node(first, doorbell) for first, doorbell, _, _ in REFUSED)
    with Guest(args.kernel, args.modules, args.folder, nodes) as guest:
        for first, _, header, _ in REFUSED:
            share(guest, first, header)
        guest.run("busybox insmod /vcpufreq_guest.ko")
        log = expect_calm(guest)
        for first, _, _, text in REFUSED:
            expect_said(log, f"{REGS_BASE + first * STRIDE:x}.cpufreq: error {text}")
        expect("policies", guest.run(f"echo {CPUFREQ}/*"), f"{CPUFREQ}/*")
        guest.run("busybox rmmod vcpufreq_guest")
        expect_calm(guest)


def memory_of_the_device_tree(args):
    tree = node(GOOD, (GOOD + PAGES, 0x1000))
    with Guest(args.kernel, args.modules, args.folder, tree) as guest:
        share(guest, GOOD, {})
        guest.run("busybox insmod /vcpufreq_guest.ko")
        expect_calm(guest)
        cpus = [guest.page(GOOD + 1 + cpu) for cpu in range(CPUS)]
        expect("first requests", [page[SET_PERF] for page in cpus], [MAX] * CPUS)
        for cpu in range(CPUS):
            governor(guest, cpu, "performance")
            guest.page(GOOD + PAGES)[DOORBELL] = 0
            guest.run(f"echo {MAX // 2} > {CPUFREQ}/policy{cpu}/scaling_max_freq")
            # A work item of the guest's makes the request, and rings after that.
            until("the ring", lambda: guest.page(GOOD + PAGES)[DOORBELL] == 1 << 16 | cpu)
            expect("asked", cpus[cpu][SET_PERF], MAX // 2)
        cpus[2][CUR_PERF] = MAX // 4
        expect_speed(guest, 2, 0.25)
        guest.run("busybox rmmod vcpufreq_guest")
        expect("requests", [page[SET_PERF] for page in cpus], [0] * CPUS)
        expect_calm(guest)
