// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Makes a thread of another process do a system call, as code that has taken that process over
//! would: with the thread's own rights, and through its own filters.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::ptrace::{self, Options, regset::NT_PRSTATUS};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// An argument.
#[derive(Clone, Debug)]
pub enum Argument {
    /// A number.
    Number(i64),
    /// The address of these bytes, in the process.
    Bytes(Vec<u8>),
}

impl Argument {
    /// The address of a text.
    pub fn text(text: &str) -> Self {
        Self::Bytes([text.as_bytes(), &[0]].concat())
    }
}

/// Has thread `tid` of process `pid` do `call`; the kernel's answer. The thread goes on where it was,
/// unless a filter ends the process: it does so after this.
///
/// # Errors
/// When the thread can't be traced, or ends otherwise.
pub fn inject(pid: u32, tid: i32, call: i64, arguments: &[Argument]) -> Result<i64> {
    let thread = Pid::from_raw(tid);
    ptrace::seize(thread, Options::PTRACE_O_TRACESYSGOOD)?;
    ptrace::interrupt(thread)?;
    wait(thread)?;
    let before = ptrace::getregset::<NT_PRSTATUS>(thread)?;
    let numbers = place(pid, stack(&before), arguments)?;
    let mut registers = before;
    prepare(&mut registers, instruction(pid)?, call, &numbers);
    ptrace::setregset::<NT_PRSTATUS>(thread, registers)?;
    // To its begin, then to its end.
    for _ in 0..2 {
        ptrace::syscall(thread, None)?;
        let at = wait(thread)?;
        ensure!(
            matches!(at, WaitStatus::PtraceSyscall(_)),
            "the thread is at {at:?}"
        );
    }
    let after = ptrace::getregset::<NT_PRSTATUS>(thread)?;
    ptrace::setregset::<NT_PRSTATUS>(thread, before)?;
    ptrace::detach(thread, None)?;
    Ok(result(&after))
}

fn wait(thread: Pid) -> Result<WaitStatus> {
    Ok(waitpid(thread, Some(WaitPidFlag::__WALL))?)
}

/// Puts bytes below what the thread has on its stack.
fn place(pid: u32, stack: u64, arguments: &[Argument]) -> Result<Vec<u64>> {
    let memory = OpenOptions::new()
        .write(true)
        .open(format!("/proc/{pid}/mem"))?;
    let mut at = stack - 4096;
    let mut numbers = Vec::new();
    for argument in arguments {
        numbers.push(match argument {
            Argument::Number(number) => u64::from_ne_bytes(number.to_ne_bytes()),
            Argument::Bytes(bytes) => {
                memory.write_all_at(bytes, at)?;
                let start = at;
                at += u64::try_from(bytes.len())?.next_multiple_of(16);
                start
            }
        });
    }
    Ok(numbers)
}

/// Where the process' code has an instruction that enters the kernel.
fn instruction(pid: u32) -> Result<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let memory = fs::File::open(format!("/proc/{pid}/mem"))?;
    for line in maps.lines().filter(|line| line.contains("r-xp")) {
        let (start, rest) = line.split_once('-').context("a map")?;
        let (end, _) = rest.split_once(' ').context("a map")?;
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16));
        let (start, end) = (start?, end?);
        let mut code = vec![0; usize::try_from(end - start)?];
        if memory.read_exact_at(&mut code, start).is_err() {
            continue;
        }
        let found = code.chunks_exact(4).position(|word| word == ENTER);
        if let Some(index) = found {
            return Ok(start + 4 * u64::try_from(index)?);
        }
    }
    bail!("no instruction of process {pid} enters the kernel")
}

/// `svc #0`.
const ENTER: [u8; 4] = [0x01, 0x00, 0x00, 0xd4];

fn prepare(registers: &mut libc::user_regs_struct, at: u64, call: i64, arguments: &[u64]) {
    registers.pc = at;
    registers.regs[8] = u64::from_ne_bytes(call.to_ne_bytes());
    registers.regs[..arguments.len()].copy_from_slice(arguments);
}

fn stack(registers: &libc::user_regs_struct) -> u64 {
    registers.sp
}

fn result(registers: &libc::user_regs_struct) -> i64 {
    i64::from_ne_bytes(registers.regs[0].to_ne_bytes())
}
