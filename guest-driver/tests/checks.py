# SPDX-License-Identifier: GPL-2.0-only
"""What the driver's tests do and check on a guest, whichever device it has."""

import re
import time

CPUFREQ = "/sys/devices/system/cpu/cpufreq"
MAX = 2_000_000


def expect(what, got, wanted):
    if got != wanted:
        raise AssertionError(f"{what}: {got!r}, expected {wanted!r}")


def expect_said(log, text):
    if not re.search(text, log):
        raise AssertionError(f"the kernel didn't say {text!r} but:\n{log}")


def expect_calm(guest):
    """No warning, oops or lock-up in the kernel's log since it was last read."""
    log = guest.dmesg()
    if re.search("WARNING:|BUG:|Oops|Call trace|stall", log):
        raise AssertionError(f"the kernel complains:\n{log}")
    return log


def until(what, condition):
    end = time.monotonic() + 900
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within 15 minutes: {what}")
        time.sleep(0.02)


def governor(guest, policy, name):
    guest.run(f"echo {name} > {CPUFREQ}/policy{policy}/scaling_governor")


def expect_speed(guest, cpu, share):
    """The scheduler takes the CPU for so fast, of its full speed, at its ticks."""
    guest.run("[ -e /sys/module/freq_scale ] || busybox insmod /freq_scale.ko")
    busy(guest, cpu)
    scale = guest.run("busybox cat /sys/module/freq_scale/parameters/scale").split()[cpu]
    expect(f"scale of CPU{cpu}", int(scale), int(1024 * share))


def suspend(guest, asked):
    """The kernel's own test: devices are suspended, and resumed when the emulator has worked for 5 s of
    virtual time. This process looks 50 times a second meanwhile."""
    guest.run("echo 5 > /sys/module/suspend/parameters/pm_test_delay")
    guest.run("echo devices > /sys/power/pm_test")
    guest.send("echo freeze > /sys/power/state")
    until("withdrawn in suspend", lambda: all(asked(cpu) == 0 for cpu in (0, 1, 2)))
    expect("suspend", guest.finish()[1], 0)
    expect("renewed after suspend", [asked(cpu) for cpu in (1, 2)], [MAX, MAX])


def busy(guest, cpu):
    loop = "busybox timeout 0.2 sh -c 'while :; do :; done'"
    guest.run(f"busybox taskset {1 << cpu:x} {loop} || true")


def has_model(guest, cpu):
    return not guest.fails(f"busybox ls /sys/kernel/debug/energy_model/cpu{cpu}")
