// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device's registers by their physical address.

use std::sync::atomic::{Ordering, fence};

use anyhow::{Context as _, Result, bail};

use crate::harness::sys::Registers;

/// Bytes of a vCPU's registers, by the binding.
pub const PAGE: u64 = 0x1000;

pub fn register(address: &str) -> Result<(Registers, usize)> {
    let digits = address.strip_prefix("0x").context("an address is 0x...")?;
    let address = u64::from_str_radix(digits, 16)?;
    Ok((
        Registers::map(address & !0xfff)?,
        usize::try_from(address & 0xfff)?,
    ))
}

/// A register that takes requests: `0xADDRESS`; or in shared memory, with the doorbell that is rung
/// after each and the value that rings it, `0xADDRESS,0xBELL,0xVALUE`; `memory` is a word of the
/// process' own, for comparison. Behind `0xMARK:` each follows a write to that, which a trace has.
pub struct Requests {
    page: Registers,
    offset: usize,
    bell: Option<(Registers, usize, u32)>,
    mark: Option<(Registers, usize)>,
}

impl Requests {
    pub fn at(text: &str) -> Result<Self> {
        if text == "memory" {
            let page = Registers::own_memory()?;
            // The first store to it is a fault, which a mapped register has none of.
            page.write(0, 0);
            return Ok(Self {
                page,
                offset: 0,
                bell: None,
                mark: None,
            });
        }
        let (mark, text) = match text.split_once(':') {
            Some((mark, text)) => (Some(register(mark)?), text),
            None => (None, text),
        };
        let mut parts = text.split(',');
        let (page, offset) = register(parts.next().unwrap_or_default())?;
        let bell = match (parts.next(), parts.next()) {
            (None, None) => None,
            (Some(bell), Some(value)) => {
                let (page, offset) = register(bell)?;
                let digits = value.strip_prefix("0x").context("a value is 0x...")?;
                Some((page, offset, u32::from_str_radix(digits, 16)?))
            }
            _ => bail!("a doorbell without a value in '{text}'"),
        };
        Ok(Self {
            page,
            offset,
            bell,
            mark,
        })
    }

    pub fn write(&self, value: u32) {
        if let Some((page, offset)) = &self.mark {
            page.write(*offset, 0);
        }
        self.page.write(self.offset, value);
        if let Some((page, offset, value)) = &self.bell {
            // The server looks for the request once it is rung.
            fence(Ordering::Release);
            page.write(*offset, *value);
        }
    }
}
