// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Why a path can't be had, or can't follow its guest.

use std::io;

use vcpufreq_device::{PagesError, StateError, VcpuId};
use vcpufreq_host::SourceSetupError;

/// A backend's error.
pub type BackendError = Box<dyn std::error::Error + Send + Sync>;

/// Why a bridge or its path can't be started, or a thread can't be registered. The text has the
/// cause in it.
#[derive(Debug, thiserror::Error)]
pub enum PathError {
    /// The host refused a call.
    #[error("{what}: {error}")]
    Refused {
        /// What can't be done.
        what: &'static str,
        /// The kernel's error.
        error: io::Error,
    },
    /// The host or the guest lacks what is needed.
    #[error("{0}")]
    Missing(&'static str),
    /// The actuator can't have the thread of a vCPU.
    #[error("the thread of vCPU {vcpu} can't be clamped: {error}")]
    NotClamped {
        /// The vCPU.
        vcpu: VcpuId,
        /// The kernel's error.
        error: io::Error,
    },
    /// The thread of a vCPU can't run on its pCPUs.
    #[error("the thread of vCPU {vcpu} can't be pinned: {error}")]
    NotPinned {
        /// The vCPU.
        vcpu: VcpuId,
        /// The kernel's error: `EINVAL` when none of them is online or in its cpuset.
        error: io::Error,
    },
    /// The order of a vCPU's writes can't be recorded: it has a thread already, or isn't there.
    #[error("vCPU {vcpu} can't be recorded")]
    NotRecorded {
        /// The vCPU.
        vcpu: VcpuId,
    },
    /// The register pages can't be the device's.
    #[error(transparent)]
    Pages(#[from] PagesError),
    /// A saved state isn't one of this device.
    #[error(transparent)]
    State(#[from] StateError),
    /// The source can't have the thread of a vCPU.
    #[error(transparent)]
    Source(#[from] SourceSetupError),
    /// A backend that is required can't be started.
    #[error("{required}: {error}")]
    Required {
        /// The text of [`Offered`](super::Offered) for that.
        required: String,
        /// Why not.
        error: BackendError,
    },
    /// The running backend refused something.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// Adds the failed action to an error.
pub trait Context<T> {
    /// The value, or an error with the action that failed.
    fn context(self, what: &'static str) -> Result<T, PathError>;
}

impl<T> Context<T> for io::Result<T> {
    fn context(self, what: &'static str) -> Result<T, PathError> {
        self.map_err(|error| PathError::Refused { what, error })
    }
}

impl<T> Context<T> for Option<T> {
    fn context(self, what: &'static str) -> Result<T, PathError> {
        self.ok_or(PathError::Missing(what))
    }
}
