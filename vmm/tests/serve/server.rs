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
use vcpufreq_device::fakes::FakeHost;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::{
    PATIENCE,
    vmm::{Vmm, qemu_in},
    wait_until,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_vcpufreq");

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
    fn command(of: &str, host: &FakeHost) -> Command {
        let mut command = Command::new("unshare");
        let mount = r#"mount --bind "$0" /sys/devices/system/cpu && exec "$@""#;
        command.args(["--mount", "sh", "-c", mount]);
        command.arg(host.root().path("sys/devices/system/cpu"));
        command.args([PROGRAM, of, "--cpus=1", "--pin=0=0"]);
        command.args(["--table=0=500000,1000000", "--capacity=0=1024"]);
        command.arg("--actuator=none");
        command
    }

    fn serve_at(socket: &Path, host: &FakeHost) -> Command {
        let mut command = Self::command("serve", host);
        command.arg("--socket").arg(socket);
        command
    }

    pub fn start(socket: &Path) -> Self {
        let host = host();
        Self::spawn(&mut Self::serve_at(socket, &host), host)
    }

    /// One of this process alone.
    pub fn start_for(socket: &Path, pid: u32) -> Self {
        let host = host();
        let mut command = Self::serve_at(socket, &host);
        Self::spawn(command.arg(format!("--pid={pid}")), host)
    }

    /// One that finds threads by the control socket at `qmp`.
    pub fn start_by(socket: &Path, qmp: &Path) -> Self {
        let host = host();
        let mut command = Self::serve_at(socket, &host);
        Self::spawn(command.arg("--qmp").arg(qmp), host)
    }

    /// `vcpufreq qemu`, with a VMM that it serves.
    pub fn before_vmm(dir: &Path) -> (Self, Vmm) {
        let host = host();
        let mut command = Self::command("qemu", &host);
        command.arg("--").arg(qemu_in(dir));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut prefix = Self::spawn(&mut command, host);
        let vmm = Vmm::of_qemu(&mut prefix.process);
        (prefix, vmm)
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
        let served = Self::serve_at(socket, &host);
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
        let server = Self::start(socket);
        server.hear("waits at");
        (server, Vmm::served_at(socket))
    }

    /// The request of its VM that is in force, kHz.
    pub fn asked(&self) -> Option<u64> {
        let pid = self.process.id().to_string();
        let mut stats = Command::new(PROGRAM);
        let stats = stats.args(["stats", &pid, "--json"]).output().unwrap();
        let stats: Value = serde_json::from_slice(&stats.stdout).unwrap();
        stats["vcpus"][0]["asks_khz"].as_u64()
    }

    /// Signals the eventfd by which a dead worker shows its end. It is the only one that no epoll
    /// waits for, once the VMM's interrupt is closed here.
    pub fn kill_worker(&self) {
        let mut eventfds = Vec::new();
        wait_until("one eventfd that no epoll waits for", || {
            eventfds = self.eventfds_alone();
            eventfds.len() == 1
        });
        let lost = &eventfds[0];
        let lost: i32 = lost.parse().unwrap();
        // SAFETY: takes two numbers.
        let server = unsafe { libc::syscall(libc::SYS_pidfd_open, self.process.id(), 0) };
        // SAFETY: takes three numbers.
        let copy = unsafe { libc::syscall(libc::SYS_pidfd_getfd, server, lost, 0) };
        // SAFETY: the kernel has just made it.
        let mut copy = unsafe { File::from_raw_fd(copy.try_into().unwrap()) };
        copy.write_all(&1u64.to_ne_bytes()).unwrap();
    }

    /// Numbers of its eventfds that no epoll waits for.
    fn eventfds_alone(&self) -> Vec<String> {
        let of = |what: &str| PathBuf::from(format!("/proc/{}/{what}", self.process.id()));
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

    pub fn end(mut self, signal: Signal) -> (ExitStatus, Vec<String>) {
        let pid = i32::try_from(self.process.id()).unwrap();
        kill(Pid::from_raw(pid), signal).unwrap();
        let status = self.process.wait().unwrap();
        (status, self.said.iter().collect())
    }
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
    // SAFETY: the kernel has just made them.
    let files = files[..count]
        .iter()
        .map(|file| unsafe { OwnedFd::from_raw_fd(*file) });
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
