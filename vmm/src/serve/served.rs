// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is served, checked before a VMM connects.

use std::fs::File;

use anyhow::Context;
use vcpufreq_device::Util;
use vcpufreq_host::undo::KernelHost;
use vcpufreq_host::{ActuatorChoice, HostRoot};

use crate::{
    config::{RtWish, VcpuConfig, pinned, rt_pcpus, served_vm::ServedVmConfig},
    events,
    message::warn,
    options::serve::ServedArgs,
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

    fn of_options(options: ServedArgs, host: HostRoot) -> anyhow::Result<Self> {
        let config = ServedVmConfig::check(&options, &host)?;
        Ok(Self {
            vcpus: config.vcpus,
            floors: config.floors,
            topology_source: config.topology_source,
            actuator: config.actuator,
            options,
            host,
            has_guardian: true,
            events: None,
        })
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

    /// Checks what can be checked without a VMM of real-time vCPUs, and of others where the host is set
    /// apart for such. Takes this process off their pCPUs: with it what it starts.
    fn check_real_time(&self) -> anyhow::Result<()> {
        let applied = self.applied()?;
        let record = applied.as_ref().and_then(InForce::record);
        RtGuest::check_host(&self.rt(), &self.host, record)?;
        if !self.rt().is_real_time() {
            return Ok(());
        }
        RtGuest::try_policies(&self.rt())?;
        RtGuest::leave(&rt_pcpus(&self.vcpus), &self.host)
    }

    /// Checks that no other guest has the partition of its real-time vCPUs. A VMM that runs may have it,
    /// and be served later.
    ///
    /// # Errors
    /// Where one runs.
    pub fn check_unused(&self) -> anyhow::Result<()> {
        let applied = self.applied()?;
        let record = applied.as_ref().and_then(InForce::record);
        RtGuest::check_unused(&self.rt(), &self.host, record)
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

#[cfg(test)]
mod tests {
    //! Promise: what the host is set apart for is known before there is a VMM.
    use clap::Parser;
    use vcpufreq_host::fakes::FakeHost;
    use vcpufreq_rt::{Partition, PartitionGuest, Profile, Record};

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        served: ServedArgs,
    }

    fn check(
        host: &FakeHost,
        line: &[&str],
        checked: fn(&Served) -> anyhow::Result<()>,
    ) -> Result<(), String> {
        let words = ["qemu"].iter().chain(line);
        let options = Line::try_parse_from(words).unwrap().served;
        let served = Served::of_options(options, host.root());
        let checked = served.and_then(|served| checked(&served));
        checked.map_err(|error| error.to_string())
    }

    /// A host whose CPU 3 is a real-time guest's, with a cpuset.
    fn applied() -> FakeHost {
        let host = FakeHost::two_plus_two();
        host.write("proc/sys/kernel/random/boot_id", "boot\n");
        let guest = PartitionGuest {
            name: "plc".to_owned(),
            cpus: "3".parse().unwrap(),
        };
        let record = Record {
            boot_id: "boot".to_owned(),
            profile_name: "kvm-rt".to_owned(),
            profile: Profile::default(),
            partition: Partition {
                guests: vec![guest],
                housekeeping: "0-2".parse().unwrap(),
            },
            owner: None,
            entries: Vec::new(),
        };
        let text = serde_json::to_string(&record).unwrap();
        host.write("run/vcpufreq-rt/rt.json", text);
        host
    }

    // QEMU was started, and its exit code was the one of the command.
    #[test]
    fn an_ordinary_vcpu_is_refused_on_a_cpu_that_is_set_apart() {
        let check = |host: &FakeHost, pin: &str| check(host, &[pin], Served::check_real_time);
        let line = check(&applied(), "--pin=0=3").unwrap_err();
        let said =
            "vCPU 0 is pinned to CPU 3, which vcpufreq rt apply has given to real-time guest plc";
        assert!(line.starts_with(said), "{line}");
        assert_eq!(line.lines().count(), 1);
        assert_eq!(check(&applied(), "--pin=0=2"), Ok(()));
        assert_eq!(check(&FakeHost::two_plus_two(), "--pin=0=3"), Ok(()));
    }

    #[test]
    fn a_second_real_time_guest_is_refused_in_a_partition() {
        let host = applied();
        let events = "sys/fs/cgroup/vcpufreq-rt.plc/rt/cgroup.events";
        host.write(events, "populated 1\n");
        let check = |line: &[&str]| check(&host, line, Served::check_unused);
        let line = check(&["--pin=0=3", "--rt=0=fifo:1"]).unwrap_err();
        assert!(line.starts_with("a guest runs in "), "{line}");
        assert_eq!(check(&["--pin=0=2"]), Ok(()));
    }
}
