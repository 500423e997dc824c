// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: a process that has only the name of a kernel thread, or of irqbalance, is named in one
//! line and left alone: by plan, apply, check and restore.

use vcpufreq_host::undo::{OldValue, Target};
use vcpufreq_rt::{
    Entry, Finding, PATH, Record, Restored, RtPlan, apply, check, is_ready, restore,
};

use crate::{
    fake::{FakeKernel, STRANGER},
    partition::planned,
};

fn impostors(plan: &RtPlan) -> Vec<&str> {
    let texts = plan.findings.iter().filter_map(|finding| match finding {
        Finding::Impostor(what) => Some(&**what),
        _ => None,
    });
    texts.collect()
}

const KSOFTIRQD: &str = "settings.ksoftirqd = 'fifo:2'";
const INTERRUPTS: &str = "settings.interrupts = 'housekeeping'";

#[test]
fn a_process_with_a_kernel_threads_name_is_left_alone() {
    let host = FakeKernel::four();
    host.impostor(900, "ksoftirqd/3");
    let (plan, profile) = planned(&host, KSOFTIRQD);
    let names: Vec<String> = plan
        .changes()
        .map(|(_, change)| change.target.name())
        .collect();
    assert_eq!(names, ["ksoftirqd/3 (thread 42)"]);
    let said: Vec<&str> = impostors(&plan);
    assert_eq!(
        said,
        [
            "process 900 of user 54321 is called ksoftirqd/3 and is not a kernel thread; it is left alone"
        ]
    );
    apply(&host, &plan, ("test", &profile), &mut |_, _, _| {}).unwrap();
    let (plan, _) = planned(&host, KSOFTIRQD);
    assert!(is_ready(&plan, &check(&host, &plan, &profile)));
    restore(&host, &mut |_, _, _| {}).unwrap();
    let touched = host.touched.borrow();
    assert!(touched.iter().any(|path| path == "/proc/42/stat"));
    assert!(
        !touched.iter().any(|path| path.contains("900")),
        "{touched:?}"
    );
}

#[test]
fn neither_the_flag_nor_the_parent_alone_makes_a_kernel_thread() {
    let host = FakeKernel::four();
    host.impostor(900, "ksoftirqd/3");
    // A child of process 2; a child of process 1 with PF_KTHREAD: kernels have had both.
    for (parent, flags) in [("2", "0"), ("1", "2097152"), ("0", "2097152")] {
        let stat = format!(
            "900 (ksoftirqd/3) S {parent} 0 0 0 0 {flags} {}",
            "0 ".repeat(36)
        );
        host.put("/proc/900/stat", &stat);
        let (plan, _) = planned(&host, KSOFTIRQD);
        assert_eq!(plan.changes().count(), 1, "{parent} {flags}");
    }
}

#[test]
fn many_of_one_name_are_one_line() {
    let host = FakeKernel::four();
    for pid in 900..950 {
        host.impostor(pid, "ksoftirqd/3");
    }
    let (plan, _) = planned(&host, KSOFTIRQD);
    let said: Vec<&str> = impostors(&plan);
    assert!(said.len() == 1 && said[0].contains("49 more"), "{said:?}");
}

#[test]
fn callbacks_are_not_offloaded_by_a_process_with_their_threads_name() {
    let text = "cmdline = ['rcu_nocbs={rt}']";
    let not_in_force = |host: &FakeKernel| {
        host.put("/proc/cmdline", "rcu_nocbs=3");
        let (plan, _) = planned(host, text);
        let told =
            |one: &Finding| matches!(one, Finding::Reboot(text) if text.contains("not in force"));
        (plan.findings.iter().any(told), impostors(&plan).len())
    };
    let host = FakeKernel::four();
    host.impostor(900, "rcuop/3");
    assert_eq!(not_in_force(&host), (true, 1));
    host.thread(901, "rcuop/3", 0, 0);
    assert_eq!(not_in_force(&host), (false, 1));
}

#[test]
fn another_users_irqbalance_is_left_alone() {
    for users in [[STRANGER; 4], [STRANGER, 0, 0, 0], [0, STRANGER, 0, 0]] {
        let host = FakeKernel::four();
        host.thread(900, "irqbalance", 0, 0);
        host.users(900, users);
        // Its environment, which isn't there, is not read.
        let (plan, _) = planned(&host, INTERRUPTS);
        assert!(plan.unseen.is_empty(), "{:?}", plan.unseen);
        assert_eq!((impostors(&plan).len(), plan.findings.len()), (1, 1));
    }
}

#[test]
fn a_recorded_thread_that_is_no_kernel_thread_is_left_alone() {
    let host = FakeKernel::four();
    host.impostor(900, "ksoftirqd/3");
    let (plan, profile) = planned(&host, KSOFTIRQD);
    let record = Record {
        boot_id: "boot-1".into(),
        profile_name: "test".into(),
        profile,
        partition: plan.partition,
        owner: None,
        entries: vec![Entry {
            setting: "ksoftirqd".into(),
            was: OldValue {
                target: Target::Thread {
                    pid: 900,
                    name: "ksoftirqd/3".into(),
                    start_ticks: 0,
                },
                old: "fifo:99".into(),
                only_if: None,
            },
            new: None,
        }],
    };
    host.put(PATH, &serde_json::to_string(&record).unwrap());
    let restored = restore(&host, &mut |_, _, _| {}).unwrap();
    assert!(
        matches!(&restored, Restored::Done { brought_back: 0, gone, .. } if gone.len() == 1),
        "{restored:?}"
    );
    assert!(
        !host
            .touched
            .borrow()
            .iter()
            .any(|path| path.contains("900"))
    );
}
