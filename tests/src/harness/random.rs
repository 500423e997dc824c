// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Numbers that are the same in each run.

/// xorshift32, of Marsaglia's "Xorshift RNGs".
#[derive(Debug)]
pub struct Random(u32);

impl Random {
    /// From a seed.
    pub fn new(seed: u32) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9).max(1))
    }

    /// Any number but 0.
    pub fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0
    }

    /// A number below `end`, which isn't 0.
    pub fn below(&mut self, end: u32) -> u32 {
        self.next() % end
    }

    /// An index of so many elements.
    #[cfg_attr(
        not(feature = "bpf"),
        expect(dead_code, reason = "for those scenarios")
    )]
    pub fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.next()).unwrap_or_default() % len
    }
}
