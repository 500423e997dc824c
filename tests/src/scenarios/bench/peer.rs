// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! crosvm beside vcpufreq: the same measurements of the same guest, which drives both by the
//! kernel's own virtual-cpufreq (docs/peers.md). Without a crosvm, vcpufreq alone.

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_bench::piped::child;
use vcpufreq_tests::LabVerdict;

use super::peer_setup::{PeerVmm, SERVED, remove_groups, served};
use crate::harness::dips::{LIGHT_CHANGES, LIGHT_US, dips, start_light, stop_light};
use crate::harness::frequency::{LOOKS, look_after, stay_off};
use crate::harness::plan::{Plan, ask_for, cur_perf, registers, set_governor};
use crate::harness::policy::Policy;
use crate::harness::server::ServeProcess;
use crate::harness::sysfs;
use crate::harness::trace::exits::Exits;
use crate::harness::trace::{Trace, now_us};
use crate::harness::vm::Vm;
use crate::harness::vmm::{self, CROSVM};
use crate::scenarios::device::memory::{MOST_KIB, Own};
use crate::scenarios::device::opps::Ramp;

/// Turns of the fixed amount of work, and how often it is done.
const WORK: &str = "30000000";
const WORKS: usize = 5;
/// Accesses that are counted by where they end.
const COUNTED: u64 = 1_000;
/// How long a guest idles before its VMM's memory is measured again, in virtual time: the emulator
/// skips the idle part of it.
const HOUR: Duration = Duration::from_secs(3_600);

/// A guest under one of them: a vCPU on the first CPU of each policy, or one vCPU.
struct PeerGuest {
    vm: Vm,
    vcpus: Vec<(usize, Policy)>,
    /// Until it had settled, and to load its driver.
    ready_ms: u64,
    /// The work, without the driver.
    bare_work_ns: u64,
    /// Beside a crosvm without a device.
    server: Option<ServeProcess>,
}

/// What is measured of a guest, and how.
type PeerMetric = (&'static str, fn(&mut PeerGuest) -> Result<Value>);

const EXITS: PeerMetric = ("exits_to_userspace_of_1000", exits);
const BELOW: PeerMetric = ("below_request", below_request);
const EXACT: PeerMetric = ("exact", exact);
const DIPS: PeerMetric = ("dips", light_dips);
const WRITE: PeerMetric = ("write_ns", |guest| guest.each(PeerGuest::write));
const ALL: &[PeerMetric] = &[
    ("own", PeerGuest::own),
    ("ready_ms", |guest| Ok(guest.ready_ms.into())),
    ("read_ns", |guest| guest.each(PeerGuest::read)),
    WRITE,
    ("rewrite_ns", |guest| guest.each(PeerGuest::rewrite)),
    EXITS,
    ("work_with_driver_to_without", work),
    BELOW,
    DIPS,
    // Last, so that it includes what the others leave.
    LATER,
];
const LATER: PeerMetric = ("own_after_an_hour", |guest| {
    sleep(HOUR);
    guest.own()
});

/// Each VMM, and what is measured of it.
fn guests(policies: &[Policy]) -> Vec<(PeerVmm, Vec<PeerMetric>)> {
    let ours = |path, clamp, actuator| PeerVmm::Ours {
        path,
        clamp,
        actuator,
    };
    let mut guests = vec![
        (ours("exit", "floor", "auto"), ALL.to_vec()),
        (ours("ioeventfd", "floor", "auto"), ALL.to_vec()),
        (ours("bpf", "floor", "auto"), ALL.to_vec()),
        (ours("exit", "floor", "thread"), vec![DIPS]),
        (ours("bpf", "exact", "auto"), vec![EXACT]),
    ];
    if Path::new(CROSVM).exists() {
        guests.push((PeerVmm::Crosvm, ALL.to_vec()));
        guests.push((PeerVmm::CrosvmGroups, vec![WRITE, DIPS]));
        // No trace sees a store in RAM.
        let traceless = ALL.iter().filter(|(name, _)| *name != DIPS.0).copied();
        guests.push((PeerVmm::CrosvmServed("floor"), traceless.collect()));
        guests.push((PeerVmm::CrosvmServed("exact"), vec![EXACT]));
        // Its throttling thread wants the pCPU behind its vCPU's.
        let last = policies.iter().flat_map(|policy| &policy.cpus).max();
        let with_next = policies.iter().enumerate();
        let with_next = with_next.filter(|(_, policy)| Some(&policy.cpu()) != last);
        guests.extend(with_next.map(|(index, _)| (PeerVmm::CrosvmExact(index), vec![EXACT])));
    }
    guests
}

/// Both, or vcpufreq alone.
pub fn run() -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let mut rows = Vec::new();
    for (vmm, metrics) in guests(&policies) {
        let name = vmm.name();
        // One that fails doesn't hide the others.
        rows.push(match measure(vmm, &policies, &metrics) {
            Ok(row) => json!({ "vmm": name, "measured": row }),
            Err(error) => json!({ "vmm": name, "error": format!("{error:#}") }),
        });
    }
    let wrong = wrong(&rows);
    let crosvm = match Path::new(CROSVM).exists() {
        true => json!({ "version": vmm::crosvm_version()? }),
        false => json!({ "skipped": "no crosvm given (--crosvm FILE)" }),
    };
    let figures = json!({
        "wrong": wrong, "crosvm": crosvm, "rows": rows,
        "kernel": sysfs::text("/proc/sys/kernel/osrelease")?,
    });
    Ok(LabVerdict::with_figures(figures).check_none("nothing is wrong", &wrong))
}

fn measure(vmm: PeerVmm, policies: &[Policy], metrics: &[PeerMetric]) -> Result<Value> {
    let measured = PeerGuest::boot(vmm, policies).and_then(|mut guest| {
        let mut row = json!({});
        for (name, metric) in metrics {
            row[*name] = metric(&mut guest).context(*name)?;
        }
        match vmm {
            PeerVmm::Ours { .. } => drop(guest.vm.quit()?),
            // With which exit code it ends is its own affair.
            _ => guest.vm.kill()?,
        }
        Ok(row)
    });
    remove_groups()?;
    measured
}

/// What wasn't measured, and what of vcpufreq's rows isn't as its docs have it; crosvm's are as
/// they are.
fn wrong(rows: &[Value]) -> Vec<String> {
    let named = |row: &&Value| row["vmm"].as_str().unwrap_or_default().to_owned();
    let most_kib = |seen: &Value| {
        let own = ["own", LATER.0].map(|own| seen[own]["vmm_kib"].as_u64());
        own.into_iter().flatten().max()
    };
    let failed = rows.iter().filter(|row| !row["error"].is_null());
    let mut wrong: Vec<_> = failed
        .map(|row| format!("error of {}", named(&row)))
        .collect();
    for row in rows.iter().filter(|row| !named(row).starts_with("crosvm")) {
        let (name, seen) = (named(&row), &row["measured"]);
        let by_exit = name.contains(" exit");
        let checks = [
            // What crosvm needs is its own affair.
            (
                "memory",
                name.starts_with(SERVED) || most_kib(seen).is_none_or(|kib| kib < MOST_KIB),
            ),
            (
                "exits",
                by_exit || none(&seen[EXITS.0], &["reads", "writes"]),
            ),
            ("below", none(&seen[BELOW.0], &["opps_below"])),
            ("exact", none(&seen[EXACT.0], &["opps_wrong"])),
            (
                "dips",
                name.contains("thread") || none(&seen[DIPS.0], &["dips"]),
            ),
        ];
        let not_so = checks.iter().filter(|(_, held)| !held);
        wrong.extend(not_so.map(|(what, _)| format!("{what} of {name}")));
    }
    wrong
}

/// These counts are 0, or it wasn't measured.
fn none(seen: &Value, counts: &[&str]) -> bool {
    seen.is_null() || counts.iter().all(|count| seen[*count] == 0)
}

impl PeerGuest {
    fn boot(vmm: PeerVmm, policies: &[Policy]) -> Result<Self> {
        let (setup, vcpus) = vmm.setup(policies)?;
        let started = now_us();
        let mut vm = Vm::boot(&setup)?;
        let settled = now_us();
        let (vcpu, policy) = vcpus.last().context("no vCPU")?;
        stay_off(policy, &vm)?;
        let bare_work_ns = median_work(&mut vm, *vcpu)?;
        let loading = now_us();
        let server = match vmm {
            PeerVmm::CrosvmServed(clamp) => Some(served(clamp, policies, &mut vm)?),
            _ => None,
        };
        let plan = Plan {
            driver: "virtual-cpufreq".to_owned(),
            path: None,
            vmm: vmm::Vmm::Vcpufreq,
            protected: false,
        };
        plan.load_driver(&mut vm)?;
        let ready_ms = (settled - started + now_us() - loading) / 1_000;
        for (vcpu, _) in &vcpus {
            set_governor(&mut vm, *vcpu, "userspace")?;
        }
        Ok(Self {
            vm,
            vcpus,
            ready_ms,
            bare_work_ns,
            server,
        })
    }

    /// Of the VMM, with its server.
    fn own(&mut self) -> Result<Value> {
        let mut own = Own::of(&self.vm)?;
        let server = self.server.as_ref().map(ServeProcess::pid);
        for pid in server
            .into_iter()
            .chain(server.and_then(|pid| child(pid, "vcpufreq")))
        {
            own.kib += sysfs::field::<u64>(format!("/proc/{pid}/status"), "VmRSS")?;
        }
        Ok(own.json())
    }

    /// What one vCPU after the other gives.
    fn each(&mut self, of: fn(&mut Self, usize, &Policy) -> Result<Value>) -> Result<Value> {
        let vcpus = self.vcpus.clone();
        let all = vcpus.iter().map(|(vcpu, policy)| of(self, *vcpu, policy));
        Ok(Value::Array(all.collect::<Result<_>>()?))
    }

    fn last(&self) -> Result<(usize, Policy)> {
        self.vcpus.last().cloned().context("no vCPU")
    }

    /// The address of a vCPU's cur_perf.
    fn page(&mut self, vcpu: usize) -> Result<u64> {
        Ok(registers(&mut self.vm)? + 0x1000 * u64::try_from(vcpu)?)
    }

    /// From the vCPU itself, where a look at its register takes the guest's agent: crosvm clamps
    /// the thread of the one that writes.
    fn ask_for(&mut self, vcpu: usize, khz: u32) -> Result<()> {
        let base = registers(&mut self.vm)?;
        cur_perf(&mut self.vm, base, vcpu)?;
        ask_for(&mut self.vm, vcpu, khz)
    }

    /// Median and 99th percentile.
    fn times(&mut self, line: String) -> Result<Value> {
        let answer = self.vm.ask(line)?;
        let numbers = answer.split(' ').map(str::parse::<f64>);
        Ok(json!(numbers.collect::<Result<Vec<_>, _>>()?))
    }

    fn read(&mut self, vcpu: usize, _policy: &Policy) -> Result<Value> {
        let page = self.page(vcpu)?;
        self.times(format!("load-times {vcpu} {page:#x} 200 50"))
    }

    fn write(&mut self, vcpu: usize, policy: &Policy) -> Result<Value> {
        let set_perf = self.page(vcpu)? + 4;
        let opps = listed(policy);
        self.times(format!("store-times {vcpu} {set_perf:#x} 500 {opps}"))
    }

    fn rewrite(&mut self, vcpu: usize, policy: &Policy) -> Result<Value> {
        let set_perf = self.page(vcpu)? + 4;
        let khz = policy.max();
        self.times(format!("store-times {vcpu} {set_perf:#x} 500 {khz}"))
    }
}

fn listed(policy: &Policy) -> String {
    let opps: Vec<_> = policy.opps.iter().map(u32::to_string).collect();
    opps.join(" ")
}

/// Reads and writes that KVM handed to the VMM; the guest's tick reads too.
fn exits(guest: &mut PeerGuest) -> Result<Value> {
    let (vcpu, policy) = guest.last()?;
    let page = guest.page(vcpu)?;
    let (set_perf, opps) = (page + 4, listed(&policy));
    let mut counted = |line: String, at: u64| {
        let exits = Exits::watch()?;
        guest.vm.number(line)?;
        anyhow::Ok(exits.stop()?.at(at..at + 4).exited)
    };
    let reads = counted(format!("loads {vcpu} {page:#x} {COUNTED}"), page)?;
    let line = format!("stores {vcpu} {set_perf:#x} {COUNTED} {opps}");
    let writes = counted(line, set_perf)?;
    Ok(json!({ "reads": reads, "writes": writes }))
}

/// The same work with the driver, whose tick reads cur_perf, against without.
fn work(guest: &mut PeerGuest) -> Result<Value> {
    let (vcpu, policy) = guest.last()?;
    stay_off(&policy, &guest.vm)?;
    guest.ask_for(vcpu, policy.max())?;
    let ns = median_work(&mut guest.vm, vcpu)?;
    Ok(json!(ns as f64 / guest.bare_work_ns as f64))
}

fn median_work(vm: &mut Vm, vcpu: usize) -> Result<u64> {
    let all = (0..WORKS).map(|_| vm.number(format!("work {vcpu} {WORK}")));
    let mut all = all.collect::<Result<Vec<_>>>()?;
    all.sort_unstable();
    Ok(all[WORKS / 2])
}

/// A vCPU that has just become busy: OPPs at which its pCPU runs below the request.
fn below_request(guest: &mut PeerGuest) -> Result<Value> {
    let (mut opps, mut opps_below, mut moments, mut moments_below) = (0, 0, 0, 0);
    for (vcpu, policy) in guest.vcpus.clone() {
        stay_off(&policy, &guest.vm)?;
        for &asked in &policy.opps {
            let mut ramp = Ramp::default();
            for _ in 0..LOOKS {
                guest.ask_for(vcpu, asked)?;
                ramp = Ramp::of(&mut guest.vm, vcpu, &policy, (asked, asked))?;
                if ramp.without_tick.is_empty() && (ramp.wrong.is_empty() || !ramp.disturbed) {
                    break;
                }
            }
            let below = |row: &&Value| row["host_khz"].as_u64() < row["asked_khz"].as_u64();
            let below = ramp.wrong.iter().filter(below).count();
            opps += 1;
            opps_below += u32::from(below > 0);
            moments += ramp.compared;
            moments_below += below;
        }
    }
    Ok(json!({
        "opps": opps, "opps_below": opps_below, "moments": moments, "moments_below": moments_below,
    }))
}

/// Busy vCPUs, each OPP up and down: the pCPU runs at it and never below.
fn exact(guest: &mut PeerGuest) -> Result<Value> {
    let (mut opps, mut wrong) = (0, Vec::new());
    for (vcpu, policy) in guest.vcpus.clone() {
        guest.vm.ask(format!("start busy busy {vcpu}"))?;
        stay_off(&policy, &guest.vm)?;
        let down = policy.opps.iter().rev().skip(1);
        for &asked in policy.opps.iter().chain(down) {
            let mut held = None;
            for look in 0..LOOKS {
                if look > 0 {
                    // Anew, from another OPP, as in opps.rs.
                    let other = if asked == policy.min() {
                        policy.max()
                    } else {
                        policy.min()
                    };
                    guest.ask_for(vcpu, other)?;
                }
                let look = look_after(&policy, || guest.ask_for(vcpu, asked), || Ok(()))?;
                let right = look.held.most == asked && look.held.lowest >= asked;
                held = (!right).then_some(look.held);
                if right || !look.disturbed {
                    break;
                }
            }
            opps += 1;
            wrong.extend(held.map(|held| json!({ "asked_khz": asked, "host_khz": held.most })));
        }
        guest.vm.ask("stop busy")?;
    }
    Ok(json!({ "opps": opps, "opps_wrong": wrong.len(), "wrong": wrong }))
}

/// Changes of request on a vCPU that has just become busy, after which the frequency dips.
fn light_dips(guest: &mut PeerGuest) -> Result<Value> {
    let (vcpu, policy) = guest.last()?;
    let set_perf = guest.page(vcpu)? + 4;
    stay_off(&policy, &guest.vm)?;
    let trace = Trace::start_with_registers()?;
    start_light(&mut guest.vm, vcpu, &policy)?;
    std::thread::sleep(LIGHT_CHANGES);
    stop_light(&mut guest.vm, vcpu)?;
    let seen = trace.stop()?;
    let own = seen.writes.iter().filter(|write| write.address == set_perf);
    let requests = own.map(|write| anyhow::Ok((write.time_us, u32::try_from(write.value)?)));
    let requests = requests.collect::<Result<Vec<_>>>()?;
    Ok(dips(&policy, &requests, &seen.frequencies, LIGHT_US).json())
}

#[cfg(test)]
mod tests {
    //! Of vcpufreq's rows, each figure that isn't right is named; crosvm's are no error.
    use super::*;

    fn row(vmm: &str, kib: u64, count: u64) -> Value {
        json!({ "vmm": vmm, "measured": {
            "own": { "vmm_kib": 6_000 }, LATER.0: { "vmm_kib": kib },
            EXITS.0: { "reads": count, "writes": count },
            BELOW.0: { "opps_below": count }, EXACT.0: { "opps_wrong": count },
            DIPS.0: { "dips": count },
        } })
    }

    #[test]
    fn what_is_wrong_is_named() {
        let none: Vec<String> = Vec::new();
        let ours = |kib, count| row("vcpufreq bpf floor auto", kib, count);
        assert_eq!(wrong(&[ours(6_000, 0), row("crosvm", 9_000, 5)]), none);
        assert_eq!(wrong(&[ours(MOST_KIB, 1)]).len(), 5);
        let seen = wrong(&[ours(MOST_KIB, 0)]);
        assert_eq!(seen, ["memory of vcpufreq bpf floor auto"]);
        let by_exit = row("vcpufreq exit floor thread", 5_000, 1);
        assert_eq!(wrong(&[by_exit]).len(), 2);
        assert_eq!(wrong(&[json!({ "vmm": "vcpufreq", "measured": {} })]), none);
        let failed = json!({ "vmm": "crosvm", "error": "it ended" });
        assert_eq!(wrong(&[failed]), ["error of crosvm"]);
    }
}
