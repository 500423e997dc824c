// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is promised when a VMM is killed, checked with the real guardian and
//! real cgroups; a sleeping process stands for the VMM.
//!
//! - Whenever the VMM is killed, its cgroups, its record and its guardian go
//!   too. (Within a second, as the lab's `kill` shows in virtual time.)
//! - A VMM that was taken over gets nothing from its guardian for what is no request.
//! - Signals that end groups of processes don't end the guardian.
//! - A terminal that a killed VMM left in raw mode is put back.
//! - A guardian is not dismissed while its VMM's record is there. It takes no path, and removes
//!   nothing that is no record.
//! - `vcpufreq cleanup` removes what dead VMMs left, and nothing else. A VMM whose main thread has ended
//!   lives as long as its other threads.
//!
//! The program's /run is a temporary directory, in a mount namespace.
//! Without cgroup v2 or the right to make groups each test prints that it is
//! skipped.
#![expect(unsafe_code, reason = "a pseudo-terminal has no safe wrapper")]

mod scene;

use std::{
    ffi::CStr,
    fs::{self, File},
    os::fd::AsRawFd,
    os::unix::ffi::OsStrExt,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    os::unix::net::UnixDatagram,
    path::Path,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::unistd::Pid;
use tempfile::TempDir;
use vcpufreq::lifecycle::record::{Owner, VmmRecord, owner_of};
use vcpufreq::lifecycle::state::{ROOT_DIR, StateDir};
use vcpufreq_host::{HostRoot, stat_field};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use scene::{
    PATIENCE, PROGRAM, Vmm, cgroups_or_skip, guarded, guarded_at, guardian, is_gone_within,
    is_root, program, scene_or_skip,
};

const KILLS: u64 = 50;
/// A request to the guardian that it refuses.
const NO_PCPU: [u8; 5] = [b'f', 0xff, 0xff, 0xff, 0xff];

#[test]
fn whenever_a_vmm_is_killed_nothing_is_left() {
    let Some((cgroups, runtime, dir)) = scene_or_skip() else {
        return;
    };
    let mut slowest = Duration::ZERO;
    for round in 0..KILLS {
        let (mut vmm, mut guardian) = guarded(&cgroups, &dir);
        vmm.make(&dir, round % 6);
        // 0 to 14 ms in an order that isn't theirs.
        sleep(Duration::from_millis(round * 7 % 15));
        let killed = Instant::now();
        vmm.kill();
        // It stays a zombie until the end of the round: it isn't waited for.
        let record = dir.record_path(vmm.child.id());
        let gone = is_gone_within(PATIENCE, || {
            let ended = guardian.try_wait().unwrap().is_some();
            ended && !vmm.group.exists() && !record.exists()
        });
        assert!(
            gone,
            "round {round}: {} or {}",
            vmm.group.display(),
            record.display()
        );
        slowest = slowest.max(killed.elapsed());
        assert!(guardian.wait().unwrap().success());
        vmm.child.wait().unwrap();
    }
    assert!(!runtime.path().join("vcpufreq").exists());
    println!("slowest of {KILLS}: {slowest:?}");
}

#[test]
fn the_guardian_outlives_signals_to_the_group() {
    let Some((cgroups, _runtime, dir)) = scene_or_skip() else {
        return;
    };
    let (mut vmm, mut guardian) = guarded(&cgroups, &dir);
    vmm.make(&dir, 5);
    use Signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};
    let pid = Pid::from_raw(i32::try_from(guardian.id()).unwrap());
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP] {
        kill(pid, signal).unwrap();
    }
    let session = |pid: u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat_field(&stat, 6).unwrap().to_owned()
    };
    assert_eq!(
        session(guardian.id()),
        guardian.id().to_string(),
        "a session of its own"
    );
    vmm.kill();
    assert!(is_gone_within(PATIENCE, || !vmm.group.exists()));
    assert!(guardian.wait().unwrap().success());
    vmm.child.wait().unwrap();
}

/// A VMM, its guardian, and its end of the sockets, which is another's now, too.
fn taken_over(cgroups: &Path, dir: &StateDir) -> (Vmm, Child, UnixDatagram) {
    let (domain, kind) = (AddressFamily::Unix, SockType::SeqPacket);
    let pair = socketpair(domain, kind, None, SockFlag::SOCK_CLOEXEC);
    let (own, other) = pair.expect("a pair of sockets");
    let shared = own.try_clone().expect("one more descriptor");
    let vmm = Vmm::start(cgroups, shared.into());
    let guardian = guardian(dir, &vmm, other.into(), Stdio::null());
    vmm.make(dir, 5);
    (vmm, guardian, own.into())
}

/// What is no request, and may name what isn't the VMM's. Few enough for their answers to have room.
fn no_requests(paths: &[&Path]) -> Vec<Vec<u8>> {
    let mut all = [b"\0", b"\n", b"/", b"F", b"U", b"f", b"\xff"]
        .map(Vec::from)
        .to_vec();
    // A request behind 8 bytes, which is what the guardian reads.
    all.extend([
        [&[0; 8], &b"u"[..]].concat(),
        [&[0; 8], &NO_PCPU[..]].concat(),
    ]);
    for first in [b'u', b'f', b'/'] {
        let lengths = [2, 3, 4, 6, 7, 8, 9, 4096, 64 << 10];
        all.extend(lengths.map(|bytes| [vec![first], vec![0; bytes - 1]].concat()));
        for path in paths.iter().map(|path| path.as_os_str().as_bytes()) {
            all.push(path.to_vec());
            all.push([&[first], path].concat());
            all.push([&[first], path, &[0]].concat());
        }
    }
    all
}

/// What of a VMM is there: the group of a domain, its own, its record.
fn is_there(dir: &StateDir, vmm: &Vmm) -> [bool; 3] {
    let domain = vmm.group.join("domain0");
    let record = dir.record_path(vmm.child.id());
    [domain.exists(), vmm.group.exists(), record.exists()]
}

#[test]
fn a_vmm_that_was_taken_over_gets_nothing_for_what_is_no_request() {
    let Some((cgroups, runtime, dir)) = scene_or_skip() else {
        return;
    };
    let (mut vmm, mut own_guardian, own) = taken_over(&cgroups, &dir);
    let (mut neighbour, mut guardian) = guarded(&cgroups, &dir);
    neighbour.make(&dir, 5);
    let file = runtime.path().join("file");
    fs::write(&file, "kept").unwrap();

    let record = dir.record_path(neighbour.child.id());
    for message in no_requests(&[&file, &record, &neighbour.group]) {
        own.send(&message).expect("it is heard");
    }
    let passed = File::options().write(true).open(&file).unwrap();
    own.send_with_fd(&b"x"[..], passed.as_raw_fd()).unwrap();
    // This one is a request, for a pCPU that can't be: its answer is the only one.
    own.send(&NO_PCPU).unwrap();
    let mut answer = [0; 64];
    let (bytes, event) = own.recv_with_fd(&mut answer).unwrap();
    assert_eq!(answer[..bytes], libc::EIO.to_le_bytes());
    assert!(event.is_none());
    assert_eq!(fs::read_to_string(&file).unwrap(), "kept");
    for there in [&vmm, &neighbour].map(|of| is_there(&dir, of)) {
        assert_eq!(there, [true; 3]);
    }

    // It reads as the end of the file.
    own.send(&[]).unwrap();
    vmm.kill();
    assert!(own_guardian.wait().unwrap().success());
    assert_eq!(own.recv(&mut answer).unwrap(), 0, "one more answer");
    assert_eq!(is_there(&dir, &vmm), [false; 3]);
    assert_eq!(is_there(&dir, &neighbour), [true; 3]);
    neighbour.kill();
    assert!(guardian.wait().unwrap().success());
    for mut vmm in [vmm, neighbour] {
        vmm.child.wait().unwrap();
    }
}

#[test]
fn a_guardian_whose_answers_nobody_takes_cleans_up() {
    let Some((cgroups, _runtime, dir)) = scene_or_skip() else {
        return;
    };
    let (mut vmm, mut guardian, own) = taken_over(&cgroups, &dir);
    own.set_nonblocking(true).unwrap();
    let sleeps = || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", guardian.id())).unwrap();
        stat_field(&stat, 3) == Some("S")
    };
    // With requests to read it sleeps when its answers have no room.
    while own.send(&NO_PCPU).is_ok() || !sleeps() {}
    drop(own);
    vmm.kill();
    assert!(guardian.wait().unwrap().success());
    assert_eq!(is_there(&dir, &vmm), [false; 3]);
    vmm.child.wait().unwrap();
}

#[test]
fn a_guardian_is_not_dismissed_while_the_record_is_there() {
    let Some((cgroups, _runtime, dir)) = scene_or_skip() else {
        return;
    };
    let (mut vmm, mut guardian, own) = taken_over(&cgroups, &dir);
    let ask = || {
        own.send(b"d").unwrap();
        let mut answer = [0; 8];
        let bytes = own.recv(&mut answer).unwrap();
        answer[..bytes].to_vec()
    };
    assert_eq!(ask(), b"d");
    // It goes on to answer.
    own.send(&NO_PCPU).unwrap();
    assert_eq!(own.recv(&mut [0; 8]).unwrap(), 4);
    fs::rename(dir.record_path(vmm.child.id()), dir.record_path(0)).unwrap();
    assert_eq!(ask(), b"ends");
    assert!(guardian.wait().unwrap().success());
    vmm.kill();
    vmm.child.wait().unwrap();
    fs::remove_dir(vmm.group.join("rest")).unwrap();
    fs::remove_dir(vmm.group.join("domain0")).unwrap();
    fs::remove_dir(&vmm.group).unwrap();
}

#[test]
fn a_guardian_removes_nothing_that_is_no_record() {
    let runtime = TempDir::new().unwrap();
    let dir = StateDir::at(runtime.path().join("vcpufreq"));
    let owner = owner_of(&HostRoot::default(), std::process::id()).unwrap();
    let own = VmmRecord::new(owner);
    dir.write(&own).unwrap();
    let file = runtime.path().join("file");
    let [foreign, other_version] = [7, 8].map(|pid| dir.record_path(pid));
    let more = serde_json::to_string(&own)
        .unwrap()
        .replacen('{', "{\"more\":1,", 1);
    let more = more.replace(&format!("\"pid\":{}", own.owner.pid), "\"pid\":8");
    for (path, text) in [(&file, "kept"), (&foreign, "kept"), (&other_version, &more)] {
        fs::write(path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    }
    let guard = |what: &str| {
        let guardian = program(&dir).args(["guardian", what]).output().unwrap();
        let said = String::from_utf8(guardian.stderr).unwrap();
        (guardian.status.code(), said.lines().count(), said)
    };
    let [by_path, by_name] = [file.to_str().unwrap(), "7.json"].map(guard);
    assert_eq!((by_path.0, by_name.0), (Some(2), Some(2)));
    for (number, line) in [("7", "7.json: "), ("8", "8.json: it is another version's")] {
        let (code, lines, said) = guard(number);
        assert_eq!((code, lines), (Some(2), 1), "{said}");
        assert!(said.contains(line), "{said}");
    }
    for (path, text) in [(&file, "kept"), (&foreign, "kept"), (&other_version, &more)] {
        assert_eq!(fs::read_to_string(path).unwrap(), text);
    }
}

/// A process whose main thread has ended and whose other thread runs.
fn without_main_thread() -> Option<Child> {
    let script = format!(
        "import ctypes, threading, time\n\
         threading.Thread(target=time.sleep, args=(3600,)).start()\n\
         ctypes.CDLL(None).syscall({}, 0)",
        libc::SYS_exit
    );
    let child = Command::new("python3").args(["-c", &script]).spawn().ok()?;
    let stat = format!("/proc/{}/stat", child.id());
    let is_zombie = || {
        let stat = fs::read_to_string(&stat);
        stat.is_ok_and(|stat| stat_field(&stat, 3) == Some("Z"))
    };
    assert!(is_gone_within(PATIENCE, is_zombie));
    Some(child)
}

#[test]
fn a_vmm_without_its_main_thread_keeps_what_it_has() {
    let runtime = TempDir::new().unwrap();
    let dir = StateDir::at(runtime.path().join("vcpufreq"));
    let Some(mut vmm) = without_main_thread() else {
        println!("SKIP: a VMM without its main thread: no python3");
        return;
    };
    let stat = fs::read_to_string(format!("/proc/{}/stat", vmm.id())).unwrap();
    let own = owner_of(&HostRoot::default(), std::process::id()).unwrap();
    let record = VmmRecord {
        real_time: vec![1],
        ..VmmRecord::new(Owner {
            pid: vmm.id(),
            start_ticks: stat_field(&stat, 22).unwrap().parse().unwrap(),
            ..own
        })
    };
    dir.write(&record).unwrap();
    let path = dir.record_path(vmm.id());
    let clean = || {
        let cleaned = program(&dir).arg("cleanup").output().unwrap();
        String::from_utf8(cleaned.stdout).unwrap()
    };
    let said = clean();
    assert!(path.exists(), "{said}");
    vmm.kill().unwrap();
    vmm.wait().unwrap();
    let said = clean();
    assert!(!path.exists() && said.contains("json"), "{said}");
}

/// A terminal: the end that a program would use, and the name of it.
fn terminal() -> (File, File, String) {
    let open = |path: &str| {
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_NOCTTY);
        options.open(path).expect("a pseudo-terminal")
    };
    let master = open("/dev/ptmx");
    // SAFETY: the call has no memory arguments.
    assert_eq!(unsafe { libc::unlockpt(master.as_raw_fd()) }, 0);
    let mut name = [0_u8; 64];
    let (start, len) = (name.as_mut_ptr().cast(), name.len());
    // SAFETY: at most `len` bytes are written to `name`.
    let named = unsafe { libc::ptsname_r(master.as_raw_fd(), start, len) };
    assert_eq!(named, 0);
    let name = CStr::from_bytes_until_nul(&name).expect("a terminated name");
    let name = name.to_str().expect("a UTF-8 name").to_owned();
    (master, open(&name), name)
}

#[test]
fn a_terminal_in_raw_mode_is_put_back() {
    let Some((cgroups, _runtime, dir)) = scene_or_skip() else {
        return;
    };
    let (_master, slave, name) = terminal();
    let stty = |arguments: &[&str]| {
        let output = Command::new("stty")
            .args(["-F", &name])
            .args(arguments)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let before = stty(&["-g"]);
    let (mut vmm, mut guardian) = guarded_at(&cgroups, &dir, slave.into());
    vmm.make(&dir, 1);
    stty(&["raw", "-echo"]);
    assert_ne!(stty(&["-g"]), before);
    vmm.kill();
    assert!(is_gone_within(PATIENCE, || stty(&["-g"]) == before));
    assert!(guardian.wait().unwrap().success());
    vmm.child.wait().unwrap();
}

#[test]
fn cleanup_removes_what_dead_vmms_left_and_nothing_else() {
    let Some(cgroups) = cgroups_or_skip() else {
        return;
    };
    // One at a time on this machine: another one would clean up after this one.
    let alone = File::open(&cgroups).unwrap();
    let _alone = Flock::lock(alone, FlockArg::LockExclusive).unwrap();
    let runtime = TempDir::new().unwrap();
    let dir = match is_root() {
        true => StateDir::at(ROOT_DIR),
        false => StateDir::at(runtime.path().join("vcpufreq")),
    };
    let [mut dead, mut alive, mut lost] = [(); 3].map(|()| Vmm::start(&cgroups, Stdio::null()));
    dead.make(&dir, 5);
    alive.make(&dir, 5);
    lost.make(&dir, 5);
    fs::remove_file(dir.record_path(lost.child.id())).unwrap();
    let stranger = cgroups.join(format!("vcpufreq.{}", u32::MAX));
    fs::create_dir_all(stranger.join("somebody")).unwrap();
    for vmm in [&mut dead, &mut lost] {
        vmm.kill();
        vmm.child.wait().unwrap();
    }
    let clean = || {
        let output = Command::new(PROGRAM)
            .arg("cleanup")
            .env("XDG_RUNTIME_DIR", runtime.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        said
    };
    let said = clean();
    let there = [&dead, &alive, &lost].map(|vmm| vmm.group.exists());
    let recorded = [&dead, &alive].map(|vmm| dir.record_path(vmm.child.id()).exists());
    let strangers = stranger.join("somebody").exists();
    alive.kill();
    alive.child.wait().unwrap();
    let said_then = clean();
    fs::remove_dir(stranger.join("somebody")).unwrap();
    fs::remove_dir(&stranger).unwrap();
    assert_eq!(there, [false, true, false], "{said}");
    assert_eq!(recorded, [false, true], "{said}");
    assert!(strangers && !said.contains("somebody"), "{said}");
    assert!(
        said_then.contains(&alive.group.display().to_string()),
        "{said_then}"
    );
    assert!(!alive.group.exists());
}
