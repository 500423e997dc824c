// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! fio, which measures storage: requests of one thread, one after the other, past the page cache. On a
//! host they go to its device, in a guest to the disk whose file that is.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use serde_json::Value;

use crate::device::{IO_DEVICE, in_guest, other_null_blk};
use crate::load_log::LoadLog;
use crate::signals::run_in;
use crate::work::now_ns;

/// The disk of a guest.
const DISK: &str = "/dev/vda";
/// As many requests before those that count: fio's start, with the libraries of each kind of storage,
/// is work, and an emulated CPU owes time for it.
const BEFORE: &str = "before";

/// A kind of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FioJob {
    name: &'static str,
    /// fio's `--rw`, and its place in the report.
    rw: &'static str,
    direction: &'static str,
    block: &'static str,
}

const JOBS: [FioJob; 4] = [
    job("seq_read", "read", "read", "128k"),
    job("seq_write", "write", "write", "128k"),
    job("rand_read", "randread", "read", "4k"),
    job("rand_write", "randwrite", "write", "4k"),
];

const fn job(
    name: &'static str,
    rw: &'static str,
    direction: &'static str,
    block: &'static str,
) -> FioJob {
    FioJob {
        name,
        rw,
        direction,
        block,
    }
}

impl FioJob {
    /// The one of this name.
    ///
    /// # Errors
    /// Names those that there are.
    pub fn named(name: &str) -> Result<Self> {
        let found = JOBS.into_iter().find(|one| one.name == name);
        found.with_context(|| {
            let names = JOBS.map(|one| one.name).join(", ");
            format!("no job '{name}' of fio; there are: {names}")
        })
    }

    /// Does so many requests; marks their `start` and `end`, as fio tells them.
    pub fn carry_out(&self, log: &mut LoadLog, count: u64) -> Result<()> {
        let dir = std::env::temp_dir().join(format!("vcpufreq-load-{}", std::process::id()));
        let device = device(Path::new("/"), in_guest())?;
        if in_guest() {
            take_interrupts().context("the interrupts of the guest's disk")?;
        }
        let mut fio = Command::new("fio");
        fio.args(self.options(device, count)).current_dir("/");
        let read = |output: &Output| {
            let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
            ensure!(
                output.status.success(),
                "fio ended with {}: {}",
                output.status,
                said(&output.stderr)
            );
            Ok(said(&output.stdout))
        };
        let report = run_in(&dir, &mut fio, || Ok(()), read)??;
        // CLOCK_REALTIME, which fio's report has, in that of the marks.
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let now_ms = u64::try_from(since_epoch.as_millis())?;
        let ago = |ms: u64| now_ns().saturating_sub(now_ms.saturating_sub(ms) * 1_000_000);
        let (start_ms, took_ms, done) = self.read(&report)?;
        ensure!(done == count, "fio did {done} of {count} requests");
        log.mark_told("start", ago(start_ms));
        log.mark_told("end", ago(start_ms + took_ms));
        log.figure("done", done);
        Ok(())
    }

    fn options(&self, device: &str, count: u64) -> Vec<String> {
        let Self {
            name, rw, block, ..
        } = self;
        let own = [
            format!("--filename={device}"),
            format!("--rw={rw}"),
            format!("--bs={block}"),
            format!("--number_ios={count}"),
        ];
        let jobs = [
            format!("--name={BEFORE}"),
            format!("--name={name}"),
            "--stonewall".to_owned(),
        ];
        let all = [
            "--size=1G",
            "--direct=1",
            "--ioengine=psync",
            "--thread",
            "--randrepeat=1",
            "--clocksource=clock_gettime",
            "--disk_util=0",
            "--eta=never",
            "--output-format=json",
        ];
        let all = all.map(str::to_owned);
        own.into_iter().chain(all).chain(jobs).collect()
    }

    /// When the first request began, how long all took, and how many there were.
    fn read(&self, report: &str) -> Result<(u64, u64, u64)> {
        // Notes may come before it.
        let json = report.find('{').and_then(|start| report.get(start..));
        let report: Value = serde_json::from_str(json.unwrap_or_default())
            .with_context(|| format!("fio's report: {report}"))?;
        let jobs = report["jobs"].as_array().into_iter().flatten();
        let mut jobs = jobs.filter(|job| job["jobname"] == self.name);
        let job = jobs.next().context("fio's report lacks the job")?;
        let number = |value: &Value, what| value.as_u64().context(what);
        let side = &job[self.direction];
        Ok((
            number(&job["job_start"], "job_start")?,
            number(&side["runtime"], "runtime")?,
            number(&side["total_ios"], "total_ios")?,
        ))
    }
}

/// What requests go to. A host may have a disk of its own by the name that a guest's has: it is not
/// touched.
fn device(root: &Path, in_guest: bool) -> Result<&'static str> {
    if in_guest {
        ensure!(
            root.join(DISK.trim_start_matches('/')).exists(),
            "the guest has no {DISK}: its kernel needs virtio_blk, built in or by --guest-module"
        );
        return Ok(DISK);
    }
    let other = other_null_blk(root);
    ensure!(other.is_none(), "{}", other.unwrap_or_default());
    Ok(IO_DEVICE)
}

/// Has the interrupts of the guest's disk come to the CPUs of this thread, as those of the host's device
/// come to the CPU that asked. The kernel spreads those of a disk with a queue for each CPU itself, and
/// refuses.
fn take_interrupts() -> Result<()> {
    let device = fs::read_link("/sys/block/vda/device")?;
    let device = device.file_name().context("no device")?.to_string_lossy();
    let status = fs::read_to_string("/proc/thread-self/status")?;
    let cpus = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let cpus = cpus.context("no list of CPUs")?.trim();
    let interrupts = fs::read_to_string("/proc/interrupts")?;
    for number in numbers(&interrupts, &device) {
        let file = format!("/proc/irq/{number}/smp_affinity_list");
        match fs::write(&file, cpus) {
            Err(error) if error.raw_os_error() != Some(Errno::EIO as i32) => {
                return Err(error).context(file);
            }
            _ => (),
        }
    }
    Ok(())
}

/// The numbers of a device's lines in /proc/interrupts.
fn numbers<'a>(interrupts: &'a str, device: &str) -> impl Iterator<Item = &'a str> {
    interrupts.lines().filter_map(move |line| {
        let (number, rest) = line.split_once(':')?;
        let name = rest.split_whitespace().last()?.strip_prefix(device)?;
        (name.is_empty() || name.starts_with('-')).then_some(number.trim())
    })
}

#[cfg(test)]
mod tests {
    //! Promises: a job is one that fio knows, and its report is read; a mark is where fio began; no
    //! request goes to a disk of the host's, nor in a guest to anything but its disk.
    use super::*;
    use crate::device::NULL_BLK;

    const REPORT: &str = r#"fio: a note
        { "fio version": "fio-3.39", "jobs": [ { "jobname": "before" },
          { "jobname": "rand_read", "job_start": 1700000000123,
          "read": { "runtime": 1500, "total_ios": 600, "iops": 400.0 },
          "write": { "runtime": 0, "total_ios": 0 } } ] }"#;

    #[test]
    fn a_report_is_read() {
        let of = |name| FioJob::named(name).unwrap().read(REPORT).unwrap();
        assert_eq!(of("rand_read"), (1_700_000_000_123, 1500, 600));
        let job = FioJob::named("seq_read").unwrap();
        assert!(job.read(REPORT).is_err());
        assert!(job.read("fio: no device").is_err());
        let error = FioJob::named("read").unwrap_err().to_string();
        assert!(
            error.contains("seq_read, seq_write, rand_read, rand_write"),
            "{error}"
        );
    }

    #[test]
    fn a_hosts_own_disk_gets_no_request() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let file = root.path().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        for option in NULL_BLK.split_whitespace() {
            let (name, value) = option.split_once('=').unwrap();
            write(&format!("sys/module/null_blk/parameters/{name}"), value);
        }
        assert!(device(root.path(), true).is_err());
        write("dev/vda", "");
        assert_eq!(device(root.path(), false).unwrap(), IO_DEVICE);
        assert_eq!(device(root.path(), true).unwrap(), DISK);
    }

    #[test]
    fn interrupts_are_those_of_the_device() {
        let interrupts = "           CPU0       CPU1\n 14:   7  0   GICv3  48 Edge      virtio1\n \
                          15:   9  0   GICv3  49 Edge      virtio10\n  \
                          31:   0  3   ITS-MSI   2 Edge      virtio1-req.0\nIPI0:  5  5   Rescheduling interrupts\n";
        let found: Vec<_> = numbers(interrupts, "virtio1").collect();
        assert_eq!(found, ["14", "31"]);
    }

    #[test]
    fn requests_go_past_the_page_cache() {
        let options = FioJob::named("rand_write").unwrap().options("/dev/x", 7);
        for option in [
            "--rw=randwrite",
            "--bs=4k",
            "--direct=1",
            "--number_ios=7",
            "--filename=/dev/x",
        ] {
            assert!(options.iter().any(|one| one == option), "{options:?}");
        }
    }
}
