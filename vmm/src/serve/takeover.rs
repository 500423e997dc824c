// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM goes on when its server has ended. The next server finds memory and doorbells by the record
//! of the VM, among the files that the service manager kept, or else among the VMM's own.

use std::{
    collections::BTreeSet,
    fmt::Display,
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::fs::MetadataExt,
    },
    path::Path,
    sync::Arc,
};

use anyhow::{Context, anyhow, bail, ensure};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use vcpufreq_bridge::shm::SharedMemory;
use vcpufreq_host::HostRoot;
use vcpufreq_host::undo::{KernelHost, LockedFile};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    socket::Socket,
    vmm::{Connection, ServedVmm, SharedWithVmm},
};
use crate::{
    config::ram_place::RamPlace,
    lifecycle::{
        record::{OwnerStatus, owner_of},
        served_vms::{KeptVm, PagesInRam, RunningVms},
        state::StateDir,
    },
    manager,
    message::{chain, warn},
    sys,
};

/// What the kernel calls the file of a memory that a server has made.
const MEMORY: &str = "/memfd:vcpufreq (deleted)";
/// The name by which the service manager keeps the files of a VMM begins so, and ends with its
/// number.
const STORED: &str = "vm-";

fn store_name(pid: u32) -> String {
    format!("{STORED}{pid}")
}

/// Lets a later server take `vmm` over, which has `shared` or is about to get it.
///
/// # Errors
/// When procfs doesn't show the VMM, the kernel doesn't number eventfds (before Linux 5.2), or the
/// record can't be written.
pub fn keep(vmm: &ServedVmm, shared: &SharedWithVmm) -> anyhow::Result<()> {
    let host = HostRoot::default();
    let bells: Option<Vec<_>> = bells_of(shared).collect();
    StateDir::of_user()?.write_vm(&KeptVm {
        vmm: owner_of(&host, vmm.pid())?,
        server: Some(owner_of(&host, std::process::id())?),
        socket: vmm.socket.clone(),
        memory: memory_of(shared)?,
        bells: bells.context("this kernel doesn't number eventfds; it is older than 5.2")?,
        in_ram: pages_of(shared),
    })
}

/// Where its pages are in the guest's RAM, if they are there.
fn pages_of(shared: &SharedWithVmm) -> Option<PagesInRam> {
    let offset = shared.memory.offset_in_ram()?;
    let vcpus = shared.memory.vcpus();
    Some(PagesInRam { offset, vcpus })
}

/// Device and number of the memory.
///
/// # Errors
/// As fcntl(2): `EMFILE`.
pub fn memory_of(shared: &SharedWithVmm) -> io::Result<(u64, u64)> {
    let memory = File::from(shared.memory.as_fd().try_clone_to_owned()?).metadata()?;
    Ok((memory.dev(), memory.ino()))
}

/// The kernel's numbers of the doorbells; none before Linux 5.2.
pub fn bells_of(shared: &SharedWithVmm) -> impl Iterator<Item = Option<u64>> + '_ {
    let bells = shared.bells.iter();
    bells.map(|bell| eventfd_id(&fdinfo("self", bell.as_raw_fd())))
}

/// Has the service manager keep the files of `vmm`, which has `shared`, for a later server.
///
/// # Errors
/// As [`manager::store`].
pub fn store(vmm: &ServedVmm, shared: &SharedWithVmm) -> anyhow::Result<()> {
    let (Some(_), Some(stream)) = (&vmm.socket, &vmm.stream) else {
        return Ok(());
    };
    let bells = shared.bells.iter().map(sys::file_of);
    let files: Vec<_> = [shared.memory.as_fd(), stream.as_fd()]
        .into_iter()
        .chain(bells)
        .collect();
    manager::store(&store_name(vmm.pid()), &files)
}

/// No later server takes `vmm` over. It has ended, or has lost its device or a vCPU.
pub fn forget(vmm: &ServedVmm) {
    forget_process(vmm.pid());
    if vmm.socket.is_some() {
        let discarded = manager::discard(&store_name(vmm.pid()));
        discarded.unwrap_or_else(|error| warn(&chain(&error)));
    }
}

/// The same of process `pid`, of which the service manager stores nothing.
pub fn forget_process(pid: u32) {
    let removed = StateDir::of_user().and_then(|dir| Ok(dir.remove_vm(pid)?));
    removed.unwrap_or_else(|error| warn(&chain(&error)));
}

/// Discards what the service manager has stored by one of `names` for a VMM that has ended while no
/// server ran.
///
/// # Errors
/// When the records can't be read; as [`manager::discard`].
pub fn discard_ended(names: &BTreeSet<String>) -> anyhow::Result<()> {
    let running = StateDir::of_user()?.kept(&HostRoot::default())?;
    let kept = running.kept.iter().map(|vm| vm.vmm.pid);
    let pids: Vec<_> = kept
        .chain(running.unknown.iter().map(|(pid, _)| *pid))
        .collect();
    let runs = |name: &String| pids.iter().any(|pid| store_name(*pid) == *name);
    let stored = names.iter().filter(|name| name.starts_with(STORED));
    let mut ended = stored.filter(|name| !runs(name));
    ended.try_for_each(|name| manager::discard(name))
}

/// The VMMs that have connected to `socket` of an earlier server of VMs of `vcpus` vCPUs, and run;
/// and that of a `vcpufreq qemu`, if it is the only process that `socket` allows. Each that can't be
/// taken over is a warning.
///
/// # Errors
/// When the records can't be read.
pub fn find(socket: &Socket, vcpus: usize, handed: &[OwnedFd]) -> anyhow::Result<Vec<ServedVmm>> {
    let RunningVms { mut kept, unknown } = StateDir::of_user()?.kept(&HostRoot::default())?;
    for (pid, why) in unknown {
        warn(&format!(
            "process {pid} isn't taken over: {why}; serve it with the version that wrote this"
        ));
    }
    kept.retain(|vm| match &vm.socket {
        Some(path) => path == socket.path() && socket.allowed().is_pid(vm.vmm.pid),
        None => socket.allowed().pid == Some(vm.vmm.pid),
    });
    let taken = kept.into_iter().filter_map(|vm| {
        let taken = take_over(socket, &vm, vcpus, handed);
        let pid = vm.vmm.pid;
        let failed = |error: &anyhow::Error| {
            warn(&format!("process {pid} isn't taken over: {}", chain(error)));
        };
        taken.inspect_err(failed).ok()
    });
    Ok(taken.collect())
}

fn take_over(
    socket: &Socket,
    vm: &KeptVm,
    vcpus: usize,
    handed: &[OwnedFd],
) -> anyhow::Result<ServedVmm> {
    let host = HostRoot::default();
    // At a socket no two servers can be.
    if vm.socket.is_none() {
        check_unserved(vm, &host)?;
    }
    let host = KernelHost::from(&host);
    let count = vm.in_ram.map_or(vm.bells.len(), |pages| pages.vcpus.into());
    check_count(count, vcpus)?;
    let pid = vm.vmm.pid;
    let process = sys::pidfd_open(pid).context("it can't be watched")?;
    // The number was still its own when the file was opened.
    if vm.vmm.status(&host) != OwnerStatus::InUse {
        bail!("it has ended");
    }
    let files = match VmmFiles::among(vm, handed)? {
        Some(files) if files.bells.iter().all(Option::is_some) => files,
        _ => VmmFiles::of_process(vm, process.as_fd())?,
    };
    let shared = files.share()?;
    let stream = handed.iter().find(|file| is_connection_of(file, pid));
    let stream = stream.map(|file| {
        file.try_clone()
            .map(|file| Connection::resumed(file.into()))
    });
    let mut vmm = ServedVmm::taken_over(process, pid, socket.path().to_owned(), shared);
    vmm.stream = stream.transpose().context("no more open files")?;
    Ok(vmm)
}

/// Checks that no server serves process `pid`, whose guest has registers in its RAM. The record of the
/// last one that did, if there is one.
///
/// # Errors
/// When the records can't be read, or another server serves it.
pub fn last_record(pid: u32) -> anyhow::Result<Option<KeptVm>> {
    let host = HostRoot::default();
    let running = StateDir::of_user()?.kept(&host)?;
    let vm = running.kept.into_iter().find(|vm| vm.vmm.pid == pid);
    vm.iter().try_for_each(|vm| check_unserved(vm, &host))?;
    Ok(vm)
}

/// Checks that no server that lives serves `vm`.
fn check_unserved(vm: &KeptVm, host: &HostRoot) -> anyhow::Result<()> {
    let server = vm.server.as_ref();
    match server.filter(|server| server.status(&KernelHost::from(host)) == OwnerStatus::InUse) {
        Some(server) => bail!("process {} serves it; end that first", server.pid),
        None => Ok(()),
    }
}

fn check_count(count: usize, served: usize) -> anyhow::Result<()> {
    ensure!(
        count == served,
        "it has {count} vCPUs; start the server with --cpus {count}"
    );
    Ok(())
}

/// Whether `vm` is the record of the pages at `place` in `ram`.
///
/// # Errors
/// When it is, of another number of vCPUs than these; as fstat(2).
pub fn is_of(vm: &KeptVm, ram: &File, place: RamPlace, vcpus: usize) -> anyhow::Result<bool> {
    let ram = ram.metadata().context("the guest's RAM")?;
    let there = vm.in_ram.filter(|pages| pages.offset == place.offset);
    let there = there.filter(|_| vm.memory == (ram.dev(), ram.ino()));
    if let Some(pages) = &there {
        check_count(pages.vcpus.into(), vcpus)?;
    }
    Ok(there.is_some())
}

/// Keeps other servers from putting a VM on record, as long as the result lives. Before the first
/// record there is no folder to hold, and the result is none.
///
/// # Errors
/// As [`StateDir::lock`].
pub fn lock() -> anyhow::Result<Option<LockedFile>> {
    let locked = StateDir::of_user()?.lock();
    let why = locked.as_ref().err().and_then(|error| error.downcast_ref());
    match why.map(io::Error::kind) {
        Some(io::ErrorKind::NotFound) => Ok(None),
        _ => locked.map(Some),
    }
}

fn is_connection_of(file: &OwnedFd, pid: u32) -> bool {
    let peer = getsockopt(file, PeerCredentials);
    peer.is_ok_and(|peer| u32::try_from(peer.pid()) == Ok(pid))
}

/// Memory, and the doorbells of its vCPUs. A VMM may lack some: see [`super::hand_over`].
struct VmmFiles {
    memory: File,
    bells: Vec<Option<OwnedFd>>,
    in_ram: Option<PagesInRam>,
}

impl VmmFiles {
    /// Those of `vm` among files of this process, if the memory is there.
    fn among(vm: &KeptVm, files: &[OwnedFd]) -> anyhow::Result<Option<Self>> {
        let mut memory = None;
        let mut bells: Vec<_> = vm.bells.iter().map(|_| None).collect();
        for file in files {
            let copy = || file.try_clone().context("no more open files");
            let Some(id) = eventfd_id(&fdinfo("self", file.as_raw_fd())) else {
                // A look at another file may wait for its file system.
                let name = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
                let is_ram = vm.in_ram.is_some();
                if !is_ram && !name.is_ok_and(|name| name.as_os_str() == MEMORY) {
                    continue;
                }
                let file = File::from(copy()?);
                let is_it = file
                    .metadata()
                    .is_ok_and(|found| (found.dev(), found.ino()) == vm.memory);
                memory = memory.or(is_it.then_some(file));
                continue;
            };
            if let Some(vcpu) = vm.bells.iter().position(|bell| *bell == id) {
                bells[vcpu] = Some(copy()?);
            }
        }
        let in_ram = vm.in_ram;
        Ok(memory.map(|memory| Self {
            memory,
            bells,
            in_ram,
        }))
    }

    /// Copies of what the VMM itself has open.
    fn of_process(vm: &KeptVm, process: BorrowedFd<'_>) -> anyhow::Result<Self> {
        let pid = vm.vmm.pid;
        let refused = |error| {
            let pid = vm.vmm.pid;
            anyhow!(
                "the files of process {pid} can't be taken ({error}); start serve with \
                 CAP_SYS_PTRACE, or as a service with FileDescriptorStoreMax="
            )
        };
        let open = fs::read_dir(format!("/proc/{pid}/fd")).map_err(refused)?;
        let mut copies = Vec::new();
        for file in open.flatten() {
            let number = file.file_name();
            let Some(number) = number.to_str().and_then(|name| name.parse::<RawFd>().ok()) else {
                continue;
            };
            if is_wanted(vm, &file.path(), number) {
                copies.push(sys::pidfd_getfd(process, number).map_err(refused)?);
            }
        }
        // What a number stands for may have changed meanwhile: the copies are what counts.
        Self::among(vm, &copies)?.with_context(|| format!("process {pid} has closed its memory"))
    }

    fn share(self) -> anyhow::Result<SharedWithVmm> {
        if let Some(PagesInRam { offset, vcpus }) = self.in_ram {
            let memory = SharedMemory::in_guest_ram(self.memory, offset, vcpus);
            let memory = memory.context("its RAM can't be mapped")?;
            return Ok(SharedWithVmm::in_guest_ram(memory));
        }
        let vcpus = u16::try_from(self.bells.len()).context("too many vCPUs")?;
        let memory = SharedMemory::adopt(self.memory, vcpus);
        let memory = memory.context("its memory isn't this server's")?;
        let bells = self.bells.into_iter().map(|bell| match bell {
            Some(bell) => Ok(sys::eventfd_of(bell)),
            // The server rings it.
            None => EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC),
        });
        let bells: io::Result<Vec<_>> = bells.collect();
        Ok(SharedWithVmm {
            memory: Arc::new(memory),
            bells: bells.context("no more open files")?.into(),
        })
    }
}

/// Whether a process' file looks like one of `vm`. Without a look at the file itself, which another
/// file system may answer late or never.
fn is_wanted(vm: &KeptVm, path: &Path, number: RawFd) -> bool {
    let name = fs::read_link(path).unwrap_or_default();
    let info = || fdinfo(vm.vmm.pid, number);
    match name.to_str() {
        Some("anon_inode:[eventfd]") => {
            eventfd_id(&info()).is_some_and(|id| vm.bells.contains(&id))
        }
        Some(_) if vm.in_ram.is_some() => has_inode(&info(), vm.memory.1),
        Some(name) => is_memory(name, info, vm.memory.1),
        None => false,
    }
}

/// Whether a process' file of this name looks like the memory of this number: others may have one of
/// the same name. Linux before 5.14 doesn't number it there.
pub fn is_memory(name: &str, info: impl FnOnce() -> String, inode: u64) -> bool {
    name == MEMORY && has_inode(&info(), inode)
}

/// Whether a process' file may have this number, by its `fdinfo`; Linux before 5.14 has none there.
pub fn has_inode(info: &str, inode: u64) -> bool {
    number_in(info, "ino:").is_none_or(|found| found == inode)
}

/// What proc_pid_fdinfo(5) has of a process' file; nothing if that is closed.
pub fn fdinfo(process: impl Display, number: RawFd) -> String {
    fs::read_to_string(format!("/proc/{process}/fdinfo/{number}")).unwrap_or_default()
}

/// The number of an eventfd, by its `fdinfo`.
pub fn eventfd_id(info: &str) -> Option<u64> {
    number_in(info, "eventfd-id:")
}

fn number_in(info: &str, name: &str) -> Option<u64> {
    let number = info.lines().find_map(|line| line.strip_prefix(name))?;
    number.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    //! A VM's files are distinguished from similar ones.
    use super::*;

    #[test]
    fn another_memory_of_the_same_name_and_size_is_not_taken() {
        let (host, pid) = (HostRoot::default(), std::process::id());
        let [other, shared] = [(); 2].map(|()| SharedWithVmm::new(2).unwrap());
        let id_of = |shared: &SharedWithVmm| {
            let file = File::from(shared.memory.as_fd().try_clone_to_owned().unwrap());
            let found = file.metadata().unwrap();
            (found.dev(), found.ino())
        };
        let bells = shared.bells.iter();
        let bells = bells.map(|bell| eventfd_id(&fdinfo("self", bell.as_raw_fd())).unwrap());
        let vm = KeptVm {
            in_ram: None,
            vmm: owner_of(&host, pid).unwrap(),
            server: None,
            socket: None,
            memory: id_of(&shared),
            bells: bells.collect(),
        };
        let wanted = |shared: &SharedWithVmm| {
            let number = shared.memory.fd();
            is_wanted(&vm, Path::new(&format!("/proc/{pid}/fd/{number}")), number)
        };
        assert_eq!([&other, &shared].map(wanted), [false, true]);
        let process = sys::pidfd_open(pid).unwrap();
        let taken = VmmFiles::of_process(&vm, process.as_fd()).unwrap().share();
        assert_eq!(id_of(&taken.unwrap()), vm.memory);
        // By any way to get files.
        let copy = |shared: &SharedWithVmm| shared.memory.as_fd().try_clone_to_owned().unwrap();
        let mut handed: Vec<_> = shared.bells.iter().map(sys::file_of).collect();
        let other = copy(&other);
        handed.push(other.as_fd());
        let handed: io::Result<Vec<_>> =
            handed.iter().map(BorrowedFd::try_clone_to_owned).collect();
        assert!(VmmFiles::among(&vm, &handed.unwrap()).unwrap().is_none());
    }

    #[test]
    fn pages_in_ram_are_taken_with_their_number_of_vcpus() {
        let ram = vcpufreq_host::memory_file(c"ram").unwrap();
        let found = ram.metadata().unwrap();
        let (offset, vcpus) = (1 << 20, 4);
        let vm = KeptVm {
            in_ram: Some(PagesInRam { offset, vcpus }),
            vmm: owner_of(&HostRoot::default(), std::process::id()).unwrap(),
            server: None,
            socket: None,
            memory: (found.dev(), found.ino()),
            bells: Vec::new(),
        };
        let place = |offset| RamPlace {
            base: 0,
            offset,
            size: 0,
        };
        assert!(is_of(&vm, &ram, place(offset), 4).unwrap());
        assert!(!is_of(&vm, &ram, place(0), 2).unwrap());
        let error = is_of(&vm, &ram, place(offset), 2).unwrap_err();
        assert!(error.to_string().ends_with("--cpus 4"), "{error}");
    }
}
