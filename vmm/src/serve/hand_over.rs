// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether a VMM has taken what it was given. QEMU closes a doorbell for which its device has no vector,
//! and loses one for which it has no open file; with `reconnect=` it never reads. A vCPU stores its
//! requests in its page without a doorbell, too: then the server rings in its place.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, ErrorKind},
    os::fd::AsFd as _,
    time::Duration,
};

use vcpufreq_device::VcpuId;
use vcpufreq_host::{CpuList, HostRoot};

use super::{
    ServedVmm, SharedWithVmm,
    takeover::{bells_of, eventfd_id, fdinfo, is_memory, memory_of},
};
use crate::sys;

/// What to do about a VMM that doesn't read.
pub const READ_CURE: &str = "if it is QEMU, leave reconnect= and reconnect-ms= out of its -chardev";

/// How often the requests of vCPUs without a doorbell are read.
pub const RING_EVERY: Duration = Duration::from_millis(10);
/// Looks, a second apart, within which QEMU has read what it was sent, or is no QEMU that will.
const READS_WITHIN: u32 = 10;

/// What has become of memory and doorbells.
pub struct HandOver {
    state: HandOverState,
    /// The vCPUs without a doorbell, and the request of each that was rung for last.
    silent: Vec<(VcpuId, u32)>,
}

enum HandOverState {
    /// The VMM hasn't read all yet, at so many looks.
    Sent(u32),
    /// It has, by the last look.
    Read,
    Checked,
}

/// What a process has open.
struct HeldFiles {
    memory: bool,
    /// The numbers of its eventfds.
    eventfds: BTreeSet<u64>,
    /// How many files more it may open.
    room: u64,
}

impl HandOver {
    /// Of `shared`, not looked at. In a guest's RAM nothing is handed over.
    pub fn new(shared: &SharedWithVmm) -> Self {
        let in_ram = shared.memory.offset_in_ram().is_some();
        Self {
            state: match in_ram {
                true => HandOverState::Checked,
                false => HandOverState::Sent(0),
            },
            silent: Vec::new(),
        }
    }

    /// Looks what `vmm` has of `shared`, until that is known. Returns a line about what it lacks, or that
    /// it can't be checked. Then the server rings for no vCPU: requests with a doorbell would count twice.
    pub fn look(
        &mut self,
        host: &HostRoot,
        vmm: &ServedVmm,
        shared: &SharedWithVmm,
    ) -> Option<String> {
        let pid = vmm.pid();
        match self.state {
            HandOverState::Sent(looks) => {
                let stream = vmm.stream.as_ref();
                let left = stream.map_or(Ok(0), |stream| sys::unread_by_peer(stream.as_fd()));
                self.state = match left {
                    Ok(1..) => HandOverState::Sent(looks.saturating_add(1)),
                    // It makes use of what it has read until the next look.
                    _ => HandOverState::Read,
                };
                (looks == READS_WITHIN)
                    .then(|| format!("process {pid} doesn't read what it was sent; {READ_CURE}"))
            }
            HandOverState::Read => {
                self.state = HandOverState::Checked;
                match HeldFiles::read(host, pid, shared) {
                    Ok(held) => self.check(&held, shared),
                    Err(_) if vmm.check().is_err() => None,
                    Err(error) => Some(format!(
                        "can't be checked for its memory and doorbells ({error}); start serve \
                         with CAP_SYS_PTRACE: without a doorbell requests are up to 500 ms late"
                    )),
                }
                .map(|line| format!("process {pid} {line}"))
            }
            HandOverState::Checked => None,
        }
    }

    /// What of `shared` isn't `held`. From now on the server rings for vCPUs without a doorbell.
    fn check(&mut self, held: &HeldFiles, shared: &SharedWithVmm) -> Option<String> {
        let given: Vec<_> = bells_of(shared).collect();
        let silent = held.silent(&given);
        self.silent = silent.iter().map(|vcpu| (*vcpu, 0)).collect();
        held.lacks(&silent, given.len())
    }

    /// Whether there is a vCPU without a doorbell.
    pub fn has_silent(&self) -> bool {
        !self.silent.is_empty()
    }

    /// Rings for each vCPU without a doorbell that has another request than the last time.
    pub fn ring(&mut self, shared: &SharedWithVmm) {
        for (vcpu, rung_for) in &mut self.silent {
            let requested = shared.memory.requested(*vcpu);
            if requested != *rung_for {
                *rung_for = requested;
                // Fails when the counter is full only, and then the bell is heard anyway.
                let _ = shared.bells[vcpu.index()].write(1);
            }
        }
    }
}

impl HeldFiles {
    /// Those of process `pid`.
    ///
    /// # Errors
    /// When it doesn't let this one look, or has ended. With CAP_DAC_OVERRIDE alone the files are
    /// listed, and what they are isn't shown.
    fn read(host: &HostRoot, pid: u32, shared: &SharedWithVmm) -> io::Result<Self> {
        let open = fs::read_dir(host.path(format!("proc/{pid}/fd")))?;
        let (_, inode) = memory_of(shared)?;
        let (mut memory, mut eventfds, mut count) = (false, BTreeSet::new(), 0);
        for file in open.flatten() {
            count += 1;
            let Some(number) = file.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            let info = || fdinfo(pid, number);
            let name = match fs::read_link(file.path()) {
                // It was closed meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                name => name?,
            };
            match name.to_str() {
                Some("anon_inode:[eventfd]") => eventfds.extend(eventfd_id(&info())),
                Some(name) => memory |= is_memory(name, info, inode),
                None => {}
            }
        }
        let limits = fs::read_to_string(host.path(format!("proc/{pid}/limits")))?;
        let most = open_files_of(&limits).unwrap_or(u64::MAX);
        Ok(Self {
            memory,
            eventfds,
            room: most.saturating_sub(count),
        })
    }

    /// The vCPUs whose doorbells aren't among them.
    fn silent(&self, given: &[Option<u64>]) -> Vec<VcpuId> {
        let held = |bell: &Option<u64>| bell.is_none_or(|bell| self.eventfds.contains(&bell));
        let bells = (0..).map(VcpuId).zip(given);
        let silent = bells.filter(|(_, bell)| !held(bell));
        silent.map(|(vcpu, _)| vcpu).collect()
    }

    /// What is not among them, and what to do about that.
    fn lacks(&self, silent: &[VcpuId], vcpus: usize) -> Option<String> {
        let list: CpuList = silent.iter().map(|vcpu| u32::from(vcpu.0)).collect();
        let what = match (self.memory, silent) {
            (true, []) => return None,
            (true, _) => format!("has no doorbell of vCPU {list}"),
            (false, _) => "has not taken its memory".to_owned(),
        };
        let cure = match self.room {
            0 => "raise its limit of open files (ulimit -n, LimitNOFILE=, libvirt's max_files)"
                .to_owned(),
            _ => format!(
                "give its ivshmem-doorbell vectors={vcpus} (libvirt: <msi vectors='{vcpus}'/>)"
            ),
        };
        let until = match self.memory {
            true => "; until then its requests are up to 10 ms late",
            false => "",
        };
        Some(format!("{what}: {cure}{until}"))
    }
}

/// How many files a process may open, by its `limits` in procfs.
fn open_files_of(limits: &str) -> Option<u64> {
    let mut lines = limits.lines();
    let line = lines.find_map(|line| line.strip_prefix("Max open files"))?;
    let soft = line.split_whitespace().next()?;
    soft.parse()
        .ok()
        .or_else(|| (soft == "unlimited").then_some(u64::MAX))
}

#[cfg(test)]
mod tests {
    //! What a VMM lacks is a line with its cure, and the server rings for a vCPU without a doorbell
    //! when that has another request. A VMM that can't be checked is a line, too.
    use std::os::unix::net::UnixStream;

    use vcpufreq_host::fakes::FakeHost;

    use super::*;
    use crate::serve::Connection;

    fn held(memory: bool, eventfds: &[u64], room: u64) -> HeldFiles {
        HeldFiles {
            memory,
            eventfds: eventfds.iter().copied().collect(),
            room,
        }
    }

    fn lacks(held: &HeldFiles) -> Option<String> {
        held.lacks(&held.silent(&[Some(11), Some(12), Some(13)]), 3)
    }

    #[test]
    fn what_is_lacking_has_its_cure() {
        assert_eq!(lacks(&held(true, &[10, 11, 12, 13], 0)), None);
        for (held, line) in [
            (
                held(true, &[11], 9),
                "has no doorbell of vCPU 1-2: give its ivshmem-doorbell vectors=3 (libvirt: <msi \
                 vectors='3'/>); until then its requests are up to 10 ms late",
            ),
            (
                held(true, &[11, 12], 0),
                "has no doorbell of vCPU 2: raise its limit of open files (ulimit -n, \
                 LimitNOFILE=, libvirt's max_files); until then its requests are up to 10 ms late",
            ),
            (
                held(false, &[], 0),
                "has not taken its memory: raise its limit of open files (ulimit -n, \
                 LimitNOFILE=, libvirt's max_files)",
            ),
        ] {
            assert_eq!(lacks(&held).as_deref(), Some(line));
        }
    }

    #[test]
    fn a_vmm_that_cannot_be_checked_is_one_line() {
        let (own, _other) = UnixStream::pair().unwrap();
        let pid = std::process::id();
        let vmm = ServedVmm::child(Connection::resumed(own), pid).unwrap();
        let shared = SharedWithVmm::new(2).unwrap();
        // Its folder can't be read, or what is in it.
        for file in ["fd", "fd/3"] {
            let host = FakeHost::empty();
            host.write(&format!("proc/{pid}/limits"), "");
            host.write(&format!("proc/{pid}/{file}"), "");
            let mut hand_over = HandOver::new(&shared);
            hand_over.state = HandOverState::Read;
            let mut look = || hand_over.look(&host.root(), &vmm, &shared);
            let line = look().unwrap();
            let begin = format!("process {pid} can't be checked for its memory and doorbells (");
            assert!(line.starts_with(&begin), "{line}");
            assert!(line.contains("start serve with CAP_SYS_PTRACE"), "{line}");
            assert_eq!(look(), None);
            assert!(!hand_over.has_silent());
        }
    }

    #[test]
    fn the_limit_is_the_soft_one() {
        let limits =
            "Limit     Soft Limit  Hard Limit  Units\nMax open files  1024  524288  files\n";
        assert_eq!(open_files_of(limits), Some(1024));
        let none = "Max open files            unlimited            unlimited            files\n";
        assert_eq!(open_files_of(none), Some(u64::MAX));
        assert_eq!(open_files_of("Max processes 1 1\n"), None);
    }

    #[test]
    fn a_silent_vcpu_is_rung_for_once_for_each_request() {
        let shared = SharedWithVmm::new(2).unwrap();
        let mut hand_over = HandOver {
            state: HandOverState::Checked,
            silent: vec![(VcpuId(1), 0)],
        };
        let mut rings = |khz: u32| {
            let guest = fs::File::from(shared.memory.as_fd().try_clone_to_owned().unwrap());
            // Of vCPU 1's page.
            std::os::unix::fs::FileExt::write_all_at(&guest, &khz.to_le_bytes(), 0x2004).unwrap();
            hand_over.ring(&shared);
            [0, 1].map(|vcpu: usize| shared.bells[vcpu].read().unwrap_or(0))
        };
        assert_eq!(rings(0), [0, 0]);
        assert_eq!(rings(600_000), [0, 1]);
        assert_eq!(rings(600_000), [0, 0]);
        assert_eq!(rings(800_000), [0, 1]);
    }
}
