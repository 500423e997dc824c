// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is served, checked before a VMM connects.

use std::fs::File;

use anyhow::Context;
use vcpufreq_device::host::{ActuatorChoice, HostCpus, HostRoot};

use crate::{
    config::{VcpuConfig, likeness, no_frequencies::with_next_step, resolve},
    events,
    message::warn,
    options::serve::ServedArgs,
    sandbox::Sandbox,
    sys,
};

/// What is served, checked.
pub struct Served {
    pub(super) options: ServedArgs,
    /// Its vCPUs.
    pub vcpus: Vec<VcpuConfig>,
    /// What they were made like, in a line.
    pub likeness: String,
    /// How requests reach the host's scheduler.
    pub(super) actuator: ActuatorChoice,
    pub(super) host: HostRoot,
    /// The file of --events, which the bridges of this server share.
    pub(super) events: Option<File>,
}

impl Served {
    /// How many vCPUs it has.
    ///
    /// # Errors
    /// More than a device has.
    pub fn count(&self) -> anyhow::Result<u16> {
        u16::try_from(self.vcpus.len()).context("too many vCPUs")
    }

    /// Checks everything that can be checked without a VMM.
    ///
    /// # Errors
    /// The first rule that is broken, in one line.
    pub fn check(options: ServedArgs, host: HostRoot) -> anyhow::Result<Self> {
        const INSTEAD: &str = "start the VM without vcpufreq";
        if let Err(error) = sys::raise_open_files() {
            warn(&format!(
                "can't raise the limit of open files ({error}); VMs of many vCPUs may not be served"
            ));
        }
        options.check()?;
        // Each VM has its own; what the host lacks is reported once.
        Sandbox::by(options.sandbox, warn)?;
        let count = resolve::vcpu_count(&options.vcpus)?;
        let cpus = HostCpus::read(&host);
        let vcpus = resolve::vcpus(&options.vcpus, &cpus, count);
        let vcpus = vcpus.map_err(|error| with_next_step(error, true, INSTEAD))?;
        Ok(Self {
            actuator: resolve::actuator_choice(&options.bridge)?,
            likeness: likeness::line(&options.vcpus, &cpus, &vcpus),
            options,
            vcpus,
            host,
            events: None,
        })
    }

    /// Makes the file of --events anew: once, and by `serve` only when it has its socket.
    ///
    /// # Errors
    /// As [`events::create`].
    pub fn create_events(&mut self) -> anyhow::Result<()> {
        let path = self.options.bridge.events.as_deref();
        self.events = path.map(events::create).transpose()?;
        Ok(())
    }
}
