// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What runs on some CPUs, to say what keeps their frequency up.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

/// While it looks.
const SPAN: Duration = Duration::from_millis(400);

/// The thread that runs longest on some CPUs, but this process' own:
/// `NAME runs 3100 us of 400 ms`.
pub fn on(cpus: &[u32]) -> String {
    let before = threads();
    sleep(SPAN);
    let mut most: Option<(u64, String)> = None;
    for (tid, now) in threads() {
        let ran = now.ran_ns - before.get(&tid).map_or(0, |one| one.ran_ns.min(now.ran_ns));
        let more = most.as_ref().is_none_or(|(longest, _)| ran > *longest);
        if cpus.contains(&now.cpu) && ran > 0 && more {
            most = Some((ran, now.name));
        }
    }
    let of = SPAN.as_millis();
    match most {
        Some((ns, name)) => format!("{name} runs {} us of {of} ms", ns / 1000),
        None => format!("nothing runs there in {of} ms"),
    }
}

struct Thread {
    name: String,
    cpu: u32,
    ran_ns: u64,
}

/// All threads, the kernel's too, by their number.
fn threads() -> BTreeMap<u32, Thread> {
    let mut found = BTreeMap::new();
    let numbered = |dir: &Path| -> Vec<(u32, std::path::PathBuf)> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let number = |entry: fs::DirEntry| {
            let name = entry.file_name().to_string_lossy().parse().ok()?;
            Some((name, entry.path()))
        };
        entries.filter_map(number).collect()
    };
    let own = std::process::id();
    for (_, dir) in numbered(Path::new("/proc"))
        .into_iter()
        .filter(|(pid, _)| *pid != own)
    {
        for (tid, dir) in numbered(&dir.join("task")) {
            // One that has ended meanwhile has no files any more.
            found.extend(thread(&dir).map(|thread| (tid, thread)));
        }
    }
    found
}

fn thread(dir: &Path) -> Option<Thread> {
    let stat = fs::read_to_string(dir.join("stat")).ok()?;
    // A name can hold anything, also a parenthesis; what is behind it can't.
    let (head, tail) = stat.rsplit_once(')')?;
    let schedstat = fs::read_to_string(dir.join("schedstat")).ok()?;
    Some(Thread {
        name: head.split_once('(')?.1.to_owned(),
        // The 39th field, `processor`; the third is the first behind the name.
        cpu: tail.split_whitespace().nth(36)?.parse().ok()?,
        ran_ns: schedstat.split_whitespace().next()?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    //! What runs is found, with its CPU and its time.

    use vcpufreq_device::host::CpuList;

    use super::*;

    fn online() -> CpuList {
        let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
        online.parse().unwrap()
    }

    #[test]
    fn this_thread_is_found_in_proc() {
        crate::work::spin(1_000_000);
        let own = thread(Path::new("/proc/thread-self")).unwrap();
        assert!(own.ran_ns > 0);
        assert!(own.name.starts_with("busiest::tests:"), "{}", own.name);
        assert!(online().contains(own.cpu));
    }

    #[test]
    fn what_is_busy_is_named() {
        let mut child = std::process::Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let named = on(online().as_slice());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(
            named.contains(" runs ") && named.ends_with(" of 400 ms"),
            "{named}"
        );
        assert_eq!(on(&[]), "nothing runs there in 400 ms");
    }
}
