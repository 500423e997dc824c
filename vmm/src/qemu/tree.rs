// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's device tree: QEMU's own, with capacities, OPPs and energy.

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{Read, Seek, SeekFrom, Write},
    os::fd::AsFd,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vcpufreq_dt::Seeds;
use vcpufreq_host::memory_file;

use super::inherited::inherited;
use crate::{
    config::{ram_place::RamPlace, topology},
    lifecycle::state::{self, StateDir},
    message::warn,
    options::serve::QemuPath,
    patience::patience,
    qemu_command::{Described, QemuCommand},
    serve::Served,
    sys,
};
use vcpufreq_vm::image::KernelImage;

/// How long QEMU may take to write its tree. It takes some 100 ms.
const DUMP_WITHIN: Duration = patience(30);
/// How many bytes of its last messages are read.
const LAST_WORDS: u64 = 4096;

/// A tree for one boot of QEMU, or why there is none.
pub struct Tree {
    file: Option<File>,
    summary: &'static str,
    /// Where the registers are, if that is in RAM.
    in_ram: Option<RamPlace>,
}

impl Tree {
    /// Asks QEMU for its tree, and puts the served vCPUs into it.
    ///
    /// # Errors
    /// When QEMU makes none, or one of other vCPUs.
    pub fn make(
        command: &QemuCommand<'_>,
        served: &Served,
        path: QemuPath,
    ) -> anyhow::Result<Self> {
        let none = |summary| {
            Ok(Self {
                file: None,
                summary,
                in_ram: None,
            })
        };
        match command.described() {
            Described::ByTree => {}
            Described::ByFile(_) => {
                return none(
                    "the guest has the device tree of -dtb: put capacities into it by vcpufreq dt \
                     --merge",
                );
            }
            Described::Otherwise if command.is_x86() => {
                return none("the guest takes its CPUs for equal: x86-64 has no capacities");
            }
            Described::Otherwise => {
                return none(
                    "the guest has no device tree: its driver sets capacities in sysfs, but its \
                     scheduler balances as if CPUs were equal",
                );
            }
        }
        let base = dumped(command)?;
        let in_ram = match path {
            QemuPath::Shm => None,
            QemuPath::Ram => Some(RamPlace::of_base(&base)?),
        };
        let kernel = command
            .kernel()
            .and_then(|path| KernelImage::open(&path).ok());
        let preempt_rt = |mut kernel: KernelImage| matches!(kernel.preempt_rt(), Ok(Some(true)));
        // A guest that QEMU emulates doesn't wake from it.
        let is_rt = served.rt().is_real_time() || kernel.is_some_and(preempt_rt);
        let standby = command.has_kvm() && is_rt;
        let region = match in_ram {
            Some(place) => topology::in_guest_ram(&served.vcpus, place.base),
            None => topology::registers(&served.vcpus, 0),
        };
        let mut machine = topology::machine(&served.vcpus, Some(region), standby)
            .context("can't describe the guest's CPUs; correct --table or --capacity")?;
        if in_ram.is_none() {
            // Without registers in the tree: they are the PCI device's.
            machine = machine.without_cpufreq();
        }
        let merged = vcpufreq_dt::merge(&base, &machine, Seeds::Keep)
            .context("can't describe the CPUs in QEMU's device tree; give it as many as --cpus")?;
        merged.notes.iter().for_each(|note| warn(&note.to_string()));
        let file = memory_file(c"vcpufreq.dtb");
        let mut file = file.context("can't make a file in memory")?;
        file.write_all(&merged.blob)
            .context("can't write the device tree")?;
        Ok(Self {
            file: Some(file),
            summary: match in_ram {
                Some(_) => {
                    "the guest has registers in its RAM, for virtual-cpufreq or vcpufreq_guest, and \
                     capacities, OPPs and energy in its device tree"
                }
                None => "the guest has capacities, OPPs and energy in its device tree",
            },
            in_ram,
        })
    }

    /// Where the registers are, if that is in RAM.
    pub fn in_ram(&self) -> Option<RamPlace> {
        self.in_ram
    }

    /// What the guest will see.
    pub fn summary(&self) -> &'static str {
        self.summary
    }

    /// The options that give it to QEMU.
    ///
    /// # Errors
    /// As fcntl(2), when the file can't be left open for QEMU.
    pub fn arguments(&self) -> anyhow::Result<Vec<String>> {
        let Some(file) = &self.file else {
            return Ok(Vec::new());
        };
        // By this name each open begins at the file's start.
        let path = format!("/proc/self/fd/{}", inherited(file)?);
        Ok(vec!["-dtb".to_owned(), path])
    }
}

/// QEMU's own tree for these options. It writes the tree before it starts a vCPU, and ends.
fn dumped(command: &QemuCommand<'_>) -> anyhow::Result<Vec<u8>> {
    // Beside the records: if this process is killed now, the next start or cleanup removes it.
    let file = StateDir::of_user()?.tree_file(std::process::id())?;
    let mut dump = OsString::from("dumpdtb=");
    dump.push(file.as_os_str());
    let mut qemu = command.start();
    qemu.args(command.of_tree()?).arg("-machine").arg(dump);
    let ran = run(&mut qemu, |pid| ends_within(pid, DUMP_WITHIN));
    let tree = fs::read(&file);
    state::remove_tree_file(&file).context("can't remove QEMU's device tree")?;
    ran?;
    tree.context("can't read QEMU's device tree")
}

/// Whether process `pid` ends within so long.
fn ends_within(pid: u32, within: Duration) -> anyhow::Result<bool> {
    let process = sys::pidfd_open(pid)?;
    let mut process = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    Ok(poll(&mut process, PollTimeout::try_from(within)?)? > 0)
}

/// Runs QEMU to its end; `has_ended` waits for that of a process, in vain after [`DUMP_WITHIN`].
fn run(
    qemu: &mut Command,
    has_ended: impl FnOnce(u32) -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let program = qemu.get_program().to_string_lossy().into_owned();
    // A file, which it can't be kept from writing by.
    let said = memory_file(c"vcpufreq.stderr");
    let mut said = said.context("can't make a file in memory")?;
    qemu.stdin(Stdio::null()).stdout(Stdio::null());
    qemu.stderr(said.try_clone().context("no more open files")?);
    let qemu = qemu.spawn();
    let mut qemu = qemu.with_context(|| format!("can't start {program}"))?;
    if !has_ended(qemu.id()).context("can't wait for QEMU")? {
        // It may end just now.
        let _ = qemu.kill();
        let _ = qemu.wait();
        bail!(
            "{program} takes more than {} s to write its device tree; give the guest one by -dtb",
            DUMP_WITHIN.as_secs()
        );
    }
    if qemu.wait().context("can't wait for QEMU")?.success() {
        return Ok(());
    }
    let mut text = Vec::new();
    let end = said.metadata().map_or(0, |said| said.len());
    let read = said.seek(SeekFrom::Start(end.saturating_sub(LAST_WORDS)));
    read.and_then(|_| said.read_to_end(&mut text))
        .context("can't read QEMU's messages")?;
    let text = String::from_utf8_lossy(&text);
    let last = text.lines().last().unwrap_or("no message");
    bail!("QEMU doesn't write its device tree: {last}");
}

#[cfg(test)]
mod tests {
    //! A QEMU that writes no device tree is an error of one line, and ends.
    use super::*;

    fn line(script: &str, has_ended: impl FnOnce(u32) -> anyhow::Result<bool>) -> String {
        let mut shell = Command::new("sh");
        let ran = run(shell.args(["-c", script]), has_ended);
        ran.unwrap_err().to_string()
    }

    #[test]
    fn one_that_hangs_is_ended() {
        let mut started = None;
        // However far it has come when the time is over.
        let line = line("exec sleep 1000", |pid| {
            started = Some(pid);
            ends_within(pid, Duration::ZERO)
        });
        let seconds = DUMP_WITHIN.as_secs();
        assert!(line.contains(&format!("more than {seconds} s")), "{line}");
        let pid = started.unwrap();
        assert!(!fs::exists(format!("/proc/{pid}")).unwrap());
    }

    #[test]
    fn the_last_of_its_lines_is_told() {
        let script = "seq 10000 >&2; echo no such machine >&2; exit 1";
        let line = line(script, |pid| ends_within(pid, DUMP_WITHIN));
        assert!(line.ends_with(": no such machine"), "{line}");
    }
}
