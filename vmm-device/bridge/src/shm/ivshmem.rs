// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! QEMU's ivshmem protocol, version 0 (docs/specs/ivshmem-spec.rst): what a server sends a VMM that
//! has connected. Each message is a number of 64 bits, some with a file.
//!
//! ```text
//! 0            the protocol's version
//! 0            the VMM's number
//! -1  + memfd  the memory
//! 1   + eventfd, for each vector: the server's doorbells, which the guest rings
//! 0   + eventfd, for each vector: interrupts of the guest, which the server never makes
//! ```

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::layout::SERVER;
use super::memory::SharedMemory;

const VERSION: i64 = 0;
/// A version that no VMM takes.
const NO_VERSION: i64 = -1;
const GUEST: i64 = 0;
const MEMORY: i64 = -1;

/// Hands the memory and its doorbells, one for each vCPU, to a VMM, which has to take all of it
/// within so long.
///
/// # Errors
/// `BrokenPipe` when the VMM has gone, `TimedOut` or `WouldBlock` when it is too slow, `EMFILE`
/// when this process has no more open files. The VMM may have a part of it then.
pub fn hand_over(
    vmm: &UnixStream,
    memory: &SharedMemory,
    bells: &[EventFd],
    within: Duration,
) -> io::Result<()> {
    let until = Instant::now() + within;
    // The VMM keeps what it was sent.
    let interrupt = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
    let head = [(VERSION, None), (GUEST, None), (MEMORY, Some(memory.fd()))];
    let doorbells = bells.iter();
    let doorbells = doorbells.map(|bell| (SERVER.into(), Some(bell.as_raw_fd())));
    let interrupts = bells.iter().map(|_| (GUEST, Some(interrupt.as_raw_fd())));
    let mut messages = head.into_iter().chain(doorbells).chain(interrupts);
    messages.try_for_each(|(number, file)| {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        vmm.set_write_timeout(Some(left))?;
        send(vmm, number, file)
    })
}

/// Refuses a VMM that has connected and was sent nothing: QEMU ends with the line "server sent version
/// -1, expecting 0". If the connection were closed alone, QEMU 11 would read from it in a busy loop
/// (`ivshmem_recv_msg` in hw/misc/ivshmem-pci.c takes its end for no data yet).
pub fn refuse(vmm: &UnixStream) {
    // It may have gone. A stream that nothing was sent on has room.
    drop(send(vmm, NO_VERSION, None));
}

fn send(vmm: &UnixStream, number: i64, file: Option<RawFd>) -> io::Result<()> {
    let message = number.to_le_bytes();
    let sent = match file {
        Some(file) => vmm.send_with_fd(&message[..], file),
        None => vmm.send_with_fds::<&[u8]>(&[&message], &[]),
    };
    let sent = sent.map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
    // A stream socket takes so few bytes at once or not at all.
    (sent == message.len())
        .then_some(())
        .ok_or_else(|| io::ErrorKind::WriteZero.into())
}

#[cfg(test)]
mod tests {
    //! A VMM hears what QEMU expects, in its order, and is not waited for longer than allowed.
    use super::*;

    #[test]
    fn a_vmm_gets_memory_and_a_doorbell_for_each_vcpu() {
        let (server, vmm) = UnixStream::pair().unwrap();
        let memory = SharedMemory::new(2).unwrap();
        let bells: Vec<_> = (0..2)
            .map(|_| EventFd::new(libc::EFD_NONBLOCK).unwrap())
            .collect();
        // However long this thread has to wait for a CPU.
        hand_over(&server, &memory, &bells, Duration::from_secs(600)).unwrap();
        drop(server);
        let mut heard = Vec::new();
        loop {
            let mut number = [0; 8];
            let (len, file) = vmm.recv_with_fd(&mut number).unwrap();
            if len == 0 {
                break;
            }
            heard.push((i64::from_le_bytes(number), file));
        }
        let numbers: Vec<_> = heard
            .iter()
            .map(|(number, file)| (*number, file.is_some()))
            .collect();
        assert_eq!(
            numbers,
            [
                (0, false),
                (0, false),
                (-1, true),
                (1, true),
                (1, true),
                (0, true),
                (0, true)
            ]
        );
        // The second doorbell is the one of vCPU 1.
        let ring = heard[4].1.take().unwrap();
        std::io::Write::write_all(&mut &ring, &1u64.to_ne_bytes()).unwrap();
        assert!(bells[0].read().is_err());
        assert_eq!(bells[1].read().unwrap(), 1);
    }

    #[test]
    fn a_refused_vmm_gets_a_version_that_it_does_not_take() {
        let (server, mut vmm) = UnixStream::pair().unwrap();
        refuse(&server);
        drop(server);
        let mut heard = Vec::new();
        std::io::Read::read_to_end(&mut vmm, &mut heard).unwrap();
        assert_eq!(heard, (-1_i64).to_le_bytes());
        let (server, vmm) = UnixStream::pair().unwrap();
        drop(vmm);
        refuse(&server);
    }

    #[test]
    fn a_vmm_that_reads_slowly_is_given_up() {
        let (server, vmm) = UnixStream::pair().unwrap();
        let memory = SharedMemory::new(1).unwrap();
        // More than a socket holds.
        let bells: Vec<_> = (0..400).map(|_| EventFd::new(0).unwrap()).collect();
        let reader = std::thread::spawn(move || {
            let mut number = [0; 8];
            while vmm.recv_with_fd(&mut number).is_ok_and(|(len, _)| len > 0) {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let handed = hand_over(&server, &memory, &bells, Duration::from_millis(100));
        drop(server);
        reader.join().unwrap();
        let kind = handed.unwrap_err().kind();
        assert!(
            matches!(kind, io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock),
            "{kind}"
        );
    }
}
