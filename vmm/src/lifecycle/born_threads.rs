// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Threads that a VMM has started while it was served. They are in no record, and were born with the
//! pCPUs of a thread that was kept off those of real-time vCPUs.

use std::fs;

use vcpufreq_host::undo::JournalEntry;
use vcpufreq_host::{CpuList, HostRoot, HostThread, SavedThread, Tid, affinity_of, pin};

use super::record::VmmRecord;

/// Gives such threads the pCPUs that the main thread had. One that its manager has pinned elsewhere
/// stays.
pub fn put_back_born(host: &HostRoot, record: &VmmRecord) {
    let is_main = |thread: &SavedThread| u32::try_from(thread.tid) == Ok(thread.pid);
    put_back_born_beside(host, record, is_main);
}

fn put_back_born_beside(
    host: &HostRoot,
    record: &VmmRecord,
    is_main: impl Fn(&SavedThread) -> bool,
) {
    let real_time: CpuList = record.real_time.iter().copied().collect();
    let threads = record.entries.iter().filter_map(|entry| match entry {
        JournalEntry::Thread(thread) => Some(thread),
        _ => None,
    });
    let threads: Vec<_> = threads.collect();
    // Where the main thread was not narrowed, what is born has its manager's pCPUs. A process that has
    // ended may have left its number to another one.
    let mut main = threads
        .iter()
        .filter(|thread| is_main(thread) && thread.lives(host));
    let Some((main, before)) = main.find_map(|main| Some((main, main.pcpus.as_ref()?))) else {
        return;
    };
    let narrow = before.without(&real_time);
    if main.policy.is_some() || narrow == *before {
        return;
    }
    let is_recorded = |tid: &Tid| {
        let mut threads = threads.iter();
        threads.any(|thread| thread.tid == tid.get() && thread.lives(host))
    };
    for tid in tids(host, main.pid).filter(|tid| !is_recorded(tid)) {
        // One that has ended needs nothing.
        let put = || -> std::io::Result<()> {
            let thread = HostThread::of_process(host, main.pid, tid)?;
            match affinity_of(thread.tid()?)? == narrow {
                true => pin(thread.tid()?, before.as_slice()),
                false => Ok(()),
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
    use crate::lifecycle::record::owner_of;

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
        let put_back =
            |main: Tid| put_back_born_beside(&host, &record, |one| one.tid == main.get());
        // Of another main thread, that is not in the record.
        put_back(placed);
        assert_eq!(affinity_of(born).unwrap().as_slice(), rest);
        put_back(recorded);
        for (tid, cpus) in [
            (born, before.clone()),
            (placed, [real_time].into_iter().collect()),
        ] {
            assert_eq!(affinity_of(tid).unwrap(), cpus);
        }
    }
}
