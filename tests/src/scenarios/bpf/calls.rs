// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host module's device under random calls. Threads of several processes open, set up, bind,
//! apply, ask, map and close a few files at once, with right and wrong arguments. They also fork, run a
//! program, remove the groups and end, and a guest makes requests by BPF. Meanwhile the module is
//! loaded and removed, and processes are killed. On a kernel with fault injection an allocation fails
//! in one call of four.
//!
//! Afterwards the module can be removed and works as before, and the kernel has reported nothing.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Read as _;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use serde_json::json;
use vcpufreq_device::{Clamp, Util};
use vcpufreq_host_bpf::{DEVICE, HostModule};
use vcpufreq_tests::LabVerdict;

use super::group::ClampGroup;
use crate::harness::console_commands::{insmod, rmmod, unload_host_module};
use crate::harness::faults::{self, Faults};
use crate::harness::kernel_log;
use crate::harness::random::Random;
use crate::harness::sys::{self, BIND, SET_UP};
use crate::harness::sysfs;

const TREE: &str = "/sys/fs/cgroup";
/// Processes of a round, threads of each, and calls of each thread.
const PROCESSES: u32 = 3;
const THREADS: u32 = 3;
const CALLS: u32 = 400;
const ROUNDS: u32 = 8;
/// Files that the threads of a process share.
const FILES: usize = 3;
/// Groups that all processes bind.
const GROUPS: u32 = 3;
/// A call has fewer allocations.
const MOST_ALLOCATIONS: u32 = 24;

/// The other numbers of the module's calls (abi/vcpufreq-module.h).
const APPLY: libc::Ioctl = 0x4010_cf02;
const STATS: libc::Ioctl = 0xc098_cf03;

pub fn run() -> Result<LabVerdict> {
    // Earlier reports are of earlier scenarios.
    kernel_log::look()?;
    insmod("vcpufreq_host", "")?;
    for group in 0..GROUPS {
        make_group(group)?;
    }
    faults::prepare()?;
    let mut counted = BTreeMap::new();
    let mut random = Random::new(1);
    for round in 0..ROUNDS {
        count_round(round, &mut random, &mut counted)?;
    }
    unload_host_module()?;
    let works = works()?;
    for group in 0..GROUPS {
        fs::remove_dir(group_dir(group)).or_else(missing)?;
    }
    let of = |name: &str| counted.get(name).copied().unwrap_or_default();
    // Each kind of call was right at times, and wrong at times.
    let tried = ["set_up", "bind", "apply", "stats"]
        .iter()
        .all(|call| of(&format!("{call} ok")) > 20 && of(&format!("{call} refused")) > 20);
    let reports = kernel_log::look()?.reports;
    let failed = !faults::exist() || of("failed allocations") > 100;
    let others = of("map ok") + of("other ok");
    let figures = json!({
        "calls": counted, "works_afterwards": works, "reports": reports,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_none("the kernel reports nothing", &reports)
        .check("the module works afterwards", works, ())
        .check("each call is right at times, and wrong", tried, &counted)
        .check("allocations fail", failed, of("failed allocations"))
        .check_eq("no other call is right", &others, 0))
}

/// One round: processes, of which one is killed, every other one with a flooding guest, whose programs
/// hold the module.
fn count_round(round: u32, random: &mut Random, counted: &mut BTreeMap<String, u64>) -> Result<()> {
    let mut children = Children(Vec::new());
    let floods = round % 2 == 0;
    if floods {
        children.0.push(flooding()?);
    }
    for n in 1..=PROCESSES {
        let seed = (round * PROCESSES + n).to_string();
        children.0.push(spawn(&["bpf-calls", &seed])?);
    }
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(random.below(100).into()));
        // It stays while a file is open, and comes back when it has gone.
        let gone = rmmod("vcpufreq_host").is_ok();
        add(
            counted,
            if gone { "removals" } else { "refused removals" },
            1,
        );
        if gone {
            insmod("vcpufreq_host", "")?;
        }
    }
    children.0[0].kill()?;
    for (n, child) in children.0.iter_mut().enumerate() {
        let mut text = String::new();
        let stdout = child.stdout.as_mut().context("no stdout")?;
        stdout.read_to_string(&mut text)?;
        let status = child.wait()?;
        let was_killed = n == 0 && status.signal() == Some(libc::SIGKILL);
        ensure!(status.success() || was_killed, "{status}: {text}");
        // The guest prints counts alone.
        for (name, count) in text.lines().filter_map(|line| line.rsplit_once(": ")) {
            add(counted, name, count.parse()?);
        }
    }
    Ok(())
}

fn add(counted: &mut BTreeMap<String, u64>, name: &str, more: u64) {
    *counted.entry(name.to_owned()).or_default() += more;
}

/// Ends with a round, whatever fails in it.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Both fail if it has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A guest that makes requests, once it has made some.
fn flooding() -> Result<Child> {
    let mut guest = spawn(&["bpf-flood", "kfunc", "asks"])?;
    // Its count of requests.
    let stdout = guest.stdout.as_mut().context("no stdout")?;
    stdout.read_exact(&mut [0; 4])?;
    Ok(guest)
}

fn spawn(words: &[&str]) -> Result<Child> {
    let mut command = Command::new("/init");
    Ok(command.args(words).stdout(Stdio::piped()).spawn()?)
}

/// After all that, a clamp takes effect.
fn works() -> Result<bool> {
    insmod("vcpufreq_host", "")?;
    let group = ClampGroup::with_current("called")?;
    let module = HostModule::open(2, 1)?;
    module.bind(0, group.min.as_fd(), group.max.as_fd())?;
    let util = |of| Util::new(of).context("a utilization");
    let clamp = Clamp {
        min: util(512)?,
        max: util(1024)?,
    };
    module.apply(0, clamp)?;
    let shown = sysfs::text(format!("{TREE}/called/cpu.uclamp.min"))?;
    drop(module);
    unload_host_module()?;
    Ok(shown.trim() == "50.00")
}

fn group_dir(group: u32) -> String {
    format!("{TREE}/calls{group}")
}

fn make_group(group: u32) -> Result<()> {
    sysfs::write(format!("{TREE}/cgroup.subtree_control"), "+cpu")?;
    let dir = group_dir(group);
    Ok(fs::create_dir(&dir).or_else(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => Ok(()),
        _ => Err(error),
    })?)
}

fn missing(error: std::io::Error) -> std::io::Result<()> {
    match error.kind() {
        std::io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    }
}

/// A process of a round: `words` are its seed. Prints how often each call was right and refused.
pub fn process(words: &[String]) -> Result<()> {
    let seed: u32 = words.first().context("no seed")?.parse()?;
    let caller = Arc::new(Caller::default());
    let threads = (0..THREADS).map(|n| {
        let (caller, mut random) = (caller.clone(), Random::new(seed * THREADS + n + 1));
        std::thread::spawn(move || -> Result<()> {
            let faults = Faults::of_this_thread()?;
            (0..CALLS).try_for_each(|_| caller.call(&mut random, &faults))
        })
    });
    for thread in threads.collect::<Vec<_>>() {
        thread.join().map_err(|_| anyhow!("a thread panicked"))??;
    }
    let counted = caller
        .counted
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    for (name, count) in counted.iter() {
        println!("{name}: {count}");
    }
    // With files open.
    std::process::exit(0);
}

/// What the threads of a process share.
#[derive(Default)]
struct Caller {
    files: [Mutex<Option<Arc<File>>>; FILES],
    counted: Mutex<BTreeMap<String, u64>>,
}

impl Caller {
    fn call(&self, random: &mut Random, faults: &Faults) -> Result<()> {
        let slot = &self.files[random.index(FILES)];
        let file = slot.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(file) = file.filter(|_| random.below(16) > 0) else {
            // Opens one in place of none, or of one that others may still use.
            let mut options = OpenOptions::new();
            let options = options.read(true).write(true);
            let opened = self.at_times_with_fault(random, faults, || options.open(DEVICE))?;
            self.count("open", opened.is_ok());
            *slot.lock().unwrap_or_else(PoisonError::into_inner) = opened.ok().map(Arc::new);
            return Ok(());
        };
        match random.below(32) {
            0 => self.count("fork", sys::fork_and_wait().is_ok()),
            1 => self.count("exec", run_a_program(&file).is_ok()),
            2 => self.count("map", sys::can_map(&file)),
            3 => {
                let group = random.below(GROUPS);
                let _ = fs::remove_dir(group_dir(group));
                // Another process may have made it anew.
                let _ = make_group(group);
            }
            4 => {
                let number = random.next();
                let known = [SET_UP, BIND, APPLY, STATS].contains(&number.into());
                if !known {
                    let mut words = self.words(random);
                    self.count(
                        "other",
                        sys::call_module(&file, number.into(), &mut words).is_ok(),
                    );
                }
            }
            _ => self.right_number(&file, random, faults)?,
        }
        Ok(())
    }

    fn right_number(&self, file: &File, random: &mut Random, faults: &Faults) -> Result<()> {
        let calls = [
            ("set_up", SET_UP),
            ("bind", BIND),
            ("apply", APPLY),
            ("stats", STATS),
        ];
        let (name, number) = calls[random.index(calls.len())];
        let mut words = self.words(random);
        if random.below(2) == 0 {
            let (domain, min) = (random.below(3), random.below(1000));
            let right = match number {
                SET_UP => [4, 3, 0, 0],
                APPLY => [domain, min, min + 24, random.below(2)],
                _ => [domain; 4],
            };
            words[..4].copy_from_slice(&right);
        }
        let files = (number == BIND).then(|| clamp_files(random)).flatten();
        if let Some((min, max)) = &files {
            let fds = [min, max].map(|file| u32::try_from(file.as_raw_fd()).unwrap_or(u32::MAX));
            words[1..3].copy_from_slice(&fds);
        }
        let call = || sys::call_module(file, number, &mut words);
        let result = self.at_times_with_fault(random, faults, call)?;
        self.count(name, result.is_ok());
        Ok(())
    }

    fn at_times_with_fault<T>(
        &self,
        random: &mut Random,
        faults: &Faults,
        call: impl FnOnce() -> T,
    ) -> Result<T> {
        if random.below(4) > 0 {
            return Ok(call());
        }
        let (result, failed) = faults.during(1 + random.below(MOST_ALLOCATIONS), call)?;
        if failed {
            let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
            add(&mut counted, "failed allocations", 1);
        }
        Ok(result)
    }

    /// Mostly small numbers, which calls take for vCPUs, domains and clamps.
    fn words(&self, random: &mut Random) -> [u32; 64] {
        std::array::from_fn(|_| match random.below(8) {
            0 => random.next(),
            1 => random.below(1100),
            _ => random.below(3),
        })
    }

    fn count(&self, name: &str, ok: bool) {
        let name = format!("{name} {}", if ok { "ok" } else { "refused" });
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        add(&mut counted, &name, 1);
    }
}

/// Files for a domain, mostly those of a group.
fn clamp_files(random: &mut Random) -> Option<(File, File)> {
    let dir = group_dir(random.below(GROUPS));
    let mut open = |name: &str| match random.below(12) {
        0 => File::open(format!("{dir}/{name}")).ok(),
        1 => File::options().write(true).open("/dev/null").ok(),
        2 => File::options()
            .write(true)
            .open(format!("{dir}/cpu.weight"))
            .ok(),
        _ => File::options()
            .write(true)
            .open(format!("{dir}/{name}"))
            .ok(),
    };
    Some((open("cpu.uclamp.min")?, open("cpu.uclamp.max")?))
}

/// Runs a program that has the file too.
fn run_a_program(file: &File) -> Result<()> {
    fcntl(file, FcntlArg::F_SETFD(FdFlag::empty()))?;
    let status = Command::new("/bin/busybox").arg("true").status()?;
    ensure!(status.success(), "{status}");
    Ok(())
}
