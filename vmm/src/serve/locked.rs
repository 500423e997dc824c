// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether the memory of a real-time guest's VMM is locked: a page that isn't there costs its vCPU
//! more than any other latency. The VMM alone can lock it.

use std::time::{Duration, Instant};

use anyhow::bail;
use vcpufreq_host::{HostRoot, proc_field};

use super::ServedVmm;
use crate::patience::{patience, patiently};

/// How long a VMM may do nothing before it has locked its memory. QEMU has its vCPUs' threads earlier.
const IDLE: Duration = patience(3);
/// How long one that works may take: the server serves nothing else meanwhile. A guest of so much memory
/// that this takes longer is refused; 768 MiB were the largest that was tried.
const AT_MOST: Duration = Duration::from_secs(60);
/// How often to look.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Waits until the memory of `vmm` is locked, as long as it works and for [`AT_MOST`].
///
/// # Errors
/// When it isn't, and what to do; or `vmm` has ended, or a signal asks this program to.
pub fn wait_for_lock(host: &HostRoot, vmm: &ServedVmm) -> anyhow::Result<()> {
    wait_while_busy(host, vmm, IDLE)
}

/// The same of one that does nothing for so long.
fn wait_while_busy(host: &HostRoot, vmm: &ServedVmm, idle: Duration) -> anyhow::Result<()> {
    let mut last = (vmm.worked(host), Instant::now());
    let what = format!("for process {} to lock its memory", vmm.pid());
    let locked = patiently(AT_MOST, &what, |part| {
        let status = host.text(format!("proc/{}/status", vmm.pid()));
        if is_locked(&status.unwrap_or_default()) {
            return Ok(Some(true));
        }
        let worked = vmm.worked(host);
        if worked != last.0 {
            last = (worked, Instant::now());
        }
        let ends: Vec<_> = vmm.ends().collect();
        if part.is_ready(&ends, LOOK_EVERY)? {
            bail!("it has ended");
        }
        Ok((last.1.elapsed() > idle).then_some(false))
    });
    if locked? != Some(true) {
        bail!(
            "its memory is not locked, which a real-time guest's has to be; give QEMU -overcommit \
             mem-lock=on, or its domain <memoryBacking><locked/></memoryBacking>"
        );
    }
    // Where smaps can't be read, VmLck has to do.
    let smaps = host.text(format!("proc/{}/smaps", vmm.pid()));
    if is_on_fault(&smaps.unwrap_or_default()) {
        bail!(
            "its memory is locked on fault, and the first access to a page that isn't there is late; \
             give QEMU -overcommit mem-lock=on instead of mem-lock=on-fault"
        );
    }
    Ok(())
}

/// Whether pages are locked only once they are there (`MCL_ONFAULT`), by `VmFlags` of the largest
/// locked mapping in proc_pid_smaps(5): the guest's RAM, unless that is of huge pages, which no lock
/// holds.
fn is_on_fault(smaps: &str) -> bool {
    let (mut size, mut largest) = (0, (0, false));
    for line in smaps.lines() {
        if let Some(kib) = line.strip_prefix("Size:") {
            let kib = kib.trim_end_matches("kB").trim();
            size = kib.parse::<u64>().unwrap_or(0);
        }
        let flags = line.strip_prefix("VmFlags:").unwrap_or_default();
        let has = |flag| flags.split_whitespace().any(|one| one == flag);
        if has("lo") && size > largest.0 {
            largest = (size, has("lf"));
        }
    }
    largest.1
}

/// Whether all is locked that is there, by proc_pid_status(5): mlockall counts whole mappings. A device
/// that is passed through locks the guest's pages alone.
fn is_locked(status: &str) -> bool {
    let kib = |name| {
        let value = proc_field(status, name)?.strip_suffix("kB")?;
        value.trim().parse::<u64>().ok()
    };
    let (locked, there) = (kib("VmLck").unwrap_or(0), kib("VmRSS").unwrap_or(u64::MAX));
    locked > 0 && locked >= there
}

#[cfg(test)]
mod tests {
    //! Memory is locked only if all of it is, before it is touched. A signal ends the wait for that.
    use std::os::unix::net::UnixStream;

    use nix::sys::signal::{Signal, raise};
    use vcpufreq_host::fakes::FakeHost;

    use super::*;
    use crate::{serve::Connection, signals::EndSignals};

    #[test]
    fn a_signal_ends_the_wait() {
        let told = std::thread::spawn(|| {
            let _signals = EndSignals::take().unwrap();
            raise(Signal::SIGTERM).unwrap();
            let (own, _other) = UnixStream::pair().unwrap();
            let vmm = ServedVmm::child(Connection::resumed(own), std::process::id());
            wait_for_lock(&FakeHost::empty().root(), &vmm.unwrap())
        });
        let line = told.join().unwrap().unwrap_err().to_string();
        assert_eq!(line, "this program is told to end");
    }

    /// Sizes in KiB and `VmFlags` of a VMM's mappings, as far as they matter, and whether it is
    /// refused: a hole; the guest's RAM, which can be of huge pages; a library's buffer.
    const MAPPINGS: [(&[(u32, &str)], bool); 6] = [
        (&[(65536, "mr mw me nr"), (4096, "rd wr mr lo ac")], false),
        (
            &[(65536, "mr mw"), (4096, "rd wr lo lf"), (8, "rd lo")],
            true,
        ),
        (&[(4096, "rd wr mr mw lo sd"), (64, "rd wr lo lf")], false),
        (&[(4096, "rd wr sh de ht"), (64, "rd wr lo lf")], true),
        (&[(4096, "rd wr sh de ht"), (64, "rd wr lo")], false),
        (&[], false),
    ];

    #[test]
    fn memory_that_is_locked_on_fault_is_refused() {
        let pid = std::process::id();
        for (mappings, refused) in MAPPINGS {
            let host = FakeHost::empty();
            let of = |(kib, flags): &(u32, &str)| {
                format!(
                    "7f00-7f10 rw-p 00000000 00:00 0\nSize:  {kib:>8} kB\nLocked:  {kib} kB\n\
                     VmFlags: {flags} \n"
                )
            };
            let smaps: String = mappings.iter().map(of).collect();
            host.write(&format!("proc/{pid}/smaps"), smaps);
            let status = "VmLck:\t 900 kB\nVmRSS:\t 700 kB\n";
            host.write(&format!("proc/{pid}/status"), status);
            let (own, _other) = UnixStream::pair().unwrap();
            let vmm = ServedVmm::child(Connection::resumed(own), pid).unwrap();
            let line = wait_for_lock(&host.root(), &vmm).map_err(|why| why.to_string());
            assert_eq!(line.is_err(), refused, "{mappings:?}: {line:?}");
            let cure = "give QEMU -overcommit mem-lock=on instead";
            assert!(line.err().is_none_or(|line| line.contains(cure)));
        }
    }

    #[test]
    fn memory_that_stays_unlocked_is_refused() {
        let (host, pid) = (FakeHost::empty(), std::process::id());
        let (own, _other) = UnixStream::pair().unwrap();
        let vmm = ServedVmm::child(Connection::resumed(own), pid).unwrap();
        for (locked, refused) in [(0, true), (512, true), (900, false)] {
            let status = format!("VmLck:\t {locked} kB\nVmRSS:\t 700 kB\n");
            host.write(&format!("proc/{pid}/status"), status);
            let waited = wait_while_busy(&host.root(), &vmm, Duration::ZERO);
            let line = waited.map_err(|why| why.to_string()).err();
            assert_eq!(line.is_some(), refused, "{locked}: {line:?}");
            let line = line.unwrap_or_default();
            for cure in ["QEMU -overcommit mem-lock=on", "<locked/>"] {
                assert_eq!(line.contains(cure), refused, "{line}");
            }
            assert!(line.lines().count() <= 1);
        }
    }

    #[test]
    fn pages_of_the_guest_alone_are_not_enough() {
        let status = |locked, there| {
            format!(
                "Name:\tqemu\nVmLck:\t{locked:>8} kB\nVmHWM:\t     900 kB\nVmRSS:\t{there:>8} kB\n"
            )
        };
        for (locked, there, is) in [
            (0, 700, false),
            (512, 700, false),
            (900, 700, true),
            (0, 0, false),
        ] {
            assert_eq!(is_locked(&status(locked, there)), is, "{locked} {there}");
        }
        assert!(!is_locked("Name:\tkthreadd\n"));
    }
}
