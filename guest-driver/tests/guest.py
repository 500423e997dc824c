# SPDX-License-Identifier: GPL-2.0-only
"""An emulated guest with a shell, whose memory the test can reach.

The device's registers are pages of guest memory that the device tree takes
away from the kernel. The test reads and writes them through the file that
backs the memory. Such registers are memory: what is written to set_perf can be
read, and perftbl_rd gives the same value for every selection, which is a
complete device when the table has one entry. A guest for x86-64 has no device
tree, and devices of memory alone.

Time in the guest follows the instructions that it runs, so that loads are as
long on a busy machine as on an idle one. Its vCPUs have one thread then.
"""

import os
import select
import struct
import subprocess
import time

RAM_BASE = 0x40000000
RAM_SIZE = 256 << 20
REGS_BASE = 0x4F000000
REGS_SIZE = 0x100000
STRIDE = 0x1000
CPUS = 3

# 4 ns for an instruction: a second of a busy CPU costs the emulator half of what it does at 2.
VIRTUAL_TIME = ["-icount", "shift=2,sleep=off"]
ARM64 = {"emulator": ["qemu-system-aarch64", "-cpu", "neoverse-v1", *VIRTUAL_TIME],
         "board": "virt,gic-version=3", "console": "ttyAMA0", "busybox": "/usr/bin/busybox"}
X86_64 = {"emulator": ["qemu-system-x86_64", "-cpu", "max", *VIRTUAL_TIME],
          "board": "q35", "console": "ttyS0", "busybox": "/opt/amd64/busybox"}
# A thread for each vCPU, as with KVM.
X86_64_THREADS = {**X86_64, "emulator": ["qemu-system-x86_64", "-cpu", "max",
                                         "-accel", "tcg,thread=multi"]}

CUR_PERF, SET_PERF, PERFTBL_LEN, PERFTBL_SEL, PERFTBL_RD, PERF_DOMAIN = range(0, 24, 4)

INIT = """#!/bin/sh
busybox mkdir -p /proc /sys /dev
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
busybox mount -t devtmpfs dev /dev
busybox mount -t debugfs debug /sys/kernel/debug
busybox stty -echo -onlcr
echo @ready
while read -r line; do eval "$line"; done
"""

LOAD = """#!/bin/sh
busybox mkfifo /fifo$$
exec 3<> /fifo$$
while :; do
    i=0; while [ $i -lt 200 ]; do i=$((i + 1)); done
    read -t 0.01 -u 3
done
"""


class Guest:
    """Boots on entry; the emulator has ended when the block is left."""

    def __init__(self, kernel, modules, folder, nodes, memories=(), machine=ARM64,
                 limit_s=1800):
        self.kernel, self.modules, self.nodes = kernel, modules, nodes
        self.machine = machine
        self.memories = memories
        self.path = f"{folder}/guest-{os.getpid()}"
        self.limit_s = limit_s
        self.seen = ""
        self.ram = self.emulator = None

    def _machine(self):
        return [
            *self.machine["emulator"], "-smp", str(CPUS),
            "-m", str(RAM_SIZE >> 20), "-display", "none", "-monitor", "none",
            "-object", f"memory-backend-file,id=ram,size={RAM_SIZE},"
            f"mem-path={self.path}/ram,share=on",
        ]

    def _memory(self):
        with open(f"{self.path}/ram", "wb") as ram:
            ram.truncate(RAM_SIZE)
        self.ram = open(f"{self.path}/ram", "r+b", buffering=0)

    def _initramfs(self):
        tree = f"{self.path}/tree"
        os.makedirs(f"{tree}/bin")
        for source in [self.machine["busybox"], *self.modules]:
            target = "bin" if source.endswith("busybox") else "."
            subprocess.run(["cp", source, f"{tree}/{target}/"], check=True)
        os.symlink("busybox", f"{tree}/bin/sh")
        for name, text in [("init", INIT), ("load", LOAD)]:
            with open(f"{tree}/{name}", "w") as script:
                script.write(text)
            os.chmod(f"{tree}/{name}", 0o755)
        subprocess.run("find . | cpio -o -H newc --quiet > ../initrd",
                       shell=True, cwd=tree, check=True)

    def _device_tree(self):
        """The emulator's own, with the test's nodes added; what it needs for that."""
        if self.machine is not ARM64:
            return []
        machine = f"{self.machine['board']},memory-backend=ram,dumpdtb={self.path}/base.dtb"
        subprocess.run([*self._machine(), "-M", machine], check=True, capture_output=True)
        source = subprocess.run(["dtc", "-q", "-O", "dts", f"{self.path}/base.dtb"],
                                check=True, capture_output=True, text=True).stdout
        source += f"""/ {{ reserved-memory {{
            #address-cells = <2>; #size-cells = <2>; ranges;
            registers@{REGS_BASE:x} {{ no-map; reg = <0 {REGS_BASE:#x} 0 {REGS_SIZE:#x}>; }};
        }}; }}; {self.nodes}"""
        subprocess.run(["dtc", "-q", "-o", f"{self.path}/guest.dtb"],
                       input=source, check=True, text=True)
        return ["-dtb", f"{self.path}/guest.dtb"]

    def __enter__(self):
        os.makedirs(self.path)
        try:
            self._memory()
            self._initramfs()
            self._boot(self._device_tree())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.emulator:
            self.emulator.kill()
            self.emulator.wait()
        if self.ram:
            self.ram.close()
        for memory in self.memories:
            memory.close()
        subprocess.run(["rm", "-rf", self.path], check=True)

    def _boot(self, tree):
        self.deadline = time.monotonic() + self.limit_s
        devices = [word for memory in self.memories for word in memory.listen()]
        self.emulator = subprocess.Popen(
            [*self._machine(), *devices, *tree, "-M", f"{self.machine['board']},memory-backend=ram",
             "-kernel", self.kernel, "-initrd", f"{self.path}/initrd", "-serial", "stdio",
             "-append", f"console={self.machine['console']} quiet loglevel=0 rdinit=/init nokaslr "
             # It reads certificates, slowly, by which nothing here is verified.
             "initcall_blacklist=load_system_certificate_list "
             "cpufreq.default_governor=performance"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        for memory in self.memories:
            memory.serve()
        self._until("@ready\n")

    def _until(self, mark):
        while mark not in self.seen:
            left = self.deadline - time.monotonic()
            ready, _, _ = select.select([self.emulator.stdout], [], [], max(left, 0))
            data = os.read(self.emulator.stdout.fileno(), 65536) if ready else b""
            if not data:
                why = "the guest ended" if ready else "out of time"
                raise RuntimeError(f"{why}; its console:\n{self.seen[-3000:]}")
            self.seen += data.decode(errors="replace").replace("\r", "")
        before, self.seen = self.seen.split(mark, 1)
        return before

    def send(self, command):
        """Starts a command whose end `finish` waits for."""
        self.emulator.stdin.write(f"{{ {command}; }} 2>&1; echo @end $?\n".encode())

    def finish(self):
        output = self._until("@end ")
        return output, int(self._until("\n"))

    def run(self, command):
        """Output of a command that has to succeed."""
        self.send(command)
        output, status = self.finish()
        if status:
            raise RuntimeError(f"{command}: exit {status}: {output}")
        return output.strip()

    def fails(self, command):
        self.send(command)
        return self.finish()[1] != 0

    def dmesg(self):
        """What the kernel logged since the last call."""
        return self.run("busybox dmesg -c")

    def page(self, number):
        """Registers of a CPU: pages are counted from REGS_BASE."""
        return Registers(self.ram, REGS_BASE - RAM_BASE + number * STRIDE)


class Registers:
    """One CPU's registers, by their offset."""

    def __init__(self, ram, start):
        self.ram, self.start = ram, start

    def __getitem__(self, offset):
        return struct.unpack("<I", os.pread(self.ram.fileno(), 4, self.start + offset))[0]

    def __setitem__(self, offset, value):
        os.pwrite(self.ram.fileno(), struct.pack("<I", value), self.start + offset)
