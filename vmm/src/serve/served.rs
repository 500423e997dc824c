// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is served, checked before a VMM connects.

use std::fs::File;

use anyhow::Context;
use vcpufreq_device::Util;
use vcpufreq_host::undo::KernelHost;
use vcpufreq_host::{ActuatorChoice, HostCpus, HostRoot};

use crate::{
    config::{
        RtWish, VcpuConfig, no_frequencies::with_next_step, pinned, resolve, rt, rt_pcpus,
        topology_source,
    },
    events,
    message::warn,
    options::{serve::ServedArgs, values::largest},
    rt_guest::{InForce, RtGuest},
    sandbox::Sandbox,
    sys,
};

/// What is served, checked.
pub struct Served {
    pub(super) options: ServedArgs,
    /// Its vCPUs.
    pub vcpus: Vec<VcpuConfig>,
    floors: Vec<Util>,
    /// What they were made like, in a line.
    pub topology_source: String,
    /// How requests reach the host's scheduler.
    pub(super) actuator: ActuatorChoice,
    pub(super) host: HostRoot,
    /// Whether a guardian puts back what the server changes.
    pub(super) has_guardian: bool,
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
        if let Err(error) = sys::raise_open_files() {
            warn(&format!(
                "can't raise the limit of open files ({error}); VMs of many vCPUs may not be served"
            ));
        }
        options.check()?;
        options.check_offered()?;
        // Each VM has its own; what the host lacks is reported once.
        Sandbox::by(options.sandbox, warn)?;
        let served = Self::of_options(options, host)?;
        served.check_real_time()?;
        Ok(served)
    }

    /// What these options, which are checked, amount to on this host.
    ///
    /// # Errors
    /// The first rule that is broken, in one line.
    pub fn of_options(options: ServedArgs, host: HostRoot) -> anyhow::Result<Self> {
        const INSTEAD: &str = "start the VM without vcpufreq";
        let count = resolve::vcpu_count(&options.vcpus)?;
        resolve::check_named(largest(&options.bounds.floor), count)?;
        let cpus = HostCpus::read(&host);
        let vcpus = resolve::vcpus(&options.vcpus, &cpus, count);
        let vcpus = vcpus.map_err(|error| with_next_step(error, true, INSTEAD))?;
        let served = Self {
            actuator: resolve::actuator_choice(&options.bridge)?,
            topology_source: topology_source::line(&options.vcpus, &cpus, &vcpus),
            floors: rt::floors(&options.bounds, &vcpus, &cpus.online())?,
            options,
            vcpus,
            host,
            has_guardian: true,
            events: None,
        };
        served.rt().check_clamped(served.actuator)?;
        Ok(served)
    }

    /// What it asks for of a real-time host.
    pub fn rt(&self) -> RtWish<'_> {
        RtWish {
            vcpus: &self.vcpus,
            floors: &self.floors,
            resume_latency: self.options.bounds.resume_latency_us,
        }
    }

    /// What `vcpufreq rt apply` has set, if it matters to these vCPUs. It stays so while this is held.
    ///
    /// # Errors
    /// As [`InForce::look`].
    pub(super) fn applied(&self) -> anyhow::Result<Option<InForce>> {
        if pinned(&self.vcpus).is_empty() {
            return Ok(None);
        }
        Ok(Some(InForce::look(&KernelHost::from(&self.host))?))
    }

    /// Checks what can be checked of real-time vCPUs without a VMM, and takes this process off their
    /// pCPUs: with it what it starts.
    fn check_real_time(&self) -> anyhow::Result<()> {
        self.rt().check_clamped(self.actuator)?;
        if !self.rt().is_real_time() {
            return Ok(());
        }
        let applied = self.applied()?;
        let record = applied.as_ref().and_then(InForce::record);
        RtGuest::check_host(&self.rt(), &self.host, record)?;
        RtGuest::try_policies(&self.rt())?;
        RtGuest::leave(&rt_pcpus(&self.vcpus), &self.host)
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
