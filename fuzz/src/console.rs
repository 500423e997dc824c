// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Accesses of a guest to its console while input arrives: no access panics, and input only leaves
//! the queue.

use std::collections::VecDeque;
use std::io;

use vcpufreq_bridge::MmioDevice as _;
use vcpufreq_vm::console::Console;
use vmm_sys_util::eventfd::EventFd;

use crate::operations;

/// Bytes of input that wait, at most: what the terminal's thread keeps is bounded too.
const WAITING: usize = 4096;

/// Carries accesses of two bytes each out: register and value, a read where the value is odd.
pub fn console(data: &[u8]) {
    let interrupt = EventFd::new(nix::libc::EFD_NONBLOCK).expect("an eventfd");
    let console = Console::new(interrupt, Box::new(io::sink())).expect("an eventfd");
    let mut input = VecDeque::new();
    for access in data.chunks_exact(2) {
        operations::count();
        let (register, value) = (access[0], access[1]);
        match register {
            // Input arrives.
            0xf0.. if input.len() < WAITING => {
                input.extend(std::iter::repeat_n(value, usize::from(register & 0xf)));
                let before = input.len();
                console.feed(&mut input);
                assert!(input.len() <= before);
            }
            _ if value & 1 == 0 => console.write(u64::from(register), &[value]),
            _ => {
                let mut byte = [0];
                console.read(u64::from(register), &mut byte);
            }
        }
    }
}
