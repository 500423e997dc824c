// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the guest does in one run, on any machine.

/// Guest addresses: the code, and where a write makes the guest leave.
pub const CODE: u64 = 0x4000_0000;
/// Memory behind the code, for loads that aren't of a register.
pub const RAM: u64 = CODE + 0x800;
pub const LEAVE: u64 = 0x0900_0000;

/// What the guest does in one run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Deed {
    /// Turns of a loop of two instructions first.
    pub before: u64,
    /// Accesses of `address`, at least 1.
    pub times: u64,
    /// Guest address of the register.
    pub address: u64,
    /// Written by the first access; each further one writes `step` more.
    pub value: u32,
    /// See `value`.
    pub step: u32,
    /// Loads instead of stores.
    pub read: bool,
    /// Turns of the loop afterwards.
    pub after: u64,
}
