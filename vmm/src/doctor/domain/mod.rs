// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What of a libvirt domain's XML spoils latency or the bridge, and the line to write instead.
//!
//! ```text
//! virsh or file ─▶ DomainXml ─┐
//! host, rt apply, server ─▶ AroundDomain ─┴─▶ CheckedDomain ─▶ findings
//! ```
//! A blocker is what libvirt or the server refuses. What matters to real-time vCPUs alone is `n/a` in a
//! domain that has none.

mod around;
mod bridge;
mod checked;
mod latency;
mod pins;
mod source;
mod xml;

use anyhow::Context;
use serde_json::{Value, json};
use vcpufreq_host::HostRoot;

use super::{DoctorFinding, exit_code};
use around::AroundDomain;
use checked::CheckedDomain;
use xml::DomainXml;

/// A domain's name, and what was found.
#[derive(Debug)]
pub struct DomainFindings {
    name: String,
    /// In the order of the XML's parts.
    pub findings: Vec<DoctorFinding>,
}

/// Reads a domain (a name that libvirt knows, or a path of XML), and compares it with the host below
/// `root` of this architecture.
///
/// # Errors
/// In one line: there is no such domain or file, or it holds no domain.
pub fn look(name: &str, root: &HostRoot, arch: &str) -> anyhow::Result<DomainFindings> {
    let context = || format!("domain {name}");
    let text = source::read(name).with_context(context)?;
    let xml = DomainXml::parse(&text).with_context(context)?;
    let around = AroundDomain::read(root, arch, &xml.name, xml.dtb.as_deref());
    Ok(DomainFindings {
        findings: findings(&xml, &around),
        name: xml.name,
    })
}

impl DomainFindings {
    /// The findings for programs.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "domain": self.name,
            "findings": self.findings,
            "exit_code": exit_code(&self.findings),
        })
    }
}

fn findings(xml: &DomainXml, around: &AroundDomain) -> Vec<DoctorFinding> {
    let checked = CheckedDomain::new(xml, around);
    let mut found = latency::findings(&checked);
    found.extend(pins::findings(&checked));
    found.extend(bridge::findings(&checked));
    found.into_iter().map(DoctorFinding::printable).collect()
}

#[cfg(test)]
mod tests;
