// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise of the command line and the kernel's configuration: the findings list exactly what needs
//! a reboot or another kernel, and the words that the kernel ignored.

use vcpufreq_host::undo::ReadHost;
use vcpufreq_rt::{Finding, RtPlan};

use crate::{fake::FakeKernel, partition::planned};

#[test]
fn words_that_the_kernel_ignored_are_told() {
    let words = "cmdline = ['nohz_full={rt}', 'isolcpus=managed_irq,domain,{rt}']";
    let ignored = |isolated: &str, nohz_full: &str| {
        let host = FakeKernel::four();
        host.put("/proc/cmdline", "nohz_full=3 isolcpus=managed_irq,domain,3");
        host.put("/sys/devices/system/cpu/isolated", isolated);
        host.put("/sys/devices/system/cpu/nohz_full", nohz_full);
        let (plan, _) = planned(&host, words);
        assert_eq!(plan.cmdline, None);
        reboots(&plan, "not in force")
    };
    assert_eq!(ignored("3", "3"), 0);
    assert_eq!(ignored("2-3", "0-3"), 0);
    assert_eq!(ignored("", "(null)"), 2);
    assert_eq!(ignored("3", "(null)"), 1);
    assert_eq!(ignored("2", "3"), 1);
}

/// The plan of a host with this command line, of which a profile asks.
fn booted_with(host: &FakeKernel, running: &str, cmdline: &[&str]) -> RtPlan {
    host.put("/proc/cmdline", running);
    planned(host, &format!("cmdline = {cmdline:?}")).0
}

fn reboots(plan: &RtPlan, part: &str) -> usize {
    let told = |one: &&Finding| matches!(one, Finding::Reboot(text) if text.contains(part));
    plan.findings.iter().filter(told).count()
}

#[test]
fn callbacks_are_offloaded_where_their_threads_run() {
    let threads = |threads: &[(&str, &str)]| {
        let host = FakeKernel::four();
        for (pid, (name, state)) in (900..).zip(threads) {
            host.thread(pid, name, 0, 20);
            let stat = host.read(&format!("/proc/{pid}/stat")).unwrap();
            let stat = stat.replace(") S ", &format!(") {state} "));
            host.put(&format!("/proc/{pid}/stat"), &stat);
        }
        let plan = booted_with(&host, "rcu_nocbs=3", &["rcu_nocbs={rt}"]);
        assert_eq!(plan.cmdline, None);
        assert!(plan.unseen.is_empty(), "{:?}", plan.unseen);
        reboots(&plan, "not in force")
    };
    assert_eq!(threads(&[]), 1, "a kernel without the option");
    assert_eq!(threads(&[("rcuog/2", "S"), ("rcuop/3", "S")]), 0);
    assert_eq!(
        threads(&[("rcuos/3", "I")]),
        0,
        "a kernel that isn't preemptible"
    );
    assert_eq!(threads(&[("rcuop/2", "S")]), 1);
    // They are made for all CPUs as soon as one is offloaded.
    assert_eq!(threads(&[("rcuop/2", "S"), ("rcuop/3", "P")]), 1);
    let hidden = FakeKernel::four();
    hidden.remove("/proc/1/comm");
    let plan = booted_with(&hidden, "rcu_nocbs=3", &["rcu_nocbs={rt}"]);
    assert_eq!(reboots(&plan, "not in force"), 0);
    assert!(plan.unseen.iter().any(|one| one.path.contains("rcuo")));
}

#[test]
fn words_need_options_of_the_kernel() {
    let words = [
        "isolcpus=managed_irq,{rt}",
        "nohz_full={rt}",
        "rcu_nocbs={rt}",
        "rcu_nocb_poll",
    ];
    let with = |config: &str| {
        let host = FakeKernel::four();
        host.put("/boot/config-7.2.12-rt", config);
        let plan = booted_with(&host, "", &words);
        ["CPU_ISOLATION", "NO_HZ_FULL", "RCU_NOCB_CPU"]
            .map(|option| reboots(&plan, &format!("lacks CONFIG_{option}, without which")))
    };
    assert_eq!(with("# CONFIG_RCU_NOCB_CPU is not set"), [1, 1, 1]);
    assert_eq!(
        with("CONFIG_CPU_ISOLATION=y\nCONFIG_NO_HZ_FULL=y"),
        [0, 0, 1]
    );
    assert_eq!(
        with("CONFIG_CPU_ISOLATION=y\nCONFIG_NO_HZ_FULL=y\nCONFIG_RCU_NOCB_CPU=y"),
        [0, 0, 0]
    );
    let host = FakeKernel::four();
    let plan = booted_with(&host, "", &words);
    assert!(plan.unseen.is_empty(), "the profile asks for no option");
}

#[test]
fn the_command_line_is_said_exactly() {
    let host = FakeKernel::four();
    let text = "cmdline = ['nohz_full={rt}', 'irqaffinity={housekeeping}', 'console=ttyAMA0']";
    let (plan, _) = planned(&host, text);
    assert_eq!(plan.cmdline.as_deref(), Some("nohz_full=3 irqaffinity=0-2"));
    let replaced = Finding::Reboot(
        "the command line has irqaffinity=0-3; replace it by irqaffinity=0-2".into(),
    );
    assert!(plan.findings.contains(&replaced), "{:?}", plan.findings);
}

#[test]
fn the_kernels_configuration_may_be_its_own() {
    let host = FakeKernel::four();
    let planned = || planned(&host, "kernel-config = ['CPUSETS', 'PREEMPT_RT']").0;
    assert!(planned().unseen[0].why.contains("config.gz"));
    // CONFIG_CPUSETS=y, CONFIG_NO_HZ_FULL=y, CONFIG_CPUSETS_V1=y.
    let gz = [
        0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x03, 0x73, 0xf6, 0xf7, 0x73, 0xf3,
        0x74, 0x8f, 0x77, 0x0e, 0x08, 0x0d, 0x76, 0x0d, 0x09, 0xb6, 0xad, 0xe4, 0x72, 0x86, 0x08,
        0xf8, 0xf9, 0xc7, 0x7b, 0x44, 0xc5, 0xbb, 0x85, 0xfa, 0xf8, 0x20, 0xc4, 0xa0, 0x8a, 0xe2,
        0xc3, 0x0c, 0x81, 0x62, 0x00, 0x22, 0xec, 0x4c, 0x4d, 0x39, 0x00, 0x00, 0x00,
    ];
    host.put_bytes("/proc/config.gz", &gz);
    let plan = planned();
    assert!(plan.unseen.is_empty(), "{:?}", plan.unseen);
    let lacks =
        |option: &str| format!("{:?}", plan.findings).contains(&format!("lacks CONFIG_{option}"));
    assert!(lacks("PREEMPT_RT") && !lacks("CPUSETS"));
}
