// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where a real-time guest with I/O is cut: a guest of QEMU's with a virtio disk and network card,
//! both under load from its housekeeping vCPU, and the wake-up latency of its real-time vCPU. By
//! `vcpufreq qemu --rt`; by hand, as the field's guides have it (taskset, chrt, governor
//! performance); and by `vcpufreq run`, whose guest loads a disk and a network of its own kernel.
//!
//! The thread that the kernel makes for a network card by vhost has to keep off the real-time pCPU, too:
//! one more guest, without latencies.
//!
//! All emulated CPUs share one stream of instructions: the latencies compare only with one another.

use std::{
    fs::{File, read_dir},
    process::Command,
    thread::sleep,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use vcpufreq_bench::piped::threads;
use vcpufreq_device::Util;
use vcpufreq_host::{CpuList, Tid};
use vcpufreq_tests::LabVerdict;

use super::{
    inventory,
    latency::{MEM_MIB, idle_latency},
};
use crate::{
    harness::{
        console_commands::insmod,
        guest_shell::ask,
        kernel_threads::Company,
        plan::{Plan, set_governor},
        policy::Policy,
        rt_command::succeeded,
        sys::set_fifo_priority_of,
        sysfs,
        thread_facts::allowed,
        trace::{self, Trace},
        uclamp::RT_DEFAULT,
        vm::{Setup, Vm},
        vmm::{Vmm, vcpu_name},
    },
    scenarios::models::speed::energy_uj,
};

const DISK: &str = "/run/disk.img";
const DISK_BYTES: u64 = 64 << 20;
/// Requests of the disk go through QEMU's worker threads, which come and go.
const DEVICES: [&str; 6] = [
    "-drive",
    "file=/run/disk.img,format=raw,if=virtio,aio=threads",
    "-netdev",
    "user,id=net",
    "-device",
    "virtio-net-pci,netdev=net,romfile=",
];
/// A card by vhost, and what the host loads for it, in this order.
const VHOST_DEVICES: [&str; 4] = [
    "-netdev",
    "tap,id=net,ifname=tap0,script=no,downscript=no,vhost=on",
    "-device",
    "virtio-net-pci,netdev=net,romfile=",
];
const VHOST: [&str; 5] = ["vhost_iotlb", "vhost", "tap", "tun", "vhost_net"];
/// A second of echo requests; it fails if a reply is missing.
const PING: &str = "
taskset -c 0 busybox ping -q -c 50 -i 0.02 $address > /dev/null";
/// Loads the drivers, and both devices; QEMU's network answers at this address itself.
const LOAD_OF_QEMU: &str = "
for one in virtio_blk failover net_failover virtio_net; do
    busybox insmod /lab/modules/$one.ko || exit
done
busybox ifconfig eth0 10.0.2.15 up || exit
disk=/dev/vda address=10.0.2.2";
/// The same for a guest without devices.
const LOAD_OF_RUN: &str = "
busybox insmod /lab/modules/configfs.ko || exit
busybox insmod /lab/modules/null_blk.ko nr_devices=1 completion_nsec=200000 irqmode=2 || exit
busybox ifconfig lo up || exit
disk=/dev/nullb0 address=127.0.0.1";
/// On the housekeeping vCPU, until the guest ends.
const BEGIN: &str = "
quietly() { taskset -c 0 \"$@\" > /dev/null 2>&1 < /dev/null & }
quietly busybox ping -q -A $address
quietly sh -c \"while busybox dd if=$disk of=/dev/null bs=4k count=512 iflag=direct; do :; done\"
";
/// What the disk has read, and the echo replies that came.
const COUNTERS: &str = "
for one in vda nullb0; do
    [ ! -e /sys/block/$one/stat ] || while read -r reads rest; do echo $reads; done < /sys/block/$one/stat
done
busybox awk '/^Icmp:/ { for (i = 2; i <= NF; i++) if (n[i] == \"InEchoReps\") print $i; else n[i] = $i }' /proc/net/snmp";
/// Of the scheduler, on host and guest.
const TICK_US: u64 = 4_000;
/// Wake-ups of cyclictest, of 10,000 that are due: with fewer than 95 % `rt report` calls it incomplete.
/// By QEMU some hundred are missed, on a guest started by hand as well.
const ENOUGH: u64 = 9_500;
/// Both in 10 s, at least.
const LOADED: u64 = 100;
const OPTIONS: [&str; 4] = ["--rt", "1=fifo:1", "--resume-latency-us", "50"];

/// A guest, its pCPUs, and the policy of the real-time one.
struct IoGuest<'a> {
    little: u32,
    cpu: u32,
    policy: &'a Policy,
}

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let (policy, others) = policies.split_last().context("no policy")?;
    let cpu = policy.cpu();
    ensure!(
        policy.cpus == [cpu] && !others.is_empty(),
        "CPU {cpu} shares its policy; use the topology 4+3+1"
    );
    File::create(DISK)?.set_len(DISK_BYTES)?;
    trace::off()?;
    let before = inventory::everything()?;
    let guest = IoGuest {
        little: others[0].cpu(),
        cpu,
        policy,
    };
    succeeded(&["apply", "--guest", &format!("plc={cpu}")])?;
    let by_run = guest.served(plan, Vmm::Vcpufreq)?;
    let by_tool = guest.served(plan, Vmm::Qemu)?;
    let by_vhost = guest.by_vhost(plan)?;
    succeeded(&["restore"])?;
    let by_hand = guest.by_hand(plan)?;
    let left = inventory::changes(&before, &inventory::everything()?);
    let deviations = deviations(&by_hand);
    let vhost_alone = by_vhost["alone"] == true && by_vhost["vhost_threads"] == 1;
    let figures = json!({
        "emulated": true, "by_vhost": by_vhost, "by_run": by_run, "by_tool": by_tool, "by_hand": by_hand, "left": left,
        "deviations_by_hand": deviations,
    });
    let measured = [&by_run, &by_tool, &by_hand].map(|row| row["measured"] == true);
    let longest = [&by_run, &by_tool].map(|row| row["latency"]["max_us"].as_u64().unwrap_or(0));
    let near = longest[1] <= (longest[0] * 11 / 10).max(longest[0] + TICK_US);
    let alone = [&by_run, &by_tool].map(|row| row["alone"] == true);
    Ok(LabVerdict::with_figures(figures)
        .check_eq("each is measured", &measured, [true; 3])
        .check_eq("the vCPU is alone there", &alone, [true; 2])
        .check("the thread of vhost keeps off it", vhost_alone, ())
        .check("QEMU's longest latency is near run's", near, longest)
        .check("by hand it is another", !deviations.is_empty(), &deviations)
        .check_none("nothing is left", &left))
}

/// What the tool would have otherwise: other threads and interrupts on the pCPU, and the clamp, which is
/// the real-time default.
fn deviations(by_hand: &Value) -> Vec<String> {
    let mut found = Vec::new();
    for list in ["strangers", "vmm_threads_that_may_run_there"] {
        let names = by_hand[list].as_array().into_iter().flatten();
        found.extend(names.map(|name| format!("{list}: {name}")));
    }
    if by_hand["interrupts_there"] != 0 {
        found.push(format!("{} interrupts", by_hand["interrupts_there"]));
    }
    if by_hand["uclamp_min"].as_u64() == Some(u64::from(Util::MAX.get())) {
        found.push("clamped to the maximum".to_owned());
    }
    found
}

impl IoGuest<'_> {
    /// By this project's program, on a host that `rt apply` has prepared.
    fn served(&self, plan: &Plan, vmm: Vmm) -> Result<Value> {
        let (devices, load): (&[&str], _) = match vmm {
            Vmm::Qemu => (&DEVICES, LOAD_OF_QEMU),
            _ => (&[], LOAD_OF_RUN),
        };
        let mut vm = self.boot_served(plan, vmm, devices)?;
        let row = self.measure(&mut vm, load)?;
        vm.quit()?;
        Ok(row)
    }

    fn boot_served(&self, plan: &Plan, vmm: Vmm, devices: &[&str]) -> Result<Vm> {
        let plan = Plan {
            driver: plan.driver.clone(),
            path: None,
            vmm,
            protected: false,
        };
        let setup = Setup {
            mem_mib: Some(MEM_MIB),
            ..plan.real_time(&[self.little, self.cpu]).with(&OPTIONS)
        };
        let mut vm = Vm::boot_real_time_prepared(&setup, |vmm| {
            vmm.args(devices);
        })?;
        plan.load_driver(&mut vm)?;
        set_governor(&mut vm, 1, "schedutil")?;
        Ok(vm)
    }

    /// What runs on the real-time pCPU, or may, while packets pass the thread of vhost.
    fn by_vhost(&self, plan: &Plan) -> Result<Value> {
        for module in VHOST {
            insmod(module, "")?;
        }
        let mut vm = self.boot_served(plan, Vmm::Qemu, &VHOST_DEVICES)?;
        let mut ifconfig = Command::new("/bin/busybox");
        let up = ifconfig
            .args(["ifconfig", "tap0", "10.0.2.2", "up"])
            .status()?;
        ensure!(up.success(), "cannot bring up tap0");
        let trace = Trace::start()?;
        ask(&mut vm, &format!("{LOAD_OF_QEMU}{PING}"))?;
        let Company { strangers, .. } = Company::of("vcpu1", self.cpu, &trace.stop()?.switches);
        let may = self.that_may_run_there(&vm)?;
        let vhost = threads(vm.pid())?.into_iter();
        let vhost = vhost.filter(|(_, name)| name.starts_with("vhost-")).count();
        vm.quit()?;
        Ok(json!({
            "alone": strangers.is_empty() && may.is_empty(), "vhost_threads": vhost,
            "strangers": strangers, "vmm_threads_that_may_run_there": may,
        }))
    }

    /// As a person does it, and nothing else: vCPUs pinned, the real-time one SCHED_FIFO, QEMU's
    /// other threads kept off its pCPU, memory locked, governor performance.
    fn by_hand(&self, plan: &Plan) -> Result<Value> {
        let setup = Setup {
            vmm: Vmm::Qemu,
            mem_mib: Some(MEM_MIB),
            ..plan
                .real_time(&[self.little, self.cpu])
                .with(&["--no-bridge"])
        };
        let governor = format!("{}/scaling_governor", self.policy.path);
        sysfs::write(&governor, "performance")?;
        let mut vm = Vm::boot_real_time_prepared(&setup, |qemu| {
            qemu.args(DEVICES);
        })?;
        for (tid, name) in threads(vm.pid())? {
            let tid = Tid::new(tid).context("a thread's number")?;
            if vcpu_name(&name).is_none() {
                vcpufreq_host::pin(tid, &self.others()?)?;
            }
        }
        set_fifo_priority_of(vm.vcpu_tid(1)?, 1)?;
        let row = self.measure(&mut vm, LOAD_OF_QEMU)?;
        vm.quit()?;
        sysfs::write(&governor, "schedutil")?;
        Ok(row)
    }

    /// The pCPUs but the real-time one.
    fn others(&self) -> Result<Vec<u32>> {
        let all: CpuList = sysfs::text("/sys/devices/system/cpu/online")?
            .trim()
            .parse()?;
        Ok(all.iter().filter(|cpu| *cpu != self.cpu).collect())
    }

    /// 10 s of cyclictest on the real-time vCPU beside the load: latencies, and what else ran on its
    /// pCPU or may.
    fn measure(&self, vm: &mut Vm, load: &str) -> Result<Value> {
        ask(vm, &format!("{load}{BEGIN}"))?;
        sleep(Duration::from_secs(1));
        let before = counters(vm)?;
        let trace = Trace::start()?;
        let energy = energy_uj(self.policy)?;
        // By hand nothing is applied, from which it would know these.
        let others: CpuList = self.others()?.into_iter().collect();
        let [cpu, others] = [self.cpu.to_string(), others.to_string()];
        let latency = idle_latency(vm, &["--cpus", &cpu, "--others", &others])?;
        let energy = energy_uj(self.policy)? - energy;
        let seen = trace.stop()?;
        let loaded: Vec<u64> = (counters(vm)?.iter().zip(&before))
            .map(|(now, before)| now - before)
            .collect();
        let Company { strangers, .. } = Company::of("vcpu1", self.cpu, &seen.switches);
        let may = self.that_may_run_there(vm)?;
        let lost = trace::lost_on(self.cpu)?;
        let measured = latency["samples"].as_u64() >= Some(ENOUGH)
            && loaded.len() == 2
            && loaded.iter().all(|count| *count >= LOADED)
            && lost == 0;
        Ok(json!({
            "measured": measured, "alone": strangers.is_empty() && may.is_empty(),
            "latency": latency, "energy_uj": energy, "strangers": strangers,
            "vmm_threads_that_may_run_there": may, "uclamp_min": vm.clamp(1)?.0,
            "rt_default": sysfs::text(RT_DEFAULT)?.trim(), "disk_reads_and_echo_replies": loaded,
            "events_lost": lost, "interrupts_there": self.interrupts_there()?,
        }))
    }

    /// The VMM's threads, but its vCPU's.
    fn that_may_run_there(&self, vm: &Vm) -> Result<Vec<String>> {
        let mut may = Vec::new();
        for (tid, name) in threads(vm.pid())? {
            // One that has ended runs nowhere.
            let Ok(list) = allowed(vm.pid(), tid) else {
                continue;
            };
            let list: CpuList = list.parse()?;
            if list.contains(self.cpu) && vcpu_name(&name).as_deref() != Some("vcpu1") {
                may.push(format!("{name} on {list}"));
            }
        }
        Ok(may)
    }

    /// Interrupts that the real-time pCPU takes.
    fn interrupts_there(&self) -> Result<usize> {
        let mut count = 0;
        for entry in read_dir("/proc/irq")?.flatten() {
            let list = sysfs::text(entry.path().join("effective_affinity_list"));
            let list = list
                .ok()
                .and_then(|text| text.trim().parse::<CpuList>().ok());
            count += usize::from(list.is_some_and(|list| list.contains(self.cpu)));
        }
        Ok(count)
    }
}

/// Of the disk's reads, and of echo replies.
fn counters(vm: &mut Vm) -> Result<Vec<u64>> {
    let text = ask(vm, COUNTERS)?;
    let numbers = text.split_whitespace().map(str::parse);
    numbers
        .collect::<Result<_, _>>()
        .with_context(|| format!("the guest's counters: '{text}'"))
}
