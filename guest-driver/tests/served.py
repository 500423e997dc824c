# SPDX-License-Identifier: GPL-2.0-only
"""The driver on ivshmem-doorbell of the emulator, with the real server.

`vcpufreq serve --cur-perf request` waits at a socket, with this guest's CPUs and
LEVELS. What has to hold: the driver binds, a request reaches the server, and
the driver reads the server's answer, which is the request.
"""

import sys

from checks import CPUFREQ, MAX, expect, until
from guest import CPUS, X86_64_THREADS, Guest
from pci_device import LEVELS


class Device:
    """What ivshmem.Memory is, of a server that runs beside the test."""

    def __init__(self, socket):
        self.socket = socket

    def listen(self):
        return ["-name", "debug-threads=on", "-chardev", f"socket,path={self.socket},id=vcpufreq",
                "-device", f"ivshmem-doorbell,master=on,chardev=vcpufreq,vectors={CPUS}"]

    def serve(self):
        """The server lets the emulator connect."""

    def close(self):
        """The device ends with the emulator."""


def answer(guest, cpu):
    return guest.run(f"busybox cat {CPUFREQ}/policy{cpu}/host_cur_freq")


def requests_are_answered(args):
    """The guest stays until the end of the input, so that the server can be looked at."""
    with Guest(args.kernel, args.modules, args.folder, "", [Device(args.socket)],
               X86_64_THREADS) as guest:
        guest.run("busybox insmod /vcpufreq_guest.ko")
        for cpu in range(CPUS):
            levels = guest.run(f"busybox cat {CPUFREQ}/policy{cpu}/scaling_available_frequencies")
            expect("levels", levels, " ".join(map(str, LEVELS)))
            until("the first request", lambda cpu=cpu: answer(guest, cpu) == str(MAX))
        for level in LEVELS[:2]:
            guest.run(f"echo {level} > {CPUFREQ}/policy1/scaling_max_freq")
            until(f"{level} kHz", lambda level=level: answer(guest, 1) == str(level))
        expect("other answers", [answer(guest, cpu) for cpu in (0, 2)], [str(MAX)] * 2)
        print("@answered", flush=True)
        sys.stdin.read()
