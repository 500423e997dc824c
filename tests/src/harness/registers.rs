// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device's registers by their physical address.

use anyhow::{Context as _, Result};

use crate::harness::sys::Registers;

pub fn register(address: &str) -> Result<(Registers, usize)> {
    let digits = address.strip_prefix("0x").context("an address is 0x...")?;
    let address = u64::from_str_radix(digits, 16)?;
    Ok((
        Registers::map(address & !0xfff)?,
        usize::try_from(address & 0xfff)?,
    ))
}
