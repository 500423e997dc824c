// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Facts about a machine as they come in.

/// A machine as the host or a user describes it; nothing is checked yet.
///
/// [`Machine::try_from`](crate::Machine) checks it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineFacts {
    /// The CPUs in the order of their nodes, which is the order in which Linux
    /// numbers them. The boot CPU comes first.
    pub cpus: Vec<CpuFacts>,
    /// OPP tables that [`CpuFacts::opp_table`] refers to by index.
    pub opp_tables: Vec<OppTable>,
    /// Whether the CPUs get PSCI's standby as an idle state, and with it Linux a
    /// cpuidle driver; true where the kernel isn't known.
    ///
    /// A `PREEMPT_RT` kernel needs one. Without it, Linux 7.2 and later keep the tick on the first
    /// entry to idle (`cpuidle_idle_call`). Each tick wakes a thread of such a kernel, the CPU
    /// never counts as idle, and schedutil never lowers its request (`sugov_hold_freq`). Any other
    /// kernel is faster without it: around an idle state Linux puts the GICv3's redistributor to
    /// sleep and wakes it (`gic_cpu_pm_notifier`), by eight accesses that each exit. With QEMU's
    /// emulated GICv3 (no KVM) the CPU then never wakes.
    pub standby: bool,
    /// The virtual cpufreq device's registers; `None` leaves its node out.
    pub cpufreq: Option<CpufreqRegion>,
}

/// One CPU of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuFacts {
    /// The affinity fields of the CPU's MPIDR_EL1: bits 39:32 and 23:0.
    pub reg: u64,
    /// The `cpu_capacity` that the guest shall show for this CPU, 1 to 1024: the host's
    /// `cpu_capacity` of the pCPU behind it.
    ///
    /// Linux calls its own largest CPU 1024. A guest without a CPU of 1024
    /// therefore sees every capacity multiplied by 1024 / its largest; see
    /// [`Machine::guest_capacities`](crate::Machine::guest_capacities).
    pub capacity: u16,
    /// The highest frequency that the guest's cpufreq driver will report for
    /// the CPU, in kHz: Linux multiplies the device tree's value by it.
    pub khz_max: u32,
    /// Index into [`MachineFacts::opp_tables`].
    pub opp_table: Option<usize>,
    /// Its socket, cluster and core.
    pub place: CpuPlace,
    /// Whether the CPU is for real-time work: its [standby](MachineFacts::standby)
    /// gets a residency of 1 s, so that Linux waits by WFI wherever a timer is
    /// nearer.
    pub real_time: bool,
}

/// Where a CPU is in the machine. CPUs with the same number are in one socket, or in one cluster of
/// it. The numbers need not be contiguous: their order is kept, the nodes are numbered from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct CpuPlace {
    /// Linux before 6.0 takes no capacities from a map with sockets: it has them only where there
    /// is more than one.
    pub socket: u32,
    /// Within the socket.
    pub cluster: u32,
    /// CPUs of one cluster with the same number are threads of one core; without, each is one.
    pub core: Option<u32>,
}

/// The OPPs of one or more CPUs, slowest first, 1 to 64 of them.
///
/// Linux makes a CPU's energy model from these: from the powers where the
/// table has them, else from the voltages and the cpu node's
/// `dynamic-power-coefficient` (`dev_pm_opp_of_register_em`). That coefficient
/// is written where all voltages and powers are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OppTable {
    /// The OPPs, in rising order of frequency.
    pub opps: Vec<Opp>,
    /// The CPUs of this table change frequency together (`opp-shared`). CPUs
    /// with the same OPPs in different performance domains need a table each,
    /// or this off.
    pub shared: bool,
}

/// An operating performance point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opp {
    /// Frequency in kHz, not 0.
    pub khz: u32,
    /// Voltage in µV, not 0. All OPPs of a table have one, or none has.
    pub uv: Option<u32>,
    /// Power at this OPP and full load in µW, 1 to 64,000,000 (the largest
    /// that Linux' energy model takes). All OPPs of a table have one, or none.
    pub uw: Option<u32>,
}

/// Where the virtual cpufreq device is in the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpufreqRegion {
    /// Guest physical address, a multiple of 64 KiB.
    pub base: u64,
    /// Size in bytes: at least one 4 KiB page for each CPU.
    pub size: u64,
    /// What is there.
    pub kind: RegionKind,
}

/// What a guest finds in the region of the virtual cpufreq device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionKind {
    /// Registers of a device.
    Registers,
    /// Shared memory (`abi/vcpufreq-shm.h`), and the doorbell's page behind it.
    SharedMemory,
    /// Registers in the guest's own RAM: the tree reserves [`RESERVED`] bytes for them.
    GuestRam,
}

/// Bytes of RAM that a [`RegionKind::GuestRam`] takes, and its alignment: the registers of 512 CPUs,
/// and a block by which arm64 maps the RAM around it.
pub const RESERVED: u64 = 2 << 20;
