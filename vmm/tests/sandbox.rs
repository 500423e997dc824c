// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a confined thread can't do, in a process of its own for each try: this program, which runs
//! one test again.
//!
//! - A system call that isn't its class' ends the process.
//! - A confined thread of root is another user's, without capabilities, and opens no file to write.
//! - Two VMMs are two users: neither touches the threads of the other.
//! - A guest doesn't run beside a thread that isn't confined.
#![expect(unsafe_code, reason = "bad calls have no safe functions")]

use std::{
    fs::{self, File, OpenOptions},
    os::unix::process::ExitStatusExt as _,
    process::{Command, Output},
    time::Duration,
};

use vcpufreq::sandbox::{CLASSES, Limits, Sandbox, ThreadClass};

/// Which class the process is of, and what it tries.
const CLASS: &str = "SANDBOX_TEST_CLASS";
const TRY: &str = "SANDBOX_TEST_TRY";
const LIMITS: Limits = Limits {
    vcpus: 1,
    file_bytes: None,
};

/// A system call with its arguments.
type Call = (&'static str, i64, [i64; 4]);

/// What no class may do, whatever it has open.
fn bad_calls() -> Vec<Call> {
    let code = libc::PROT_EXEC.into();
    let anonymous = i64::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    vec![
        ("start a program", libc::SYS_execve, [0; 4]),
        (
            "make a process",
            libc::SYS_clone,
            [libc::SIGCHLD.into(), 0, 0, 0],
        ),
        ("remove a file", libc::SYS_unlinkat, [-100, 0, 0, 0]),
        ("move a file", libc::SYS_renameat2, [-100, 0, -100, 0]),
        ("link a file", libc::SYS_linkat, [-100, 0, -100, 0]),
        ("link to a path", libc::SYS_symlinkat, [0, -100, 0, 0]),
        ("send a signal", libc::SYS_kill, [1, 0, 0, 0]),
        ("signal a thread of another", libc::SYS_tgkill, [1, 1, 0, 0]),
        ("trace a process", libc::SYS_ptrace, [0; 4]),
        ("load BPF", libc::SYS_bpf, [5, 0, 0, 0]),
        ("write into a map", libc::SYS_bpf, [2, 0, 0, 0]),
        ("make a socket", libc::SYS_socket, [2, 1, 0, 0]),
        ("type into the terminal", libc::SYS_ioctl, [0, 0x5412, 0, 0]),
        ("signal by a file", libc::SYS_fcntl, [0, 8, 1, 0]),
        ("mount", libc::SYS_mount, [0; 4]),
        ("become root", libc::SYS_setresuid, [0; 4]),
        ("map code", libc::SYS_mmap, [0, 4096, code, anonymous]),
        ("load a module", libc::SYS_init_module, [0; 4]),
        (
            "write another's memory",
            libc::SYS_process_vm_writev,
            [1, 0, 0, 0],
        ),
    ]
}

/// What a class alone may not do, because others do.
fn bad_calls_of(class: ThreadClass) -> Vec<Call> {
    let kvm: i64 = 0xae80;
    let affinity = ("move", libc::SYS_sched_setaffinity, [0; 4]);
    let clamp = ("clamp", libc::SYS_sched_setattr, [0; 4]);
    let bpf = ("run a program of BPF", libc::SYS_bpf, [10, 0, 0, 0]);
    let runs = ("run a vCPU", libc::SYS_ioctl, [-1, kvm, 0, 0]);
    let writes = [-100, 0, libc::O_WRONLY.into(), 0];
    let writes = ("open to write", libc::SYS_openat, writes);
    match class {
        ThreadClass::Main => vec![writes],
        ThreadClass::Vcpu => vec![affinity, bpf],
        ThreadClass::Requests => vec![affinity, runs],
        ThreadClass::Maintenance => vec![runs, writes],
        ThreadClass::Stats => vec![affinity, clamp, runs],
        ThreadClass::Tune => vec![affinity, runs],
        ThreadClass::Events | ThreadClass::Disk => vec![affinity, clamp, bpf, runs],
    }
}

/// Runs a test of this program again, with a class and something to try.
fn child(test: &str, class: usize, index: usize) -> Output {
    Command::new(std::env::current_exe().expect("its path"))
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(CLASS, class.to_string())
        .env(TRY, index.to_string())
        .output()
        .expect("this program starts")
}

/// What such a process was given; `None`: it is no such process.
fn given() -> Option<(usize, usize)> {
    let number = |key| std::env::var(key).ok()?.parse().ok();
    Some((number(CLASS)?, number(TRY)?))
}

fn sandbox() -> Sandbox {
    let mut lacks = Vec::new();
    Sandbox::prepare(&mut lacks).expect("a kernel with seccomp")
}

fn system_call((_, call, [a, b, c, d]): Call) -> i64 {
    // SAFETY: the calls are refused, or fail for their arguments.
    unsafe { libc::syscall(call, a, b, c, d, -1, 0) }
}

/// In a process of its own.
fn makes_a_bad_call((class, index): (usize, usize)) {
    let class = CLASSES[class];
    let calls = [bad_calls(), bad_calls_of(class)].concat();
    let sandbox = sandbox();
    sandbox.enter(class).expect("the kernel confines");
    if let Some(call) = calls.get(index) {
        system_call(*call);
        return;
    }
    // What libraries try.
    let tried = [
        libc::SYS_clone3,
        libc::SYS_getcwd,
        libc::SYS_perf_event_open,
    ];
    let refused = tried.map(|call| system_call(("try", call, [0; 4])));
    println!("refused {refused:?}");
}

#[test]
fn a_bad_call_of_each_class_ends_the_process() {
    const NAME: &str = "a_bad_call_of_each_class_ends_the_process";
    if let Some(given) = given() {
        return makes_a_bad_call(given);
    }
    for (number, class) in CLASSES.into_iter().enumerate() {
        let calls = [bad_calls(), bad_calls_of(class)].concat();
        for (index, (name, ..)) in calls.iter().enumerate() {
            let status = child(NAME, number, index).status;
            assert_eq!(
                status.signal(),
                Some(libc::SIGSYS),
                "{class:?}: {name}: {status}"
            );
        }
        let without = child(NAME, number, calls.len());
        let text = String::from_utf8_lossy(&without.stdout);
        // What the harness does after it is not its class', so a signal may end it, too; but not
        // before the call.
        assert!(text.contains("refused [-1, -1, -1]"), "{class:?}: {text}");
    }
}

/// In a process of its own.
fn looks_at_itself() {
    let mut cpus = File::open("/sys/devices/system/cpu/possible").expect("CPUs");
    let sandbox = sandbox();
    sandbox
        .enter(ThreadClass::Main)
        .expect("the kernel confines");
    // Only landlock and the user's rights are in the way of these.
    let opened = File::open("/etc/passwd").is_ok();
    let again = File::open("/sys/devices/system/cpu/possible").is_ok();
    let read = std::io::Read::read(&mut cpus, &mut [0; 4]).is_ok();
    let status = fs::read_to_string("/proc/self/status").is_ok();
    println!("opened {opened} again {again} read {read} status {status}");
    let _ = OpenOptions::new().write(true).open("/dev/null");
}

#[test]
fn a_confined_thread_reads_cpus_and_writes_nothing() {
    if given().is_some() {
        return looks_at_itself();
    }
    let ended = child("a_confined_thread_reads_cpus_and_writes_nothing", 0, 0);
    let text = String::from_utf8_lossy(&ended.stdout);
    assert!(text.contains("again true read true"), "{text}");
    if fs::read_to_string("/sys/kernel/security/lsm").is_ok_and(|list| list.contains("landlock")) {
        assert!(
            text.contains("opened false") && text.contains("status false"),
            "{text}"
        );
    } else {
        println!("SKIP: what landlock refuses: this kernel has none");
    }
    assert_eq!(ended.status.signal(), Some(libc::SIGSYS), "{text}");
}

#[test]
fn a_thread_that_is_not_confined_keeps_the_guest_from_running() {
    if given().is_some() {
        return enters_too_early();
    }
    let ended = child(
        "a_thread_that_is_not_confined_keeps_the_guest_from_running",
        0,
        0,
    );
    let text = String::from_utf8_lossy(&ended.stdout);
    assert!(text.contains("isn't confined"), "{text}");
}

/// In a process of its own.
fn enters_too_early() {
    let (hold, held) = std::sync::mpsc::channel::<()>();
    let free = std::thread::Builder::new().name("free".to_owned());
    let free = free.spawn(move || held.recv());
    let mut sandbox = sandbox();
    // It never is.
    sandbox.confine_within(Duration::ZERO);
    let refused = sandbox.enter_last(LIMITS).expect_err("a thread is free");
    println!("{refused}");
    drop(hold);
    drop(free);
}
