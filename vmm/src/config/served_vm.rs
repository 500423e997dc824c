// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM of another program, as the options of `serve` and `qemu` have it.

use vcpufreq_device::Util;
use vcpufreq_host::{ActuatorChoice, HostCpus, HostRoot};

use super::{RtWish, VcpuConfig, no_frequencies::with_next_step, resolve, rt, topology_source};
use crate::options::{serve::ServedArgs, values::largest};

/// Such a VM, checked. Nothing of the host is changed.
#[derive(Debug)]
pub struct ServedVmConfig {
    /// Its vCPUs.
    pub vcpus: Vec<VcpuConfig>,
    /// Of each its lowest uclamp.min.
    pub floors: Vec<Util>,
    /// What they were made like, in a line.
    pub topology_source: String,
    /// How requests reach the host's scheduler.
    pub actuator: ActuatorChoice,
}

impl ServedVmConfig {
    /// What these options, which are checked, amount to on this host.
    ///
    /// # Errors
    /// The first rule that is broken, in one line.
    pub fn check(options: &ServedArgs, host: &HostRoot) -> anyhow::Result<Self> {
        const INSTEAD: &str = "start the VM without vcpufreq";
        let count = resolve::vcpu_count(&options.vcpus)?;
        resolve::check_named(largest(&options.bounds.floor), count)?;
        let cpus = HostCpus::read(host);
        let vcpus = resolve::vcpus(&options.vcpus, &cpus, count);
        let vcpus = vcpus.map_err(|error| with_next_step(error, true, INSTEAD))?;
        let config = Self {
            actuator: resolve::actuator_choice(&options.bridge)?,
            topology_source: topology_source::line(&options.vcpus, &cpus, &vcpus),
            floors: rt::floors(&options.bounds, &vcpus, &cpus.online())?,
            vcpus,
        };
        let wish = RtWish {
            vcpus: &config.vcpus,
            floors: &config.floors,
            resume_latency: options.bounds.resume_latency_us,
        };
        wish.check_clamped(config.actuator)?;
        Ok(config)
    }
}
