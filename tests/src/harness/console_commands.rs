// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a scenario can ask for by a line of text, in the guest as on the
//! host: `VERB ARGUMENT...`, answered by one line.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::kmod::{DeleteModuleFlags, ModuleInitFlags, delete_module, finit_module};
use vcpufreq_device::region_size;

use crate::harness::access_cost;
use crate::harness::guest_shell;
use crate::harness::kernel_log;
use crate::harness::load::{self, Load};
use crate::harness::random::Random;
use crate::harness::registers::{Requests, register};
use crate::harness::shared_memory;
use crate::harness::sys::Registers;
use crate::harness::sysfs;
use crate::harness::wait::{SOON, settled};

/// A 16550's interrupt enable register, and what Linux' driver has there while the port is open
/// and sends nothing: received data, line status.
const IER: usize = 1;
const IER_OF_LINUX: u8 = 5;
/// For an answer to be on its way.
const QUIET: Duration = Duration::from_millis(100);

/// The loads that are running, by the name that the scenario gave them.
#[derive(Debug, Default)]
pub struct Deeds {
    loads: BTreeMap<String, Load>,
}

impl Deeds {
    /// Carries out one line; the answer has no line break.
    pub fn carry_out(&mut self, line: &str) -> Result<String> {
        if let Some(script) = line.strip_prefix("sh ") {
            return guest_shell::run(script);
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["read", path] => Ok(sysfs::text(path)?.replace('\n', "\\n")),
            ["write", path, value @ ..] => {
                sysfs::write(path, value.join(" ")).map(|()| String::new())
            }
            ["digest", path] => digest(path),
            ["store-pair", address] => store_pair(address),
            ["insmod", module, options @ ..] => insmod(module, &options.join(" ")),
            ["rmmod", module] => rmmod(module),
            ["sleep", ms] => sleep(ms),
            // Reads on the vCPU whose register it is, as the kernel's tick does. Waits first: the
            // host's work on the command line moves the frequency, too.
            ["peek", cpu, address] => {
                load::pin(cpu.parse()?)?;
                std::thread::sleep(Duration::from_millis(20));
                let (page, offset) = register(address)?;
                Ok(page.read(offset).to_string())
            }
            ["poke", cpu, address, value] => {
                load::pin(cpu.parse()?)?;
                Requests::at(address)?.write(value.parse()?);
                Ok(String::new())
            }
            ["loads", cpu, address, count] => {
                load::pin(cpu.parse()?)?;
                let (page, offset) = register(address)?;
                Ok(load::timed(count.parse()?, |_| {
                    std::hint::black_box(page.read(offset));
                })
                .to_string())
            }
            ["reads", path, count] => {
                let file = File::open(path).with_context(|| (*path).to_owned())?;
                let mut text = [0; 256];
                for _ in 0..count.parse::<u32>()? {
                    file.read_at(&mut text, 0)?;
                }
                Ok(String::new())
            }
            ["stores", cpu, address, count, values @ ..] if !values.is_empty() => {
                load::pin(cpu.parse()?)?;
                let register = Requests::at(address)?;
                let values: Vec<u32> =
                    values.iter().map(|v| v.parse()).collect::<Result<_, _>>()?;
                Ok(load::timed(count.parse()?, |turn| {
                    register.write(values[turn % values.len()]);
                })
                .to_string())
            }
            // One now and then, timed each: `MEDIAN P99` in ns.
            ["store-times", cpu, address, count, values @ ..] if !values.is_empty() => {
                load::pin(cpu.parse()?)?;
                let register = Requests::at(address)?;
                let values: Vec<u32> =
                    values.iter().map(|v| v.parse()).collect::<Result<_, _>>()?;
                let times = load::times(count.parse()?, |turn| {
                    register.write(values[turn % values.len()]);
                });
                Ok(times)
            }
            [
                verb @ ("store-naps" | "store-bursts" | "load-times" | "ram-times"),
                rest @ ..,
            ] => access_cost::carry_out(verb, rest),
            ["registers"] => match shared_memory::find()? {
                Some(found) => Ok(found),
                None => in_device_tree(),
            },
            ["work", cpu, turns] => {
                load::pin(cpu.parse()?)?;
                Ok(load::timed_work(turns.parse()?).to_string())
            }
            ["start", name, rest @ ..] => self.start(name, rest),
            [verb @ ("turns" | "places" | "burst-p99" | "stop"), name] => self.of_load(verb, name),
            ["dmesg", pattern] => Ok(dmesg(pattern)?),
            ["reports"] => reports(),
            _ => bail!("not understood: '{line}'"),
        }
    }

    /// What a running load has done: its turns, its nanoseconds on each CPU, or what a burst took; or
    /// its end.
    fn of_load(&mut self, verb: &str, name: &str) -> Result<String> {
        if verb == "stop" {
            let load = self.loads.remove(name).context("no such load")?;
            return Ok(load.stop()?.to_string());
        }
        let load = self.loads.get(name).context("no such load")?;
        if verb == "turns" {
            return Ok(load.turns().to_string());
        }
        if verb == "burst-p99" {
            return Ok(load.burst_p99().to_string());
        }
        let places: Vec<_> = load.places().iter().map(u64::to_string).collect();
        Ok(places.join(" "))
    }

    fn start(&mut self, name: &str, words: &[&str]) -> Result<String> {
        let load = match words {
            ["busy", cpu] => Load::busy(cpu.parse()?),
            ["roaming", turns, nap_us] => {
                let nap = Duration::from_micros(nap_us.parse()?);
                Load::roaming(turns.parse()?, nap)
            }
            ["periodic", cpu, period_us, busy_us] => {
                let us = |word: &str| Ok::<_, anyhow::Error>(Duration::from_micros(word.parse()?));
                Load::periodic(cpu.parse()?, us(period_us)?, us(busy_us)?)
            }
            // All registers of so many vCPUs, and what is none.
            ["flood-all", cpu, address, vcpus, low, high] => {
                let base = address.strip_prefix("0x").context("an address is 0x...")?;
                let base = u64::from_str_radix(base, 16)?;
                let vcpus: u64 = vcpus.parse()?;
                let values: [u32; 2] = [low.parse()?, high.parse()?];
                let pages = (0..vcpus).map(|vcpu| Registers::map(base + vcpu * 0x1000));
                let pages = pages.collect::<Result<Vec<_>>>()?;
                let mut turn = 0_usize;
                Load::repeat(cpu.parse()?, move || {
                    turn ^= 1;
                    for page in &pages {
                        for offset in (0..0x20).step_by(4) {
                            page.write(offset, values[turn]);
                            page.read(offset);
                        }
                        page.write_of_other_widths(0x10, values[turn]);
                    }
                })
            }
            ["scribble", cpu, rest @ ..] => Load::repeat(cpu.parse()?, scribble(rest)?),
            ["flood", cpu, address, low, high] => {
                Load::repeat(cpu.parse()?, writes(address, low, high)?)
            }
            // The UART's interrupt enable register and its empty receive buffer in turn, for so
            // long. The console is quiet before and after, for the answers.
            ["flood-uart", cpu, address, ms] => {
                let (page, _) = register(address)?;
                let start = Instant::now() + QUIET;
                let flood = start..start + Duration::from_millis(ms.parse()?);
                Load::repeat(cpu.parse()?, move || {
                    if flood.contains(&Instant::now()) {
                        page.write_byte(IER, IER_OF_LINUX);
                        page.read_byte(0);
                    } else {
                        std::thread::sleep(Duration::from_millis(10));
                    }
                })
            }
            // Stores in one register what is new in another.
            ["echo", cpu, from, to] => {
                let ((from, at), (to, to_offset)) = (register(from)?, register(to)?);
                let mut last = 0;
                Load::repeat(cpu.parse()?, move || {
                    let value = from.read(at);
                    if value != last {
                        to.write(to_offset, value);
                        last = value;
                    }
                })
            }
            ["changes", cpu, address, low, high] => {
                Load::changes(cpu.parse()?, writes(address, low, high)?)
            }
            // One each period; the first one writes `high`.
            ["writes", cpu, address, period_us, low, high] => {
                let period = Duration::from_micros(period_us.parse()?);
                let mut write = writes(address, low, high)?;
                Load::repeat(cpu.parse()?, move || {
                    std::thread::sleep(period);
                    write();
                })
            }
            _ => bail!("no such load: {words:?}"),
        };
        if self.loads.insert(name.to_owned(), load).is_some() {
            bail!("load '{name}' was running already");
        }
        Ok(String::new())
    }
}

fn sleep(ms: &str) -> Result<String> {
    std::thread::sleep(Duration::from_millis(ms.parse()?));
    Ok(String::new())
}

/// Length and FNV-1a hash (64 bits) of a file.
pub fn digest(path: &str) -> Result<String> {
    let bytes = std::fs::read(path).with_context(|| path.to_owned())?;
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    });
    Ok(format!("{} {hash:016x}", bytes.len()))
}

/// Stores two registers at once, which KVM can't decode: in a process of its
/// own, and how that ended.
fn store_pair(address: &str) -> Result<String> {
    use std::os::unix::process::ExitStatusExt as _;
    let mut child = std::process::Command::new("/init");
    let status = child.args(["store-pair", address]).status()?;
    Ok(match status.signal() {
        Some(signal) => format!("signal {signal}"),
        None => format!("{status}"),
    })
}

/// Writes `high` and `low` in turn to a register.
fn writes(address: &str, low: &str, high: &str) -> Result<impl FnMut() + Send + use<>> {
    let register = Requests::at(address)?;
    let values: [u32; 2] = [low.parse()?, high.parse()?];
    let mut turn = 0_usize;
    Ok(move || {
        turn ^= 1;
        register.write(values[turn]);
    })
}

/// All of the shared memory, before the first page and behind the last too, with values of any size,
/// and each vCPU's doorbell. A page behind the last vCPU's has its turn: with all of them in each the
/// doorbells would ring less often.
fn scribble(words: &[&str]) -> Result<impl FnMut() + Send + use<>> {
    let [pages, bell, vcpus] = words else {
        bail!("not understood: scribble {words:?}");
    };
    let base = pages.strip_prefix("0x").context("an address is 0x...")?;
    let base = u64::from_str_radix(base, 16)? - 0x1000;
    let vcpus: u16 = vcpus.parse()?;
    // A BAR's size.
    let size = (0x1000 + region_size(vcpus)).next_power_of_two();
    let pages = (base..base + size).step_by(0x1000).map(Registers::map);
    let pages = pages.collect::<Result<Vec<_>>>()?;
    let (bell, first) = bell.split_once(',').context("a doorbell has a value")?;
    let (bell, offset) = register(bell)?;
    let first = first.strip_prefix("0x").context("a value is 0x...")?;
    let first = u32::from_str_radix(first, 16)?;
    let (mut random, mut turn) = (Random::new(1), 0_usize);
    Ok(move || {
        turn += 1;
        let (used, behind) = pages.split_at(1 + usize::from(vcpus));
        let behind = behind.get(turn % behind.len().max(1));
        for page in used.iter().chain(behind) {
            for word in (0..0x1000).step_by(4) {
                let value = random.next();
                page.write(word, value >> (value % 32));
            }
        }
        for vcpu in 0..vcpus {
            bell.write(offset, first + u32::from(vcpu));
        }
    })
}

/// Loads a module of `/lab/modules`.
pub fn insmod(module: &str, options: &str) -> Result<String> {
    let path = format!("/lab/modules/{module}.ko");
    let file = File::open(&path).with_context(|| path.clone())?;
    let options = std::ffi::CString::new(options)?;
    finit_module(file, &options, ModuleInitFlags::empty())
        .with_context(|| format!("loading {path}"))?;
    Ok(String::new())
}

/// Removes a module.
pub fn rmmod(module: &str) -> Result<String> {
    let name = std::ffi::CString::new(module)?;
    delete_module(&name, DeleteModuleFlags::O_NONBLOCK)
        .with_context(|| format!("removing {module}"))?;
    Ok(String::new())
}

/// Removes the host module. The kernel frees BPF programs, which hold it, a little later than it
/// closes them.
pub fn unload_host_module() -> Result<()> {
    settled(SOON, || Ok(rmmod("vcpufreq_host")), Result::is_ok)?.map(drop)
}

/// Does something without the host's module, which a host has for its guests.
pub fn without_host_module<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    if !std::fs::exists("/sys/module/vcpufreq_host")? {
        return work();
    }
    unload_host_module()?;
    let result = work();
    let loaded = insmod("vcpufreq_host", "");
    let result = result?;
    loaded?;
    Ok(result)
}

/// The cpufreq device of the guest's device tree: the address of the first vCPU's registers; of
/// shared memory the doorbell too, and what rings it.
fn in_device_tree() -> Result<String> {
    const TREE: &str = "/proc/device-tree";
    let mut folders = vec![std::path::PathBuf::from(TREE)];
    while let Some(folder) = folders.pop() {
        let compatible = std::fs::read(folder.join("compatible")).unwrap_or_default();
        let shared = compatible.starts_with(b"vcpufreq,shm\0");
        if shared || compatible.starts_with(b"qemu,virtual-cpufreq\0") {
            let reg = std::fs::read(folder.join("reg"))?;
            let cells: Vec<u64> = reg
                .chunks_exact(8)
                .flat_map(<[u8; 8]>::try_from)
                .map(u64::from_be_bytes)
                .collect();
            return match cells[..] {
                [base, _] if !shared => Ok(format!("{base:#x}")),
                [memory, _, doorbell, _] if shared => shared_memory::at(memory, doorbell),
                _ => bail!("reg has {} bytes", reg.len()),
            };
        }
        for entry in std::fs::read_dir(&folder)?.flatten() {
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            }
        }
    }
    bail!("the device tree has no cpufreq device")
}

/// What the kernel has found wrong.
fn reports() -> Result<String> {
    let mut reports = kernel_log::look()?.reports;
    if kernel_log::has_kmemleak() {
        reports.extend(kernel_log::leaks()?);
    }
    Ok(reports.join("\n").replace('\n', "\\n"))
}

/// The kernel's messages that contain a pattern.
pub fn dmesg(pattern: &str) -> Result<String> {
    let mut messages = kernel_log::records(&mut kernel_log::open()?)?;
    messages.retain(|message| message.contains(pattern));
    let messages = messages.iter().map(|message| message.replace('\n', " "));
    Ok(messages.collect::<Vec<_>>().join("\\n"))
}
