// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The emulated hosts of the tests, a row each.

use std::cmp::Reverse;

use crate::arch::Arch::X86_64;
use crate::boot::Driver::Mainline;
use crate::boot::HostPart::{
    self, Board, Disk, DiskModules, Fio, Firmware, GibPage, Isolated, Libvirt, Monitoring,
    Perfetto, Qemu, Systemd, Tools,
};
use crate::boot::{Boot, boot, checked, raced};
use crate::kernel::Flavor::{Checked, Old, Protected, Rt};
use crate::qemu::GuestVmm;
use crate::set::Set::{self, Instrumented, Long, Short};
use crate::tools;

/// The tests on a drawn topology: each OPP, and each ramp within three ticks. A ramp
/// begins anywhere between two ticks, and the host's own repeats differ by two. Without the
/// scheduler's servers, whose share is above most OPPs of a small CPU.
const DRAWN: &[&str] = &[
    "opps-exact:fair-server-off",
    "bench:big-ramp:step-down:new-thread:little-to-big:--variant=host:--variant=vm+bridge:--repeats=3:--within-us=12000:fair-server-off",
];

/// The ramp of a real board's largest CPUs.
const BOARD_RAMP: &str =
    "bench:big-ramp:--variant=host:--variant=vm+bridge:--repeats=3:--within-us=12000";

/// What is tried on a real board that has boost.
const BOARD_WITH_BOOST: &[&str] = &[
    "opps-exact",
    "opps-exact:boost",
    "default-run",
    "default-run:boost",
    BOARD_RAMP,
    "bench:big-ramp:--variant=host:--variant=vm+bridge:--repeats=3:--within-us=12000:boost",
];

/// Cases of a vCPU beside other load, in each way of adding it.
const CONTENDED: &str = "bench:contended.new25:contended.new50:contended.new75:contended.woken25:contended.woken50:contended.woken75:contended.part50:contended.guest50:contended.fifo25:contended.deadline25:--variant=host:--variant=vm+bridge:--variant=max:--variant=scx";
/// In the way of `serve` and `qemu`.
const CONTENDED_SERVED: &str = "bench:contended.new25:contended.new50:contended.new75:contended.woken25:contended.woken50:contended.woken75:contended.part50:contended.guest50:contended.fifo25:contended.deadline25:--variant=host:--variant=sum";

/// Ramps that have to hold by `ram`, too.
const RAMPS: &str = "bench:big-ramp:step-down:new-thread:little-to-big:--variant=host:--variant=vm+bridge:--repeats=3";

/// What is tried, a host a row. Short is what finds most defects soonest: this project's driver by
/// each path on `2+2`, a default run, a real-time host's settings, the BPF programs. Long is the
/// rest: floods, kills, the bench's bounds, and other kernels, drivers and topologies.
const BOOTS: &[Boot] = &[
    boot(
        Short,
        195,
        "2+2",
        &[
            "doctor",
            "governor",
            "opps-exact",
            "no-dip",
            "domain",
            "guest-facts",
            "uclamp",
        ],
    ),
    boot(
        Long,
        95,
        "2+2",
        &[
            "driver",
            "restart",
            "host-fails",
            "pin-offline",
            "thread-actuator",
            "rt-standard",
        ],
    ),
    // The path that the VMM chooses is the best one; the others are forced.
    boot(Short, 205, "2+2", &["no-exit", "stats", "attach"]),
    boot(
        Long,
        210,
        "2+2",
        &["demo", "memory", "fallbacks", "fallbacks:start"],
    ),
    boot(Long, 140, "2+2", &["tune", "guest-limits"]),
    boot(Long, 75, "2+2", &["policy"]),
    boot(Long, 200, "rk3588", &["tune", "guest-limits", "policy"]),
    // Each of its 1,000 changes is four programs that the emulated host verifies.
    boot(Long, 300, "2+2", &["bpf-policy"]),
    Boot {
        sampled: &[
            "no-dip:fifo",
            "unpinned",
            "guest-facts:stolen",
            "caps",
            "steal",
        ],
        ..boot(Long, 120, "2+2", &[])
    },
    Boot {
        path: Some("ioeventfd"),
        ..boot(Short, 70, "2+2", &["order", "opps-exact"])
    },
    Boot {
        path: Some("ioeventfd"),
        sampled: &["in-force", "worker-place"],
        ..boot(Long, 30, "2+2", &[])
    },
    Boot {
        path: Some("exit"),
        ..boot(Short, 45, "2+2", &["opps-exact"])
    },
    boot(
        Short,
        200,
        "2+2",
        &[
            "bpf-page",
            "bpf-requests",
            "bpf-arithmetic",
            "bpf-kfunc-refused",
            "bpf-limits",
            "bpf-meddling",
            "bpf-two-vms",
            "bpf-shared",
        ],
    ),
    boot(Short, 245, "2+2", &["default-run", "sandbox"]),
    boot(Long, 100, "2+2", &["sandbox:attacks"]),
    // Its host has kernel and modules where a board has them.
    boot(Long, 40, "2+2", &["board:demo"]).with(&[Board]),
    boot(Long, 135, "2+2", &["board"]).with(&[Board]),
    boot(Long, 180, "2+2", &["board:kills"]).with(&[Board, Qemu]),
    Boot {
        driver: Mainline,
        ..boot(Long, 40, "2+2", &["board:demo"]).with(&[Board])
    },
    Boot {
        host: Rt,
        guest: Rt,
        ..boot(Short, 35, "2+2", &["rt-settings"])
    },
    Boot {
        host: Rt,
        guest: Rt,
        ..boot(Long, 300, "2+2", &["rt-settings:kills"])
    },
    Boot {
        host: Rt,
        guest: Rt,
        ..boot(Long, 260, "2+2", &["rt-qemu"]).with(&[Qemu])
    },
    Boot {
        host: Rt,
        guest: Rt,
        ..boot(Long, 900, "2+2", &["rt-qemu:kills:50"]).with(&[Qemu])
    },
    Boot {
        sampled: &["rt-io"],
        host: Rt,
        guest: Rt,
        ..boot(Long, 200, "4+3+1", &[]).with(&[Qemu, Tools])
    },
    Boot {
        sampled: &["rt-latency"],
        vmm: GuestVmm::Qemu,
        host: Rt,
        guest: Rt,
        ..boot(Long, 300, "4+3+1", &[]).with(&[Tools])
    },
    Boot {
        sampled: &["rt-guest"],
        vmm: GuestVmm::Qemu,
        host: Rt,
        guest: Rt,
        ..boot(Long, 220, "4+3+1", &[]).with(&[GibPage])
    },
    Boot {
        sampled: &["rt-guest"],
        vmm: GuestVmm::Qemu,
        host: Rt,
        guest: Rt,
        ..boot(Long, 300, "qcs6490", &[]).with(&[GibPage])
    },
    Boot {
        sampled: &["rt-guest"],
        vmm: GuestVmm::Qemu,
        host: Rt,
        guest: Rt,
        ..boot(Long, 220, "2+2", &[]).with(&[GibPage])
    },
    Boot {
        sampled: &["rt-loop", "rt-latency"],
        vmm: GuestVmm::Qemu,
        host: Rt,
        guest: Rt,
        ..boot(Long, 340, "2+2", &[]).with(&[Tools])
    },
    Boot {
        sampled: &["rt-loop"],
        vmm: GuestVmm::Qemu,
        host: Rt,
        guest: Rt,
        ..boot(Long, 160, "4+3+1", &[]).with(&[Tools])
    },
    Boot {
        sampled: &["rt-loop", "rt-latency"],
        vmm: GuestVmm::Qemu,
        host: Rt,
        guest: Rt,
        ..boot(Long, 460, "qcs6490", &[]).with(&[Tools])
    },
    boot(Long, 120, "2+2", &["trace", "guest-trace"]),
    boot(Long, 200, "2+2", &["systemd"]).with(&[Systemd]),
    boot(Long, 100, "2+2", &["metrics"]).with(&[Monitoring, Systemd]),
    boot(Long, 200, "2+2", &["perfetto"]).with(&[Perfetto]),
    Boot {
        vmm: GuestVmm::Qemu,
        ..boot(Short, 120, "2+2", &["opps-exact", "qemu"]).with(&[Qemu])
    },
    boot(Long, 30, "1", &["opps-exact", "governor"]),
    boot(Long, 20, "1", &[tools::SHELL]).with(&[Tools]),
    Boot {
        sampled: &["rt-latency"],
        host: Rt,
        guest: Rt,
        ..boot(Long, 220, "4+3+1", &[]).with(&[Tools])
    },
    Boot {
        sampled: &["rt-guest"],
        host: Rt,
        guest: Rt,
        ..boot(Long, 220, "4+3+1", &[]).with(&[GibPage])
    },
    boot(Long, 200, "2+2", &["kill", "flood"]),
    Boot {
        sampled: &["paths"],
        ..boot(Long, 120, "2+2", &["capacity"]).with(&[Qemu])
    },
    Boot {
        path: Some("ioeventfd"),
        ..boot(Long, 220, "2+2", &["flood"])
    },
    Boot {
        sampled: &["no-dip:fifo", "caps"],
        path: Some("exit"),
        ..boot(Long, 300, "2+2", &["flood", "no-dip"])
    },
    Boot {
        sampled: &["opps-floor", "speed", "speed-guest"],
        ..boot(Long, 270, "4+3+1", &["capacity", "opps-exact", "uclamp"])
    },
    Boot {
        sampled: &["opps-floor", "dip-by-actuator", "hotplug"],
        ..boot(
            Long,
            270,
            "2+2",
            &["domain:both", "idle", "rt-app", "fallbacks:reset"],
        )
    },
    Boot {
        sampled: &["caps"],
        path: Some("shm"),
        ..boot(Long, 230, "2+2", &["no-exit", "opps-exact", "two-guests"])
    },
    Boot {
        path: Some("ram"),
        ..boot(
            Long,
            270,
            "2+2",
            &["no-exit", "opps-exact", "kill", "flood"],
        )
    },
    Boot {
        path: Some("ram"),
        ..boot(Long, 180, "2+2", &[RAMPS])
    },
    // Each pCPU has a vCPU there, which the reader shares it with.
    Boot {
        path: Some("ram"),
        ..boot(Long, 120, "4+3+1", &[RAMPS])
    },
    boot(Long, 300, "2+2", &["flood:worker", "flood:uart"]),
    Boot {
        sampled: &["unpinned", "unpinned:rt", "no-dip:fifo"],
        path: Some("ioeventfd"),
        ..boot(Long, 180, "2+2", &["no-exit", "two-guests", "no-dip"])
    },
    Boot {
        guest: Rt,
        ..boot(Long, 70, "2+2", &["governor", "opps-exact", "driver"])
    },
    Boot {
        sampled: &["rt-loop:fair-server-off"],
        host: Rt,
        guest: Rt,
        ..boot(Long, 110, "2+2", &[]).with(&[Tools])
    },
    Boot {
        driver: Mainline,
        ..boot(Long, 90, "2+2", &["governor", "opps-exact", "no-exit"])
    },
    Boot {
        path: Some("exit"),
        driver: Mainline,
        ..boot(Long, 35, "2+2", &["opps-exact"])
    },
    // Without FEAT_S2FWB.
    Boot {
        path: Some("ioeventfd"),
        driver: Mainline,
        cpu: "cortex-a76",
        ..boot(Long, 80, "2+2", &["no-exit", "opps-exact"])
    },
    // As a Raspberry Pi 4 or 5 has it.
    Boot {
        gic: 2,
        ..boot(Long, 80, "2+2", &["boot", "doctor", "opps-exact"])
    },
    Boot {
        sampled: &["bpf-many", "bpf-dip", "bpf-sum"],
        ..boot(Long, 190, "2+2", &["bpf-kill", "bpf-ends", "bpf-calls"])
    },
    Boot {
        sampled: &["bpf-switch-cost", "bpf-flood"],
        ..boot(Long, 200, "2+2", &[])
    },
    Boot {
        sampled: &["bpf-sum"],
        host: Rt,
        ..boot(
            Long,
            100,
            "2+2",
            &["bpf-page", "bpf-requests", "bpf-two-vms"],
        )
    },
    Boot {
        sampled: &["bpf-dip", "bpf-switch-cost", "bpf-flood"],
        host: Rt,
        ..boot(Long, 300, "2+2", &[])
    },
    Boot {
        sampled: &["scx-requests", "scx-fallback"],
        ..boot(Long, 220, "2+2", &["scx-service", "scx-races"])
    },
    boot(Long, 200, "2+2", &["scx-deaths"]),
    boot(Long, 60, "2+2", &["scx-unit"]).with(&[Systemd]),
    // Each way of adding other load, and none: docs/bpf.md.
    boot(Long, 430, "2+2", &[CONTENDED]),
    boot(Long, 480, "4+3+1", &[CONTENDED]),
    Boot {
        vmm: GuestVmm::Qemu,
        ..boot(Long, 300, "2+2", &[CONTENDED_SERVED])
    },
    // There woken50 by scx takes 5.2 % more energy, woken75 by scx is 8.4 ms late, deadline25 up to 15 ms,
    // and part50 on the host itself takes 0 to 92 ms.
    boot(
        Long,
        430,
        "pixel6",
        &[
            "bench:contended.new25:contended.new50:contended.new75:contended.woken25:contended.fifo25:--variant=host:--variant=vm+bridge:--variant=max:--variant=scx",
        ],
    ),
    // Real boards. Three policies in one cluster, and two: with boost on and off.
    Boot {
        sampled: &["unpinned", "unpinned:boost"],
        ..boot(Long, 300, "sm8550", BOARD_WITH_BOOST)
    },
    Boot {
        sampled: &["unpinned", "unpinned:boost"],
        ..boot(Long, 300, "sdm845", BOARD_WITH_BOOST)
    },
    // Two clusters in one policy: there is no other clock for a vCPU to move to.
    boot(Long, 200, "r8a779g0", BOARD_WITH_BOOST),
    // Equal policies, without boost.
    Boot {
        sampled: &["unpinned"],
        ..boot(
            Long,
            150,
            "rk3588",
            &["opps-exact", "default-run", BOARD_RAMP],
        )
    },
    boot(Long, 60, "apple-m1", &["boot"]),
    // 20 CPUs.
    boot(Long, 120, "gb10", &["boot"]),
    boot(Long, 60, "jetson-orin", &["boot"]),
    boot(Long, 60, "mt8195-like", &["boot"]),
    boot(Long, 60, "qcs8300", &["boot"]),
    boot(Long, 60, "sa8775p", &["boot"]),
    // What `--cur-perf request` costs: docs/side-channel.md.
    boot(
        Long,
        200,
        "2+2",
        &[
            "bench:contended.part50:big-ramp:step-down:new-thread:little-to-big:--variant=vm+bridge:--variant=request",
        ],
    ),
    Boot {
        sampled: &["scx-requests"],
        host: Rt,
        ..boot(Long, 300, "2+2", &["scx-service", "scx-deaths"])
    },
    Boot {
        sampled: &["scx-fallback"],
        host: Rt,
        ..boot(Long, 120, "4+3+1", &[])
    },
    // Protected KVM, by each driver.
    Boot {
        protected: true,
        guest: Protected,
        ..boot(
            Long,
            300,
            "2+2",
            &["boot", "restart", "opps-exact", "protected", "kill"],
        )
    },
    Boot {
        protected: true,
        guest: Protected,
        driver: Mainline,
        ..boot(Long, 200, "2+2", &["opps-exact", "protected", "kill"])
    },
    Boot {
        protected: true,
        guest: Protected,
        ..boot(Long, 200, "sm8550", &["opps-exact", "protected"])
    },
    Boot {
        protected: true,
        guest: Protected,
        driver: Mainline,
        ..boot(Long, 200, "sm8550", &["opps-exact", "protected"])
    },
    boot(Long, 100, "2+2", &["disk"]).with(&[DiskModules]),
    Boot {
        protected: true,
        guest: Protected,
        ..boot(Long, 120, "2+2", &["disk"]).with(&[DiskModules])
    },
    // By Debian's kernel, which shares nothing.
    Boot {
        protected: true,
        ..boot(Long, 100, "2+2", &["disk-not-shared"]).with(&[DiskModules])
    },
    // What the authors of virtual cpufreq measured in protected guests: requests of fio, here also in
    // ordinary ones.
    boot(Long, 250, "2+2", &["bench:fio:--repeats=3"]).with(&[DiskModules, Fio]),
    Boot {
        vmm: GuestVmm::Qemu,
        ..boot(Long, 250, "2+2", &["bench:fio:--repeats=3"]).with(&[DiskModules, Fio])
    },
    Boot {
        protected: true,
        guest: Protected,
        ..boot(Long, 300, "2+2", &["bench:fio:--repeats=3"]).with(&[DiskModules, Fio])
    },
    // What else they measured there. Within three ticks: step-down is 8.4 ms late.
    Boot {
        protected: true,
        guest: Protected,
        ..boot(
            Long,
            300,
            "2+2",
            &[
                "bench:big-ramp:step-down:new-thread:little-to-big:io-wake:work.infer_small:work.io:work.frames:--repeats=3:--within-us=12000",
            ],
        )
    },
    // Debian stable's kernel has no uclamp.
    Boot {
        sampled: &["bpf-sum"],
        host: Old,
        ..boot(
            Long,
            110,
            "2+2",
            &[
                "bpf-page",
                "bpf-requests",
                "bpf-arithmetic",
                "scx-none",
                "no-uclamp",
            ],
        )
    },
    // A host whose fair servers hold its little CPUs above their lowest OPPs.
    Boot {
        sampled: &[
            "opps-floor",
            "no-dip:fifo",
            "opps-floor:fair-server-off",
            "unpinned:fair-server-off",
        ],
        ..boot(
            Long,
            250,
            "pixel6",
            &[
                "doctor",
                "opps-exact",
                "no-dip",
                "doctor:fair-server-off",
                "opps-exact:fair-server-off",
                "ext-server",
            ],
        )
    },
    Boot {
        sampled: &["unpinned"],
        driver: Mainline,
        ..boot(
            Long,
            150,
            "pixel6",
            &["opps-exact", "opps-exact:fair-server-off"],
        )
    },
    // Within three ticks, as on the drawn topologies.
    Boot {
        sampled: &["ramps"],
        ..boot(Long, 150, "2+2", &["bench:little-to-big:--within-us=12000"])
    },
    // Hosts that nothing else here has in mind, with CPUs so small that a server's
    // reservation would be above most of their OPPs.
    boot(Long, 110, "drawn:1", DRAWN),
    boot(Long, 90, "drawn:2", DRAWN),
    boot(Long, 90, "drawn:3", DRAWN),
    Boot {
        sampled: &["no-dip:fifo"],
        vmm: GuestVmm::Qemu,
        ..boot(Long, 270, "2+2", &["no-dip", "demo", "flood"])
    },
    Boot {
        vmm: GuestVmm::Qemu,
        ..boot(Long, 400, "2+2", &["qemu-deaths"]).with(&[Qemu])
    },
    Boot {
        vmm: GuestVmm::Qemu,
        path: Some("ram"),
        sampled: &["caps"],
        ..boot(Long, 480, "2+2", &["qemu-deaths", "qemu-life"]).with(&[Qemu])
    },
    Boot {
        vmm: GuestVmm::Qemu,
        ..boot(
            Long,
            300,
            "2+2",
            &["qemu-control", "qemu-life", "qemu-moves"],
        )
        .with(&[Qemu])
    },
    Boot {
        sampled: &["qemu-late", "bpf-served"],
        ..boot(Long, 440, "2+2", &["qemu-ram"]).with(&[Qemu])
    },
    Boot {
        vmm: GuestVmm::Qemu,
        ..boot(Long, 130, "2+2", &["tune", "guest-limits", "default-run"])
    },
    // A guest with the kernel's own driver, and no device.
    Boot {
        vmm: GuestVmm::Qemu,
        driver: Mainline,
        path: Some("ram"),
        ..boot(Long, 300, "2+2", &["demo", "qemu-moves", "qemu-life"])
    },
    Boot {
        vmm: GuestVmm::Qemu,
        path: Some("ram"),
        ..boot(Long, 150, "2+2", &["opps-exact", "flood"])
    },
    boot(Long, 70, "2+2", &["qemu-service"]).with(&[Qemu, Systemd]),
    // An x86-64 host.
    Boot {
        arch: X86_64,
        vmm: GuestVmm::Qemu,
        ..boot(
            Long,
            350,
            "pc",
            &[
                "doctor",
                "uclamp",
                "board:demo",
                "board:report",
                "board:ends",
                "opps-exact",
                "no-dip",
            ],
        )
        .with(&[Board])
    },
    Boot {
        sampled: &["opps-floor", "unpinned"],
        arch: X86_64,
        vmm: GuestVmm::Qemu,
        ..boot(
            Long,
            300,
            "hybrid",
            &[
                "board:demo",
                "board:report",
                "doctor",
                "opps-exact",
                "no-dip",
            ],
        )
        .with(&[Board])
    },
    Boot {
        arch: X86_64,
        vmm: GuestVmm::Qemu,
        ..boot(Long, 400, "hybrid", &["qemu-deaths"])
    },
    Boot {
        arch: X86_64,
        vmm: GuestVmm::Qemu,
        ..boot(Long, 70, "hybrid", &["qemu-service"]).with(&[Systemd])
    },
    // The BPF programs and the module, for a VM of a few instructions and for QEMU's guests.
    Boot {
        sampled: &["bpf-dip", "bpf-served", "bpf-sum", "scx-requests"],
        arch: X86_64,
        vmm: GuestVmm::Qemu,
        ..boot(
            Long,
            400,
            "2+2",
            &[
                "bpf-page",
                "bpf-requests",
                "bpf-arithmetic",
                "bpf-kfunc-refused",
                "bpf-limits",
                "bpf-meddling",
                "bpf-two-vms",
                "bpf-shared",
                "bpf-calls",
                "bpf-ends",
                "bpf-kill",
                // Before any that mounts bpffs.
                "scx-service",
            ],
        )
        .with(&[Qemu])
    },
    // bpf-requests and scx-requests count steps of kHz, of which a PC's CPUs have fewer for each clamp;
    // bpf-sum expects shares of 1024, of which the last CPUs have less.
    Boot {
        sampled: &["bpf-dip", "bpf-served", "scx-fallback"],
        arch: X86_64,
        vmm: GuestVmm::Qemu,
        ..boot(
            Long,
            480,
            "hybrid",
            &[
                // Before any that mounts bpffs.
                "scx-service",
                "bpf-page",
                "bpf-arithmetic",
                "bpf-kfunc-refused",
                "bpf-limits",
                "bpf-meddling",
                "bpf-two-vms",
                "bpf-shared",
                "bpf-calls",
                "bpf-ends",
                "bpf-kill",
                "scx-races",
                "scx-deaths",
            ],
        )
        .with(&[Qemu])
    },
    // bpf-calls, scx-races and scx-deaths need two CPUs with one clock. For bpf-dip, schedutil holds the
    // frequency of a CPU with its own. scx-service has not ended there, in two draws of 400 s.
    Boot {
        sampled: &["bpf-served", "bpf-sum", "scx-fallback"],
        arch: X86_64,
        vmm: GuestVmm::Qemu,
        ..boot(
            Long,
            380,
            "pc",
            &[
                "bpf-page",
                "bpf-arithmetic",
                "bpf-kfunc-refused",
                "bpf-limits",
                "bpf-meddling",
                "bpf-two-vms",
                "bpf-shared",
                "bpf-ends",
                "bpf-kill",
                "qemu",
            ],
        )
        .with(&[Qemu])
    },
    Boot {
        arch: X86_64,
        vmm: GuestVmm::Qemu,
        ..boot(Long, 280, "hybrid", &["flood", "default-run"])
    },
    Boot {
        sampled: &["opps-floor", "unpinned"],
        arch: X86_64,
        vmm: GuestVmm::Qemu,
        ..boot(Long, 640, "pc", &["flood", "default-run", "qemu-deaths"])
    },
    Boot {
        sampled: &["rt-guest"],
        arch: X86_64,
        vmm: GuestVmm::Qemu,
        host: Rt,
        guest: Rt,
        ..boot(Long, 140, "pc", &["rt-settings"]).with(&[GibPage])
    },
    Boot {
        sampled: &["rt-guest"],
        arch: X86_64,
        vmm: GuestVmm::Qemu,
        host: Rt,
        guest: Rt,
        ..boot(Long, 140, "hybrid", &["rt-settings"]).with(&[GibPage])
    },
    Boot {
        arch: X86_64,
        vmm: GuestVmm::Qemu,
        ..boot(Long, 70, "pc", &["qemu-service"]).with(&[Systemd])
    },
    boot(Long, 130, "2+2", &["libvirt"]).with(&[Libvirt, Qemu, Systemd]),
    Boot {
        driver: Mainline,
        path: Some("ram"),
        ..boot(Long, 290, "2+2", &["libvirt"]).with(&[Libvirt, Qemu, Systemd])
    },
    Boot {
        host: Rt,
        guest: Rt,
        ..boot(Long, 200, "2+2", &["libvirt-rt"]).with(&[Isolated, Libvirt, Qemu, Systemd])
    },
    Boot {
        vmm: GuestVmm::Qemu,
        ..boot(Long, 160, "2+2", &["debian-guest", "qemu-efi"]).with(&[Disk, Firmware, Qemu])
    },
    Boot {
        vmm: GuestVmm::Qemu,
        host: Rt,
        guest: Rt,
        ..boot(Long, 120, "2+2", &["opps-exact", "demo"])
    },
    Boot {
        vmm: GuestVmm::Qemu,
        ..boot(
            Long,
            240,
            "2+2",
            &[
                "bench:big-ramp:step-down:new-thread:little-to-big:--variant=host:--variant=vm+bridge:--repeats=3",
            ],
        )
    },
    Boot {
        vmm: GuestVmm::Qemu,
        ..boot(
            Long,
            90,
            "pixel6",
            // new-thread is up to four ticks late, and little-to-big migrates as early.
            &[
                "bench:big-ramp:step-down:--variant=host:--variant=vm+bridge:--repeats=3:--within-us=12000:fair-server-off",
            ],
        )
    },
    boot(Long, 40, "2+2", &["repeat"]),
    boot(Long, 40, "2+2", &["repeat"]),
    // Kernels with checks of their own: values and counts, which don't depend on their speed.
    checked(300, &["planted", "kunit", "bpf-calls", "doctor"]),
    checked(600, &["boot", "governor", "opps-exact", "domain"]),
    checked(
        400,
        &["restart", "host-fails", "pin-offline", "thread-actuator"],
    ),
    checked(300, &["rt-standard"]),
    checked(
        500,
        &[
            "bpf-page",
            "bpf-requests",
            "bpf-arithmetic",
            "bpf-kfunc-refused",
            "bpf-meddling",
        ],
    ),
    checked(500, &["bpf-two-vms", "bpf-shared"]),
    checked(400, &["no-exit", "stats", "attach"]),
    Boot {
        path: Some("ioeventfd"),
        ..checked(600, &["order", "opps-exact"])
    },
    Boot {
        guest: Checked,
        ..boot(
            Instrumented,
            600,
            "2+2",
            &["boot", "kunit", "driver", "opps-exact"],
        )
    },
    // Data races show where CPUs run at once.
    raced(300, &["planted", "bpf-calls"]),
    raced(300, &["boot"]),
    raced(300, &["bpf-page", "bpf-requests", "bpf-two-vms"]),
];

/// What a host has for these scenarios where no row of the table is carried out: each one's parts in the
/// first row that names it, or names the scenario of which it is a variant (`board` of `board:kills:3`).
pub fn parts(scenarios: &[String]) -> Vec<HostPart> {
    let row = |scenario: &str| {
        let names = |boot: &&Boot| [boot.scenarios, boot.sampled].concat().contains(&scenario);
        BOOTS.iter().find(names)
    };
    let mut parts = Vec::new();
    for scenario in scenarios {
        let ends = scenario.match_indices(':').map(|(end, _)| end).rev();
        let mut names = [scenario.len()].into_iter().chain(ends);
        if let Some(boot) = names.find_map(|end| row(&scenario[..end])) {
            parts.extend(boot.parts);
        }
        // As the bench takes it, with any options.
        if scenario.split(':').any(|word| word.starts_with("fio")) {
            parts.extend([DiskModules, Fio]);
        }
    }
    parts
}

/// A set's boots, the longest first, so that those at a time end at about the same time.
pub fn of(set: Set) -> Vec<&'static Boot> {
    let mut boots: Vec<_> = BOOTS.iter().filter(|boot| boot.set == set).collect();
    boots.sort_by_key(|boot| Reverse(boot.about_s));
    boots
}

#[cfg(test)]
mod tests;
