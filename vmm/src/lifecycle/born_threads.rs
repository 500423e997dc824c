// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Threads that a VMM has started while it was served. They are in no record, and were born with the
//! pCPUs of a thread that was kept off those of real-time vCPUs.

use std::fs;

use vcpufreq_host::undo::JournalEntry;
use vcpufreq_host::{CpuList, HostRoot, HostThread, SavedThread, Tid, affinity_of, pin};

use super::record::VmmRecord;

/// Gives such threads the pCPUs that the recorded one had, the main thread's first. One that its manager
/// has pinned elsewhere stays.
pub fn put_back_born(host: &HostRoot, record: &VmmRecord) {
    let real_time: CpuList = record.real_time.iter().copied().collect();
    let threads = record.entries.iter().filter_map(|entry| match entry {
        JournalEntry::Thread(thread) => Some(thread),
        _ => None,
    });
    let threads: Vec<_> = threads.collect();
    let narrowed = threads.iter().filter_map(|thread| {
        let before = thread.pcpus.as_ref()?;
        let now = before.without(&real_time);
        (thread.policy.is_none() && now != *before).then_some((*thread, before, now))
    });
    let mut narrowed: Vec<_> = narrowed.collect();
    narrowed.sort_by_key(|(thread, _, _)| u32::try_from(thread.tid) != Ok(thread.pid));
    let Some(pid) = narrowed.first().map(|(thread, _, _)| thread.pid) else {
        return;
    };
    let is_recorded = |tid: &Tid| {
        let is = |thread: &&&SavedThread| thread.tid == tid.get() && thread.lives(host);
        threads.iter().any(|thread| is(&thread))
    };
    for tid in tids(host, pid).filter(|tid| !is_recorded(tid)) {
        let born = |now: &CpuList| narrowed.iter().find(|(_, _, narrow)| narrow == now);
        // One that has ended needs nothing.
        let put = || -> std::io::Result<()> {
            let thread = HostThread::of_process(host, pid, tid)?;
            match born(&affinity_of(thread.tid()?)?) {
                Some((_, before, _)) => pin(thread.tid()?, before.as_slice()),
                None => Ok(()),
            }
        };
        let _ = put();
    }
}

fn tids(host: &HostRoot, pid: u32) -> impl Iterator<Item = Tid> {
    let tasks = fs::read_dir(host.path(format!("proc/{pid}/task")));
    let names = tasks.into_iter().flatten().flatten();
    names.filter_map(|task| task.file_name().to_str()?.parse().ok().and_then(Tid::new))
}

#[cfg(test)]
mod tests {
    //! Promise: after the end no thread of a VMM is kept off the real-time CPUs.
    use std::{sync::mpsc, thread};

    use super::*;
    use crate::lifecycle::{
        cleanup::{Cleaned, Cleaner},
        record::owner_of,
        state::StateDir,
    };

    // It kept the narrowed mask.
    #[test]
    fn a_thread_that_was_born_meanwhile_has_its_cpus() {
        let (host, pid) = (HostRoot::default(), std::process::id());
        let before = affinity_of(Tid::current()).unwrap();
        let [real_time, ref rest @ ..] = *before.as_slice() else {
            return;
        };
        if rest.is_empty() {
            println!("SKIP: this process may run on one CPU only");
            return;
        }
        let on = |cpus: &[u32]| {
            let (cpus, (told, tid)) = (cpus.to_vec(), mpsc::channel());
            let (stop, stopped) = mpsc::channel::<()>();
            thread::spawn(move || {
                pin(Tid::current(), &cpus).unwrap();
                told.send(Tid::current()).unwrap();
                // Until the end of the test.
                let _ = stopped.recv();
            });
            (tid.recv().unwrap(), stop)
        };
        let (recorded, _first) = on(before.as_slice());
        let saved = SavedThread::look(&host, pid, recorded, true).unwrap();
        pin(recorded, rest).unwrap();
        let ((born, _second), (placed, _third)) = (on(rest), on(&[real_time]));
        let record = VmmRecord {
            real_time: vec![real_time],
            entries: vec![JournalEntry::Thread(saved)],
            ..VmmRecord::new(owner_of(&host, pid).unwrap())
        };
        let dir = tempfile::tempdir().unwrap();
        let dir = StateDir::at(dir.path().join("run"));
        dir.write(&record).unwrap();
        let left = Cleaner::new(&host).end(&dir, &record, &mut Cleaned::default());
        assert_eq!(left, Vec::<String>::new());
        for (tid, cpus) in [
            (recorded, before.clone()),
            (born, before.clone()),
            (placed, [real_time].into_iter().collect()),
        ] {
            assert_eq!(affinity_of(tid).unwrap(), cpus);
        }
    }
}
