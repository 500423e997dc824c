// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One request of the guest's block driver (virtio 1.3, 5.2.6): a chain of descriptors, which is
//! carried out on the disk's file.
//!
//! The guest may write anything into a chain, and change it at any time: each descriptor and the header
//! are read once. A request that is wrong gets a status; one that has no place for it gets nothing.

use std::collections::VecDeque;
use std::ops::Deref;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};
use virtio_queue::DescriptorChain;
use vm_memory::{Address as _, Bytes as _, GuestAddress, GuestMemory, GuestMemoryMmap};

use super::image::DiskImage;
use crate::sys::{Transfer, transfer};

/// Descriptors of the queue, and so of a chain.
pub const QUEUE_SIZE: u16 = 256;
/// `struct virtio_blk_outhdr`: type, a reserved word, sector.
const HEADER: usize = 16;
/// What the guest reads as the disk's serial number: 20 bytes, ended by 0.
const NAME: [u8; 20] = *b"vcpufreq\0\0\0\0\0\0\0\0\0\0\0\0";

/// Why a request wasn't carried out: `VIRTIO_BLK_S_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum BlockStatus {
    IoError = 1,
    Unsupported = 2,
}

/// Pieces of the guest's memory, in turn.
#[derive(Debug, Default)]
struct Pieces(VecDeque<(GuestAddress, usize)>);

impl Pieces {
    fn len(&self) -> usize {
        // At most 2^32: the iterator over a chain ends before it has more.
        self.0.iter().map(|(_, len)| len).sum()
    }

    /// The first `len` bytes and the rest; `None` if there are fewer, or an address wraps around.
    fn split(mut self, mut len: usize) -> Option<(Self, Self)> {
        let mut first = Self::default();
        while len > 0 {
            let (at, size) = self.0.pop_front()?;
            let taken = size.min(len);
            first.0.push_back((at, taken));
            if taken < size {
                let rest = at.checked_add(taken.try_into().ok()?)?;
                self.0.push_front((rest, size - taken));
            }
            len -= taken;
        }
        Some((first, self))
    }

    fn read(&self, memory: &GuestMemoryMmap, mut bytes: &mut [u8]) -> Option<()> {
        for (at, len) in &self.0 {
            let (piece, rest) = bytes.split_at_mut_checked(*len)?;
            memory.read_slice(piece, *at).ok()?;
            bytes = rest;
        }
        Some(())
    }

    fn write(&self, memory: &GuestMemoryMmap, mut bytes: &[u8]) -> Option<()> {
        for (at, len) in &self.0 {
            let (piece, rest) = bytes.split_at_checked(*len)?;
            memory.write_slice(piece, *at).ok()?;
            bytes = rest;
        }
        Some(())
    }

    /// All at once: a device takes as long for a piece as for all of them.
    fn transfer(
        &self,
        way: Transfer,
        memory: &GuestMemoryMmap,
        image: &DiskImage,
        sector: u64,
    ) -> Option<()> {
        let (file, at) = image.at(sector, self.len().try_into().ok()?)?;
        let slices = self.0.iter();
        let slices = slices.flat_map(|(at, len)| memory.get_slices(*at, *len));
        let slices: Vec<_> = slices.collect::<Result<_, _>>().ok()?;
        transfer(way, file, at, &slices).then_some(())
    }
}

/// A chain, in parts.
struct BlockRequest {
    header: Pieces,
    /// What the device reads.
    data_out: Pieces,
    /// What it writes.
    data_in: Pieces,
    status: Pieces,
}

/// Carries a request out; how many bytes of the guest's memory were written.
pub fn carry_out<M>(chain: DescriptorChain<M>, memory: &GuestMemoryMmap, image: &DiskImage) -> u32
where
    M: Deref,
    M::Target: GuestMemory,
{
    let written = BlockRequest::of(chain).and_then(|request| {
        let done = request.carry_out(memory, image);
        let status = done.map_or_else(|status| status as u8, |_| 0);
        request.status.write(memory, &[status])?;
        u32::try_from(done.unwrap_or(0)).ok()?.checked_add(1)
    });
    written.unwrap_or(0)
}

impl BlockRequest {
    /// Where the parts end is not where descriptors do (virtio 1.3, 2.7.4): the header is the first
    /// bytes that the device reads, the status the last one that it writes.
    fn of<M>(chain: DescriptorChain<M>) -> Option<Self>
    where
        M: Deref,
        M::Target: GuestMemory,
    {
        let (mut readable, mut writable) = (Pieces::default(), Pieces::default());
        // With an indirect table, which isn't offered, there could be more.
        for descriptor in chain.take(QUEUE_SIZE.into()) {
            let len = usize::try_from(descriptor.len()).ok()?;
            let to = match descriptor.is_write_only() {
                true => &mut writable,
                false => &mut readable,
            };
            if len > 0 {
                to.0.push_back((descriptor.addr(), len));
            }
        }
        let (header, data_out) = readable.split(HEADER)?;
        let before_status = writable.len().checked_sub(1)?;
        let (data_in, status) = writable.split(before_status)?;
        Some(Self {
            header,
            data_out,
            data_in,
            status,
        })
    }

    /// How many bytes of data were written to the guest.
    fn carry_out(&self, memory: &GuestMemoryMmap, image: &DiskImage) -> Result<usize, BlockStatus> {
        let mut header = [0; HEADER];
        self.header
            .read(memory, &mut header)
            .ok_or(BlockStatus::IoError)?;
        let kind = header.first_chunk().copied().map_or(0, u32::from_le_bytes);
        let sector = header.last_chunk().copied().map_or(0, u64::from_le_bytes);
        let done = match kind {
            VIRTIO_BLK_T_IN => self.read(memory, image, sector),
            VIRTIO_BLK_T_OUT => self.write(memory, image, sector),
            VIRTIO_BLK_T_FLUSH => image.flush().ok().map(|()| 0),
            VIRTIO_BLK_T_GET_ID => self
                .data_in
                .write(memory, &NAME)
                .map(|()| self.data_in.len()),
            _ => return Err(BlockStatus::Unsupported),
        };
        done.ok_or(BlockStatus::IoError)
    }

    fn read(&self, memory: &GuestMemoryMmap, image: &DiskImage, sector: u64) -> Option<usize> {
        self.data_in
            .transfer(Transfer::Read, memory, image, sector)?;
        Some(self.data_in.len())
    }

    fn write(&self, memory: &GuestMemoryMmap, image: &DiskImage, sector: u64) -> Option<usize> {
        self.data_out
            .transfer(Transfer::Write, memory, image, sector)?;
        Some(0)
    }
}
