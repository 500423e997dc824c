# SPDX-License-Identifier: GPL-2.0-only
"""The other end of a guest's ivshmem-doorbell: memory, and a count of rings.

The emulator is a client of a socket. It gets the memory, and for each vector
of the guest and of this server an eventfd. An eventfd counts what the guest
rings until it is read, so nothing has to wait for it.
"""

import os
import socket
import struct

from guest import CPUS, PERF_DOMAIN, PERFTBL_LEN, STRIDE, Registers

MAGIC, VERSION, FEATURES, VCPUS, SIZE, PEER = range(0, 24, 4)
CAPACITY, PERFTBL, POWER = 0x104, 0x200, 0x300
MAGIC_VALUE = 0x71667076
PROTOCOL = 0
GUEST, SERVER = 0, 1


class Memory:
    """One device. Its memory is as the contract wants it but for `header`."""

    def __init__(self, folder, slot, bar_size, header, plain=False):
        self.slot, self.plain = slot, plain
        self.path = f"{folder}/ivshmem-{os.getpid()}-{slot}"
        self.connection = self.listener = None
        self.file = open(f"{self.path}-memory", "x+b", buffering=0)
        self.file.truncate(bar_size)
        self.bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(CPUS)]
        self.guest_bells = [os.eventfd(0) for _ in range(CPUS)]
        good = {MAGIC: MAGIC_VALUE, VERSION: 1, VCPUS: CPUS, SIZE: (1 + CPUS) * STRIDE,
                PEER: SERVER}
        for offset, value in {**good, **header}.items():
            Registers(self.file, 0)[offset] = value

    def page(self, cpu):
        return Registers(self.file, (1 + cpu) * STRIDE)

    def table(self, cpu, levels, power=()):
        """Gives a CPU its levels, in a domain of its own."""
        page = self.page(cpu)
        page[PERF_DOMAIN], page[PERFTBL_LEN] = cpu, len(levels)
        for i, level in enumerate(levels):
            page[PERFTBL + 4 * i] = level
        for i, microwatts in enumerate(power):
            page[POWER + 4 * i] = microwatts

    def rings(self, cpu):
        """How often the guest rang for a CPU since the last call."""
        try:
            return os.eventfd_read(self.bells[cpu])
        except BlockingIOError:
            return 0

    def listen(self):
        """Returns what the emulator needs to connect."""
        where = f"addr={self.slot:#x}"
        if self.plain:
            size = os.fstat(self.file.fileno()).st_size
            return ["-object", f"memory-backend-file,id=m{self.slot},size={size},share=on,"
                    f"mem-path={self.file.name}", "-device", f"ivshmem-plain,memdev=m{self.slot},{where}"]
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(1)
        return ["-chardev", f"socket,path={self.path},id=c{self.slot}",
                "-device", f"ivshmem-doorbell,vectors={CPUS},chardev=c{self.slot},{where}"]

    def serve(self):
        """Lets the emulator connect, which waits for it."""
        if self.plain:
            return
        self.listener.settimeout(900)
        self.connection, _ = self.listener.accept()
        for number in (PROTOCOL, GUEST):
            self._send(number)
        self._send(-1, self.file.fileno())
        for peer, bells in ((SERVER, self.bells), (GUEST, self.guest_bells)):
            for bell in bells:
                self._send(peer, bell)

    def _send(self, number, *fds):
        socket.send_fds(self.connection, [struct.pack("<q", number)], fds)

    def close(self):
        for end in (self.connection, self.listener, self.file):
            if end:
                end.close()
        for bell in self.bells + self.guest_bells:
            os.close(bell)
        os.unlink(self.file.name)
        if self.listener:
            os.unlink(self.path)
