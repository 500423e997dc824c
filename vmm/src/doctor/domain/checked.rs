// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A domain beside its host and server: which vCPUs are real-time, where they run, and how bad what is
//! found is.

use vcpufreq_host::CpuList;

use super::{around::AroundDomain, xml::DomainXml};
use crate::{
    doctor::DoctorFinding,
    options::{
        rt_values::RtPolicy,
        serve::ServeArgs,
        values::{PerVcpu, of_vcpu},
    },
};

/// A domain and what it is compared with.
pub struct CheckedDomain<'a> {
    pub xml: &'a DomainXml,
    pub around: &'a AroundDomain,
    /// The vCPUs that libvirt or the server schedules so.
    pub real_time: CpuList,
    /// Their CPUs.
    pub real_time_cpus: CpuList,
}

impl<'a> CheckedDomain<'a> {
    pub fn new(xml: &'a DomainXml, around: &'a AroundDomain) -> Self {
        let bare = Self {
            xml,
            around,
            real_time: CpuList::default(),
            real_time_cpus: CpuList::default(),
        };
        let is = |vcpu: &u32| bare.policy(*vcpu).is_some() || bare.server_policy(*vcpu).is_some();
        let real_time: CpuList = bare.vcpus().filter(is).collect();
        let pins = real_time
            .iter()
            .filter_map(|vcpu| xml.pin(vcpu).or(bare.server_pin(vcpu)));
        Self {
            real_time_cpus: pins.flat_map(CpuList::iter).collect(),
            real_time,
            ..bare
        }
    }

    pub fn vcpus(&self) -> std::ops::Range<u32> {
        0..self.xml.vcpus
    }

    pub fn server(&self) -> Option<&'a ServeArgs> {
        self.around.server.as_ref().ok()?.as_ref()
    }

    fn of_server<T>(
        &self,
        flags: impl FnOnce(&'a ServeArgs) -> &'a [PerVcpu<T>],
        vcpu: u32,
    ) -> Option<&'a T> {
        of_vcpu(flags(self.server()?), vcpu)
    }

    /// The CPUs to which the server pins a vCPU.
    pub fn server_pin(&self, vcpu: u32) -> Option<&'a CpuList> {
        self.of_server(|server| &server.served.vcpus.pin, vcpu)
    }

    /// How the server schedules a vCPU.
    pub fn server_policy(&self, vcpu: u32) -> Option<RtPolicy> {
        self.of_server(|server| &server.served.vcpus.rt, vcpu)
            .copied()
    }

    /// How libvirt schedules a vCPU, if it is a real-time policy.
    pub fn policy(&self, vcpu: u32) -> Option<&'a str> {
        let policy = self.xml.policies.get(&vcpu)?;
        (policy.starts_with("fifo") || policy.starts_with("rr")).then_some(policy)
    }

    /// The online CPUs but for those of real-time vCPUs, as libvirt takes a list.
    pub fn housekeeping(&self) -> String {
        let rest = self.around.online.without(&self.real_time_cpus);
        match rest.is_empty() {
            true => "0".to_owned(),
            false => rest.to_string(),
        }
    }

    /// Whether the server would refuse a domain that isn't fit for real-time vCPUs.
    pub fn is_served_real_time(&self) -> bool {
        self.vcpus().any(|vcpu| self.server_policy(vcpu).is_some())
    }

    /// What delays real-time vCPUs.
    pub fn delays(
        &self,
        subject: &'static str,
        what: impl Into<String>,
        why: impl Into<String>,
    ) -> DoctorFinding {
        // Memory is locked for them alone.
        match self.xml.locked || !self.real_time.is_empty() {
            true => DoctorFinding::limit(subject, what, why),
            false => DoctorFinding::absent(subject, what, why),
        }
    }

    /// The same, where the server refuses it if it has real-time vCPUs.
    pub fn refuses(
        &self,
        subject: &'static str,
        what: impl Into<String>,
        why: impl Into<String>,
    ) -> DoctorFinding {
        match self.is_served_real_time() {
            true => DoctorFinding::blocker(subject, what, why),
            false => self.delays(subject, what, why),
        }
    }
}
