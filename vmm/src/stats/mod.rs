// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A running VMM's counters, for `vcpufreq stats` and `vcpufreq top`.
//!
//! ```text
//! device, paths ─▶ Stats ─▶ JSON on a unix socket beside the VMM's record ─▶ checks ─▶ stats, top
//! ```
//! Each connection gets one [`Stats`] and is closed.

mod answer;
mod client;
mod http;
mod openmetrics;
mod residency;
mod server;
mod snapshot;
mod text;
mod top;

pub use answer::{BadAnswer, read_answer};
pub use client::{VmmSocket, ask, ask_all, choose, running};
pub use http::answer;
pub use openmetrics::openmetrics;
pub use residency::TimeInState;
pub use server::start_answering;
pub use snapshot::{DeciderStats, OppTime, PolicyTimes, Stats, Times, TuningStats, VcpuStats};
pub use text::table;
pub use top::{screen, top};

#[cfg(test)]
mod tests {
    //! Promises: the client reads what the server sends. A missing VMM, or one that hangs up, is an
    //! error of one line; so is one that answers without an end, or slowly, or takes no connections,
    //! and it costs its own answer alone. Another user gets nothing. A slow reader gets what fits the
    //! deadline, and nothing waits for it. The table has a line for each vCPU.

    use std::{
        fs,
        io::{Read, Write},
        os::unix::{
            fs::PermissionsExt,
            net::{UnixListener, UnixStream},
        },
        path::PathBuf,
        sync::{Arc, Mutex},
        time::Duration,
    };

    use vcpufreq_device::{CounterSnapshot, Histogram};

    use super::{client::ask_while, *};
    use crate::{as_other::as_user, patience::patience, socket_thread::SocketThread};

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
            pcpu_khz: Some(2_400_000),
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
            ..Stats::default()
        }
    }

    /// Asks for process 42 at `path`.
    fn ask_at(path: &std::path::Path) -> anyhow::Result<Stats> {
        ask(&VmmSocket::at(path.to_owned(), 42))
    }

    /// A server, and its socket.
    fn served(counted: Arc<Mutex<Stats>>) -> (tempfile::TempDir, PathBuf, SocketThread) {
        served_within(patience(1), counted)
    }

    /// The same; a client may take so long to read an answer.
    fn served_within(
        patience: Duration,
        counted: Arc<Mutex<Stats>>,
    ) -> (tempfile::TempDir, PathBuf, SocketThread) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("42.sock");
        let stats = move || counted.lock().unwrap().clone();
        let server = server::start_answering_within(patience, &path, None, stats).unwrap();
        (dir, path, server)
    }

    #[test]
    fn sent_is_read() {
        let (_dir, path, server) = served(fixed(sample()));
        for _ in 0..3 {
            assert_eq!(ask_at(&path).unwrap(), sample());
        }
        server.stop();
        let error = ask_at(&path).unwrap_err();
        assert!(format!("{error:#}").contains("42.sock"), "{error:#}");
    }

    #[test]
    fn a_silent_client_holds_no_other_up() {
        let (_dir, path, server) = served(fixed(sample()));
        let idle = std::os::unix::net::UnixStream::connect(&path).unwrap();
        assert_eq!(ask_at(&path).unwrap().pid, 42);
        drop(idle);
        server.stop();
    }

    /// What stands for a VMM that a guest has taken over: it sends as `send` does.
    fn taken_over(send: impl FnOnce(UnixStream) + Send + 'static) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("13.sock");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || send(listener.accept().unwrap().0));
        (dir, path)
    }

    /// The answers, with so many waits, of a VMM at `path` and of one that is as it should be.
    fn beside_a_good_one(path: PathBuf, waits: u32) -> Vec<anyhow::Result<Stats>> {
        let (_dir, good, server) = served(fixed(sample()));
        let mut waits = (0..waits).map(|_| patience(1)).chain([Duration::ZERO]);
        let sockets = [VmmSocket::at(path, 13), VmmSocket::at(good, 42)];
        let answers = ask_while(&sockets, || waits.next().unwrap_or_default());
        server.stop();
        answers
    }

    #[test]
    fn an_answer_without_end_is_given_up() {
        let (_dir, path) =
            taken_over(|mut stream| while stream.write_all(&[b' '; 4096]).is_ok() {});
        let answers = beside_a_good_one(path, u32::MAX);
        let line = format!("{:#}", answers[0].as_ref().unwrap_err());
        assert!(
            line.starts_with("process 13: no VMM answers so: it has more"),
            "{line}"
        );
        assert_eq!(answers[1].as_ref().unwrap(), &sample());
    }

    #[test]
    fn vmms_that_answer_too_much_together_cost_their_own_metrics() {
        let largest = answer::tests::largest();
        let answer = serde_json::to_vec(&largest).unwrap();
        let many = |_| {
            let answer = answer.clone();
            // One that is given up doesn't read.
            taken_over(move |mut stream| drop(stream.write_all(&answer)))
        };
        let many: Vec<_> = (0..6).map(many).collect();
        let (_dir, good, server) = served(fixed(sample()));
        let sockets = many.iter().map(|(_, path)| VmmSocket::at(path.clone(), 13));
        let sockets = sockets.chain([VmmSocket::at(good, 42)]);
        let answers = ask_while(&sockets.collect::<Vec<_>>(), || patience(1));
        server.stop();
        let fit = answer::MOST_OF_ALL / answer::size_of(&largest);
        let (taken, left_out): (Vec<_>, Vec<_>) = answers.into_iter().partition(Result::is_ok);
        assert_eq!((taken.len(), left_out.len()), (fit + 1, 6 - fit));
        for error in left_out {
            let line = format!("{:#}", error.unwrap_err());
            assert!(line.starts_with("process 13: all VMMs' answers"), "{line}");
        }
        let taken: Vec<_> = taken.into_iter().map(Result::unwrap).collect();
        assert_eq!(taken.last(), Some(&sample()));
        assert!(openmetrics(&taken).len() <= answer::MOST_OF_ALL);
    }

    #[test]
    fn a_byte_now_and_then_is_given_up() {
        let (_dir, path) = taken_over(|mut stream| {
            while stream.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        // However long each takes: more than a VMM that answers has.
        let answers = beside_a_good_one(path, 1000);
        let line = format!("{:#}", answers[0].as_ref().unwrap_err());
        assert!(line.contains("doesn't answer in time"), "{line}");
        assert_eq!(answers[1].as_ref().unwrap(), &sample());
    }

    #[test]
    fn one_that_takes_no_connections_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("13.sock");
        let listener = UnixListener::bind(&path).unwrap();
        nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(0).unwrap()).unwrap();
        let _waits = UnixStream::connect(&path).unwrap();
        let answers = beside_a_good_one(path, u32::MAX);
        let line = format!("{:#}", answers[0].as_ref().unwrap_err());
        assert!(line.contains("takes no connections"), "{line}");
        assert!(answers[1].is_ok());
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
        if let Ok(refused) = as_user(NOBODY, || ask_at(&path)) {
            let line = format!("{:#}", refused.unwrap_err());
            assert!(line.contains("its own user alone"), "{line}");
        }
        assert_eq!(ask_at(&path).unwrap(), sample());
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
        let (_dir, path, server) = served_within(Duration::from_secs(1), counted.clone());
        let mut slow = UnixStream::connect(&path).unwrap();
        let mut piece = [0; 32 << 10];
        // Nothing, if it is the server that was slow.
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
        let start = ["0", "exit", "2@2400.0", "1800.0", "2800.0"];
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
    fn a_line_for_each_tuning_names_whose_it_is() {
        let tuned = TuningStats {
            handle: 7,
            vcpu: 1,
            floor_khz: Some(1_800_000),
            left_ms: 150,
            user: 1000,
            client: 99,
            ..TuningStats::default()
        };
        let stats = Stats {
            tunings: vec![tuned],
            decided_by: None,
            ..sample()
        };
        let line = "tuned: vCPU 1 from 1800.0 MHz; handle 7, user 1000, process 99, 150 ms left";
        assert!(
            table(&stats).lines().any(|is| is == line),
            "{}",
            table(&stats)
        );
        let shown = screen(&stats, &stats);
        assert!(shown.iter().any(|is| is == line), "{shown:?}");
    }
}
