// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where QEMU starts. On big.LITTLE a QEMU with `-cpu host` fails if it wanders between types of CPU
//! while it makes its vCPUs: KVM has made the one for a type, and QEMU asks on another. The server pins
//! the vCPUs when they are there; until then QEMU is on CPUs of one type.

use anyhow::Context;
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};
use vcpufreq_host::{CpuList, HostRoot};

/// This thread.
const THIS: Pid = Pid::from_raw(0);

/// The pCPUs of the type of the first that a vCPU is pinned to; none if no vCPU is pinned, or all are
/// of one type, or the kernel doesn't tell (`regs/identification`, of Arm).
pub fn pcpus_alike<'a>(
    host: &HostRoot,
    mut pins: impl Iterator<Item = &'a [u32]>,
) -> Option<CpuList> {
    let first = pins.find_map(|pin| pin.first().copied())?;
    let online: CpuList = host.text("sys/devices/system/cpu/online")?.parse().ok()?;
    let midr = |cpu: u32| {
        let file = format!("sys/devices/system/cpu/cpu{cpu}/regs/identification/midr_el1");
        // The lowest bits are the revision, which may differ within a cluster.
        let midr = host.text(file)?;
        let midr = midr.trim().trim_start_matches("0x");
        u64::from_str_radix(midr, 16).ok().map(|midr| midr >> 4)
    };
    let own = midr(first)?;
    let alike: CpuList = online
        .iter()
        .filter(|cpu| midr(*cpu) == Some(own))
        .collect();
    (alike != online).then_some(alike)
}

/// Runs `start` while this thread is on `pcpus`, if any are named. What it starts stays there.
///
/// # Errors
/// As sched_setaffinity(2): `EINVAL` when the cgroup allows none of them.
pub fn start_on<T>(pcpus: Option<&CpuList>, start: impl FnOnce() -> T) -> anyhow::Result<T> {
    let Some(pcpus) = pcpus else {
        return Ok(start());
    };
    let limit = || {
        let before = sched_getaffinity(THIS)?;
        let mut set = CpuSet::new();
        let mut numbers = pcpus.iter().filter_map(|cpu| usize::try_from(cpu).ok());
        numbers.try_for_each(|cpu| set.set(cpu))?;
        sched_setaffinity(THIS, &set).map(|()| before)
    };
    let before = limit().with_context(|| {
        format!("can't start QEMU on pCPUs {pcpus}, which are alike; correct --pin")
    })?;
    let started = start();
    // They were allowed just now.
    let _ = sched_setaffinity(THIS, &before);
    Ok(started)
}

#[cfg(test)]
mod tests {
    //! QEMU starts on CPUs of one type, and its server is where it was.
    use std::process::Command;

    use vcpufreq_host::fakes::FakeHost;

    use super::*;

    fn host(midrs: &[&str]) -> FakeHost {
        let host = FakeHost::empty();
        host.write("sys/devices/system/cpu/online", "0-3\n");
        for (cpu, midr) in midrs.iter().enumerate() {
            let file = format!("sys/devices/system/cpu/cpu{cpu}/regs/identification/midr_el1");
            host.write(&file, format!("{midr}\n"));
        }
        host
    }

    fn alike(midrs: &[&str], pins: &[&[u32]]) -> Option<String> {
        let alike = pcpus_alike(&host(midrs).root(), pins.iter().copied());
        alike.map(|pcpus| pcpus.to_string())
    }

    #[test]
    fn the_type_is_that_of_the_first_pin() {
        // Cortex-A55 and A76, in two revisions.
        let midrs = ["0x412fd050", "0x412fd050", "0x414fd0b0", "0x414fd0b1"];
        for (pins, pcpus) in [
            (&[&[0][..], &[2]][..], Some("0-1")),
            (&[&[], &[3], &[0]], Some("2-3")),
            (&[&[], &[]], None),
        ] {
            assert_eq!(alike(&midrs, pins).as_deref(), pcpus, "{pins:?}");
        }
        assert_eq!(alike(&["0x414fd0b0"; 4], &[&[0]]), None);
        assert_eq!(alike(&[], &[&[0]]), None);
    }

    #[test]
    fn what_is_started_is_there_and_this_is_where_it_was() {
        let before = sched_getaffinity(THIS).unwrap();
        let first = (0..CpuSet::count()).find(|cpu| before.is_set(*cpu) == Ok(true));
        let pcpus: CpuList = [u32::try_from(first.unwrap()).unwrap()]
            .into_iter()
            .collect();
        let mut look = Command::new("grep");
        look.args(["Cpus_allowed_list", "/proc/self/status"]);
        let seen = start_on(Some(&pcpus), || look.output()).unwrap().unwrap();
        let seen = String::from_utf8(seen.stdout).unwrap();
        assert_eq!(seen.trim(), format!("Cpus_allowed_list:\t{pcpus}"));
        assert_eq!(sched_getaffinity(THIS), Ok(before));
    }
}
