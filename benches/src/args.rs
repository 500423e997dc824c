// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of `bench`, and of the guests that it and `demo` boot.

use std::path::PathBuf;

use clap::Args;

use crate::variant::Variant;

/// A guest's tick and a host's, in µs.
pub const TWO_TICKS_US: u64 = 8_000;

/// Options of the guests that `bench` and `demo` boot.
#[derive(Debug, Args)]
pub struct GuestArgs {
    /// The guest's kernel, as --kernel of vcpufreq run [default: this host's]
    #[arg(long, value_name = "FILE", requires = "initrd")]
    pub kernel: Option<PathBuf>,
    /// The guest's initial ramdisk; vcpufreq-load is /bin/vcpufreq-load in it [default: made in
    /// memory, of this program and the modules of this host's kernel]
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub initrd: Option<PathBuf>,
    /// A module in the guest's ramdisk and its options, loaded in this order; may be repeated
    #[arg(long, value_name = "PATH[ OPTION...]", requires = "initrd")]
    pub guest_module: Vec<String>,
    /// More words for the guest's command line
    #[arg(
        long,
        value_name = "TEXT",
        allow_hyphen_values = true,
        default_value = ""
    )]
    pub guest_cmdline: String,
    /// How the guest's accesses reach the device, as --path of vcpufreq run
    #[arg(long, value_name = "PATH", default_value = "auto")]
    pub path: String,
    /// The guests are protected, as by --protected of vcpufreq run
    #[arg(long)]
    pub protected: bool,
    /// The cgroup in which the VMM makes its own, as --cgroup-parent of vcpufreq run
    #[arg(long, value_name = "DIR")]
    pub cgroup_parent: Option<PathBuf>,
    /// The QEMU that runs them on a machine that vcpufreq run has no guests for.
    #[arg(skip)]
    pub qemu: Option<PathBuf>,
    /// The guest is made of this host's parts.
    #[arg(skip)]
    pub of_host: bool,
    /// Why it can't be made of them, if so.
    #[arg(skip)]
    pub lacks: Option<String>,
    /// A line on a better path that the guests go without, if so.
    #[arg(skip)]
    pub note: Option<String>,
}

/// Options of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Those of its guests.
    #[command(flatten)]
    pub guest: GuestArgs,
    /// Guests of this QEMU, behind vcpufreq qemu with the bridge, in place of vcpufreq run's; its
    /// path is its own
    #[arg(long, value_name = "FILE", conflicts_with_all = ["path", "protected"])]
    pub qemu: Option<PathBuf>,
    /// How a request becomes a clamp, as --clamp of vcpufreq run
    #[arg(long, value_name = "MODE", default_value = "ceilings", value_parser = ["ceilings", "floor", "exact"])]
    pub clamp: String,
    /// Measure this scenario alone, or as NAME.CASE one case of it; may be repeated
    #[arg(long, value_name = "NAME")]
    pub scenario: Vec<String>,
    /// Measure on this variant alone; may be repeated [default: host, vm, vm+bridge]
    #[arg(long, value_name = "VARIANT")]
    pub variant: Vec<Variant>,
    /// Measure workloads on guests of which each has one ingredient of the bridge more
    #[arg(long, conflicts_with = "variant")]
    pub ablation: bool,
    /// Times that each scenario is measured, unless it has a lower maximum [default: 5; 9 for
    /// work's io]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub repeats: Option<u32>,
    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Write a page with a chart of each scenario, which needs no network
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Where 1 switches on an emulated host's speed model, for scenarios of fixed work
    #[arg(long, value_name = "FILE", hide = true)]
    pub speed_switch: Option<PathBuf>,
    /// How far a ramp of the guest with the bridge may be from the host's, in us
    #[arg(long, value_name = "US", hide = true, default_value_t = TWO_TICKS_US)]
    pub within_us: u64,
}

impl GuestArgs {
    /// Prints what the guests go without. Those of QEMU have one path.
    pub(crate) fn print_note(&self) {
        if let Some(note) = self.note.as_ref().filter(|_| self.qemu.is_none()) {
            eprintln!("vcpufreq: {note}");
        }
    }
}

impl BenchArgs {
    /// The options of its guests, if one boots: the variant `host` needs none.
    #[must_use]
    pub fn guests(&self) -> Option<&GuestArgs> {
        let boots = self.variants().any(|one| one != Variant::Host);
        boots.then_some(&self.guest)
    }

    pub(crate) fn variants(&self) -> impl Iterator<Item = Variant> + Clone {
        let asked = if self.ablation {
            Variant::ABLATION
        } else {
            &self.variant
        };
        let all = Variant::ALL.into_iter();
        let there = |one: &Variant| !(self.ablation && self.qemu.is_some()) || one.is_for_qemu();
        all.filter(|one| one.is_asked(asked)).filter(there)
    }

    /// Whether a guest has the bridge.
    pub(crate) fn bridge(&self) -> bool {
        self.variants().any(|one| one.bridge().is_some())
    }
}

#[cfg(test)]
mod tests {
    //! Promises: where no guest boots, nothing of a guest is needed, and without the bridge no uclamp.
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Bench {
        #[command(flatten)]
        args: BenchArgs,
    }

    #[test]
    fn the_variant_host_needs_nothing_of_a_guest() {
        let needs = |options: &[&str]| {
            let words = ["bench"].iter().chain(options);
            Bench::parse_from(words).args.guests().is_some()
        };
        assert!(!needs(&["--variant", "host"]));
        assert!(needs(&["--variant", "host", "--variant", "vm"]));
        assert!(needs(&[]));
    }

    #[test]
    fn an_ablation_has_the_variants_that_the_vmm_has() {
        let of = |options: &[&str]| {
            let words = ["bench", "--ablation"].iter().chain(options);
            let args = Bench::parse_from(words).args;
            args.variants().map(Variant::name).collect::<Vec<_>>()
        };
        let run = of(&[]);
        assert_eq!((run.len(), run[1], run[10]), (11, "plain", "vm+bridge"));
        let qemu = of(&["--qemu", "/bin/qemu"]);
        let expected = [
            "host",
            "plain",
            "pinned",
            "vm",
            "opps",
            "cur_perf",
            "sum",
            "vm+bridge",
        ];
        assert_eq!(qemu, expected);
        assert!(Bench::try_parse_from(["bench", "--ablation", "--variant", "vm"]).is_err());
    }

    #[test]
    fn the_bridge_alone_needs_uclamp() {
        let needs = |options: &[&str]| {
            let words = ["bench"].iter().chain(options);
            Bench::parse_from(words).args.bridge()
        };
        assert!(needs(&[]) && needs(&["--variant", "scx"]));
        assert!(!needs(&["--variant", "host", "--variant", "vm"]));
    }
}
