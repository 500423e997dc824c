// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a program answers that is asked for its vCPUs as QEMU: in one part or in two, it is learnt
//! the same, and each vCPU has one thread of the VMM's process, or none.

use std::io::Write as _;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Instant;

use vcpufreq::serve::Qmp;
use vcpufreq_device::MAX_VCPUS;
use vcpufreq_host::{Tid, fakes::FakeHost};

const PID: u32 = 7;
/// Threads of that process.
const THREADS: [i32; 3] = [7, 8, 9];

struct QmpScene {
    /// Of two threads that connect at once, each would accept the other's.
    turn: Mutex<()>,
    host: FakeHost,
    path: PathBuf,
    listener: UnixListener,
}

static SCENE: LazyLock<QmpScene> = LazyLock::new(|| {
    let host = FakeHost::empty();
    for tid in THREADS {
        host.write(&format!("proc/{PID}/task/{tid}/comm"), "qemu\n");
    }
    // One for each process that fuzzes.
    let path = host.root().path("qmp");
    let listener = UnixListener::bind(&path).expect("a socket");
    QmpScene {
        turn: Mutex::default(),
        host,
        path,
        listener,
    }
});

/// How many vCPUs, where the answer is cut, and the answer.
pub fn qmp(data: &[u8]) {
    let &[vcpus, cut, ref answer @ ..] = data else {
        return;
    };
    let (vcpus, cut) = (usize::from(vcpus % 4), usize::from(cut));
    let answer = &answer[..answer.len().min(1 << 14)];
    let whole = learnt(vcpus, &[answer]);
    let cut = cut.min(answer.len());
    let parts = learnt(vcpus, &[&answer[..cut], &answer[cut..]]);
    assert_eq!(whole, parts, "in two parts");
    if let Ok(Some(threads)) = whole {
        assert!((vcpus..=MAX_VCPUS).contains(&threads.len()), "{threads:?}");
        assert!(
            threads.iter().flatten().all(|tid| THREADS.contains(tid)),
            "{threads:?}"
        );
    }
}

/// What is learnt after these parts, in any turn.
fn learnt(vcpus: usize, parts: &[&[u8]]) -> Result<Option<Vec<Option<i32>>>, String> {
    let scene = &*SCENE;
    let _alone = scene.turn.lock().unwrap_or_else(PoisonError::into_inner);
    let mut qmp = Qmp::ask(&scene.path).expect("a listener");
    let (mut qemu, _) = scene.listener.accept().expect("a connection");
    let mut learnt = None;
    for part in parts {
        qemu.write_all(part).expect("room");
        learnt = qmp
            .vcpu_threads(&scene.host.root(), (PID, vcpus), Instant::now())
            .map_err(|error| format!("{error:#}"))?;
        if learnt.is_some() {
            break;
        }
    }
    let number = |tid: Option<Tid>| tid.map(Tid::get);
    Ok(learnt.map(|threads| threads.into_iter().map(number).collect()))
}
