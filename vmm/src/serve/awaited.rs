// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VMM that doesn't connect: its guest has registers in its RAM, and the server looks for that.

use std::{
    fs,
    io::ErrorKind,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, ensure};
use nix::{
    sys::inotify::{AddWatchFlags, InitFlags, Inotify},
    unistd::geteuid,
};

use super::{
    Served, ServedVmm, WantedRam, booted_tree, check_coherent, ram_of, registers_in, takeover,
};
use crate::{
    config::{ram_place::RamPlace, topology::read_tree},
    message::warn,
    signals::{EndSignals, Ready, is_ready, wait},
    sys,
};

/// How the hint for a VMM without such RAM goes on.
const OR_TREE: &str = "or make the tree of --dtb from one that was dumped with the same -m";

/// A VMM that may not run yet, and the tree that its guest boots.
pub struct AwaitedVmm {
    pub process: AwaitedProcess,
    pub tree: PathBuf,
}

/// Which process it is.
pub enum AwaitedProcess {
    /// The one of this number.
    Number(u32),
    /// The one that this file names, once it does.
    File(PathBuf),
}

impl AwaitedVmm {
    /// Checks what can be checked without the process.
    ///
    /// # Errors
    /// When the tree can't be read, or has no such registers; when this host's CPUs can't share them
    /// with a guest.
    pub fn check(&self, served: &Served) -> anyhow::Result<()> {
        check_coherent()?;
        self.place(served).map(drop)
    }

    /// Waits for its process and its RAM; none if it has ended, or a signal ends that.
    ///
    /// # Errors
    /// As [`ram_of`]; when the process is no VMM of such a guest, or another server serves it.
    pub fn found(
        &self,
        served: &Served,
        signals: &EndSignals,
    ) -> anyhow::Result<Option<ServedVmm>> {
        loop {
            let Some(pid) = self.pid(served, signals)? else {
                return Ok(None);
            };
            let found = self.of_process(pid, served);
            // It has ended a wait, too.
            if matches!(wait(signals, &[], Some(Duration::ZERO))?, Ready::Signal(_)) {
                let found = found.ok().flatten().filter(|vmm| !vmm.was_served());
                found.iter().for_each(takeover::forget);
                return Ok(None);
            }
            let found = found.with_context(|| format!("process {pid} isn't served"))?;
            if found.is_some() || matches!(self.process, AwaitedProcess::Number(_)) {
                return Ok(found);
            }
        }
    }

    fn place(&self, served: &Served) -> anyhow::Result<RamPlace> {
        let place = RamPlace::of_tree(&read_tree(&self.tree)?, &served.vcpus);
        place.with_context(|| format!("can't serve by {}", self.tree.display()))
    }

    /// Waits until the process is known; none if a signal ends that.
    fn pid(&self, served: &Served, signals: &EndSignals) -> anyhow::Result<Option<u32>> {
        let path = match &self.process {
            AwaitedProcess::Number(pid) => return Ok(Some(*pid)),
            AwaitedProcess::File(path) => path,
        };
        let shown = path.display();
        let folder = path.parent().filter(|folder| *folder != Path::new(""));
        let changes = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        // QEMU doesn't close it.
        let wanted =
            AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_MOVED_TO;
        changes
            .add_watch(folder.unwrap_or(Path::new(".")), wanted)
            .with_context(|| format!("can't wait for {shown}; name another --pid-file"))?;
        let mut is_said = false;
        loop {
            if let Some(pid) = process_of(path)? {
                return Ok(Some(pid));
            }
            if !is_said {
                let vcpus = served.vcpus.len();
                warn(&format!(
                    "waits for {shown} to name a VMM with {vcpus} vCPUs"
                ));
                is_said = true;
            }
            match wait(signals, &[changes.as_fd()], None)? {
                Ready::Signal(_) => return Ok(None),
                // What has changed there doesn't matter.
                _ => drop(changes.read_events()),
            }
        }
    }

    /// The VMM that process `pid` is, once it has its guest's RAM; none if it ends before that, or
    /// isn't the process any longer.
    fn of_process(&self, pid: u32, served: &Served) -> anyhow::Result<Option<ServedVmm>> {
        let process = match sys::pidfd_open(pid) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
            process => process.context("it can't be watched")?,
        };
        let watch = process.try_clone().context("no more open files")?;
        match self.of_watched((pid, process), served) {
            // What is looked at of such a process fails in many ways.
            Err(_) if has_ended(&watch)? => {
                warn(&format!("process {pid} has ended"));
                Ok(None)
            }
            found => found,
        }
    }

    fn of_watched(
        &self,
        (pid, process): (u32, OwnedFd),
        served: &Served,
    ) -> anyhow::Result<Option<ServedVmm>> {
        takeover::last_record(pid)?;
        let place = self.place(served)?;
        let wanted = WantedRam { place, or: OR_TREE };
        let mut has_ended = || Ok(has_ended(&process)? || !self.names(pid)?);
        let Some(ram) = ram_of((pid, process.as_fd()), wanted, &mut has_ended)? else {
            return Ok(None);
        };
        // Another server may have waited for the same.
        let _alone = takeover::lock()?;
        let last = takeover::last_record(pid)?;
        let was_served = match last {
            Some(vm) => takeover::is_of(&vm, &ram, place, served.vcpus.len())?,
            None => false,
        };
        if !was_served {
            // By now it is the VMM: a manager's child has its number before it becomes that.
            booted_tree::check(pid, &self.tree)?;
        }
        let shared = registers_in(ram, place, served)?;
        let vmm = ServedVmm::with_ram(shared.clone(), (pid, process), was_served);
        takeover::keep(&vmm, &shared)?;
        Ok(Some(vmm))
    }

    /// Whether process `pid` is still the one.
    fn names(&self, pid: u32) -> anyhow::Result<bool> {
        match &self.process {
            AwaitedProcess::Number(_) => Ok(true),
            AwaitedProcess::File(path) => Ok(process_of(path)? == Some(pid)),
        }
    }
}

fn has_ended(process: &OwnedFd) -> anyhow::Result<bool> {
    is_ready(&[process.as_fd()], Duration::ZERO, false)
}

/// The process that the file at `path` names, if it does, and that runs. The file is this user's, root's
/// or that process' user's: another one could name any process.
fn process_of(path: &Path) -> anyhow::Result<Option<u32>> {
    let unreadable = || format!("can't read {}; name another --pid-file", path.display());
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        text => text.with_context(unreadable)?,
    };
    // While it is written it has none.
    let Ok(pid) = text.trim().parse::<u32>() else {
        return Ok(None);
    };
    let watched = sys::pidfd_open(pid).ok().filter(|process| {
        // Its parent may not have seen it end.
        !has_ended(process).is_ok_and(|ended| ended)
    });
    let process = watched.and_then(|_| fs::metadata(format!("/proc/{pid}")).ok());
    let Some(process) = process else {
        return Ok(None);
    };
    let owner = fs::metadata(path).with_context(unreadable)?.uid();
    ensure!(
        [0, geteuid().as_raw(), process.uid()].contains(&owner),
        "{} is user {owner}'s, and process {pid} is user {}'s; name another --pid-file",
        path.display(),
        process.uid()
    );
    Ok(Some(pid))
}

#[cfg(test)]
mod tests {
    //! A file names a process once it is there and whole, and the process runs.
    use super::*;

    #[test]
    fn a_process_is_the_one_that_runs() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm.pid");
        assert_eq!(process_of(&path).unwrap(), None);
        let own = std::process::id();
        for (text, found) in [
            ("", None),
            ("4294967295\n", None),
            ("no number\n", None),
            (&*format!("{own}\n"), Some(own)),
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(process_of(&path).unwrap(), found, "{text:?}");
        }
        let error = process_of(folder.path()).unwrap_err().to_string();
        assert!(error.ends_with("name another --pid-file"), "{error}");
    }
}
