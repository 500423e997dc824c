# SPDX-License-Identifier: GPL-2.0-only
"""The driver on ivshmem-doorbell of the emulator, with the real server.

`vcpufreq serve --cur-perf request` waits at a socket, with this guest's CPUs and
LEVELS. What has to hold: the driver binds, a request reaches the server, and
the driver reads the server's answer, which is the request. So it is for the
CPUs that are left when one is unplugged, for that one once it is back, and after a
suspend to memory.
"""

import json
import os
import socket
import sys

from checks import CPUFREQ, MAX, expect, expect_calm, until
from guest import CPUS, X86_64_THREADS, Guest
from pci_device import LEVELS


LAST = CPUS - 1
# CPUs without a vector have no doorbell: then the server looks for their requests.
VECTORS = os.environ.get("VECTORS", CPUS)
LAST_CPU = {"driver": "max-x86_64-cpu", "id": "last",
            "socket-id": LAST, "core-id": 0, "thread-id": 0}
FOLDER_OF_LAST = f"/sys/devices/system/cpu/cpu{LAST}"


class Device:
    """What ivshmem.Memory is, of a server that runs beside the test."""

    def __init__(self, socket):
        self.socket = socket

    def listen(self):
        """The last CPU is a device of its own, which can be unplugged. The emulator makes devices in
        this order, and waits at the socket until the server has found all CPUs. Its TCG takes as
        many threads as maxcpus in all, and counts one that has ended."""
        return ["-name", "debug-threads=on", "-smp", f"{LAST},maxcpus={CPUS + 1},sockets={CPUS + 1}",
                "-device", ",".join(f"{key}={value}" for key, value in LAST_CPU.items()),
                "-chardev", f"socket,path={self.socket},id=vcpufreq",
                "-device", f"ivshmem-doorbell,master=on,chardev=vcpufreq,vectors={VECTORS}",
                "-qmp", f"unix:{self.socket}.qmp,server=on,wait=off"]

    def serve(self):
        """The server lets the emulator connect."""

    def close(self):
        """The device ends with the emulator."""


def tell_emulator(path, command, arguments=None):
    """What the emulator answers to a command at its control socket."""
    with socket.socket(socket.AF_UNIX) as qmp:
        qmp.connect(path)
        answers = qmp.makefile()
        answers.readline()
        for command in [{"execute": "qmp_capabilities"},
                        {"execute": command, "arguments": arguments or {}}]:
            qmp.sendall(json.dumps(command).encode())
            while "return" not in (answer := json.loads(answers.readline())):
                if "error" in answer:
                    raise AssertionError(f"{command}: {answer}")
    return answer["return"]


def answer(guest, cpu):
    return guest.run(f"busybox cat {CPUFREQ}/policy{cpu}/host_cur_freq")


def expect_answers(guest, levels):
    """To a request of each CPU."""
    for cpu, level in levels.items():
        guest.run(f"echo {level} > {CPUFREQ}/policy{cpu}/scaling_max_freq")
        until(f"CPU {cpu}: {level} kHz", lambda cpu=cpu, level=level: answer(guest, cpu) == str(level))
    expect_calm(guest)


def requests(guest):
    guest.run("busybox insmod /vcpufreq_guest.ko")
    for cpu in range(CPUS):
        levels = guest.run(f"busybox cat {CPUFREQ}/policy{cpu}/scaling_available_frequencies")
        expect("levels", levels, " ".join(map(str, LEVELS)))
        until("the first request", lambda cpu=cpu: answer(guest, cpu) == str(MAX))
    for level in LEVELS[:2]:
        expect_answers(guest, {1: level})
    expect("other answers", [answer(guest, cpu) for cpu in (0, 2)], [str(MAX)] * 2)


def unplug(guest, qmp):
    tell_emulator(qmp, "device_del", {"id": "last"})
    until("the unplug", lambda: guest.fails(f"test -e {FOLDER_OF_LAST}"))
    expect_answers(guest, dict(enumerate(LEVELS[:LAST])))


def plug(guest, qmp):
    tell_emulator(qmp, "device_add", LAST_CPU)
    until("the new CPU", lambda: not guest.fails(f"test -e {FOLDER_OF_LAST}"))
    guest.run(f"echo 1 > {FOLDER_OF_LAST}/online")
    expect_answers(guest, {LAST: LEVELS[1]})


def suspend(guest, qmp):
    guest.send("echo mem > /sys/power/state")
    until("the suspend", lambda: tell_emulator(qmp, "query-status")["status"] == "suspended")
    tell_emulator(qmp, "system_wakeup")
    expect("the suspend", guest.finish(), ("", 0))
    expect_answers(guest, {0: LEVELS[1], 1: LEVELS[0], LAST: LEVELS[0]})


def requests_are_answered(args):
    """Each step begins when a line of the input names it, so that the server can be looked at between
    them."""
    qmp = f"{args.socket}.qmp"
    with Guest(args.kernel, args.modules, args.folder, "", [Device(args.socket)],
               X86_64_THREADS) as guest:
        requests(guest)
        print("@answered", flush=True)
        for line in sys.stdin:
            step = {"unplug": unplug, "plug": plug, "suspend": suspend}[line.strip()]
            step(guest, qmp)
            print(f"@{line.strip()}", flush=True)
