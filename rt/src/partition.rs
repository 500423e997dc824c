// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which CPUs are which guest's and which are left for everything else.

use serde::{Deserialize, Serialize};
use thiserror::Error;
use vcpufreq_device::host::CpuList;

use crate::host::Look;

/// The online CPUs, as the kernel lists them.
pub(crate) const ONLINE: &str = "/sys/devices/system/cpu/online";
const PRESENT: &str = "/sys/devices/system/cpu/present";
/// The longest name of a guest: it becomes part of a cgroup's.
const MAX_NAME: usize = 32;

/// A guest and the CPUs that its real-time vCPUs run on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Guest {
    /// Its name: letters, digits, `-` and `_`, up to 32.
    pub name: String,
    /// Its real-time CPUs.
    pub cpus: CpuList,
}

/// A host divided into real-time CPUs and housekeeping CPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Partition {
    /// The guests.
    pub guests: Vec<Guest>,
    /// What interrupts, kernel threads and everything else is left.
    pub housekeeping: CpuList,
}

/// Why a partition can't be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PartitionError {
    /// Nothing to do.
    #[error("no guest has a CPU; give one with --guest NAME=CPUS")]
    NoGuest,
    /// A name that can't be part of a cgroup's.
    #[error("'{0}' is no name for a guest; use up to 32 letters, digits, - and _")]
    Name(String),
    /// Two guests with one name.
    #[error("two guests are called {0}; give each a name of its own")]
    SameName(String),
    /// CPUs that the host doesn't have.
    #[error("CPU {missing} doesn't exist here; this host has {present}")]
    NoSuchCpu {
        /// Those that don't exist.
        missing: CpuList,
        /// Those that do.
        present: CpuList,
    },
    /// CPUs that are switched off.
    #[error("CPU {0} is offline; bring it online or choose another")]
    Offline(CpuList),
    /// Housekeeping was named, with no CPU.
    #[error(
        "housekeeping has no CPU; name at least one, or leave it out for all that no guest has"
    )]
    EmptyHousekeeping,
    /// Nothing is left for housekeeping.
    #[error(
        "no CPU is left for housekeeping: guests have all of {online}; leave at least one out of --guest"
    )]
    NoHousekeeping {
        /// The online CPUs.
        online: CpuList,
    },
    /// As above, where real-time tasks could then stop the machine.
    #[error(
        "throttling of real-time tasks is to be off ({what}), and no CPU is left for housekeeping: one busy guest would stop this machine; leave at least one CPU out of --guest"
    )]
    Unthrottled {
        /// What turns it off.
        what: &'static str,
    },
    /// A CPU that two guests want.
    #[error(
        "CPU {cpus} is wanted by {second}, and is {first}'s already; give each guest CPUs of its own"
    )]
    Taken {
        /// The contended CPUs.
        cpus: CpuList,
        /// The guest that has them.
        first: String,
        /// The guest that is to have them too.
        second: String,
    },
    /// A CPU that is a guest's and housekeeping.
    #[error(
        "CPU {cpus} is {guest}'s and can't be for housekeeping too; take it out of one of them"
    )]
    Both {
        /// The contended CPUs.
        cpus: CpuList,
        /// Whose they are.
        guest: String,
    },
    /// The host's CPUs can't be read.
    #[error("{ONLINE} can't be read; mount /sys")]
    Unknown,
}

impl Partition {
    /// A partition of the host that `look` sees; housekeeping is what the guests leave, unless
    /// it is given. `unthrottled` names what would take the limit off real-time tasks, if anything does.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn new(
        look: &dyn Look,
        guests: Vec<Guest>,
        housekeeping: Option<CpuList>,
        unthrottled: Option<&'static str>,
    ) -> Result<Self, PartitionError> {
        let online = list(look, ONLINE).ok_or(PartitionError::Unknown)?;
        let present = list(look, PRESENT).unwrap_or_else(|| online.clone());
        if guests.is_empty() {
            return Err(PartitionError::NoGuest);
        }
        check_guests(&guests)?;
        if housekeeping.as_ref().is_some_and(CpuList::is_empty) {
            return Err(PartitionError::EmptyHousekeeping);
        }
        let rt = all_cpus(&guests);
        let given = housekeeping.clone().unwrap_or_default();
        let wanted = rt.or(&given);
        let missing = wanted.without(&present);
        if !missing.is_empty() {
            return Err(PartitionError::NoSuchCpu { missing, present });
        }
        if let Some(guest) = guests
            .iter()
            .find(|guest| !guest.cpus.and(&given).is_empty())
        {
            return Err(PartitionError::Both {
                cpus: guest.cpus.and(&given),
                guest: guest.name.clone(),
            });
        }
        let housekeeping = housekeeping.unwrap_or_else(|| online.without(&rt));
        let offline = wanted.without(&online);
        if !offline.is_empty() {
            return Err(PartitionError::Offline(offline));
        }
        match (housekeeping.is_empty(), unthrottled) {
            (true, Some(what)) => Err(PartitionError::Unthrottled { what }),
            (true, None) => Err(PartitionError::NoHousekeeping { online }),
            (false, _) => Ok(Self {
                guests,
                housekeeping,
            }),
        }
    }

    /// Of a host without real-time guests.
    ///
    /// # Errors
    /// When the host's CPUs can't be read.
    pub fn without_guests(look: &dyn Look) -> Result<Self, PartitionError> {
        Ok(Self {
            guests: Vec::new(),
            housekeeping: list(look, ONLINE).ok_or(PartitionError::Unknown)?,
        })
    }

    /// All guests' real-time CPUs.
    #[must_use]
    pub fn rt(&self) -> CpuList {
        all_cpus(&self.guests)
    }
}

fn all_cpus(guests: &[Guest]) -> CpuList {
    guests
        .iter()
        .fold(CpuList::default(), |all, guest| all.or(&guest.cpus))
}

pub(crate) fn check_guests(guests: &[Guest]) -> Result<(), PartitionError> {
    if guests.iter().any(|guest| guest.cpus.is_empty()) {
        return Err(PartitionError::NoGuest);
    }
    for (n, second) in guests.iter().enumerate() {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let length = second.name.len();
        if !(1..=MAX_NAME).contains(&length) || !second.name.chars().all(plain) {
            return Err(PartitionError::Name(second.name.clone()));
        }
        for first in &guests[..n] {
            let cpus = first.cpus.and(&second.cpus);
            if first.name == second.name {
                return Err(PartitionError::SameName(first.name.clone()));
            }
            if !cpus.is_empty() {
                return Err(PartitionError::Taken {
                    cpus,
                    first: first.name.clone(),
                    second: second.name.clone(),
                });
            }
        }
    }
    Ok(())
}

/// The CPU list in a file.
pub(crate) fn list(look: &dyn Look, path: &str) -> Option<CpuList> {
    look.read(path).ok()?.parse().ok()
}
