// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host that is measured: its clusters, and what it lacks for measuring.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use vcpufreq_host::{
    CpufreqPolicy, HostCpus, HostRoot, NEEDS_UCLAMP, Pcpu, measures_frequency, uclamp_available,
};

use crate::args::GuestArgs;

/// The governor that follows a load and its clamps.
pub const SCHEDUTIL: &str = "schedutil";
/// The record of `vcpufreq rt apply`, as `vcpufreq_rt` has it.
pub const RT_RECORD: &str = "run/vcpufreq-rt/rt.json";

/// Steps of a made-up table, from the lowest frequency to the highest: 5 entries.
const STEPS: u32 = 4;

/// CPUs that share a frequency.
#[derive(Debug, Clone)]
pub struct Cluster {
    /// Its online CPUs.
    pub cpus: Vec<u32>,
    /// Their `cpu_capacity`, 1..=1024.
    pub capacity: u16,
    /// Its lowest frequency in kHz, and the highest that a load can bring it to by schedutil: boost
    /// may be above the one that its capacity refers to.
    pub khz: (u32, u32),
    /// The frequencies that it has, in kHz; empty where the driver lists none.
    pub opps_khz: Vec<u32>,
    /// These are not the driver's, but steps between the policy's limits.
    pub made_up: bool,
    /// Power of a busy CPU at each frequency, kHz and µW; empty where the
    /// kernel has no energy model.
    pub power: Vec<(u32, u32)>,
    /// Its governor; schedutil can be chosen where it is another.
    pub governor: String,
    /// Where its frequency can be read.
    pub(super) cur_freq: PathBuf,
}

impl Cluster {
    /// The first of its CPUs: where a pinned load runs.
    pub fn first(&self) -> u32 {
        self.cpus.first().copied().unwrap_or_default()
    }

    /// The last of them.
    pub fn last(&self) -> u32 {
        self.cpus.last().copied().unwrap_or_default()
    }

    /// The frequencies of its table that the policy's limits let it run at, in kHz.
    pub fn opps_in_reach(&self) -> impl Iterator<Item = u32> + '_ {
        let (min, max) = self.khz;
        let all = self.opps_khz.iter().copied();
        all.filter(move |khz| (min..=max).contains(khz))
    }

    /// Its policy's name, as `policy0`.
    pub fn policy(&self) -> String {
        let dir = self.cur_freq.parent().and_then(Path::file_name);
        dir.unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Power of a busy CPU at a frequency, in µW.
    pub fn uw(&self, khz: u32) -> Option<u64> {
        let mut found = self.power.iter();
        found
            .find(|(of, _)| *of == khz)
            .map(|(_, uw)| u64::from(*uw))
    }

    /// The frequency that it runs at now, in kHz.
    pub fn now_khz(&self) -> Option<u32> {
        std::fs::read_to_string(&self.cur_freq)
            .ok()?
            .trim()
            .parse()
            .ok()
    }
}

/// A host that can measure.
#[derive(Debug, Clone)]
pub struct BenchMachine {
    /// Its clusters, capacity rising: the first is little, the last big.
    pub clusters: Vec<Cluster>,
    /// The core of each CPU, where the kernel shows it.
    pub cores: BTreeMap<u32, u32>,
    /// Whether frequencies that are read were measured, not set.
    pub measured: bool,
    /// Its kernel's release.
    pub kernel: String,
    /// Its name: the device tree's model, or the firmware's.
    pub board: String,
    /// Files that a guest is made of.
    pub guest: GuestFiles,
    /// Where an emulated host's speed model is switched on.
    pub speed_switch: Option<PathBuf>,
}

/// Files that guests need; empty where none boots.
#[derive(Debug, Clone, Default)]
pub struct GuestFiles {
    /// The guest's kernel.
    pub kernel: PathBuf,
    /// Its initial ramdisk.
    pub initrd: PathBuf,
    /// The QEMU that runs it in place of `vcpufreq run`.
    pub qemu: Option<PathBuf>,
    /// Whether its disk is the host's null_blk, for fio.
    pub disk: bool,
}

impl BenchMachine {
    /// Looks at the host; a line for each thing that it lacks, `tracing` among them, and what guests of
    /// `args` need if there are any, with the bridge if so.
    pub fn check(
        args: Option<&GuestArgs>,
        bridge: bool,
        tracing: Option<String>,
    ) -> Result<Self, Vec<String>> {
        let uclamp = if bridge { uclamp_available() } else { Ok(()) };
        let lacks = no_uclamp(uclamp).into_iter().chain(tracing).collect();
        Self::at(&HostRoot::default(), args, lacks)
    }

    /// The host below `root`, if it lacks nothing, `missing` neither.
    fn at(
        root: &HostRoot,
        args: Option<&GuestArgs>,
        mut missing: Vec<String>,
    ) -> Result<Self, Vec<String>> {
        let cpus = HostCpus::read(root);
        let clusters = clusters(root, &cpus, &mut missing);
        let cores = cpus.cpus.iter().filter_map(|cpu| Some((cpu.id, cpu.core?)));
        let guest = match args {
            Some(args) => guest_files(args, &mut missing),
            None => Some(GuestFiles::default()),
        };
        let text = |path: &str| root.text(path).unwrap_or_default();
        match guest {
            Some(guest) if missing.is_empty() => Ok(Self {
                clusters,
                cores: cores.collect(),
                measured: measures_frequency(root),
                kernel: text("proc/sys/kernel/osrelease"),
                board: board(root).unwrap_or("this host".to_owned()),
                guest,
                speed_switch: None,
            }),
            _ => Err(missing),
        }
    }

    /// With a table for each cluster. CPPC has none: its frequencies have no steps.
    pub fn with_tables(mut self) -> Self {
        for cluster in &mut self.clusters {
            if cluster.opps_khz.is_empty() {
                cluster.opps_khz = steps(cluster.khz);
                cluster.made_up = true;
            }
        }
        self
    }

    /// With one CPU of each kind of cluster alone. A server with CPPC has a policy for each of its equal
    /// CPUs.
    pub fn one_of_each_kind(&self) -> Self {
        let mut one = self.clone();
        let mut kinds = Vec::new();
        one.clusters.retain_mut(|cluster| {
            let kind = (cluster.capacity, cluster.khz, cluster.opps_khz.clone());
            let is_new = !kinds.contains(&kind);
            kinds.push(kind);
            cluster.cpus.truncate(1);
            is_new
        });
        one
    }

    /// The least capable cluster.
    pub fn little(&self) -> &Cluster {
        &self.clusters[0]
    }

    /// The most capable one.
    pub fn big(&self) -> &Cluster {
        &self.clusters[self.clusters.len() - 1]
    }

    /// All CPUs, rising: the vCPUs' pCPUs in this order.
    pub fn cpus(&self) -> Vec<u32> {
        let mut cpus: Vec<u32> = self
            .clusters
            .iter()
            .flat_map(|one| one.cpus.clone())
            .collect();
        cpus.sort_unstable();
        cpus
    }

    /// Where other work disturbs this CPU least: not on its core, whose threads share a clock, and in
    /// another cluster, if there is one.
    pub fn aside_of(&self, cpu: u32) -> Option<u32> {
        let core = |cpu: &u32| self.cores.get(cpu).copied();
        let own = self.cluster_of(cpu)?;
        let others = self.cpus().into_iter().filter(|other| *other != cpu);
        others.min_by_key(|other| {
            let is_sibling = core(other).is_some() && core(other) == core(&cpu);
            (is_sibling, own.cpus.contains(other))
        })
    }

    /// The cluster of a CPU.
    pub fn cluster_of(&self, cpu: u32) -> Option<&Cluster> {
        self.clusters
            .iter()
            .find(|cluster| cluster.cpus.contains(&cpu))
    }
}

/// Frequencies in equal steps from the first to the second, in kHz.
fn steps((min, max): (u32, u32)) -> Vec<u32> {
    let step = max.saturating_sub(min) / STEPS;
    let mut steps: Vec<u32> = (0..STEPS).map(|number| min + number * step).collect();
    steps.push(max);
    steps.dedup();
    steps
}

/// The board's name: the device tree's model, or without one DMI's vendor and product.
#[must_use]
pub fn board(root: &HostRoot) -> Option<String> {
    let text = |path: &str| {
        let text = root.text(path)?.trim_matches('\0').trim().to_owned();
        Some(text).filter(|text| !text.is_empty())
    };
    text("proc/device-tree/model").or_else(|| {
        let dmi = ["sys_vendor", "product_name"].map(|name| format!("sys/class/dmi/id/{name}"));
        let named: Vec<_> = dmi.iter().filter_map(|path| text(path)).collect();
        (!named.is_empty()).then(|| named.join(" "))
    })
}

/// The line of a kernel that can't put a request into force, in `doctor`'s words.
fn no_uclamp(uclamp: io::Result<()>) -> Option<String> {
    let error = uclamp.err()?;
    Some(format!("uclamp is not available: {error}; {NEEDS_UCLAMP}"))
}

fn clusters(root: &HostRoot, cpus: &HostCpus, missing: &mut Vec<String>) -> Vec<Cluster> {
    let online = cpus.online();
    let has_profile = root.path(RT_RECORD).exists();
    missing.extend(chosen_by_cpus(&cpus.policies));
    let mut found = Vec::new();
    for policy in &cpus.policies {
        let own: Vec<u32> = policy.cpus.and(&online).into_iter().collect();
        let dir = PathBuf::from(format!(
            "sys/devices/system/cpu/cpufreq/policy{}",
            policy.id
        ));
        let khz = |file: &str| root.number(dir.join(file)).filter(|khz: &u32| *khz > 0);
        let (Some(&first), Some(min), Some(max)) = (
            own.first(),
            khz("scaling_min_freq"),
            khz("scaling_max_freq"),
        ) else {
            continue;
        };
        let choices = root.text(dir.join("scaling_available_governors"));
        let file = root.path(dir.join("scaling_governor"));
        let writable = File::options().write(true).open(file).map(drop);
        missing.extend(stays_without_schedutil(
            policy,
            choices.as_deref(),
            (writable, has_profile),
        ));
        if min >= max {
            missing.push(format!(
                "the frequency of cpufreq policy {} can't move: scaling_min_freq is {min} and scaling_max_freq {max}; write {} to the first and {} to the second",
                policy.id, khz("cpuinfo_min_freq").unwrap_or(min), khz("cpuinfo_max_freq").unwrap_or(max)
            ));
        }
        let power = policy.opps.iter();
        let reference = cpus.cpu(first).and_then(|cpu| cpu.reference_khz);
        found.push(Cluster {
            opps_khz: policy.opps.iter().map(|opp| opp.khz).collect(),
            made_up: false,
            power: power.filter_map(|opp| Some((opp.khz, opp.uw?))).collect(),
            governor: policy.governor.clone(),
            capacity: cpus.cpu(first).map_or(1024, Pcpu::capacity_or_full),
            cpus: own,
            khz: (min, reference.map_or(max, |khz| max.min(khz))),
            cur_freq: root.path(dir.join("scaling_cur_freq")),
        });
    }
    if found.is_empty() {
        missing.push("this host has no cpufreq policy, so there is no frequency to measure; load its cpufreq driver".to_owned());
    }
    found.sort_by_key(|cluster| (cluster.capacity, cluster.cpus.clone()));
    found
}

/// The line of a host whose CPUs choose their frequency themselves, as `doctor` has it.
fn chosen_by_cpus(policies: &[CpufreqPolicy]) -> Option<String> {
    let mut policies = policies.iter();
    let (driver, word) = policies.find_map(|one| Some((&one.driver, one.passive_by()?)))?;
    Some(format!(
        "the CPU chooses its frequency by {driver}, and no clamp reaches it; boot with {word}, then \
         choose schedutil"
    ))
}

/// Why a policy that has another governor can't have schedutil meanwhile.
fn stays_without_schedutil(
    policy: &CpufreqPolicy,
    choices: Option<&str>,
    (writable, has_profile): (io::Result<()>, bool),
) -> Option<String> {
    if policy.governor == SCHEDUTIL || policy.passive_by().is_some() {
        return None;
    }
    if has_profile {
        return Some(format!(
            "cpufreq policy {} has the governor '{}' by a real-time profile; run vcpufreq rt restore \
             first",
            policy.id, policy.governor
        ));
    }
    let what = format!(
        "cpufreq policy {} has the governor '{}', and a load moves the frequency under schedutil alone",
        policy.id, policy.governor
    );
    let mut choices = choices.unwrap_or_default().split_whitespace();
    if choices.all(|name| name != SCHEDUTIL) {
        return Some(format!(
            "{what}, which is not among its governors; see vcpufreq doctor"
        ));
    }
    let error = writable.err()?;
    Some(format!(
        "{what}; this user can't choose that ({error}): run as root, or write schedutil to its scaling_governor"
    ))
}

fn guest_files(args: &GuestArgs, missing: &mut Vec<String>) -> Option<GuestFiles> {
    let kvm = File::options().read(true).write(true).open("/dev/kvm");
    if let Err(error) = kvm {
        missing.push(format!(
            "can't open /dev/kvm ({error}); see vcpufreq doctor"
        ));
    }
    if let Some(lacks) = &args.lacks {
        missing.push(lacks.clone());
        return None;
    }
    let mut file = |path: Option<&Path>, option: &str| match path {
        // A ramdisk in memory is no regular file of a folder.
        Some(path) if path.exists() => Some(path.to_path_buf()),
        Some(path) => {
            missing.push(format!(
                "there is no file {}; name one with {option}",
                path.display()
            ));
            None
        }
        None => {
            missing.push(format!("{option} is missing; see --help"));
            None
        }
    };
    let kernel = file(args.kernel.as_deref(), "--kernel");
    let initrd = file(args.initrd.as_deref(), "--initrd");
    Some(GuestFiles {
        kernel: kernel?,
        initrd: initrd?,
        qemu: args.qemu.clone(),
        disk: false,
    })
}

#[cfg(test)]
mod tests {
    //! A host that can be measured, and a line for what is in the way.

    use super::*;
    use crate::findings::{LACKS, lacks};
    use vcpufreq_host::fakes::FakeHost;

    const POLICY: &str = "sys/devices/system/cpu/cpufreq/policy2";

    fn host() -> FakeHost {
        let host = FakeHost::two_plus_two();
        host.kernel("7.3.4");
        for (policy, min, max) in [(0, "600000", "1800000"), (2, "700000", "2800000")] {
            let dir = format!("sys/devices/system/cpu/cpufreq/policy{policy}");
            for (name, khz) in [("scaling", max), ("cpuinfo", max)] {
                host.write(&format!("{dir}/{name}_max_freq"), khz);
            }
            for name in ["scaling", "cpuinfo"] {
                host.write(&format!("{dir}/{name}_min_freq"), min);
            }
        }
        let power = [
            (700_000, 160_000),
            (1_200_000, 345_000),
            (1_700_000, 600_000),
            (2_200_000, 1_000_000),
            (2_800_000, 1_760_000),
        ];
        host.energy_model(2, "0x1", &power);
        host
    }

    fn seen(host: &FakeHost) -> (Vec<Cluster>, Vec<String>) {
        let mut missing = Vec::new();
        let root = host.root();
        let found = clusters(&root, &HostCpus::read(&root), &mut missing);
        (found, missing)
    }

    #[test]
    fn clusters_rise_and_have_their_power() {
        let (clusters, missing) = seen(&host());
        assert!(missing.is_empty(), "{missing:?}");
        assert_eq!(clusters[0].khz, (600_000, 1_800_000));
        assert_eq!(clusters[1].cpus, [2, 3]);
        assert_eq!(clusters[1].uw(2_800_000), Some(1_760_000));
        assert_eq!(clusters[0].uw(600_000), None);
    }

    #[test]
    fn the_highest_frequency_is_one_that_schedutil_chooses() {
        let host = host();
        host.write("proc/sys/kernel/osrelease", "7.3.4");
        let policy = "sys/devices/system/cpu/cpufreq/policy2";
        host.boost(2, "3000000", true);
        for file in ["cpuinfo_max_freq", "scaling_max_freq"] {
            host.write(&format!("{policy}/{file}"), "3000000");
        }
        let (clusters, missing) = seen(&host);
        assert!(missing.is_empty(), "{missing:?}");
        assert_eq!(clusters[1].khz.1, 2_800_000);
        assert_eq!(clusters[1].opps_khz.last(), Some(&3_000_000));
    }

    /// Four equal CPUs with CPPC, each a policy without a list of frequencies.
    fn server() -> FakeHost {
        let host = FakeHost::empty();
        for list in ["present", "online"] {
            host.write(&format!("sys/devices/system/cpu/{list}"), "0-3\n");
        }
        for cpu in 0..4 {
            host.policy(cpu, &cpu.to_string(), "", "3000000");
            let dir = format!("sys/devices/system/cpu/cpufreq/policy{cpu}");
            host.remove(&format!("{dir}/scaling_available_frequencies"));
            host.write(&format!("{dir}/scaling_min_freq"), "1000000");
            host.write(&format!("{dir}/scaling_max_freq"), "3000000");
        }
        host
    }

    #[test]
    fn clusters_without_a_table_get_steps_and_one_of_a_kind_is_enough() {
        let checked = |host: &FakeHost| BenchMachine::at(&host.root(), None, Vec::new());
        let server = checked(&server()).unwrap();
        assert!(server.clusters.iter().all(|one| one.opps_khz.is_empty()));
        let server = server.with_tables();
        let one = server.one_of_each_kind();
        assert_eq!((server.clusters.len(), one.cpus()), (4, vec![0]));
        let steps = [1_000_000, 1_500_000, 2_000_000, 2_500_000, 3_000_000];
        assert_eq!(one.little().opps_khz, steps);
        assert!(one.little().made_up);
        let board = checked(&host()).unwrap().with_tables();
        assert!(board.clusters.iter().all(|cluster| !cluster.made_up));
        assert_eq!(board.one_of_each_kind().cpus(), [0, 2]);
        assert_eq!(super::steps((7, 9)), [7, 9]);
    }

    #[test]
    fn other_work_is_on_another_core() {
        let host = server();
        for (cpu, threads) in [(0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")] {
            let list = format!("sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list");
            host.write(&list, threads);
        }
        let checked = |host: &FakeHost| BenchMachine::at(&host.root(), None, Vec::new()).unwrap();
        let server = checked(&host);
        assert_eq!(
            [0, 1, 2].map(|cpu| server.aside_of(cpu)),
            [Some(2), Some(2), Some(0)]
        );
        assert!(!server.measured);
        host.write("proc/cpuinfo", "flags\t: aperfmperf\n");
        assert!(checked(&host).measured);
        let board = checked(&super::tests::host());
        assert_eq!([0, 3].map(|cpu| board.aside_of(cpu)), [Some(2), Some(0)]);
    }

    #[test]
    fn another_governor_is_no_hindrance_where_schedutil_can_be_chosen() {
        let host = host();
        host.write(&format!("{POLICY}/scaling_governor"), "ondemand");
        let choices = "ondemand performance schedutil";
        host.write(&format!("{POLICY}/scaling_available_governors"), choices);
        let (clusters, missing) = seen(&host);
        assert!(missing.is_empty(), "{missing:?}");
        assert_eq!(
            [&clusters[0].governor, &clusters[1].governor],
            [SCHEDUTIL, "ondemand"]
        );
        let policy = &HostCpus::read(&host.root()).policies[1];
        let denied = Err(io::ErrorKind::PermissionDenied.into());
        let line = stays_without_schedutil(policy, Some(choices), (denied, false)).unwrap();
        assert!(
            line.contains("policy 2") && line.contains("(permission denied): run as root"),
            "{line}"
        );
    }

    #[test]
    fn cpus_that_choose_themselves_are_one_line_with_the_kernels_parameter() {
        for (driver, word) in [
            ("intel_pstate", "boot with intel_pstate=passive, "),
            ("amd-pstate-epp", "boot with amd_pstate=passive, "),
        ] {
            let host = server();
            for cpu in 0..4 {
                let dir = format!("sys/devices/system/cpu/cpufreq/policy{cpu}");
                host.write(&format!("{dir}/scaling_driver"), driver);
                host.write(&format!("{dir}/scaling_governor"), "powersave");
                let choices = "performance powersave";
                host.write(&format!("{dir}/scaling_available_governors"), choices);
            }
            let (_, missing) = seen(&host);
            assert_eq!(missing.len(), 1, "{missing:?}");
            assert!(missing[0].contains(word), "{missing:?}");
            let refused = BenchMachine::at(&host.root(), None, Vec::new()).unwrap_err();
            assert_eq!(refused, missing);
            // What demo and bench make of it.
            assert_eq!((lacks(&refused).is_none(), LACKS), (true, 2));
        }
    }

    #[test]
    fn a_real_time_profiles_governor_stays() {
        let host = host();
        host.write(&format!("{POLICY}/scaling_governor"), "performance");
        let choices = "performance schedutil";
        host.write(&format!("{POLICY}/scaling_available_governors"), choices);
        host.write(RT_RECORD, "");
        let (_, missing) = seen(&host);
        assert!(
            missing[0].contains("'performance' by a real-time profile"),
            "{missing:?}"
        );
        assert_eq!(missing.len(), 1);
    }

    #[test]
    fn a_kernel_without_uclamp_is_one_line_with_what_to_do() {
        let root = host();
        let check = |uclamp: io::Result<()>| {
            let missing = no_uclamp(uclamp).into_iter().collect();
            BenchMachine::at(&root.root(), None, missing)
        };
        assert!(check(Ok(())).is_ok());
        let refused = check(Err(io::ErrorKind::Unsupported.into())).unwrap_err();
        assert_eq!(
            refused,
            [
                "uclamp is not available: unsupported; use a kernel with CONFIG_UCLAMP_TASK and CONFIG_UCLAMP_TASK_GROUP"
            ]
        );
    }

    #[test]
    fn each_thing_in_the_way_is_a_line_with_what_to_do() {
        let one = |change: &dyn Fn(&FakeHost), words: [&str; 2]| {
            let host = host();
            change(&host);
            let (_, missing) = seen(&host);
            assert_eq!(missing.len(), 1, "{missing:?}");
            assert!(
                words.iter().all(|word| missing[0].contains(word)),
                "{missing:?}"
            );
        };
        one(
            &|host| host.remove("sys/devices/system/cpu/cpufreq"),
            ["no cpufreq policy", "load its cpufreq driver"],
        );
        one(
            &|host| host.write(&format!("{POLICY}/scaling_governor"), "performance"),
            ["policy 2", "not among its governors; see vcpufreq doctor"],
        );
        // As a bench leaves it that was killed while it held the frequency.
        one(
            &|host| host.write(&format!("{POLICY}/scaling_min_freq"), "2800000"),
            ["policy 2 can't move", "write 700000"],
        );
    }
}
