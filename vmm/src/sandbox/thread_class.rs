// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The classes of the VMM's threads.

/// What a thread of the VMM is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadClass {
    /// Starts, watches and ends the guest.
    Main,
    /// Runs a vCPU.
    Vcpu,
    /// Carries out requests.
    Requests,
    /// Watches the host.
    Maintenance,
    /// Answers to `vcpufreq stats`.
    Stats,
    /// Takes calls of `vcpufreq tune`.
    Tune,
    /// Writes the events file.
    Events,
    /// Carries out the requests of a guest's disk.
    Disk,
}

/// Every class.
pub const CLASSES: [ThreadClass; 8] = [
    ThreadClass::Main,
    ThreadClass::Vcpu,
    ThreadClass::Requests,
    ThreadClass::Maintenance,
    ThreadClass::Stats,
    ThreadClass::Tune,
    ThreadClass::Events,
    ThreadClass::Disk,
];
