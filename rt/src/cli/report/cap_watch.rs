// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Looks at the frequency caps of the measured CPUs while a test runs.
//!
//! Caps are read at the start, at the end, and in between as often as the caller looks: a cap that
//! comes and goes between two looks isn't seen. What the hardware throttles by itself shows on x86
//! in counters, of which none is missed.

use vcpufreq_host::CpuList;

use vcpufreq_host::undo::ReadHost;

use crate::{
    measure::RunCaps,
    settings::{CPU, FrequencyCap, frequency_caps},
};

/// The caps of one test.
pub(super) struct RunCapWatch<'a> {
    look: &'a dyn ReadHost,
    cpus: &'a CpuList,
    seen: Vec<FrequencyCap>,
    throttled_before: u64,
}

impl<'a> RunCapWatch<'a> {
    /// From now on.
    pub(super) fn start(look: &'a dyn ReadHost, cpus: &'a CpuList) -> Self {
        let mut watch = Self {
            look,
            cpus,
            seen: Vec::new(),
            throttled_before: throttled(look, cpus),
        };
        watch.look_again();
        watch
    }

    /// Adds the caps of this moment; of each policy the lowest counts.
    pub(super) fn look_again(&mut self) {
        for cap in frequency_caps(self.look, self.cpus) {
            let Some(seen) = self.seen.iter_mut().find(|seen| seen.cpus == cap.cpus) else {
                self.seen.push(cap);
                continue;
            };
            seen.khz = seen.khz.min(cap.khz);
            let new = cap.by.into_iter().filter(|by| !seen.by.contains(by));
            seen.by.extend(new.collect::<Vec<_>>());
        }
    }

    /// Until now.
    pub(super) fn so_far(&mut self) -> RunCaps {
        self.look_again();
        let throttled = throttled(self.look, self.cpus);
        RunCaps {
            caps: self.seen.clone(),
            throttled: throttled.saturating_sub(self.throttled_before),
        }
    }
}

/// How often these CPUs, or their packages, were throttled for heat since the boot, where the
/// hardware tells: each CPU counts its package's.
fn throttled(look: &dyn ReadHost, cpus: &CpuList) -> u64 {
    let count = |cpu: u32, of: &str| {
        let file = format!("{CPU}/cpu{cpu}/thermal_throttle/{of}_throttle_count");
        u64::try_from(look.number(&file)?).ok()
    };
    let counts = cpus
        .iter()
        .flat_map(|cpu| ["core", "package"].map(|of| count(cpu, of)));
    counts.flatten().sum()
}

#[cfg(test)]
mod tests {
    //! Promises: a cap that was there at any look is in the result, the lowest of each policy with
    //! all that made it; hardware's throttling is counted from the start.
    use std::fs;

    use super::*;
    use vcpufreq_host::undo::KernelHost;

    #[test]
    fn what_was_there_at_any_look_is_in_the_result() {
        let dir = tempfile::tempdir().expect("a folder");
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path.trim_start_matches('/'));
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        };
        let cap = |khz: &str, state: &str| {
            write(&format!("{CPU}/cpufreq/policy2/scaling_max_freq"), khz);
            write("/sys/class/thermal/cooling_device0/cur_state", state);
        };
        write(&format!("{CPU}/cpufreq/policy2/affected_cpus"), "2 3\n");
        write(&format!("{CPU}/cpufreq/policy2/cpuinfo_max_freq"), "2000\n");
        write("/sys/class/thermal/cooling_device0/type", "cpufreq-cpu2\n");
        let throttles = format!("{CPU}/cpu3/thermal_throttle/core_throttle_count");
        write(&throttles, "7\n");
        cap("2000", "0");
        let host = KernelHost::at(dir.path());
        let cpus: CpuList = "3".parse().expect("CPUs");
        let nothing = RunCaps::default();
        assert_eq!(RunCapWatch::start(&host, &cpus).so_far(), nothing);
        let mut watch = RunCapWatch::start(&host, &cpus);
        for (khz, state) in [("1500", "1"), ("1000", "0"), ("1500", "1")] {
            cap(khz, state);
            watch.look_again();
        }
        cap("2000", "0");
        write(&throttles, "9\n");
        let seen = watch.so_far();
        assert_eq!(seen.throttled, 2);
        let lines: Vec<_> = seen.caps.iter().map(ToString::to_string).collect();
        let line = "CPU 2-3: at most 1000 of 2000 kHz, by cooling device cpufreq-cpu2 and \
                    scaling_max_freq";
        assert_eq!(lines, [line]);
        let of_0: CpuList = "0".parse().expect("CPUs");
        assert_eq!(RunCapWatch::start(&host, &of_0).so_far(), nothing);
    }
}
