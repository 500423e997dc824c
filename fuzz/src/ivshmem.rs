// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VMM at the server's socket, by QEMU's ivshmem protocol: it may have written anything, gone, or
//! read slowly. If it reads all, it has the memory, and a doorbell for each vCPU in order; else the
//! server gets an error in time. And a file that a VMM offers as the memory of an earlier server.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use vcpufreq_bridge::shm::{SharedMemory, hand_over, refuse, size};
use vcpufreq_device::VcpuId;
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;

/// How long a VMM may take that isn't too slow: however busy the machine is. What it is sent fits its
/// socket, so nothing waits for so long.
const WITHIN: Duration = Duration::from_secs(600);

/// The VMM that the bytes describe: how many vCPUs, what it does before, and what it has written.
pub fn ivshmem(data: &[u8]) {
    let &[vcpus, how, seals, pages, ref written @ ..] = data else {
        return;
    };
    adopted(u16::from(vcpus), seals, u64::from(pages));
    let vcpus = 1 + u16::from(vcpus % 32);
    let memory = SharedMemory::new(vcpus).expect("a memory");
    let bell = |_| EventFd::new(nix::libc::EFD_NONBLOCK).expect("an eventfd");
    let bells: Vec<_> = (0..vcpus).map(bell).collect();
    let (server, mut vmm) = UnixStream::pair().expect("two sockets");
    // Fails after more than the server's end holds.
    vmm.set_nonblocking(true).expect("a flag");
    let _ = vmm.write_all(written);
    match how % 4 {
        0 => vmm.shutdown(Shutdown::Read).expect("half an end"),
        1 => vmm.shutdown(Shutdown::Write).expect("half an end"),
        2 => {
            drop(vmm);
            refuse(&server);
            assert!(hand_over(&server, &memory, &bells, WITHIN).is_err());
            return;
        }
        _ => (),
    }
    if how & 4 != 0 {
        refuse(&server);
        drop(server);
        let mut heard = Vec::new();
        let _ = vmm.read_to_end(&mut heard);
        assert!(
            heard.is_empty() || heard == (-1_i64).to_le_bytes(),
            "{heard:?}"
        );
        return;
    }
    let within = match (how >> 3) & 1 {
        0 => Duration::ZERO,
        _ => WITHIN,
    };
    let given = hand_over(&server, &memory, &bells, within);
    drop(server);
    if how % 4 == 0 || within.is_zero() {
        assert!(given.is_err());
    } else {
        given.expect("a VMM that can take it");
        heard(&vmm, &memory, &bells);
    }
}

/// All that QEMU would hear.
fn heard(vmm: &UnixStream, memory: &SharedMemory, bells: &[EventFd]) {
    let expect = |number: i64| {
        let mut heard = [0; 8];
        let (len, file) = vmm.recv_with_fd(&mut heard).expect("a message");
        assert_eq!((len, i64::from_le_bytes(heard)), (8, number));
        file
    };
    assert!(expect(0).is_none() && expect(0).is_none());
    let given: File = expect(-1).expect("the memory");
    let given = given.metadata().expect("a file");
    let own = File::from(memory.as_fd().try_clone_to_owned().expect("a file"));
    assert_eq!(given.ino(), own.metadata().expect("a file").ino());
    assert_eq!(given.len(), size(memory.vcpus()));
    for vcpu in 0..bells.len() {
        let bell = expect(1).expect("a doorbell");
        (&bell).write_all(&1_u64.to_ne_bytes()).expect("a ring");
        let rung = |bell: &EventFd| bell.read().is_ok();
        assert_eq!(bells.iter().position(rung), Some(vcpu));
    }
    for _ in bells {
        let interrupt = expect(0).expect("an interrupt");
        (&interrupt)
            .write_all(&1_u64.to_ne_bytes())
            .expect("a ring");
        assert!(bells.iter().all(|bell| bell.read().is_err()));
    }
    let mut vmm = vmm;
    assert_eq!(vmm.read(&mut [0]).unwrap_or(0), 0);
}

/// A memory is taken over if it has the size for its vCPUs, and that is sealed.
fn adopted(vcpus: u16, seals: u8, pages: u64) {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = File::from(memfd_create(c"fuzz", flags).expect("a file in memory"));
    // Sizes near the right one, too.
    let len = match pages {
        0..200 => pages << 12,
        _ => size(vcpus) + pages - 200,
    };
    file.set_len(len).expect("room");
    let seals = SealFlag::from_bits_truncate(i32::from(seals));
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).expect("seals");
    let needed = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    // A mapping for writing is refused by the kernel then.
    let read_only = SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_FUTURE_WRITE;
    let writable = !seals.intersects(read_only);
    let sound = seals.contains(needed) && len == size(vcpus);
    match SharedMemory::adopt(file, vcpus) {
        Ok(memory) => {
            assert!(sound && writable);
            let requests = (0..=vcpus).map(|vcpu| memory.requested(VcpuId(vcpu)));
            assert_eq!(requests.sum::<u32>(), 0);
        }
        Err(error) => assert!(!sound || !writable, "{error}"),
    }
}
