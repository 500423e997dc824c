// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The events file: one JSON object a line, for each request, actuation and
//! refusal, in the order in which they happened on each vCPU thread.
//!
//! A vCPU thread stamps an event and puts it into a bounded queue; it neither
//! formats, nor writes, nor wakes a thread. A writer thread looks at the queue every
//! 20 ms and writes what it finds. When a guest makes events faster
//! than that, those that find the queue full are dropped and counted.

mod line;

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, SyncSender, TryRecvError, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::Context;
use vcpufreq_bridge::{EventSink, HostEvent};
use vcpufreq_device::{Event, Events};
use vcpufreq_host::{Tid, monotonic_ns};

use self::line::{EventLine, Stamped, What};
use crate::sandbox::{Sandbox, ThreadClass};

/// Events that the queue holds: at 64 to 100 bytes, 4 to 7 MB, taken at the
/// start and never more.
const QUEUE_LEN: usize = 1 << 16;

/// How often the writer looks. The queue lasts for 3 million events a second.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The vCPU threads' end of the queue.
#[derive(Debug)]
pub struct EventQueue {
    queue: SyncSender<Stamped>,
    dropped: Arc<AtomicU64>,
}

impl Events for EventQueue {
    fn record(&self, event: &Event) {
        self.record_at(event, monotonic_ns(), Tid::current().get());
    }
}

impl EventSink for EventQueue {
    fn record_at(&self, event: &Event, t_ns: u64, tid: i32) {
        self.put(What::Event(*event), t_ns, tid);
    }

    fn record_change(&self, change: HostEvent) {
        let tid = Tid::current().get();
        self.put(What::Host(change), monotonic_ns(), tid);
    }
}

impl EventQueue {
    fn put(&self, what: What, t_ns: u64, tid: i32) {
        let stamped = Stamped { t_ns, tid, what };
        if self.queue.try_send(stamped).is_err() {
            self.dropped.fetch_add(1, Relaxed);
        }
    }
}

/// The events file's writer; writes what is left when it is finished.
#[derive(Debug)]
pub struct EventWriter {
    thread: JoinHandle<io::Result<u64>>,
    stop: Arc<AtomicBool>,
    dropped: Arc<AtomicU64>,
}

/// What became of the events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventReport {
    /// Events in the file.
    pub written: u64,
    /// Events that found the queue full.
    pub dropped: u64,
}

/// Creates `path`, anew. Each writer of it appends.
///
/// # Errors
/// As open(2), in one line.
pub fn create(path: &Path) -> anyhow::Result<File> {
    let mut options = File::options();
    let options = options.write(true).create(true).truncate(true);
    let file = options.custom_flags(libc::O_APPEND).open(path);
    file.with_context(|| {
        let path = path.display();
        format!("can't write events to {path}; give another --events")
    })
}

/// Starts a writer of `file`.
///
/// # Errors
/// When its thread can't be started.
pub fn write_to(
    file: File,
    sandbox: Option<Arc<Sandbox>>,
) -> io::Result<(EventQueue, EventWriter)> {
    start(file, QUEUE_LEN, sandbox)
}

fn start(
    output: impl Write + Send + 'static,
    queue_len: usize,
    sandbox: Option<Arc<Sandbox>>,
) -> io::Result<(EventQueue, EventWriter)> {
    let (queue, events) = sync_channel(queue_len);
    let dropped = Arc::new(AtomicU64::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let thread = std::thread::Builder::new()
        .name("events".to_owned())
        .spawn(move || {
            if let Some(sandbox) = sandbox {
                sandbox.enter_or_end(ThreadClass::Events);
            }
            write_until(&stopped, &events, BufWriter::new(output))
        })?;
    let writer = EventWriter {
        thread,
        stop,
        dropped: dropped.clone(),
    };
    Ok((EventQueue { queue, dropped }, writer))
}

impl EventWriter {
    /// Writes what was recorded so far and closes the file.
    ///
    /// # Errors
    /// The first write that failed; nothing was written after it.
    pub fn finish(self) -> io::Result<EventReport> {
        self.stop.store(true, Relaxed);
        self.thread.thread().unpark();
        let ended = self.thread.join();
        let written = ended.unwrap_or_else(|_| Err(io::Error::other("the writer panicked")))?;
        Ok(EventReport {
            written,
            dropped: self.dropped.load(Relaxed),
        })
    }
}

/// The writer thread. After a failed write it ends, and with it the queue:
/// later events count as dropped.
fn write_until(
    stop: &AtomicBool,
    events: &Receiver<Stamped>,
    mut output: impl Write,
) -> io::Result<u64> {
    let mut written = 0;
    let mut line = Vec::new();
    loop {
        // Read before the queue: what was recorded before the stop is found.
        let last = stop.load(Relaxed);
        loop {
            match events.try_recv() {
                Ok(stamped) => {
                    line.clear();
                    serde_json::to_writer(&mut line, &EventLine::from(&stamped))?;
                    line.push(b'\n');
                    // As a whole: the buffer is written out before a line that doesn't fit.
                    output.write_all(&line)?;
                    written += 1;
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return output.flush().map(|()| written),
            }
        }
        output.flush()?;
        if last {
            return Ok(written);
        }
        std::thread::park_timeout(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    //! Each event is a line with its values; a full queue drops and counts; an
    //! output that fails ends in an error, and no vCPU thread notices.

    use std::sync::{Mutex, mpsc};

    use serde_json::{Value, json};
    use vcpufreq_bridge::{PcpuLoad, PcpuTarget, TuneClient, TuneEnd, TuneRequest, Tuning};
    use vcpufreq_device::{ActuateError, Clamp, DomainId, Khz, Util, VcpuId};

    use super::*;

    const VCPU: VcpuId = VcpuId(1);
    const DOMAIN: DomainId = DomainId(7);
    const REQUEST: Event = Event::Request {
        vcpu: VCPU,
        domain: DOMAIN,
        khz: Khz(600_000),
    };

    fn clamp() -> Clamp {
        Clamp {
            min: Util::new(329).unwrap(),
            max: Util::MAX,
        }
    }

    /// Bytes that the test keeps.
    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What is written of so many events that `record` puts into the queue.
    fn recorded(count: usize, record: impl Fn(&EventQueue)) -> Vec<serde_json::Value> {
        let output = Shared::default();
        let (queue, writer) = start(output.clone(), 16, None).unwrap();
        record(&queue);
        let report = writer.finish().unwrap();
        assert_eq!(usize::try_from(report.written), Ok(count));
        let text = String::from_utf8(output.0.lock().unwrap().clone()).unwrap();
        let lines = text.lines().map(serde_json::from_str);
        lines.collect::<Result<_, _>>().unwrap()
    }

    fn lines(events: &[Event]) -> Vec<serde_json::Value> {
        recorded(events.len(), |queue| {
            events.iter().for_each(|event| queue.record(event));
        })
    }

    #[test]
    fn a_line_has_time_vcpu_thread_value_and_result() {
        let before = monotonic_ns();
        let error = ActuateError::Refused {
            domain: DOMAIN,
            call: "write",
            errno: 16,
        };
        let lines = lines(&[
            REQUEST,
            Event::Applied {
                vcpu: VCPU,
                domain: DOMAIN,
                clamp: clamp(),
            },
            Event::Refused {
                vcpu: VCPU,
                domain: DOMAIN,
                clamp: clamp(),
                error,
            },
        ]);
        for (line, kind) in lines.iter().zip(["request", "applied", "refused"]) {
            assert_eq!(line["event"], kind);
            assert_eq!((&line["vcpu"], &line["domain"]), (&1.into(), &7.into()));
            assert_eq!(line["tid"], Tid::current().get());
            let t_ns = line["t_ns"].as_u64().unwrap();
            assert!((before..=monotonic_ns()).contains(&t_ns));
        }
        assert_eq!(lines[0]["khz"], 600_000);
        assert_eq!(lines[1]["uclamp_min"], 329);
        assert_eq!(lines[1]["uclamp_max"], 1024);
        assert_eq!(lines[1]["result"], "ok");
        assert_eq!(lines[2]["result"], error.to_string());
    }

    #[test]
    fn an_illegal_access_says_where() {
        let access = Event::IllegalAccess {
            vcpu: None,
            offset: 0x3002,
            len: 2,
            write: true,
        };
        let line = &lines(&[access])[0];
        assert_eq!(line["event"], "illegal_access");
        assert_eq!((&line["offset"], &line["len"]), (&0x3002.into(), &2.into()));
        assert!(line.get("vcpu").is_none() && line["write"] == true);
    }

    #[test]
    fn a_change_of_the_host_says_what_and_whether_it_is_lost() {
        let governor = HostEvent::Governor {
            policy: 2,
            schedutil: false,
        };
        let pin = HostEvent::Pin {
            vcpu: VCPU,
            pinned: true,
        };
        let lines = recorded(2, |queue| {
            queue.record_change(governor);
            queue.record_change(pin);
        });
        assert_eq!(lines[0]["event"], "governor");
        assert_eq!(lines[0]["policy"], 2);
        assert_eq!(lines[0]["result"], "lost");
        assert_eq!(lines[1]["event"], "pin");
        assert_eq!(lines[1]["vcpu"], 1);
        assert_eq!(lines[1]["result"], "ok");
    }

    #[test]
    fn a_tuning_says_what_is_in_force_whose_it_is_and_what_ended_it() {
        let tuning = |handle, floor, ceiling| Tuning {
            handle,
            request: TuneRequest {
                vcpu: VCPU,
                floor,
                ceiling,
                lasts: Duration::from_millis(200),
            },
            domain: DOMAIN,
            until_ns: 9_000,
            client: TuneClient {
                user: 1000,
                pid: 42,
                connection: 3,
            },
        };
        let floor = tuning(7, Some(Khz(600_000)), None);
        let ceiling = tuning(8, None, Some(Khz(1_800_000)));
        let ended = [
            (TuneEnd::Time, "time"),
            (TuneEnd::Untuned, "untune"),
            (TuneEnd::Client, "client"),
        ];
        let lines = recorded(5, |queue| {
            queue.record_change(HostEvent::Tuned(floor));
            queue.record_change(HostEvent::Tuned(ceiling));
            for (end, _) in ended {
                queue.record_change(HostEvent::Untuned(floor, end));
            }
        });
        for line in &lines {
            let of = ["vcpu", "user", "client", "until_ns"].map(|name| line[name].as_u64());
            assert_eq!(of, [Some(1), Some(1000), Some(42), Some(9_000)], "{line}");
        }
        let bounds = ["event", "handle", "floor_khz", "ceiling_khz", "result"];
        let of = |line: &Value| bounds.map(|name| line.get(name).cloned().unwrap_or_default());
        let tuned = [
            json!("tuned"),
            json!(7),
            json!(600_000),
            json!(null),
            json!(null),
        ];
        assert_eq!(of(&lines[0]), tuned);
        let tuned = [
            json!("tuned"),
            json!(8),
            json!(null),
            json!(1_800_000),
            json!(null),
        ];
        assert_eq!(of(&lines[1]), tuned);
        for (line, (_, by)) in lines[2..].iter().zip(ended) {
            let untuned = [
                json!("untuned"),
                json!(7),
                json!(600_000),
                json!(null),
                json!(by),
            ];
            assert_eq!(of(line), untuned);
        }
    }

    #[test]
    fn a_load_has_what_is_known_of_the_pcpu() {
        let load = |load, target| HostEvent::Load {
            vcpu: VCPU,
            pcpu: Some((3, Khz(1_400_000))),
            clamp: clamp(),
            load,
            target,
        };
        let own = Util::new(312).unwrap();
        let others = Util::new(480).unwrap();
        let target = PcpuTarget {
            sum: 1_300,
            target: Util::MAX,
        };
        let lines = recorded(2, |queue| {
            queue.record_change(load(Some(PcpuLoad { own, others }), None));
            queue.record_change(load(None, Some(target)));
        });
        for line in &lines {
            assert_eq!(line["event"], "load");
            assert_eq!((&line["vcpu"], &line["pcpu"]), (&1.into(), &3.into()));
            assert_eq!(line["pcpu_khz"], 1_400_000);
            assert_eq!(line["uclamp_min"], 329);
        }
        let [summed, by_scx] = &lines[..] else {
            panic!("{lines:?}")
        };
        let known = (&summed["own_util"], &summed["others_util"]);
        assert_eq!(known, (&312.into(), &480.into()));
        assert!(summed.get("target").is_none());
        let known = (&by_scx["target_sum"], &by_scx["target"]);
        assert_eq!(known, (&1_300.into(), &1_024.into()));
        assert!(by_scx.get("own_util").is_none());
    }

    /// What each write(2) would be.
    #[derive(Clone, Default)]
    struct Writes(Arc<Mutex<Vec<Vec<u8>>>>);

    impl Write for Writes {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().push(bytes.to_vec());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn each_write_is_of_whole_lines() {
        let output = Writes::default();
        let (queue, writer) = start(output.clone(), 1_000, None).unwrap();
        for _ in 0..1_000 {
            queue.record(&REQUEST);
        }
        assert_eq!(writer.finish().unwrap().written, 1_000);
        for write in output.0.lock().unwrap().iter() {
            assert_eq!(write.last(), Some(&b'\n'), "a killed process leaves half");
        }
    }

    /// An output that blocks until it is released.
    struct Gate(mpsc::Receiver<()>);

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.0.recv();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_full_queue_drops_counts_and_never_blocks() {
        let (open, gate) = mpsc::channel();
        let (queue, writer) = start(Gate(gate), 4, None).unwrap();
        for _ in 0..10_000 {
            queue.record(&REQUEST);
        }
        drop(open);
        let report = writer.finish().unwrap();
        assert!(report.dropped > 0, "{report:?}");
        assert_eq!(report.written + report.dropped, 10_000);
    }

    struct Full;

    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_full_disk_is_an_error_at_the_end() {
        let (queue, writer) = start(Full, 4, None).unwrap();
        queue.record(&REQUEST);
        let error = writer.finish().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        queue.record(&REQUEST);
    }
}
