// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which CPUs are which guest's and which are left for everything else.

use serde::{Deserialize, Serialize};
use thiserror::Error;
use vcpufreq_host::CpuList;

use vcpufreq_host::undo::ReadHost;

/// The online CPUs, as the kernel lists them.
pub(crate) const ONLINE: &str = "/sys/devices/system/cpu/online";
const PRESENT: &str = "/sys/devices/system/cpu/present";
/// The longest name of a guest: it becomes part of a cgroup's.
const MAX_NAME: usize = 32;

/// A guest and the CPUs that its real-time vCPUs run on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartitionGuest {
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
    pub guests: Vec<PartitionGuest>,
    /// The CPUs for interrupts, kernel threads and everything else.
    pub housekeeping: CpuList,
}

/// Why a partition can't be: the cause, then what to do.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct PartitionError(String);

impl PartitionError {
    /// A CPU that two guests want.
    pub(crate) fn taken(cpus: &CpuList, first: &str, second: &str) -> Self {
        Self(format!(
            "CPU {cpus} is wanted by {second}, and is {first}'s already; give each guest CPUs of its own"
        ))
    }
}

/// What is wrong, as an error.
fn wrong<T>(what: impl Into<String>) -> Result<T, PartitionError> {
    Err(PartitionError(what.into()))
}

const NO_GUEST: &str = "no guest has a CPU; give one with --guest NAME=CPUS";

impl Partition {
    /// A partition of the host that `look` sees; housekeeping is what the guests leave, unless
    /// it is given. `unthrottled` names what would take the limit off real-time tasks, if anything does.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn new(
        look: &dyn ReadHost,
        guests: Vec<PartitionGuest>,
        housekeeping: Option<CpuList>,
        unthrottled: Option<&'static str>,
    ) -> Result<Self, PartitionError> {
        let online = online(look)?;
        let present = list(look, PRESENT).unwrap_or_else(|| online.clone());
        if guests.is_empty() {
            return wrong(NO_GUEST);
        }
        check_guests(&guests)?;
        if housekeeping.as_ref().is_some_and(CpuList::is_empty) {
            return wrong(
                "housekeeping has no CPU; name at least one, or leave it out for all that no guest has",
            );
        }
        let rt = all_cpus(&guests);
        let given = housekeeping.clone().unwrap_or_default();
        let wanted = rt.or(&given);
        let missing = wanted.without(&present);
        if !missing.is_empty() {
            return wrong(format!(
                "CPU {missing} doesn't exist here; this host has {present}"
            ));
        }
        if let Some(guest) = guests
            .iter()
            .find(|guest| !guest.cpus.and(&given).is_empty())
        {
            let (cpus, guest) = (guest.cpus.and(&given), &guest.name);
            return wrong(format!(
                "CPU {cpus} is {guest}'s and can't be for housekeeping too; take it out of one of them"
            ));
        }
        let housekeeping = housekeeping.unwrap_or_else(|| online.without(&rt));
        let offline = wanted.without(&online);
        if !offline.is_empty() {
            return wrong(format!(
                "CPU {offline} is offline; bring it online or choose another"
            ));
        }
        match (housekeeping.is_empty(), unthrottled) {
            (true, Some(what)) => wrong(format!(
                "throttling of real-time tasks is to be off ({what}), and no CPU is left for housekeeping: one busy guest would stop this machine; leave at least one CPU out of --guest"
            )),
            (true, None) => wrong(format!(
                "no CPU is left for housekeeping: guests have all of {online}; leave at least one out of --guest"
            )),
            (false, _) => Ok(Self {
                guests,
                housekeeping,
            }),
        }
    }

    /// Of a host without real-time guests.
    ///
    /// # Errors
    /// [`PartitionError`] when the host's CPUs can't be read.
    pub fn without_guests(look: &dyn ReadHost) -> Result<Self, PartitionError> {
        Ok(Self {
            guests: Vec::new(),
            housekeeping: online(look)?,
        })
    }

    /// All guests' real-time CPUs.
    #[must_use]
    pub fn rt(&self) -> CpuList {
        all_cpus(&self.guests)
    }
}

fn all_cpus(guests: &[PartitionGuest]) -> CpuList {
    guests
        .iter()
        .fold(CpuList::default(), |all, guest| all.or(&guest.cpus))
}

pub(crate) fn check_guests(guests: &[PartitionGuest]) -> Result<(), PartitionError> {
    if guests.iter().any(|guest| guest.cpus.is_empty()) {
        return wrong(NO_GUEST);
    }
    for (n, second) in guests.iter().enumerate() {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let length = second.name.len();
        if !(1..=MAX_NAME).contains(&length) || !second.name.chars().all(plain) {
            return wrong(format!(
                "'{}' is no name for a guest; use up to 32 letters, digits, - and _",
                second.name
            ));
        }
        for first in &guests[..n] {
            let cpus = first.cpus.and(&second.cpus);
            if first.name == second.name {
                return wrong(format!(
                    "two guests are called {}; give each a name of its own",
                    first.name
                ));
            }
            if !cpus.is_empty() {
                return Err(PartitionError::taken(&cpus, &first.name, &second.name));
            }
        }
    }
    Ok(())
}

fn online(look: &dyn ReadHost) -> Result<CpuList, PartitionError> {
    let unknown = || PartitionError(format!("{ONLINE} can't be read; mount /sys"));
    list(look, ONLINE).ok_or_else(unknown)
}

/// The CPU list in a file.
pub(crate) fn list(look: &dyn ReadHost, path: &str) -> Option<CpuList> {
    look.read(path).ok()?.parse().ok()
}
