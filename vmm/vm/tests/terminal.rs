// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the virtual machine promises of the terminal that it was started on: raw while the guest
//! runs, and as it was before when the machine has ended, whichever way. Signals and Ctrl-A x work
//! whatever the guest does: when its output isn't read, and when all it does is reset. A signal
//! that isn't to end the machine loses nothing of what a guest prints.
//!
//! The test runs itself again, on a pseudo-terminal, as a program with a
//! guest; without a usable /dev/kvm it prints that it is skipped.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code, reason = "terminals and signals are C")]
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in tests, but not in what they share"
)]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvm_ioctls::Kvm;
use tempfile::TempDir;
use vcpufreq_device::VcpuId;
use vcpufreq_host::Tid;
use vcpufreq_vm::console_output::ConsoleEnd;
use vcpufreq_vm::layout::UART_BASE;
use vcpufreq_vm::machine::{Bootable, KvmGuest};
use vcpufreq_vm::memory::{Memory, Region};
use vcpufreq_vm::vcpu::VcpuThreads;
use vcpufreq_vm::{Hooks, VmEnvironment, supervise};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

/// Set for the program that the test starts: what its guest does.
const GUEST: &str = "VCPUFREQ_TEST_GUEST";
/// And the file that it waits for before it panics.
const RAW_SEEN: &str = "VCPUFREQ_TEST_RAW_SEEN";
const TEST: &str = "a_terminal_is_put_back_however_the_machine_ends";
const COUNT_TEST: &str = "a_signal_loses_no_output";
/// Ends a test that would hang.
const PATIENCE: Duration = Duration::from_secs(600);

/// Spins, prints for ever, or resets at once.
struct Guest {
    code: &'static [u8],
}

impl Bootable for Guest {
    fn boot(&mut self, kvm: &Kvm, _console: &EventFd) -> anyhow::Result<KvmGuest> {
        let vm = kvm.create_vm()?;
        let mut memory = Memory::default();
        let (base, size) = (0, 0x1_0000);
        memory.add(&vm, Region { base, size })?;
        memory.map().write_slice(self.code, GuestAddress(0x1000))?;
        let vcpu = vm.create_vcpu(0)?;
        let mut sregs = vcpu.get_sregs()?;
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        sregs.ds.base = UART_BASE;
        // Protected mode without an interrupt table: any fault is a triple one.
        sregs.cr0 |= 1;
        sregs.idt.limit = 0;
        vcpu.set_sregs(&sregs)?;
        let mut regs = vcpu.get_regs()?;
        (regs.rip, regs.rflags) = (0x1000, 2);
        vcpu.set_regs(&regs)?;
        let vcpus = vec![vcpu];
        let vm = Arc::new(vm);
        Ok(KvmGuest { vcpus, vm, memory })
    }
}

const SPIN: &[u8] = &[0xeb, 0xfe];
const FAULT: &[u8] = &[0x0f, 0x0b];
/// `mov byte ds:[0], '.'` and back to it.
const PRINT: &[u8] = &[0xc6, 0x06, 0x00, 0x00, 0x2e, 0xeb, 0xf9];

/// `mov ds:[0], al`, `inc al` and back to it.
const COUNT: &[u8] = &[0xa2, 0x00, 0x00, 0xfe, 0xc0, 0xeb, 0xf9];

/// May panic on the main thread when the guest resets.
struct AtReset {
    panics: bool,
}

impl Hooks for AtReset {
    fn on_vcpu_thread_start(&self, _vcpu: VcpuId, _tid: Tid) -> anyhow::Result<()> {
        Ok(())
    }

    fn on_vcpu_thread(&self, _vcpu: VcpuId, _tid: Tid) -> anyhow::Result<()> {
        Ok(())
    }

    fn on_disk_thread(&self) {}

    fn on_reset(&self) {
        if !self.panics {
            return;
        }
        // The test has to see the raw terminal before.
        let seen = std::env::var_os(RAW_SEEN).expect("a file to wait for");
        wait_until("the test", || Path::new(&seen).exists());
        panic!("as the test wants");
    }

    fn on_set_up(&self) -> anyhow::Result<()> {
        Ok(())
    }

    fn before_run(&self) {}

    fn helper_end(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }

    fn on_helper_end(&self) {}

    fn on_end(&self) {}

    fn on_warning(&self, _text: &str) {}
}

/// The program on the pseudo-terminal.
fn run_guest(kind: &str) {
    let host = VmEnvironment {
        hooks: Arc::new(AtReset {
            panics: kind == "resets once",
        }),
        cpufreq: None,
        console: ConsoleEnd::default(),
    };
    let code = match kind {
        "spins" => SPIN,
        "prints" => PRINT,
        "counts" => COUNT,
        _ => FAULT,
    };
    let mut guest = Guest { code };
    let threads = VcpuThreads::spawn(&[vec![]], &host.hooks).unwrap();
    supervise(&mut guest, &Kvm::new().unwrap(), (threads, None), &host).unwrap();
}

/// Both ends of a new pseudo-terminal.
fn pseudo_terminal() -> (File, OwnedFd) {
    let (mut master, mut slave) = (-1, -1);
    let none = std::ptr::null_mut();
    // SAFETY: the C library writes one descriptor to each of the first two
    // pointers and takes null for the others.
    let result = unsafe {
        libc::openpty(
            &raw mut master,
            &raw mut slave,
            none,
            none.cast(),
            none.cast(),
        )
    };
    assert_eq!(result, 0);
    // SAFETY: openpty has just made these descriptors, with no other owner.
    let master = unsafe { File::from_raw_fd(master) };
    // SAFETY: as above.
    (master, unsafe { OwnedFd::from_raw_fd(slave) })
}

/// The flags of a terminal, by which raw and cooked differ.
fn flags(terminal: &OwnedFd) -> [u32; 4] {
    // SAFETY: termios is plain data, for which all zeroes is a value.
    let mut settings: libc::termios = unsafe { std::mem::zeroed() };
    // SAFETY: the C library writes one termios at the pointer.
    let result = unsafe { libc::tcgetattr(terminal.as_raw_fd(), &raw mut settings) };
    assert_eq!(result, 0);
    let libc::termios {
        c_iflag,
        c_oflag,
        c_cflag,
        c_lflag,
        ..
    } = settings;
    [c_iflag, c_oflag, c_cflag, c_lflag]
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what} takes too long");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A line of the status of the child's first vCPU.
fn vcpu_status(child: &Child, key: &str) -> (i32, String) {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
    let mut tasks = tasks.map(|task| task.unwrap().path());
    let task = tasks
        .find(|task| std::fs::read_to_string(task.join("comm")).unwrap().trim() == "vcpu0")
        .unwrap();
    let status = std::fs::read_to_string(task.join("status")).unwrap();
    let mut lines = status.lines();
    let value = lines.find_map(|line| line.strip_prefix(key)).unwrap();
    let tid = task.file_name().unwrap().to_str().unwrap().parse().unwrap();
    (tid, value.trim().to_owned())
}

// A migration's signal that met a write was taken for the end: the byte was lost.
#[test]
fn a_signal_loses_no_output() {
    if let Ok(kind) = std::env::var(GUEST) {
        return run_guest(&kind);
    }
    if let Err(error) = Kvm::new().and_then(|kvm| kvm.create_vm()) {
        println!("SKIP: no usable /dev/kvm: {error}");
        return;
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", COUNT_TEST, "--nocapture"])
        .env(GUEST, "counts")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child = Program(child.unwrap());
    let mut output = child.0.stdout.take().unwrap();
    wait_until_full(&output);
    for _ in 0..5 {
        let asleep = || vcpu_status(&child.0, "State:").1.starts_with('S');
        wait_until("the write", asleep);
        let waits = || vcpu_status(&child.0, "voluntary_ctxt_switches:");
        let (tid, before) = waits();
        // SAFETY: tgkill has no memory arguments; the child hasn't been waited for.
        let result = unsafe {
            libc::syscall(
                libc::SYS_tgkill,
                child.0.id(),
                tid,
                vcpufreq_vm::kick_signal(),
            )
        };
        assert_eq!(result, 0);
        wait_until("the next wait", || waits().1 != before);
    }
    // The test harness of the program prints something first, without a zero.
    let mut bytes = vec![0; 100_000];
    output.read_exact(&mut bytes).unwrap();
    let first = bytes.iter().position(|byte| *byte == 0).unwrap();
    let mut counted = (0..=u8::MAX).cycle().zip(&bytes[first..]);
    let lost = counted.position(|(expected, byte)| expected != *byte);
    assert_eq!(lost, None, "of {} bytes", bytes.len() - first);
}

fn signal(child: &Child, signal: i32) {
    let pid = child.id().try_into().unwrap();
    // SAFETY: kill has no memory arguments; the child hasn't been waited for.
    let result = unsafe { libc::kill(pid, signal) };
    assert_eq!(result, 0);
}

/// Waits until a pipe is full, so that the guest that prints waits for a reader.
fn wait_until_full(pipe: &impl AsRawFd) {
    // SAFETY: the call has no memory arguments.
    let size = unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_GETPIPE_SZ) };
    assert!(size > 0);
    wait_until("a full pipe", || {
        let mut there = 0;
        // SAFETY: the kernel writes one int at the pointer.
        let result = unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &raw mut there) };
        assert_eq!(result, 0);
        // The guest's bytes come one by one and fill each page.
        there == size
    });
}

/// A shell has what it starts in the background ignore some signals, which
/// would be inherited.
fn take_signals() -> std::io::Result<()> {
    for number in [libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
        // SAFETY: the call has no memory arguments.
        unsafe { libc::signal(number, libc::SIG_DFL) };
    }
    Ok(())
}

/// Doesn't outlive a test that fails.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        // Both fail when it has ended, which is as well.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a program with a guest, does `end` to it once its terminal is raw, and checks that the
/// terminal is as it was when it has ended. The output of a guest that prints isn't read.
fn ends(kind: &str, end: impl FnOnce(&Child, &mut File)) -> ExitStatus {
    let (mut master, slave) = pseudo_terminal();
    let before = flags(&slave);
    let dir = TempDir::new().unwrap();
    let seen = dir.path().join("raw-seen");
    let mut program = Command::new(std::env::current_exe().unwrap());
    // SAFETY: the call takes no memory and may be made between fork and exec.
    unsafe { program.pre_exec(take_signals) };
    let child = program
        .args(["--exact", TEST, "--nocapture"])
        .env(GUEST, kind)
        .env(RAW_SEEN, &seen)
        .stdin(slave.try_clone().unwrap())
        .stdout(match kind {
            "prints" => Stdio::piped(),
            _ => Stdio::null(),
        })
        .stderr(Stdio::null())
        .spawn();
    let mut child = Program(child.unwrap());
    wait_until("raw mode", || flags(&slave)[3] & libc::ICANON == 0);
    File::create(&seen).unwrap();
    let mut output = child.0.stdout.take();
    output.iter().for_each(wait_until_full);
    end(&child.0, &mut master);
    wait_until("the end of the machine", || flags(&slave) == before);
    // The test harness of the program prints something too.
    let reader = output.take().map(|mut output| {
        std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()))
    });
    let mut status = None;
    wait_until("the end", || {
        status = child.0.try_wait().unwrap();
        status.is_some()
    });
    drop(reader);
    assert_eq!(flags(&slave), before, "the terminal of a guest that {kind}");
    status.unwrap()
}

#[test]
fn a_terminal_is_put_back_however_the_machine_ends() {
    if let Ok(kind) = std::env::var(GUEST) {
        return run_guest(&kind);
    }
    if let Err(error) = Kvm::new().and_then(|kvm| kvm.create_vm()) {
        println!("SKIP: no usable /dev/kvm: {error}");
        return;
    }
    for kind in ["spins", "prints", "resets"] {
        let status = ends(kind, |_, keyboard| keyboard.write_all(b"ab\x01x").unwrap());
        assert!(status.success(), "Ctrl-A x while it {kind}: {status}");
        let status = ends(kind, |child, _| signal(child, libc::SIGTERM));
        assert!(status.success(), "SIGTERM while it {kind}: {status}");
    }
    for number in [libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
        let status = ends("spins", |child, _| signal(child, number));
        assert!(status.success(), "signal {number}: {status}");
    }
    for number in [libc::SIGSEGV, libc::SIGABRT, libc::SIGBUS] {
        let status = ends("spins", |child, _| signal(child, number));
        assert_eq!(status.signal(), Some(number));
    }
    let status = ends("resets once", |_, _| {});
    assert_eq!(status.code(), Some(101), "a panic: {status}");
}
