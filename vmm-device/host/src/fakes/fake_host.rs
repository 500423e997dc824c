// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A directory that stands for a host's `/sys` and `/proc` in tests. Its methods panic if the
//! temporary directory cannot be written.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::{HostRoot, Tid, possible_pcpus};

const CPU: &str = "sys/devices/system/cpu";
const LITTLE_KHZ: &str = "600000 1000000 1400000 1800000";
const BIG_KHZ: &str = "700000 1200000 1700000 2200000 2800000";

/// Removed with everything in it when dropped.
#[derive(Debug)]
pub struct FakeHost(PathBuf);

impl Drop for FakeHost {
    fn drop(&mut self) {
        // A test that has failed is the better message.
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl FakeHost {
    /// Without any file.
    #[must_use]
    pub fn empty() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Relaxed);
        let name = format!("vcpufreq-fake-host-{}-{number}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        fs::create_dir(&dir).expect("a new temporary directory");
        Self(dir)
    }

    /// The default topology: 2 little CPUs up to 1.8 GHz, 2 big up to 2.8 GHz.
    #[must_use]
    pub fn two_plus_two() -> Self {
        let host = Self::empty();
        for list in ["present", "online"] {
            host.write(&format!("{CPU}/{list}"), "0-3\n");
        }
        for (cpu, capacity) in [(0, "329"), (1, "329"), (2, "1024"), (3, "1024")] {
            host.write(&format!("{CPU}/cpu{cpu}/cpu_capacity"), capacity);
        }
        host.policy(0, "0 1", LITTLE_KHZ, "1800000");
        host.policy(2, "2 3", BIG_KHZ, "2800000");
        host
    }

    /// The CPUs of this machine, each at `khz` of `max_khz`, and the calling thread's place there.
    #[must_use]
    pub fn of_this_machine(khz: u32, max_khz: u32) -> Self {
        let host = Self::empty();
        let cpus = possible_pcpus(&HostRoot::default());
        for cpu in cpus.iter() {
            let cpufreq = format!("{CPU}/cpu{cpu}/cpufreq");
            host.write(&format!("{cpufreq}/scaling_cur_freq"), khz.to_string());
            host.write(&format!("{cpufreq}/cpuinfo_max_freq"), max_khz.to_string());
        }
        host.write(&format!("{CPU}/possible"), cpus.to_string());
        let stat = format!("proc/self/task/{}/stat", Tid::current());
        host.write(&stat, fs::read(format!("/{stat}")).expect("procfs"));
        host
    }

    /// Adds a policy of schedutil: its number, `related_cpus`, frequencies and the highest one.
    pub fn policy(&self, id: u32, cpus: &str, khz: &str, max_khz: &str) {
        for (name, value) in [
            ("related_cpus", cpus),
            ("scaling_driver", "lab\n"),
            ("scaling_governor", "schedutil\n"),
            ("scaling_available_frequencies", khz),
            ("cpuinfo_max_freq", max_khz),
        ] {
            self.write(&format!("{CPU}/cpufreq/policy{id}/{name}"), value);
        }
    }

    /// The release of the running kernel.
    pub fn kernel(&self, release: &str) {
        self.write("proc/sys/kernel/osrelease", release);
    }

    /// A CPU's `acpi_cppc`: highest, nominal and lowest performance; nominal and lowest frequency
    /// in MHz.
    pub fn cppc(&self, cpu: u32, perf: [u32; 3], mhz: [u32; 2]) {
        let names = ["highest_perf", "nominal_perf", "lowest_perf"].into_iter();
        let names = names.chain(["nominal_freq", "lowest_freq"]);
        for (name, value) in names.zip(perf.into_iter().chain(mhz)) {
            let path = format!("{CPU}/cpu{cpu}/acpi_cppc/{name}");
            self.write(&path, value.to_string());
        }
    }

    /// The lists of a CPU's cluster and package; an empty one is no file. Its core is its own.
    pub fn topology(&self, cpu: u32, cluster: &str, package: &str) {
        let (own, package) = (
            cpu.to_string(),
            (["package_cpus_list", "core_siblings_list"], package),
        );
        let lists = [("cluster_cpus_list", cluster), ("core_cpus_list", &own)].into_iter();
        let lists = lists.chain(package.0.map(|name| (name, package.1)));
        for (name, list) in lists.filter(|(_, list)| !list.is_empty()) {
            self.write(&format!("{CPU}/cpu{cpu}/topology/{name}"), list);
        }
    }

    /// A CPU's `capacity-dmips-mhz` in the device tree.
    pub fn dmips_mhz(&self, cpu: u32, value: u32) {
        let path = format!("{CPU}/cpu{cpu}/of_node/capacity-dmips-mhz");
        self.write(&path, value.to_be_bytes());
    }

    /// Gives a policy frequencies of boost, which is on or off.
    pub fn boost(&self, id: u32, khz: &str, on: bool) {
        let policy = format!("{CPU}/cpufreq/policy{id}");
        self.write(&format!("{policy}/scaling_boost_frequencies"), khz);
        self.write(&format!("{policy}/boost"), u8::from(on).to_string());
    }

    /// Adds the performance domain of a CPU: frequency in kHz and power of each state.
    pub fn energy_model(&self, cpu: u32, flags: &str, states: &[(u32, u32)]) {
        let dir = format!("sys/kernel/debug/energy_model/cpu{cpu}");
        self.write(&format!("{dir}/flags"), flags);
        for (khz, uw) in states {
            self.write(&format!("{dir}/ps:{khz}/frequency"), khz.to_string());
            self.write(&format!("{dir}/ps:{khz}/power"), uw.to_string());
        }
    }

    /// Runtime and period of the fair servers of CPUs 0 to 3, in ms.
    pub fn fair_server(&self, runtime_ms: u64, period_ms: u64) {
        for cpu in 0..4 {
            self.server("fair_server", cpu, (runtime_ms, period_ms));
        }
    }

    /// Of one server of one CPU.
    pub fn server(&self, name: &str, cpu: u32, (runtime_ms, period_ms): (u64, u64)) {
        let dir = format!("sys/kernel/debug/sched/{name}/cpu{cpu}");
        self.write(&format!("{dir}/runtime"), format!("{runtime_ms}000000\n"));
        self.write(&format!("{dir}/period"), format!("{period_ms}000000\n"));
    }

    /// A table of (kHz, µV, µW) in the device tree, and the CPU's link to it.
    pub fn opp_node(&self, cpu: u32, opps: &[(u32, u32, u32)]) {
        let base = "sys/firmware/devicetree/base";
        let table = format!("{base}/opp-table-{cpu}");
        let phandle = (0x10 + cpu).to_be_bytes();
        self.write(&format!("{table}/phandle"), phandle);
        self.write(
            &format!("{CPU}/cpu{cpu}/of_node/operating-points-v2"),
            phandle,
        );
        for (khz, uv, uw) in opps {
            let opp = format!("{table}/opp-{khz}");
            let hz = (u64::from(*khz) * 1000).to_be_bytes();
            self.write(&format!("{opp}/opp-hz"), hz);
            self.write(&format!("{opp}/opp-microvolt"), uv.to_be_bytes());
            self.write(&format!("{opp}/opp-microwatt"), uw.to_be_bytes());
        }
    }

    /// Writes a file, and makes its directories.
    pub fn write(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.0.join(path);
        let dirs = path.parent().map_or(Ok(()), fs::create_dir_all);
        dirs.and_then(|()| fs::write(&path, content))
            .expect("a file in the temporary directory");
    }

    /// Removes a file or a directory.
    pub fn remove(&self, path: &str) {
        let path = self.0.join(path);
        let removed = match path.is_dir() {
            true => fs::remove_dir_all(path),
            false => fs::remove_file(path),
        };
        removed.expect("it is there");
    }

    /// As what reads a host wants it.
    #[must_use]
    pub fn root(&self) -> HostRoot {
        HostRoot::at(&self.0)
    }
}
