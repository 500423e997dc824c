// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: what a driver writes it reads again, and so does the file; each request that is wrong gets
//! its status; whatever a guest has in its rings and registers, the disk neither panics nor goes
//! beyond its file, and works again after a reset.

use std::os::unix::fs::FileExt as _;

use proptest::prelude::*;
use tempfile::NamedTempFile;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT,
};
use virtio_bindings::virtio_mmio as mmio;
use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use vm_memory::{Bytes as _, GuestAddress};

use super::*;
use crate::layout::RAM_BASE;

const RAM: u64 = 0x10_0000;
/// Places in it.
const TABLE: u64 = RAM_BASE;
const AVAIL: u64 = RAM_BASE + 0x2000;
const USED: u64 = RAM_BASE + 0x3000;
const HEADER: u64 = RAM_BASE + 0x4000;
const STATUS: u64 = RAM_BASE + 0x4100;
const DATA: u64 = RAM_BASE + 0x5000;
/// Sectors of the disk.
const SECTORS: u64 = 64;
const NO_STATUS: u8 = 0xee;

/// A descriptor without its link: place, bytes, whether the device writes it.
type Part = (u64, u32, bool);

/// A driver as Linux', with the disk.
struct BlockDriver {
    disk: VirtioDisk,
    memory: GuestMemoryMmap,
    interrupt: EventFd,
    file: NamedTempFile,
    sent: u16,
}

impl BlockDriver {
    fn without_queue() -> Self {
        let file = NamedTempFile::new().unwrap();
        file.as_file().set_len(SECTORS * 512).unwrap();
        let disk = VirtioDisk::new(DiskImage::open(file.path()).unwrap()).unwrap();
        let memory = GuestMemoryMmap::from_ranges(&[(
            GuestAddress(RAM_BASE),
            usize::try_from(RAM).unwrap(),
        )]);
        let memory = memory.unwrap();
        let interrupt = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        disk.power_on(memory.clone(), interrupt.try_clone().unwrap());
        Self {
            disk,
            memory,
            interrupt,
            file,
            sent: 0,
        }
    }

    fn new() -> Self {
        let mut driver = Self::without_queue();
        driver.set_up();
        driver
    }

    fn set(&self, register: u32, value: u32) {
        self.disk.write(register.into(), &value.to_le_bytes());
    }

    fn get(&self, register: u32) -> u32 {
        let mut word = [0; 4];
        self.disk.read(register.into(), &mut word);
        u32::from_le_bytes(word)
    }

    fn negotiate(&self, features: u64) -> bool {
        self.set(mmio::VIRTIO_MMIO_STATUS, 0);
        self.set(mmio::VIRTIO_MMIO_STATUS, 3);
        for number in [0, 1] {
            self.set(mmio::VIRTIO_MMIO_DRIVER_FEATURES_SEL, number);
            self.set(mmio::VIRTIO_MMIO_DRIVER_FEATURES, word(features, number));
        }
        self.set(mmio::VIRTIO_MMIO_STATUS, 11);
        self.get(mmio::VIRTIO_MMIO_STATUS) == 11
    }

    fn set_up(&mut self) {
        assert!(self.negotiate(FEATURES));
        self.set(mmio::VIRTIO_MMIO_QUEUE_SEL, 0);
        self.set(mmio::VIRTIO_MMIO_QUEUE_NUM, 16);
        for (register, place) in [
            (mmio::VIRTIO_MMIO_QUEUE_DESC_LOW, TABLE),
            (mmio::VIRTIO_MMIO_QUEUE_AVAIL_LOW, AVAIL),
            (mmio::VIRTIO_MMIO_QUEUE_USED_LOW, USED),
        ] {
            self.set(register, word(place, 0));
            self.set(register + 4, word(place, 1));
        }
        self.memory.write_obj(0_u32, GuestAddress(AVAIL)).unwrap();
        self.memory.write_obj(0_u32, GuestAddress(USED)).unwrap();
        self.sent = 0;
        self.set(mmio::VIRTIO_MMIO_QUEUE_READY, 1);
        self.set(mmio::VIRTIO_MMIO_STATUS, 15);
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory
            .read_slice(&mut bytes, GuestAddress(at))
            .unwrap();
        bytes
    }

    /// Puts a chain into the queue, from descriptor 0 on.
    fn send(&mut self, parts: &[Part]) {
        for (number, (at, len, is_written)) in (0_u16..).zip(parts) {
            let is_last = usize::from(number) + 1 == parts.len();
            let link = if is_last { 0 } else { VRING_DESC_F_NEXT };
            let direction = if *is_written { VRING_DESC_F_WRITE } else { 0 };
            let flags = u16::try_from(link | direction).unwrap();
            let place = TABLE + u64::from(number) * 16;
            self.put(place, &at.to_le_bytes());
            self.put(place + 8, &len.to_le_bytes());
            self.put(place + 12, &flags.to_le_bytes());
            self.put(place + 14, &(number + 1).to_le_bytes());
        }
        self.put(AVAIL + 4 + u64::from(self.sent % 16) * 2, &[0, 0]);
        self.sent = self.sent.wrapping_add(1);
        self.put(AVAIL + 2, &self.sent.to_le_bytes());
    }

    /// Header, these, and a status: the status, and the used length.
    fn request(&mut self, kind: u32, sector: u64, data: &[Part]) -> (u8, u32) {
        self.put(HEADER, &u64::from(kind).to_le_bytes());
        self.put(HEADER + 8, &sector.to_le_bytes());
        self.put(STATUS, &[NO_STATUS]);
        let header = [(HEADER, 16, false)];
        let status = [(STATUS, 1, true)];
        self.send(&[&header[..], data, &status].concat());
        let at = USED + 4 + u64::from((self.sent - 1) % 16) * 8 + 4;
        self.disk.carry_out();
        let used = self.memory.read_obj(GuestAddress(at)).unwrap();
        (self.bytes(STATUS, 1)[0], used)
    }

    fn used(&self) -> u16 {
        self.memory.read_obj(GuestAddress(USED + 2)).unwrap()
    }
}

#[test]
fn a_driver_finds_a_block_device_of_the_files_size() {
    let driver = BlockDriver::new();
    let rows = [
        (mmio::VIRTIO_MMIO_MAGIC_VALUE, 0x7472_6976),
        (mmio::VIRTIO_MMIO_VERSION, 2),
        (mmio::VIRTIO_MMIO_DEVICE_ID, 2),
        (mmio::VIRTIO_MMIO_QUEUE_NUM_MAX, 256),
        (mmio::VIRTIO_MMIO_CONFIG, 64),
        (mmio::VIRTIO_MMIO_CONFIG + 4, 0),
        (mmio::VIRTIO_MMIO_CONFIG + 12, 254),
        (mmio::VIRTIO_MMIO_CONFIG + 16, 0),
        (0xffc, 0),
    ];
    for (register, value) in rows {
        assert_eq!(driver.get(register), value, "{register:#x}");
    }
    driver.set(mmio::VIRTIO_MMIO_QUEUE_SEL, 1);
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_QUEUE_NUM_MAX), 0);
}

#[test]
fn a_driver_has_to_take_what_all_is_laid_out_by() {
    let driver = BlockDriver::without_queue();
    assert!(!driver.negotiate(FEATURES & !NEEDED));
    assert!(!driver.negotiate(FEATURES | (1 << 28)));
    assert!(driver.negotiate(NEEDED));
}

#[test]
fn what_a_driver_writes_it_reads_again() {
    let mut driver = BlockDriver::new();
    let text: Vec<u8> = (0..1024_u32).map(|at| at.to_le_bytes()[0] ^ 0x5a).collect();
    driver.put(DATA, &text);
    // In two pieces that end within a sector.
    let out = [(DATA, 100, false), (DATA + 100, 924, false)];
    assert_eq!(driver.request(VIRTIO_BLK_T_OUT, 3, &out), (0, 1));
    let mut in_file = vec![0; 1024];
    driver
        .file
        .as_file()
        .read_exact_at(&mut in_file, 3 * 512)
        .unwrap();
    assert_eq!(in_file, text);
    assert_eq!(driver.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (0, 1));
    let back = [(DATA + 0x1000, 1000, true), (DATA + 0x2000, 24, true)];
    assert_eq!(driver.request(VIRTIO_BLK_T_IN, 3, &back), (0, 1025));
    assert_eq!(driver.bytes(DATA + 0x1000, 1000), text[..1000]);
    assert_eq!(driver.bytes(DATA + 0x2000, 24), text[1000..]);
    let name = [(DATA, 20, true)];
    assert_eq!(driver.request(VIRTIO_BLK_T_GET_ID, 0, &name), (0, 21));
    assert_eq!(driver.bytes(DATA, 9), b"vcpufreq\0");
    assert_eq!(driver.interrupt.read().unwrap(), 4);
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_INTERRUPT_STATUS), 1);
    driver.set(mmio::VIRTIO_MMIO_INTERRUPT_ACK, 1);
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_INTERRUPT_STATUS), 0);
}

#[test]
fn each_wrong_request_gets_its_status() {
    let (bad, unknown) = (1, 2);
    let sector = |write| (DATA, 512, write);
    let rows: [(&str, u32, u64, &[Part], u8); 8] = [
        (
            "beyond the end",
            VIRTIO_BLK_T_IN,
            SECTORS,
            &[sector(true)],
            bad,
        ),
        (
            "overflow",
            VIRTIO_BLK_T_OUT,
            u64::MAX,
            &[sector(false)],
            bad,
        ),
        ("no sectors", VIRTIO_BLK_T_IN, 0, &[(DATA, 100, true)], bad),
        (
            "no memory",
            VIRTIO_BLK_T_IN,
            0,
            &[(RAM_BASE + RAM, 512, true)],
            bad,
        ),
        (
            "its end only",
            VIRTIO_BLK_T_OUT,
            0,
            &[(RAM_BASE + RAM - 8, 512, false)],
            bad,
        ),
        (
            "no addresses",
            VIRTIO_BLK_T_IN,
            0,
            &[(u64::MAX - 8, 512, true)],
            bad,
        ),
        (
            "too much",
            VIRTIO_BLK_T_OUT,
            0,
            &[(DATA, 32 << 20, false)],
            bad,
        ),
        (
            "not offered",
            VIRTIO_BLK_T_DISCARD,
            0,
            &[sector(false)],
            unknown,
        ),
    ];
    let mut driver = BlockDriver::new();
    for (name, kind, at, data, status) in rows {
        assert_eq!(driver.request(kind, at, data), (status, 1), "{name}");
    }
    assert_eq!(
        driver.file.as_file().metadata().unwrap().len(),
        SECTORS * 512
    );
}

#[test]
fn parts_may_end_anywhere() {
    let mut driver = BlockDriver::new();
    driver.put(HEADER, &u64::from(VIRTIO_BLK_T_OUT).to_le_bytes());
    driver.put(HEADER + 8, &5_u64.to_le_bytes());
    driver.put(HEADER + 16, &[7; 512]);
    driver.send(&[
        (HEADER, 10, false),
        (HEADER + 10, 518, false),
        (STATUS, 1, true),
    ]);
    driver.disk.carry_out();
    let mut in_file = [0; 512];
    driver
        .file
        .as_file()
        .read_exact_at(&mut in_file, 5 * 512)
        .unwrap();
    assert_eq!(in_file, [7; 512]);
}

#[test]
fn a_chain_without_place_for_a_status_is_used_up() {
    let mut driver = BlockDriver::new();
    driver.send(&[(HEADER, 16, false)]);
    driver.send(&[(STATUS, 1, true)]);
    driver.send(&[(HEADER, 8, false), (STATUS, 1, true)]);
    driver.disk.carry_out();
    assert_eq!(driver.used(), 3);
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_STATUS), 15);
}

#[test]
fn rings_that_make_no_sense_need_a_reset() {
    let mut driver = BlockDriver::new();
    driver.put(AVAIL + 2, &1000_u16.to_le_bytes());
    driver.disk.carry_out();
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_STATUS), 15 | 64);
    assert_eq!(driver.get(mmio::VIRTIO_MMIO_INTERRUPT_STATUS), 2);
    driver.set_up();
    let data = [(DATA, 512, true)];
    assert_eq!(driver.request(VIRTIO_BLK_T_IN, 0, &data), (0, 513));
}

#[test]
fn a_disk_without_power_does_nothing() {
    let mut driver = BlockDriver::new();
    driver.disk.power_off();
    assert_eq!(driver.request(VIRTIO_BLK_T_FLUSH, 0, &[]).0, NO_STATUS);
    let interrupt = driver.interrupt.try_clone().unwrap();
    driver.disk.power_on(driver.memory.clone(), interrupt);
    driver.set_up();
    assert_eq!(driver.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (0, 1));
}

/// A place that a guest may name: mostly one of its memory.
fn places() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => RAM_BASE..RAM_BASE + RAM,
        1 => RAM_BASE + RAM - 16..RAM_BASE + RAM + 16,
        1 => any::<u64>(),
    ]
}

proptest! {
    #[test]
    fn no_descriptors_do_harm(
        table in prop::collection::vec((places(), any::<u32>(), 0_u32..0x1000, 0_u16..8, 0_u16..18), 16),
        heads in prop::collection::vec(0_u16..18, 16),
        header in (prop_oneof![Just(0_u32), Just(1), Just(4), Just(8), any::<u32>()], 0_u64..80),
        available in 0_u16..20,
    ) {
        let mut driver = BlockDriver::new();
        for (number, (at, long, short, flags, next)) in (0_u64..).zip(table) {
            let place = TABLE + number * 16;
            let len = if flags & 3 == 3 { long } else { short };
            driver.put(place, &at.to_le_bytes());
            driver.put(place + 8, &len.to_le_bytes());
            driver.put(place + 12, &flags.to_le_bytes());
            driver.put(place + 14, &next.to_le_bytes());
        }
        // Chains that begin with a header, too.
        driver.put(TABLE, &HEADER.to_le_bytes());
        driver.put(TABLE + 8, &16_u32.to_le_bytes());
        driver.put(TABLE + 12, &1_u16.to_le_bytes());
        driver.put(HEADER, &u64::from(header.0).to_le_bytes());
        driver.put(HEADER + 8, &header.1.to_le_bytes());
        for (number, head) in (0_u64..).zip(heads) {
            driver.put(AVAIL + 4 + number * 2, &head.to_le_bytes());
        }
        driver.put(AVAIL + 2, &available.to_le_bytes());
        driver.disk.carry_out();
        prop_assert_eq!(driver.file.as_file().metadata().unwrap().len(), SECTORS * 512);
        driver.set_up();
        prop_assert_eq!(driver.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (0, 1));
    }

    #[test]
    fn no_registers_do_harm(
        accesses in prop::collection::vec((0_u64..0x210, 0_usize..9, any::<u64>(), any::<bool>()), 1..200)
    ) {
        let mut driver = BlockDriver::new();
        driver.put(AVAIL + 2, &16_u16.to_le_bytes());
        for (offset, len, value, writes) in accesses {
            // Most are of a register.
            let offset = if value & 3 == 0 { offset } else { offset & !3 };
            let bytes = value.to_le_bytes();
            let mut data = bytes[..len].to_vec();
            match writes {
                true => driver.disk.write(offset, &data),
                false => driver.disk.read(offset, &mut data),
            }
            driver.disk.carry_out();
        }
        driver.set_up();
        prop_assert_eq!(driver.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (0, 1));
    }
}
