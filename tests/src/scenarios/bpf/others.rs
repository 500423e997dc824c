// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! More than one VMM, VMMs that are killed, and what the programs cost the rest of the host.

use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::{Value, json};
use vcpufreq_device::VcpuId;
use vcpufreq_host_bpf::{ActuateBy, HostBpf, HostModule};
use vcpufreq_tests::LabVerdict;

use super::group::ClampGroup;
use super::programs::{BASE, like, start};
use super::scx::{ServiceProcess, scx};
use super::tiny_vm::{Deed, TinyVm};
use crate::harness::leftovers::{bpf_counts as objects, no_more};
use crate::harness::machine::mount_bpffs;
use crate::harness::plan::{Plan, first_cpus};
use crate::harness::policy::Policy;
use crate::harness::vm::Vm;
use crate::harness::vmm::Vmm;
use crate::harness::wait::{SOON, settled};
use crate::harness::{console_commands, load};

/// The agent as a VMM of its own: a tiny VM on a pCPU that writes this value so often, or for ever.
pub fn vmm(words: &[String]) -> Result<()> {
    let number = |at: usize| words.get(at).context("a word is missing");
    let (cpu, value, times): (u32, u32, u64) = (
        number(0)?.parse()?,
        number(1)?.parse()?,
        number(2)?.parse()?,
    );
    let policies = Policy::all()?;
    let mut vcpu = like(policies.last().context("no policy")?, 0)?;
    vcpu.actuate = ActuateBy::Kfunc;
    load::pin(cpu)?;
    let host = start(&policies, vec![vcpu])?;
    let module = HostModule::open(1, 1)?;
    let group = ClampGroup::with_current(&format!("vmm{cpu}"))?;
    module.bind(0, group.min.as_fd(), group.max.as_fd())?;
    host.register_thread(VcpuId(0))?;
    let mut vm = TinyVm::new(Some((BASE, host.pages())))?;
    let _event = vm.swallow(BASE + 4)?;
    let deed = Deed {
        times: times.max(1_000),
        address: BASE + 4,
        value,
        step: u32::from(times == 0),
        ..Deed::default()
    };
    loop {
        vm.run(deed, |_, _| ())?;
        if times > 0 {
            break;
        }
    }
    let counters = host.counters(VcpuId(0)).context("no vCPU")?;
    let latest = host.latest(VcpuId(0)).context("no vCPU")?;
    let missed = host.missed();
    println!(
        "{}",
        json!({ "requests": counters.requests, "latest_khz": latest.khz.0, "missed": missed })
    );
    Ok(())
}

pub(super) fn spawn(cpu: u32, value: u32, times: u64) -> Result<Child> {
    Command::new("/init")
        .arg("bpf-vmm")
        .args([cpu.to_string(), value.to_string(), times.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .context("starting a VMM")
}

/// The agent as so many VMs, until it is killed.
pub fn vms(words: &[String]) -> Result<()> {
    let count: usize = words.first().context("a word is missing")?.parse()?;
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let policies = Policy::all()?;
    let vcpu = like(policies.last().context("no policy")?, 0)?;
    let vms = (0..count).map(|_| start(&policies, vec![vcpu.clone()]));
    let _vms = vms.collect::<Result<Vec<_>>>()?;
    println!("ready");
    loop {
        std::thread::park();
    }
}

/// So many VMs that end at once by a kill; another one's single look at them frees all. Programs,
/// links and maps before and after.
fn many_at_once(lives: &HostBpf) -> Result<LabVerdict> {
    const VMS: usize = 50;
    let before = objects();
    let mut child = Command::new("/init")
        .args(["bpf-vms", &VMS.to_string()])
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = [0; 6];
    let stdout = child.stdout.as_mut().context("no stdout")?;
    let ready = stdout.read_exact(&mut line);
    let with = objects();
    child.kill()?;
    child.wait()?;
    ready.context("the VMs didn't start")?;
    lives.sweep();
    // The kernel frees them after a grace period.
    let after = settled(10 * SOON, || Ok(objects()), |now| no_more(*now, before))?;
    let counts = format!("{before:?} {with:?} {after:?}");
    let figures = json!({
        "vms": VMS, "before": format!("{before:?}"), "with": format!("{with:?}"),
        "after": format!("{after:?}"),
    });
    Ok(LabVerdict::with_figures(figures)
        .check("all of theirs is freed", no_more(after, before), &counts)
        .check("each has programs", with.0 >= before.0 + VMS, &counts))
}

/// Two VMs with the same addresses at once: each sees its own guest's writes alone.
pub fn two() -> Result<LabVerdict> {
    const TIMES: u64 = 5_000;
    console_commands::insmod("vcpufreq_host", "")?;
    let mut rows = Vec::new();
    let mut children = [
        (900_000, spawn(2, 900_000, TIMES)?),
        (1_700_000, spawn(3, 1_700_000, TIMES)?),
    ];
    for (value, child) in &mut children {
        let mut text = String::new();
        let stdout = child.stdout.as_mut().context("no stdout")?;
        stdout.read_to_string(&mut text)?;
        ensure!(child.wait()?.success(), "a VMM failed: {text}");
        let row: Value = serde_json::from_str(text.trim())?;
        let counts = ["requests", "latest_khz", "missed"].map(|key| row[key].clone());
        let verdict = LabVerdict::with_figures(row)
            .check_eq("each request is counted", &counts[0], TIMES)
            .check_eq("the latest is its own", &counts[1], *value)
            .check_eq("none is missed", &counts[2], 0);
        rows.push(verdict);
    }
    console_commands::unload_host_module()?;
    Ok(LabVerdict::default().parts("vms", rows))
}

/// VMMs killed at various moments of start-up and run, beside one that lives: no program, link or
/// map of theirs is left, and the module can be removed.
pub fn kill() -> Result<LabVerdict> {
    const KILLS: u32 = 20;
    console_commands::insmod("vcpufreq_host", "")?;
    let started = Instant::now();
    ensure!(spawn(2, 900_000, 1)?.wait()?.success(), "a VMM failed");
    let start_ms = u64::try_from(started.elapsed().as_millis())?;
    // What earlier programs had is freed a little later than it was closed.
    std::thread::sleep(Duration::from_secs(2));
    let policies = Policy::all()?;
    let lives = start(
        &policies,
        vec![like(policies.last().context("no policy")?, 0)?],
    )?;
    let before = objects();
    let mut most = (0, 0, 0);
    for n in 0..KILLS {
        let mut child = spawn(2 + n % 2, 900_000, 0)?;
        // Start-up takes about half a second of the emulated host.
        std::thread::sleep(Duration::from_millis(u64::from(n) * 41 + 5));
        let now = objects();
        most = (most.0.max(now.0), most.1.max(now.1), most.2.max(now.2));
        child.kill()?;
        child.wait()?;
    }
    let look = || {
        lives.sweep();
        Ok(objects())
    };
    let after = settled(5 * SOON, look, |now| no_more(*now, before))?;
    let at_once = many_at_once(&lives)?;
    drop(lives);
    console_commands::unload_host_module()?;
    let silent = console_commands::Deeds::default().carry_out("dmesg WARNING")?;
    let counts = [before, most, after].map(|counts| format!("{counts:?}"));
    let figures = json!({
        "kills": KILLS, "start_virtual_ms": start_ms,
        "programs_links_maps": { "before": counts[0], "most": counts[1], "after": counts[2] },
        "warnings": silent,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("all of theirs is freed", no_more(after, before), &counts)
        .check("some had maps", most.2 > before.2, &counts)
        .part("at_once", at_once)
        .check("the kernel warns of nothing", silent.is_empty(), &silent))
}

/// VMMs that end by themselves: what the kernel lists at once of their programs and maps.
pub fn ends(plan: &Plan) -> Result<LabVerdict> {
    const ENDS: u32 = 10;
    const GUESTS: u32 = 2;
    let mut left = Vec::new();
    console_commands::insmod("vcpufreq_host", "")?;
    for n in 0..ENDS {
        let mut child = spawn(2 + n % 2, 900_000, 1)?;
        ensure!(child.wait()?.success(), "a VMM failed");
        left.extend(crate::harness::leftovers::bpf_objects());
    }
    // Nothing of theirs holds it any more.
    let removed = console_commands::rmmod("vcpufreq_host").is_ok();
    if removed {
        console_commands::insmod("vcpufreq_host", "")?;
    }
    // A guest of QEMU's has them for sums alone.
    let options: &[&str] = match plan.vmm {
        Vmm::Qemu => &["--sum"],
        _ => &["--path", "bpf"],
    };
    let setup = plan.mirroring(&first_cpus(&Policy::all()?)).with(options);
    for _ in 0..GUESTS {
        let vm = Vm::boot(&setup)?;
        ensure!(
            !crate::harness::leftovers::bpf_objects().is_empty(),
            "the guest has no programs"
        );
        vm.quit()?;
        left.extend(crate::harness::leftovers::bpf_objects());
    }
    console_commands::unload_host_module()?;
    let figures = json!({
        "ends": ENDS, "guests": GUESTS, "left": left, "module_removed_at_once": removed,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("nothing is left", left.is_empty(), &left)
        .check("the module is removed at once", removed, ()))
}

/// VMs of the rows.
const VMS: [usize; 4] = [0, 1, 10, 100];

/// What so many VMs cost a switch between two threads that have nothing to do with them: no more
/// than none does, give or take a tenth. And what the scheduler of `vcpufreq scx` costs it, without
/// VMs.
pub fn switch_cost() -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let vcpu = like(policies.last().context("no policy")?, 0)?;
    let (mut hosts, mut rows) = (Vec::new(), Vec::new());
    // A VM has some 25 open files.
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    for vms in VMS {
        while hosts.len() < vms {
            hosts.push(start(&policies, vec![vcpu.clone()])?);
            // This thread is the VM's; those that switch are another process'.
            hosts[hosts.len() - 1].register_thread(VcpuId(0))?;
        }
        rows.push((vms, switch_ns()?));
    }
    drop(hosts);
    mount_bpffs()?;
    let service = ServiceProcess::start()?;
    let with_scx = switch_ns();
    scx(&["stop"])?;
    drop(service);
    let with_scx = with_scx?;
    let little = with_scx * 100 <= rows[0].1 * SCX_PERCENT;
    let each = rows.windows(2).all(|rows| rows[1].1 * 10 <= rows[0].1 * 11);
    let all = rows[VMS.len() - 1].1 * 10 <= rows[1].1 * 11;
    let row = |(vms, ns): &(usize, u64)| json!({ "vms": vms, "virtual_ns": ns });
    let rows: Vec<Value> = rows.iter().map(row).collect();
    let figures = json!({
        "emulated": true, "switches": 2 * TURNS, "rows": rows, "scx_virtual_ns": with_scx,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("a switch costs little more with scx", little, with_scx)
        .check("and with more VMs", each, &rows)
        .check("most cost as one", all, &rows))
}

/// By a process of its own.
fn switch_ns() -> Result<u64> {
    let child = Command::new("/init").arg("bpf-switches").output()?;
    ensure!(child.status.success(), "the switches failed");
    Ok(String::from_utf8(child.stdout)?.trim().parse()?)
}

/// Of a switch while that scheduler is loaded, at most: it takes the fair class' short way, and its
/// programs look at two threads.
const SCX_PERCENT: u64 = 120;

const TURNS: u64 = 10_000;

/// Two threads on one CPU wake each other by pipes; the virtual ns of a switch with its wake-up.
pub fn switches() -> Result<()> {
    load::pin(1)?;
    let (ping_read, ping_write) = nix::unistd::pipe()?;
    let (pong_read, pong_write) = nix::unistd::pipe()?;
    let other = std::thread::spawn(move || {
        let mut byte = [0_u8];
        for _ in 0..TURNS {
            nix::unistd::read(&ping_read, &mut byte)?;
            nix::unistd::write(&pong_write, &byte)?;
        }
        anyhow::Ok(())
    });
    let mut byte = [0_u8];
    let start = Instant::now();
    for _ in 0..TURNS {
        nix::unistd::write(&ping_write, &byte)?;
        nix::unistd::read(&pong_read, &mut byte)?;
    }
    println!("{}", start.elapsed().as_nanos() / u128::from(2 * TURNS));
    other.join().map_err(|_| anyhow!("a thread panicked"))?
}
