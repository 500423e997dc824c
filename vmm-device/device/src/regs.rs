// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The register interface as data: offsets, widths, and which accesses are legal.
//!
//! The contract is `abi/vcpufreq-abi.h` and `docs/registers.md`; a test proves these constants equal
//! to the header. Reading and writing have tables of their own, so that an access in the wrong
//! direction doesn't decode, and nothing after the decoder knows a raw offset.

#![forbid(unsafe_code)]

use crate::units::VcpuId;

/// The device tree's name for the interface.
pub const COMPATIBLE: &str = "qemu,virtual-cpufreq";
/// Bytes of one vCPU's register page, and the distance to the next one.
pub const REGION_STRIDE: u64 = 0x1000;
/// The region is aligned and padded to this many bytes, the largest page size of an arm64 host.
pub const REGION_ALIGN: u64 = 0x1_0000;
/// Width of every register, bytes.
pub const REG_WIDTH: usize = 4;
/// Entries of a performance table, at most.
pub const PERFTBL_MAX_LEN: u32 = 64;
/// vCPUs of one device, at most.
pub const MAX_VCPUS: usize = 512;

/// R, kHz: what the vCPU gets now.
pub const REG_CUR_PERF: u64 = 0x00;
/// W, kHz: what the guest asks for; 0 takes that back.
pub const REG_SET_PERF: u64 = 0x04;
/// R, count: entries of the performance table.
pub const REG_PERFTBL_LEN: u64 = 0x08;
/// W, index: selects the entry that `REG_PERFTBL_RD` returns.
pub const REG_PERFTBL_SEL: u64 = 0x0c;
/// R, kHz: the selected entry, 0 when there is none.
pub const REG_PERFTBL_RD: u64 = 0x10;
/// R, number: the performance domain.
pub const REG_PERF_DOMAIN: u64 = 0x14;
/// R, bits: what there is beyond the registers above. Extensions have their registers from here on;
/// below it nothing is ever added.
pub const REG_FEATURES: u64 = 0x100;
/// R, kHz: the most that its domain can get now; 0 if that isn't known.
pub const REG_PERF_CAP: u64 = 0x108;

/// W, number: the first of the pages of its memory that the guest shares, for what it reads; 0: none.
pub const REG_SHARED_PAGES: u64 = 0x10c;

/// Of `REG_FEATURES`: a vCPU of any domain may write `REG_SET_PERF` of any page.
pub const FEATURE_ANY_CPU: u32 = 1;
/// Of `REG_FEATURES`: `REG_PERF_CAP` is known.
pub const FEATURE_PERF_CAP: u32 = 2;
/// Of `REG_FEATURES`: `REG_SET_PERF` has a number of ms at [`CEILING_SHIFT`].
pub const FEATURE_CEILING: u32 = 4;

/// Of `REG_FEATURES`: `REG_SHARED_PAGES` is there.
pub const FEATURE_SHARED_PAGES: u32 = 8;

/// Bits from a number of `REG_SHARED_PAGES` to an address: pages of 4 KiB, whatever the guest's are.
pub const SHARED_PAGE_SHIFT: u32 = 12;
/// `REG_CUR_PERF` in a shared page of which nothing is kept true: the guest reads the register.
pub const CUR_PERF_UNKNOWN: u32 = u32::MAX;

/// Bits of a value of `REG_SET_PERF`: the frequency, in kHz.
pub const SET_PERF_KHZ: u32 = (1 << CEILING_SHIFT) - 1;
/// Of the bits above: for how many ms the request is a ceiling too; 0: it is none. A driver that
/// writes it again in each tick asks for a little more than a tick's. If a request is lost, its guest
/// is held down for no longer.
pub const CEILING_SHIFT: u32 = 28;
/// The most of these: 15 ms, more than a tick of the slowest guests (HZ = 100).
pub const CEILING_MS_MAX: u32 = u32::MAX >> CEILING_SHIFT;

/// Size in bytes of the region of a device with `vcpus` vCPUs: a multiple of 64 KiB, so that no
/// host page holds anything else.
#[must_use]
pub fn region_size(vcpus: u16) -> u64 {
    (u64::from(vcpus) * REGION_STRIDE).next_multiple_of(REGION_ALIGN)
}

/// The vCPU whose page holds this offset in the region, and the offset in that page. `None` beyond
/// every number of a vCPU; whether the device has that vCPU is the caller's to check.
#[must_use]
pub fn page_of(offset: u64) -> Option<(VcpuId, u64)> {
    let vcpu = u16::try_from(offset / REGION_STRIDE).ok()?;
    Some((VcpuId(vcpu), offset % REGION_STRIDE))
}

/// Registers that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadReg {
    /// [`REG_CUR_PERF`]
    CurPerf,
    /// [`REG_PERFTBL_LEN`]
    PerftblLen,
    /// [`REG_PERFTBL_RD`]
    PerftblRd,
    /// [`REG_PERF_DOMAIN`]
    PerfDomain,
    /// [`REG_FEATURES`]
    Features,
    /// [`REG_PERF_CAP`]
    PerfCap,
}

/// Registers that can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteReg {
    /// [`REG_SET_PERF`]
    SetPerf,
    /// [`REG_PERFTBL_SEL`]
    PerftblSel,
}

const READABLE: [(u64, ReadReg); 6] = [
    (REG_CUR_PERF, ReadReg::CurPerf),
    (REG_PERFTBL_LEN, ReadReg::PerftblLen),
    (REG_PERFTBL_RD, ReadReg::PerftblRd),
    (REG_PERF_DOMAIN, ReadReg::PerfDomain),
    (REG_FEATURES, ReadReg::Features),
    (REG_PERF_CAP, ReadReg::PerfCap),
];

const WRITABLE: [(u64, WriteReg); 2] = [
    (REG_SET_PERF, WriteReg::SetPerf),
    (REG_PERFTBL_SEL, WriteReg::PerftblSel),
];

impl ReadReg {
    /// The register that a read of `len` bytes at `offset` within a page means, if it is legal.
    #[must_use]
    pub fn decode(offset: u64, len: usize) -> Option<Self> {
        lookup(&READABLE, offset, len)
    }

    /// Its offset within a page.
    #[must_use]
    pub fn offset(self) -> u64 {
        match self {
            Self::CurPerf => REG_CUR_PERF,
            Self::PerftblLen => REG_PERFTBL_LEN,
            Self::PerftblRd => REG_PERFTBL_RD,
            Self::PerfDomain => REG_PERF_DOMAIN,
            Self::Features => REG_FEATURES,
            Self::PerfCap => REG_PERF_CAP,
        }
    }
}

impl WriteReg {
    /// The register that a write of `len` bytes at `offset` within a page means, if it is legal.
    #[must_use]
    pub fn decode(offset: u64, len: usize) -> Option<Self> {
        lookup(&WRITABLE, offset, len)
    }
}

fn lookup<R: Copy>(table: &[(u64, R)], offset: u64, len: usize) -> Option<R> {
    if len != REG_WIDTH {
        return None;
    }
    table.iter().find(|(at, _)| *at == offset).map(|(_, r)| *r)
}
