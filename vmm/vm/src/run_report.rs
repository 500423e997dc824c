// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a virtual machine went, and why it has ended.

/// Why a virtual machine has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExitReason {
    /// The guest has turned itself off, or all its vCPUs have halted for good.
    PowerOff,
    /// Ctrl-A x.
    Quit,
    /// This signal asked the program to end.
    Signal(i32),
    /// The guest reports its own crash.
    Crashed,
    /// KVM can't go on with this vCPU.
    Failed {
        /// Which one.
        vcpu: usize,
        /// KVM's report.
        what: String,
    },
}

/// How a virtual machine went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunReport {
    /// Why it has ended.
    pub reason: ExitReason,
    /// How many times the guest has started again.
    pub resets: u64,
    /// Accesses of the guest that no device claimed.
    pub unclaimed: u64,
    /// Bytes of the console's output that its file had no room for.
    pub console_dropped: u64,
}

impl ExitReason {
    /// The program's exit status: 0 when guest or user ended it, 128 and a signal's number, 2
    /// otherwise.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::PowerOff | Self::Quit => 0,
            Self::Signal(signal) => u8::try_from(128 + signal).unwrap_or(2),
            Self::Crashed | Self::Failed { .. } => 2,
        }
    }

    /// One line for the user, when there is a cause.
    pub fn message(&self) -> Option<String> {
        match self {
            Self::PowerOff | Self::Quit => None,
            Self::Signal(signal) => Some(format!("ended by signal {signal}")),
            Self::Crashed => Some("the guest reports a crash; see its console".to_owned()),
            Self::Failed { vcpu, what } => Some(format!("vCPU {vcpu} can't go on: {what}")),
        }
    }
}

#[cfg(test)]
mod tests {
    //! Promise: `systemctl stop` is no failure to the unit that comes with the program; a crash is.
    use super::ExitReason;

    const UNIT: &str = include_str!("../../docs/vcpufreq@.service");

    #[test]
    fn a_unit_that_is_stopped_has_not_failed() {
        let is_success = |reason: ExitReason| {
            let line = format!("SuccessExitStatus={}", reason.exit_code());
            UNIT.lines().any(|one| one == line)
        };
        assert!(is_success(ExitReason::Signal(libc::SIGTERM)));
        assert!(!is_success(ExitReason::Signal(libc::SIGQUIT)));
        assert!(!is_success(ExitReason::Crashed));
    }
}
