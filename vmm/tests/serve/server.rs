// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The real server, on a host that has cpufreq; and what a service manager hears of it.
#![expect(unsafe_code, reason = "descriptors by number")]

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    os::{
        fd::{FromRawFd, OwnedFd},
        unix::{net::UnixDatagram, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
};

use nix::{
    fcntl::{FcntlArg, fcntl},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use vcpufreq_host::fakes::FakeHost;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::{
    PATIENCE,
    vmm::{VCPUS, Vmm, qemu_in},
    wait_until,
};

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_vcpufreq");

/// Of a VM with one vCPU.
pub const ONE_VCPU: [&str; 4] = [
    "--cpus=1",
    "--pin=0=0",
    "--table=0=500000,1000000",
    "--capacity=0=1024",
];

pub struct Server {
    pub process: Child,
    said: Receiver<String>,
    _host: FakeHost,
}

/// Also of a test that fails.
impl Drop for Server {
    fn drop(&mut self) {
        // Fails for one that has ended.
        let _ = self.process.kill();
    }
}

impl Server {
    /// On a host with cpufreq, which this one may lack: its CPUs are a fake's.
    fn command(of: &str, host: &FakeHost, vm: &[&str]) -> Command {
        let mut command = Command::new("unshare");
        // A program in the background may have signals ignored.
        let mount = r#"mount --bind "$0" /sys/devices/system/cpu &&
            mount --bind "${OWN_RUN:-/run}" /run && exec env --default-signal "$@""#;
        command.args(["--mount", "sh", "-c", mount]);
        command.arg(host.root().path("sys/devices/system/cpu"));
        command.args([PROGRAM, of, "--actuator=none"]).args(vm);
        // Guardians write to no log of this machine.
        command.env("VCPUFREQ_TEST_LOG", "/dev/null/no-log");
        command
    }

    fn serve_at(socket: &Path, host: &FakeHost, vm: &[&str]) -> Command {
        let mut command = Self::command("serve", host, vm);
        command.arg("--socket").arg(socket);
        command
    }

    pub fn start(socket: &Path) -> Self {
        Self::start_for(socket, &ONE_VCPU)
    }

    /// One of the guest with the device tree at `dtb`, and of the process that these options name.
    pub fn start_by_ram(dtb: &Path, process: &[&str]) -> Self {
        let host = host();
        let mut command = Self::command("serve", &host, &ONE_VCPU);
        Self::spawn(command.arg("--dtb").arg(dtb).args(process), host)
    }

    /// The same, whose records are among its own ones, in `run`.
    pub fn start_alone_by_ram(dtb: &Path, run: &Path, process: &str) -> Self {
        let host = host();
        let mut command = Self::command("serve", &host, &ONE_VCPU);
        command
            .env("OWN_RUN", run)
            .env("VCPUFREQ_TEST_PATIENCE", "600");
        Self::spawn(command.arg("--dtb").arg(dtb).arg(process), host)
    }

    /// One of a VMM that connects, and that these options describe.
    pub fn start_for(socket: &Path, vm: &[&str]) -> Self {
        let host = host();
        Self::spawn(&mut Self::serve_at(socket, &host, vm), host)
    }

    /// One whose records are among its own ones, in `run`, and that has so many seconds for a lock.
    pub fn start_alone(socket: &Path, run: &Path, patience: u32) -> Self {
        Self::start_alone_for(socket, run, (patience, &ONE_VCPU))
    }

    /// The same for a VM that these options describe.
    pub fn start_alone_for(socket: &Path, run: &Path, (patience, vm): (u32, &[&str])) -> Self {
        let host = host();
        let mut command = Self::serve_at(socket, &host, vm);
        command.env("OWN_RUN", run);
        command.env("VCPUFREQ_TEST_PATIENCE", patience.to_string());
        Self::spawn(&mut command, host)
    }

    /// One whose records are in `run`, and whose guardian's lines go to the socket at `log`.
    pub fn start_logging(socket: &Path, run: &Path, log: &Path) -> Self {
        let host = host();
        let mut command = Self::serve_at(socket, &host, &ONE_VCPU);
        command.env("OWN_RUN", run).env("VCPUFREQ_TEST_LOG", log);
        // The guardian of one at a terminal writes there.
        Self::spawn(command.stdin(Stdio::null()), host)
    }

    /// One without a guardian, whose records are in `run`.
    pub fn start_unguarded(socket: &Path, run: &Path) -> Self {
        let host = host();
        let mut command = Self::serve_at(socket, &host, &ONE_VCPU);
        command.env("OWN_RUN", run);
        Self::spawn(command.arg("--no-guardian"), host)
    }

    /// Runs `vcpufreq cleanup` where records are in `run`.
    pub fn cleanup_in(run: &Path) {
        let mut command = Command::new("unshare");
        let mount = r#"mount --bind "$0" /run && exec "$@""#;
        command.args(["--mount", "sh", "-c", mount]).arg(run);
        let output = command.args([PROGRAM, "cleanup"]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    /// One of this process alone.
    pub fn start_for_process(socket: &Path, pid: u32) -> Self {
        let host = host();
        let mut command = Self::serve_at(socket, &host, &ONE_VCPU);
        Self::spawn(command.arg(format!("--pid={pid}")), host)
    }

    /// One that finds threads by the control socket at `qmp`.
    pub fn start_by(socket: &Path, qmp: &Path) -> Self {
        let host = host();
        let mut command = Self::serve_at(socket, &host, &ONE_VCPU);
        Self::spawn(command.arg("--qmp").arg(qmp), host)
    }

    /// One that writes events to `file`.
    pub fn start_writing(socket: &Path, file: &Path) -> Self {
        let host = host();
        let mut command = Self::serve_at(socket, &host, &ONE_VCPU);
        Self::spawn(command.arg("--events").arg(file), host)
    }

    /// `vcpufreq qemu`, with a VMM that it serves.
    pub fn before_vmm(dir: &Path) -> (Self, Vmm) {
        Self::before_vmm_of(dir, &ONE_VCPU)
    }

    /// The same for a VM that these options describe.
    pub fn before_vmm_of(dir: &Path, vm: &[&str]) -> (Self, Vmm) {
        let host = host();
        let mut command = Self::command("qemu", &host, vm);
        command.arg("--").arg(qemu_in(dir));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut prefix = Self::spawn(&mut command, host);
        let vmm = Vmm::of_qemu(&mut prefix.process);
        (prefix, vmm)
    }

    /// `vcpufreq qemu` of a VM with one vCPU, before a VMM that has two.
    pub fn before_a_vcpu_too_many(dir: &Path) -> Self {
        let host = host();
        let mut command = Self::command("qemu", &host, &ONE_VCPU);
        command.arg("--").arg(qemu_in(dir)).env(VCPUS, "2");
        Self::spawn(command.stdout(Stdio::null()), host)
    }

    /// Starts a server as a service manager does, with `files` of these names.
    pub fn start_with(socket: &Path, manager: &Path, files: &[OwnedFd], names: &str) -> Self {
        // Out of the way of the numbers that they get.
        let copies = files.iter();
        let copies = copies.map(|file| fcntl(file, FcntlArg::F_DUPFD_CLOEXEC(200)).unwrap());
        let copies: Vec<_> = copies.collect();
        // The number is known to the new process alone.
        let count = files.len();
        let script = format!(
            "export LISTEN_PID=$$ LISTEN_FDS={count} LISTEN_FDNAMES={names}\nexec \"$0\" \"$@\""
        );
        let host = host();
        let served = Self::serve_at(socket, &host, &ONE_VCPU);
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(script).arg(served.get_program());
        shell.args(served.get_args()).env("NOTIFY_SOCKET", manager);
        let of_child = copies.clone();
        let place = move || {
            for (number, copy) in (3..).zip(&of_child) {
                // SAFETY: takes two numbers; of the new process nothing but files is touched.
                unsafe { libc::dup2(*copy, number) };
            }
            Ok(())
        };
        // SAFETY: the function allocates nothing.
        unsafe { shell.pre_exec(place) };
        let server = Self::spawn(&mut shell, host);
        for copy in copies {
            // SAFETY: this function has made it, and nothing else knows it.
            drop(unsafe { OwnedFd::from_raw_fd(copy) });
        }
        server
    }

    fn spawn(command: &mut Command, host: FakeHost) -> Self {
        let mut process = command.stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(process.stderr.take().unwrap());
        let (line, said) = channel();
        thread::spawn(move || {
            stderr
                .lines()
                .map_while(Result::ok)
                .try_for_each(|text| line.send(text))
        });
        Self {
            process,
            said,
            _host: host,
        }
    }

    /// Starts it, and a VMM that it serves.
    pub fn with_vmm(socket: &Path) -> (Self, Vmm) {
        let server = Self::start(socket).that_says("waits at");
        (server, Vmm::served_at(socket))
    }

    /// The process of the VM that it serves: the child that wasn't started by a command line of
    /// its own.
    pub fn vm_process(&self) -> u32 {
        let of = |pid: u32, file: &str| fs::read_to_string(format!("/proc/{pid}/{file}"));
        let parent = format!("PPid:\t{}", self.process.id());
        let command = of(self.process.id(), "cmdline").unwrap();
        let all = fs::read_dir("/proc").unwrap().flatten();
        let mut numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let found = numbers.find(|pid| {
            let status = of(*pid, "status").unwrap_or_default();
            status.lines().any(|line| line == parent)
                && of(*pid, "cmdline").is_ok_and(|line| line == command)
        });
        found.expect("a VM's process")
    }

    /// The request of its VM that is in force, kHz.
    pub fn asked(&self) -> Option<u64> {
        self.stats()["vcpus"][0]["asks_khz"].as_u64()
    }

    /// None of a server that serves no VM.
    pub fn stats(&self) -> Value {
        let pid = self.process.id().to_string();
        let mut stats = Command::new(PROGRAM);
        let stats = stats.args(["stats", &pid, "--json"]).output().unwrap();
        serde_json::from_slice(&stats.stdout).unwrap_or_default()
    }

    /// Signals the eventfd by which a dead worker shows its end. It is the only one that no epoll
    /// waits for, once the VMM's interrupt is closed here.
    pub fn kill_worker(&self) {
        let process = self.vm_process();
        let mut eventfds = Vec::new();
        wait_until("one eventfd that no epoll waits for", || {
            eventfds = eventfds_alone(process);
            eventfds.len() == 1
        });
        let lost = &eventfds[0];
        let lost: i32 = lost.parse().unwrap();
        // SAFETY: takes two numbers.
        let process = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
        // SAFETY: takes three numbers.
        let copy = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process, lost, 0) };
        // SAFETY: the kernel has just made it.
        let mut copy = unsafe { File::from_raw_fd(copy.try_into().unwrap()) };
        copy.write_all(&1u64.to_ne_bytes()).unwrap();
    }

    /// Waits for its end.
    pub fn ended(&mut self) -> ExitStatus {
        self.process.wait().unwrap()
    }

    /// Waits for a line.
    pub fn hear(&self, what: &str) -> String {
        let mut all = Vec::new();
        loop {
            match self.said.recv_timeout(PATIENCE) {
                Ok(line) if line.contains(what) => return line,
                Ok(line) => all.push(line),
                Err(error) => panic!("no {what:?} ({error}) in {all:?}"),
            }
        }
    }

    /// The same server, which has said that.
    pub fn that_says(self, what: &str) -> Self {
        self.hear(what);
        self
    }

    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.process.id()).unwrap();
        kill(Pid::from_raw(pid), signal).unwrap();
    }

    /// Whether it has a handler for this one.
    pub fn catches(&self, signal: Signal) -> bool {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let mut lines = status.lines();
        let caught = lines.find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = u64::from_str_radix(caught.unwrap().trim(), 16).unwrap();
        (caught >> (signal as i32 - 1)) & 1 == 1
    }

    pub fn end(self, signal: Signal) -> (ExitStatus, Vec<String>) {
        self.signal(signal);
        self.output()
    }

    /// Ends the VMM that it serves, then it; what it says of the VM.
    pub fn outlive(self, vmm: &mut Vmm) -> String {
        vmm.end();
        let totals = self.hear("has ended");
        self.end(Signal::SIGTERM);
        totals
    }

    /// Waits for its end, and all that it says until then.
    pub fn output(mut self) -> (ExitStatus, Vec<String>) {
        let status = self.ended();
        (status, self.said.iter().collect())
    }
}

/// Numbers of a process' eventfds that no epoll waits for.
fn eventfds_alone(process: u32) -> Vec<String> {
    let of = |what: &str| PathBuf::from(format!("/proc/{}/{what}", process));
    let mut waited_for = String::new();
    let mut eventfds = Vec::new();
    for file in fs::read_dir(of("fd")).unwrap().flatten() {
        let info = of("fdinfo").join(file.file_name());
        let info = fs::read_to_string(info).unwrap_or_default();
        let number = file.file_name().into_string().unwrap();
        if info.contains("eventfd-id:") {
            eventfds.push(number);
        }
        waited_for += &info;
    }
    let is_waited_for = |number: &str| {
        let mut lines = waited_for.lines();
        lines.any(|line| {
            let mut words = line.split_whitespace();
            words.next() == Some("tfd:") && words.next() == Some(number)
        })
    };
    eventfds.retain(|number| !is_waited_for(number));
    eventfds
}

/// What a service manager hears, and the files that come with it.
pub fn heard(manager: &UnixDatagram) -> (String, Vec<OwnedFd>) {
    let mut text = [0u8; 4096];
    let mut files = [-1; 250];
    let mut into = [libc::iovec {
        iov_base: text.as_mut_ptr().cast(),
        iov_len: text.len(),
    }];
    // SAFETY: the buffer lives longer than the call.
    let (len, count) = unsafe { manager.recv_with_fds(&mut into, &mut files) }.unwrap();
    let files = files[..count].iter().map(|file| {
        // SAFETY: the kernel has just made them.
        unsafe { OwnedFd::from_raw_fd(*file) }
    });
    let files = files.collect();
    (String::from_utf8_lossy(&text[..len]).into_owned(), files)
}

fn host() -> FakeHost {
    let host = FakeHost::two_plus_two();
    let cpus = "sys/devices/system/cpu";
    host.write(&format!("{cpus}/possible"), "0-3\n");
    for cpu in 0..4 {
        let file = format!("{cpus}/cpu{cpu}/cpufreq/scaling_cur_freq");
        host.write(&file, "1000000\n");
        host.write(
            &format!("{cpus}/cpu{cpu}/cpufreq/cpuinfo_max_freq"),
            "1000000\n",
        );
    }
    host
}
