// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: what was changed for a process is restored for that process; by others, only when it is
//! gone.

use vcpufreq_host::undo::{Owner, ReadHost};
use vcpufreq_rt::{RestoreError, Restored, restore, restore_of};

use crate::{
    fake::FakeKernel,
    partition::{applied, planned},
};

const EXEC: u32 = 900;
const OTHER: u32 = 901;
const SWAPPINESS: &str = "/proc/sys/vm/swappiness";

/// A host with settings that `rt exec` has applied; the values before, and both processes.
fn prepared() -> (FakeKernel, String, [Owner; 2]) {
    let host = FakeKernel::four();
    let owners = [EXEC, OTHER].map(|pid| {
        host.thread(pid as usize, "vcpufreq", 0, 20);
        Owner::read(&host, pid).unwrap()
    });
    let old = host.read(SWAPPINESS).unwrap();
    let (mut plan, profile) = planned(&host, "settings.swappiness = 7");
    plan.owner = Some(owners[0].clone());
    applied(&host, &(plan, profile)).unwrap();
    assert_eq!(host.read(SWAPPINESS).unwrap(), "7");
    (host, old, owners)
}

#[test]
fn nothing_is_restored_under_a_command_that_runs() {
    let (host, _, owners) = prepared();
    let error = restore(&host, &mut |_, _, _| {}).unwrap_err();
    assert!(matches!(error, RestoreError::Exec(EXEC)), "{error}");
    let done = restore_of(&host, &owners[1], &mut |_, _, _| {}).unwrap();
    assert_eq!(done, Restored::Nothing);
    assert_eq!(host.read(SWAPPINESS).unwrap(), "7");
}

#[test]
fn its_own_restore_brings_back_what_was() {
    let (host, old, owners) = prepared();
    let done = restore_of(&host, &owners[0], &mut |_, _, _| {}).unwrap();
    assert!(
        matches!(
            done,
            Restored::Done {
                brought_back: 1,
                ..
            }
        ),
        "{done:?}"
    );
    assert_eq!(host.read(SWAPPINESS).unwrap(), old);
    assert!(!host.snapshot().contains_key("/run/vcpufreq-rt"));
}

#[test]
fn anyone_restores_after_a_process_that_was_killed() {
    let (host, old, _) = prepared();
    host.remove(&format!("/proc/{EXEC}"));
    let done = restore(&host, &mut |_, _, _| {}).unwrap();
    assert!(
        matches!(
            done,
            Restored::Done {
                brought_back: 1,
                ..
            }
        ),
        "{done:?}"
    );
    assert_eq!(host.read(SWAPPINESS).unwrap(), old);
}
