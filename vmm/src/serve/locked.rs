// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether the memory of a real-time guest's VMM is locked: a page that isn't there costs its vCPU
//! more than any other latency. The VMM alone can lock it.

use std::time::{Duration, Instant};

use anyhow::bail;
use vcpufreq_host::{HostRoot, proc_field};

use super::ServedVmm;
use crate::patience::patiently;

/// How long a VMM may do nothing before it has locked its memory. QEMU has its vCPUs' threads earlier.
const IDLE: Duration = Duration::from_secs(3);
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
        Ok((last.1.elapsed() > IDLE).then_some(false))
    });
    if locked? != Some(true) {
        bail!(
            "its memory is not locked, which a real-time guest's has to be; give QEMU -overcommit \
             mem-lock=on, or its domain <memoryBacking><locked/></memoryBacking>"
        );
    }
    Ok(())
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
    //! Memory is locked only if all of it is. A signal ends the wait for that.
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
