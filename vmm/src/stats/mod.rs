// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A running VMM's counters, for `vcpufreq stats` and `vcpufreq top`.
//!
//! ```text
//! device, paths ─▶ Stats ─▶ JSON on a unix socket beside the VMM's record ─▶ stats, top
//! ```
//! Each connection gets one [`Stats`] and is closed.

mod client;
mod http;
mod openmetrics;
mod residency;
mod server;
mod text;
mod top;

use serde::{Deserialize, Serialize};
use vcpufreq_device::{Accesses, CounterSnapshot, HISTOGRAM_BUCKETS, HistogramSnapshot};

use crate::path::Path;

pub use client::{ask, choose, running};
pub use http::answer;
pub use openmetrics::openmetrics;
pub use residency::{OppTime, PolicyTimes, TimeInState};
pub use server::StatsServer;
pub use text::table;
pub use top::top;

/// A virtual machine at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Process of the VMM.
    pub pid: u32,
    /// CLOCK_MONOTONIC when it was taken, ns.
    pub at_ns: u64,
    /// Its vCPUs, by number.
    pub vcpus: Vec<VcpuStats>,
    /// Accesses behind the last vCPU's page.
    pub accesses_outside: u64,
    /// How often a policy that the vCPUs may be on was found under another
    /// governor than schedutil, after schedutil.
    pub governors_lost: u64,
    /// How often a vCPU's thread was found to run elsewhere than on the pCPUs
    /// that it is pinned to.
    pub pins_lost: u64,
    /// The cpufreq policies that vCPUs may be on; empty where the kernel doesn't count.
    #[serde(default)]
    pub policies: Vec<PolicyTimes>,
}

/// A vCPU at one moment, and what was counted of it since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuStats {
    /// Its number.
    pub vcpu: u16,
    /// Its performance domain.
    pub domain: u32,
    /// How its registers are reached now: `ioeventfd` while KVM answers reads or requests of table
    /// entries. `accesses` counts those that exit.
    pub path: Path,
    /// The pCPU that its thread is on, if that is known.
    pub pcpu: Option<u32>,
    /// That pCPU's frequency, kHz.
    pub pcpu_khz: Option<u32>,
    /// Its domain's request, kHz.
    pub asks_khz: Option<u32>,
    /// The last cur_perf that it read, kHz.
    pub gets_khz: u32,
    /// The clamp of its domain's request, including additions, 0 to 1024.
    pub uclamp: (u16, u16),
    /// Utilization of its thread when it was last looked at, 0 to 1024; null
    /// without `--sum`.
    #[serde(default)]
    pub own_util: Option<u16>,
    /// Of what else ran on its pCPU, as added to its request.
    #[serde(default)]
    pub others_util: Option<u16>,
    /// The scx target of its pCPU: the sum over all runnable vCPUs there, and the part that the
    /// kernel was given; null with another actuator.
    #[serde(default)]
    pub target_sum: Option<u32>,
    /// See `target_sum`, 0 to 1024.
    #[serde(default)]
    pub target: Option<u16>,
    /// How the guest reached its registers.
    pub accesses: Accesses,
    /// What became of its requests.
    pub counts: CounterSnapshot,
    /// How long requests that changed the clamp took until it was in force. By `bpf`, from the
    /// guest's write on; by `exit`, from the arrival in the VMM. By `ioeventfd`, from the guest's
    /// write if writes are recorded, else from when the worker takes up the request. Time that the
    /// limit makes a request wait is in it. A request that is settled at the moment in which the
    /// next one arrives may have no time, so that `n` can be below `applied`.
    pub clamp_after: Times,
    /// From where `clamp_after` begins until the vCPU's frequency was another
    /// one. By `exit` and `ioeventfd` seen at the next read of cur_perf or look.
    pub freq_after: Times,
    /// How long a request of its domain for each entry of its table was in force, first for 0 kHz
    /// how long none was. By `bpf` as the worker sees it: requests that the module or the scheduler
    /// puts into force are seen every 100 ms.
    #[serde(default)]
    pub requested: Vec<OppTime>,
}

/// A histogram of times.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times {
    /// Times counted.
    pub n: u64,
    /// Half of them are below this, ns; a power of two.
    pub p50_below_ns: Option<u64>,
    /// 99 of 100 are below this, ns; a power of two.
    pub p99_below_ns: Option<u64>,
    /// Times from 0 ns, 1 ns, 2 ns, 4 ns and so on to the next bucket's, up to
    /// the last bucket that has any.
    pub buckets: Vec<u64>,
}

impl From<HistogramSnapshot> for Times {
    fn from(histogram: HistogramSnapshot) -> Self {
        let last = histogram.counts.iter().rposition(|&count| count > 0);
        let used = last.map_or(0, |last| (last + 1).min(HISTOGRAM_BUCKETS));
        Self {
            n: histogram.n(),
            p50_below_ns: histogram.below_ns(50),
            p99_below_ns: histogram.below_ns(99),
            buckets: histogram.counts[..used].to_vec(),
        }
    }
}

impl VcpuStats {
    /// Accesses that exited to the VMM.
    #[must_use]
    pub fn exits(&self) -> u64 {
        self.accesses.reads_exited + self.accesses.writes_exited
    }
}

#[cfg(test)]
mod tests {
    //! Promises: the client reads what the server sends. A missing VMM, or one that hangs up, is an
    //! error of one line. Another user gets nothing. A slow reader gets what fits the deadline, and
    //! nothing waits for it. The table has a line for each vCPU.

    use std::{
        fs,
        io::Read,
        os::unix::{fs::PermissionsExt, net::UnixStream},
        path::PathBuf,
        sync::{Arc, Mutex},
        time::Duration,
    };

    use vcpufreq_device::Histogram;

    use super::*;

    /// Counts under a lock, as the bridge does.
    fn fixed(stats: Stats) -> Arc<Mutex<Stats>> {
        Arc::new(Mutex::new(stats))
    }

    fn sample() -> Stats {
        let times = Histogram::default();
        times.record(3_000);
        let counts = CounterSnapshot {
            requests: 7,
            superseded: 2,
            coalesced: 3,
            limited: 1,
            ..CounterSnapshot::default()
        };
        let vcpu = |vcpu| VcpuStats {
            vcpu,
            pcpu: Some(2),
            asks_khz: Some(1_800_000),
            gets_khz: 2_800_000,
            own_util: Some(312),
            others_util: Some(480),
            target_sum: Some(1300),
            target: Some(1024),
            counts,
            clamp_after: times.snapshot().into(),
            requested: vec![OppTime { khz: 0, us: 7 }],
            ..VcpuStats::default()
        };
        Stats {
            pid: 42,
            at_ns: 1,
            vcpus: vec![vcpu(0), vcpu(1)],
            accesses_outside: 0,
            governors_lost: 0,
            pins_lost: 0,
            policies: Vec::new(),
        }
    }

    /// A server, and its socket.
    fn served(counted: Arc<Mutex<Stats>>) -> (tempfile::TempDir, PathBuf, StatsServer) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("42.sock");
        let server =
            StatsServer::start(&path, None, move || counted.lock().unwrap().clone()).unwrap();
        (dir, path, server)
    }

    #[test]
    fn sent_is_read() {
        let (_dir, path, server) = served(fixed(sample()));
        for _ in 0..3 {
            assert_eq!(ask(&path).unwrap(), sample());
        }
        server.stop();
        let error = ask(&path).unwrap_err();
        assert!(format!("{error:#}").contains("42.sock"), "{error:#}");
    }

    #[test]
    fn a_silent_client_holds_no_other_up() {
        let (_dir, path, server) = served(fixed(sample()));
        let idle = std::os::unix::net::UnixStream::connect(&path).unwrap();
        assert_eq!(ask(&path).unwrap().pid, 42);
        drop(idle);
        server.stop();
    }

    /// Runs `act` on a thread of its own that is user `uid`, as the other threads aren't; needs root.
    #[expect(unsafe_code, reason = "one thread's user is a system call")]
    fn as_user<T: Send>(uid: u32, act: impl FnOnce() -> T + Send) -> std::io::Result<T> {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let uid = libc::c_long::from(uid);
                // SAFETY: the call has no memory arguments. Unlike the C library's function it is of
                // the calling thread alone.
                match unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) } {
                    0 => Ok(act()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            });
            thread.join().expect("the thread doesn't panic")
        })
    }

    /// What `user` gets.
    fn read_as(user: u32, path: &std::path::Path) -> std::io::Result<Vec<u8>> {
        as_user(user, || {
            let mut answer = Vec::new();
            let mut socket = UnixStream::connect(path).unwrap();
            socket.read_to_end(&mut answer).unwrap();
            answer
        })
    }

    #[test]
    fn another_user_gets_nothing() {
        const NOBODY: u32 = 65534;
        let (dir, path, server) = served(fixed(sample()));
        // What keeps others off is neither directory nor socket.
        fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).unwrap();
        match read_as(NOBODY, &path) {
            Ok(answer) => assert!(answer.is_empty(), "{} bytes", answer.len()),
            Err(error) => println!("SKIP: only root can be another user: {error}"),
        }
        if let Ok(refused) = as_user(NOBODY, || ask(&path)) {
            let line = format!("{:#}", refused.unwrap_err());
            assert!(line.contains("its own user alone"), "{line}");
        }
        assert_eq!(ask(&path).unwrap(), sample());
        server.stop();
    }

    // One deadline for all writes: a client that reads a little now and then would otherwise hold
    // the thread, and the end of the VMM, for as long as it likes.
    #[test]
    fn a_slow_reader_gets_what_fits_the_deadline_and_holds_no_lock() {
        let many = Stats {
            vcpus: vec![sample().vcpus[0].clone(); 5_000],
            ..sample()
        };
        let whole = serde_json::to_string(&many).unwrap().len();
        let counted = fixed(many);
        let (_dir, path, server) = served(counted.clone());
        let mut slow = UnixStream::connect(&path).unwrap();
        let mut piece = [0; 32 << 10];
        let mut got = slow.read(&mut piece).unwrap();
        assert!(counted.try_lock().is_ok(), "held while it is sent");
        loop {
            std::thread::sleep(Duration::from_millis(100));
            match slow.read(&mut piece).unwrap() {
                0 => break,
                more => got += more,
            }
        }
        assert!(got < whole, "all of {whole} bytes");
        server.stop();
    }

    #[test]
    fn a_line_for_each_vcpu_and_one_for_what_is_lost() {
        let text = table(&sample());
        let lines: Vec<_> = text.lines().collect();
        // And a line of requests, and one of what the kernel doesn't count.
        assert_eq!(lines.len(), 5);
        assert_eq!(lines[3], "requests of vCPU 0,1: none 100.0 %");
        assert!(lines[0].contains("ASKS"), "{text}");
        let cells: Vec<_> = lines[1].split_whitespace().collect();
        let start = ["0", "exit", "2", "1800.0", "2800.0"];
        assert_eq!(cells[..5], start, "{text}");
        // Own and others' utilization, sum and target, requests, applied, coalesced, limited.
        let loads = ["312+480", "1300>1024", "7", "0", "3", "1"];
        assert_eq!(cells[6..12], loads, "{text}");
        let lost = Stats {
            governors_lost: 2,
            ..sample()
        };
        let lost = table(&lost);
        let line = "governors lost 2, pinnings lost 0\n";
        assert_eq!(lost, text + line, "a line for what is lost on the host");
    }

    #[test]
    fn times_end_with_the_last_bucket() {
        let times = Times::from(HistogramSnapshot::default());
        assert_eq!(times, Times::default());
        let histogram = Histogram::default();
        histogram.record(2);
        assert_eq!(Times::from(histogram.snapshot()).buckets, [0, 0, 1]);
    }
}
