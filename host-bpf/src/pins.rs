// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where the service `vcpufreq scx` pins the maps that VMs share with it.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

use crate::layout::PINS;

/// The map that has the service's state.
pub(crate) const CONTROL: &str = "scx_control";
/// Those of which it has the numbers.
pub(crate) const OTHERS: [&str; 2] = ["scx_vcpus", "scx_cpus"];
/// All of them.
pub(crate) const SHARED: [&str; 3] = [OTHERS[0], OTHERS[1], CONTROL];

/// Where a shared map is pinned.
pub(crate) fn pin_of(name: &str) -> PathBuf {
    Path::new(PINS).join(name)
}

/// The pin of a VM's map, where the map is one of the service's.
pub(crate) fn shared_pin(name: &str) -> Option<PathBuf> {
    SHARED.contains(&name).then(|| pin_of(name))
}
