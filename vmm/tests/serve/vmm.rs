// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A process that stands for a VMM: it connects, has a thread named as QEMU's, and keeps what it is
//! sent.
#![expect(unsafe_code, reason = "a descriptor by number")]

use std::{
    collections::BTreeMap,
    env, fs,
    io::{BufRead, BufReader, Write},
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::{fs::FileExt, net::UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    ptr::null_mut,
    slice,
    sync::{
        atomic::{AtomicU64, Ordering},
        mpsc::{Sender, channel},
    },
    thread,
};

use nix::{
    sched::{CpuSet, sched_getaffinity},
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        signal::{Signal, kill},
    },
    unistd::{Pid, geteuid, setuid},
};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::scripts::write_script;

const SOCKET: &str = "VCPUFREQ_TEST_SOCKET";
/// It doesn't connect, and its guest has so many bytes of RAM.
const RAM: &str = "VCPUFREQ_TEST_RAM";
/// Which it doesn't share.
const PRIVATE: &str = "VCPUFREQ_TEST_PRIVATE";
const USER: &str = "VCPUFREQ_TEST_USER";
/// How many vCPUs it has; else one.
pub const VCPUS: &str = "VCPUFREQ_TEST_VCPUS";
/// How many vectors its device has; else one for each vCPU.
const VECTORS: &str = "VCPUFREQ_TEST_VECTORS";
/// It reads nothing until it is told.
const DEAF: &str = "VCPUFREQ_TEST_DEAF";
/// How many files more it may open.
const FILES: &str = "VCPUFREQ_TEST_FILES";
/// The number of the socket, for one that `vcpufreq qemu` starts.
const FD: &str = "VCPUFREQ_TEST_FD";
/// Of vCPU 0's page.
const CUR_PERF: u64 = 0x1000;
const SET_PERF: u64 = 0x1004;

/// What that process does; nothing in any other one.
pub fn stand_for_one() {
    if let Ok(user) = env::var(USER) {
        setuid(user.parse::<u32>().unwrap().into()).unwrap();
    }
    if let Ok(size) = env::var(RAM) {
        return stand_for_one_with_ram(size.parse().unwrap());
    }
    let Some(stream) = connection() else {
        return;
    };
    let count = env::var(VCPUS).map_or(1, |count| count.parse().unwrap());
    // A server that finds the first one finds all.
    let vcpus = (0..count).rev().map(|vcpu| (vcpu, start_vcpu(vcpu)));
    let mut vcpus: BTreeMap<_, _> = vcpus.collect();
    if env::var(DEAF).is_ok() {
        std::io::stdin().read_line(&mut String::new()).unwrap();
    }
    if let Ok(more) = env::var(FILES) {
        let next = fs::File::open("/dev/null").unwrap().as_raw_fd();
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        let soft = u64::try_from(next).unwrap() + more.parse::<u64>().unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    }
    let mut files = Vec::new();
    // Version, number, memory; for each vCPU the server's doorbell and the guest's interrupt.
    for _ in 0..3 + 2 * count {
        let mut number = [0; 8];
        let (len, file) = match stream.recv_with_fd(&mut number) {
            // As QEMU, it goes on without a file that it may not open.
            Err(error) if error.errno() == libc::ENOBUFS => continue,
            received => received.unwrap(),
        };
        assert_eq!(len, number.len());
        // As a version: the memory's comes with a file.
        if file.is_none() && i64::from_le_bytes(number) == -1 {
            // As QEMU's.
            eprintln!("server sent version -1, expecting 0");
            println!("@refused");
            return;
        }
        files.extend(file);
    }
    // As QEMU closes what it has no vector for.
    if let Ok(vectors) = env::var(VECTORS) {
        files.drain(1 + vectors.parse::<usize>().unwrap()..1 + count);
    }
    println!("@served");
    let word = |at| {
        let mut word = [0; 4];
        files[0].read_exact_at(&mut word, at).unwrap();
        u32::from_le_bytes(word)
    };
    for line in std::io::stdin().lines() {
        match line.unwrap().split_once(' ').unwrap() {
            ("request", khz) => {
                let khz: u32 = khz.parse().unwrap();
                files[0].write_all_at(&khz.to_le_bytes(), SET_PERF).unwrap();
                println!("@stored");
            }
            ("store", what) => {
                let (at, word) = what.split_once(' ').unwrap();
                let (at, word): (u64, u32) = (at.parse().unwrap(), word.parse().unwrap());
                files[0].write_all_at(&word.to_le_bytes(), at).unwrap();
                println!("@stored");
            }
            ("end", vcpu) => {
                let vcpu: usize = vcpu.parse().unwrap();
                vcpus[&vcpu].send(()).unwrap();
                println!("@ending");
            }
            ("begin", vcpu) => {
                let vcpu: usize = vcpu.parse().unwrap();
                vcpus.insert(vcpu, start_vcpu(vcpu));
                println!("@begun");
            }
            ("tell", "pid") => println!("@{}", std::process::id()),
            ("read", at) => println!("@{}", word(at.parse().unwrap())),
            other => panic!("{other:?}"),
        }
    }
}

/// One whose guest has its registers in the last 2 MiB of its RAM, of so many bytes.
fn stand_for_one_with_ram(size: usize) {
    let ram = vcpufreq_host::memory_file(c"ram").unwrap();
    ram.set_len(size.try_into().unwrap()).unwrap();
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = match env::var(PRIVATE) {
        Ok(_) => libc::MAP_PRIVATE,
        Err(_) => libc::MAP_SHARED,
    };
    // SAFETY: the kernel chooses the address, which nothing uses.
    let mapped = unsafe { libc::mmap(null_mut(), size, rights, flags, ram.as_raw_fd(), 0) };
    assert_ne!(mapped, libc::MAP_FAILED);
    // SAFETY: all of it is mapped until the end, and another process may write to it as to these.
    let words = unsafe { slice::from_raw_parts(mapped.cast::<AtomicU64>(), size / 8) };
    // The guest's stores are its vCPU's.
    let vcpu = thread::Builder::new().name("CPU 0/KVM".to_owned());
    let vcpu = vcpu.spawn(move || obey(&ram, words, size)).unwrap();
    vcpu.join().unwrap();
}

/// What that guest is told.
fn obey(ram: &fs::File, words: &[AtomicU64], size: usize) {
    println!("@ready");
    let page = u64::try_from(size).unwrap() - (2 << 20);
    for line in std::io::stdin().lines() {
        match line.unwrap().split_once(' ').unwrap() {
            ("request", khz) => {
                let khz: u32 = khz.parse().unwrap();
                ram.write_all_at(&khz.to_le_bytes(), page + 4).unwrap();
                println!("@stored");
            }
            ("scribble", times) => {
                let times: usize = times.parse().unwrap();
                let mut word = 1_u64;
                for to in words.iter().cycle().take(times * words.len()) {
                    // Marsaglia's xorshift: any value but 0.
                    word ^= word << 13;
                    word ^= word >> 7;
                    word ^= word << 17;
                    to.store(word, Ordering::Relaxed);
                }
                println!("@scribbled");
            }
            ("read", "cur_perf") => {
                let mut word = [0; 4];
                ram.read_exact_at(&mut word, page).unwrap();
                println!("@{}", u32::from_le_bytes(word));
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Starts the thread of a vCPU; what ends it.
fn start_vcpu(vcpu: usize) -> Sender<()> {
    let (end, vcpu_ends) = channel::<()>();
    let thread = thread::Builder::new().name(format!("CPU {vcpu}/KVM"));
    let (begin, vcpu_begins) = channel();
    let run = move || {
        begin.send(()).unwrap();
        vcpu_ends.recv()
    };
    thread.spawn(run).unwrap();
    // It has its name then.
    vcpu_begins.recv().unwrap();
    end
}

/// Its connection to the server, if this process is to stand for a VMM.
fn connection() -> Option<UnixStream> {
    if let Ok(number) = env::var(FD) {
        let number = number.parse().unwrap();
        // SAFETY: `vcpufreq qemu` has left it open for this process alone.
        return Some(unsafe { UnixStream::from_raw_fd(number) });
    }
    let socket = env::var_os(SOCKET)?;
    Some(UnixStream::connect(socket).unwrap())
}

/// A program in `dir` that stands for QEMU before such a process.
pub fn qemu_in(dir: &Path) -> PathBuf {
    let program = dir.join("qemu");
    let itself = env::current_exe().unwrap();
    let script = format!(
        "#!/bin/sh\nfor word; do case $word in socket,*fd=*) {FD}=${{word##*fd=}};;\n\
         *,vectors=*) {VCPUS}=${{{VCPUS}:-${{word##*,vectors=}}}};; esac; done\n\
         export {FD} {VCPUS}\nexec {} --exact vmm_process --nocapture\n",
        itself.display()
    );
    write_script(&program, &script);
    program
}

pub struct Vmm {
    pub pid: u32,
    /// Unless `vcpufreq qemu` is its parent.
    process: Option<Child>,
    ask: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Vmm {
    pub fn connect(socket: &Path) -> Self {
        Self::connect_as(socket, geteuid().as_raw())
    }

    /// One of another user. It starts as this one, whose the test program may be alone.
    pub fn connect_as(socket: &Path, user: u32) -> Self {
        Self::start(socket, USER, user)
    }

    /// One with so many vCPUs.
    pub fn of_vcpus(socket: &Path, vcpus: u32) -> Self {
        Self::start(socket, VCPUS, vcpus)
    }

    /// The same, which is served.
    pub fn with_vcpus(socket: &Path, vcpus: u32) -> Self {
        let mut vmm = Self::of_vcpus(socket, vcpus);
        assert_eq!(vmm.answer(), "served");
        vmm
    }

    /// The same, whose device has so many vectors.
    pub fn with_vectors(socket: &Path, vcpus: u32, vectors: u32) -> Self {
        let values = [(VCPUS, vcpus), (VECTORS, vectors)];
        let mut vmm = Self::start_with(socket, &values);
        assert_eq!(vmm.answer(), "served");
        vmm
    }

    /// One with so many vCPUs, which reads what it is sent on the command `hear 1`.
    pub fn deaf(socket: &Path, vcpus: u32) -> Self {
        Self::start_with(socket, &[(DEAF, 1), (VCPUS, vcpus)])
    }

    /// One that may open so many files more.
    pub fn with_files(socket: &Path, more: u32) -> Self {
        let mut vmm = Self::start(socket, FILES, more);
        assert_eq!(vmm.answer(), "served");
        vmm
    }

    fn start(socket: &Path, what: &str, value: u32) -> Self {
        Self::start_with(socket, &[(what, value)])
    }

    fn start_with(socket: &Path, values: &[(&str, u32)]) -> Self {
        let values = values.iter().map(|(what, value)| (what, value.to_string()));
        let mut process = Command::new(env::current_exe().unwrap());
        process.args(["--exact", "vmm_process", "--nocapture"]);
        Self::spawn(process.env(SOCKET, socket).envs(values))
    }

    /// One that doesn't connect, and whose guest has so much RAM and this command line of QEMU's.
    pub fn with_ram(size: usize, shares: bool, words: &[&str]) -> Self {
        let mut process = Command::new(env::current_exe().unwrap());
        // To the harness they are names of other tests.
        process.args(["--exact", "--nocapture", "vmm_process", "--"]);
        process.args(words).env(RAM, size.to_string());
        if !shares {
            process.env(PRIVATE, "1");
        }
        let mut vmm = Self::spawn(&mut process);
        assert_eq!(vmm.answer(), "ready");
        vmm
    }

    fn spawn(process: &mut Command) -> Self {
        let process = process.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = process.spawn().unwrap();
        Self {
            pid: process.id(),
            ask: process.stdin.take().unwrap(),
            answers: BufReader::new(process.stdout.take().unwrap()),
            process: Some(process),
        }
    }

    /// That of a `vcpufreq qemu`, which serves it.
    pub fn of_qemu(prefix: &mut Child) -> Self {
        let mut vmm = Self {
            pid: 0,
            ask: prefix.stdin.take().unwrap(),
            answers: BufReader::new(prefix.stdout.take().unwrap()),
            process: None,
        };
        assert_eq!(vmm.answer(), "served");
        vmm.pid = vmm.ask("tell pid").parse().unwrap();
        vmm
    }

    /// One that is served.
    pub fn served_at(socket: &Path) -> Self {
        let mut vmm = Self::connect(socket);
        assert_eq!(vmm.answer(), "served");
        vmm
    }

    pub fn answer(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.answers.read_line(&mut line).unwrap(), 0, "it ended");
            // The harness prints lines of its own, and the first one without an end.
            if let Some((_, answer)) = line.trim_end().split_once('@') {
                return answer.to_owned();
            }
        }
    }

    pub fn ask(&mut self, what: &str) -> String {
        writeln!(self.ask, "{what}").unwrap();
        self.answer()
    }

    pub fn cur_perf(&mut self) -> u32 {
        self.ask(&format!("read {CUR_PERF}")).parse().unwrap()
    }

    /// The thread of its vCPU.
    pub fn vcpu(&self) -> Pid {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid)).unwrap();
        let vcpu = tasks.flatten().find(|task| {
            let name = fs::read_to_string(task.path().join("comm"));
            name.is_ok_and(|name| name == "CPU 0/KVM\n")
        });
        let tid = vcpu.unwrap().file_name();
        Pid::from_raw(tid.to_str().unwrap().parse().unwrap())
    }

    pub fn set_perf(&mut self) -> u32 {
        self.ask(&format!("read {SET_PERF}")).parse().unwrap()
    }

    /// The pCPUs that the vCPU may run on.
    pub fn pcpus(&self) -> usize {
        let allowed = sched_getaffinity(self.vcpu()).unwrap();
        let count = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu) == Ok(true));
        count.count()
    }

    /// Whether a later server can take it over.
    pub fn is_kept(&self) -> bool {
        Path::new(&format!("/run/vcpufreq/{}.vm", self.pid)).exists()
    }

    /// Kills it, and doesn't look.
    pub fn kill(&self) {
        let pid = Pid::from_raw(self.pid.try_into().unwrap());
        kill(pid, Signal::SIGKILL).unwrap();
    }

    /// Kills it, if it doesn't end by itself.
    pub fn end(&mut self) {
        let pid = Pid::from_raw(self.pid.try_into().unwrap());
        kill(pid, Signal::SIGKILL).unwrap();
        self.ended();
    }

    /// Waits for its end; whether that was with 0.
    pub fn ended(&mut self) -> bool {
        let process = self.process.as_mut();
        process.is_some_and(|process| process.wait().unwrap().success())
    }
}
