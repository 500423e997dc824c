// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The cgroups that libvirt makes for the vCPUs of a domain, and their clamps.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use crate::harness::leftovers::CGROUPS;
use crate::harness::sysfs;
use crate::harness::vm::Vm;

/// A group's clamps where nothing is clamped.
const FREE: (u32, u32) = (0, 1024);

/// A vCPU's cgroup.
pub struct VcpuGroup {
    vcpu: usize,
    path: PathBuf,
    /// What it holds, and what is in force for its thread.
    own: (u32, u32),
    clamp: (u32, u32),
}

impl VcpuGroup {
    /// Those of a guest with so many vCPUs.
    pub fn all(vm: &Vm, vcpus: usize) -> Result<Vec<Self>> {
        (0..vcpus).map(|vcpu| Self::of(vm, vcpu)).collect()
    }

    fn of(vm: &Vm, vcpu: usize) -> Result<Self> {
        let text = sysfs::text(format!(
            "/proc/{}/task/{}/cgroup",
            vm.pid(),
            vm.vcpu_tid(vcpu)?
        ))?;
        let name = text.trim().strip_prefix("0::/").context("no cgroup")?;
        let path = Path::new(CGROUPS).join(name);
        Ok(Self {
            vcpu,
            own: clamps(&path)?,
            clamp: vm.clamp(vcpu)?,
            path,
        })
    }

    pub fn exists(&self) -> bool {
        self.path.exists()
    }

    pub fn verdict(&self) -> LabVerdict {
        let figures = json!({ "group": self.path, "own": self.own, "in_force": self.clamp });
        let vcpu = format!("vcpu{}", self.vcpu);
        LabVerdict::with_figures(figures)
            .check("it is libvirt's", self.path.ends_with(vcpu), &self.path)
            .check("it clamps", self.own != FREE, self.own)
            .check(
                "its clamp is in force",
                self.own == self.clamp,
                (self.own, self.clamp),
            )
    }
}

/// A group's clamps as utilization.
fn clamps(group: &Path) -> Result<(u32, u32)> {
    let util = |file: &str| {
        let path = group.join(file);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        // Two decimals, as the kernel writes them.
        let percent = text.trim().replace("max", "100.00").replace('.', "");
        let hundredths: u32 = percent.parse().context(text)?;
        anyhow::Ok((hundredths * 1024 + 5_000) / 10_000)
    };
    Ok((util("cpu.uclamp.min")?, util("cpu.uclamp.max")?))
}

/// Groups of libvirt's that are there after the end, and hold a clamp.
pub fn still_clamped(groups: &[VcpuGroup]) -> Result<Vec<String>> {
    let all = groups.iter().flat_map(|group| group.path.ancestors());
    let below = all.filter(|group| *group != Path::new(CGROUPS) && group.starts_with(CGROUPS));
    let mut left = Vec::new();
    for group in below.filter(|group| group.exists()) {
        if clamps(group)? != FREE {
            left.push(group.display().to_string());
        }
    }
    Ok(left)
}
