//! Promises: what the device shows is in the pages that a guest shares, and nowhere else; a page that
//! isn't shared costs the guest its loads, and this process nothing; a guest that has ended is never
//! written to.

use vm_memory::{Bytes, GuestMemoryRegion, MemoryRegionAddress};

use super::*;

const RAM: u64 = 0x4000_0000;
const SIZE: usize = 0x1_0000;
/// The first shared page of two, in the middle of the guest's memory.
const PAGE: u64 = RAM + 0x4000;
const KHZ: u32 = 1_800_000;

fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(RAM), SIZE)]).unwrap()
}

fn word(memory: &GuestMemoryMmap, address: u64) -> u32 {
    u32::from_le(memory.read_obj(GuestAddress(address)).unwrap())
}

fn number(address: u64) -> u32 {
    u32::try_from(address >> SHARED_PAGE_SHIFT).unwrap()
}

/// Pages of two vCPUs, whose second one has a frequency.
fn pages(memory: &GuestMemoryMmap) -> GuestPages {
    let pages = GuestPages::new(2).unwrap();
    show(&pages, KHZ);
    pages.attach(memory.clone());
    pages
}

fn show(pages: &GuestPages, khz: u32) {
    let index = usize::try_from(REGION_STRIDE).unwrap() / REG_WIDTH;
    pages.words()[index].store(khz.to_le(), Relaxed);
    pages.stored(index);
}

/// What the hypervisor does to a page that the guest doesn't share: no access of the host's.
fn forbid(memory: &GuestMemoryMmap, page: u64) {
    let region = memory.find_region(GuestAddress(page)).unwrap();
    let at = region
        .get_host_address(MemoryRegionAddress(page - RAM))
        .unwrap();
    // SAFETY: it is a page of a mapping that nothing else uses.
    let done = unsafe { libc::mprotect(at.cast(), 0x1000, libc::PROT_NONE) };
    assert_eq!(done, 0);
}

#[test]
fn what_is_shown_is_where_the_guest_shares() {
    let memory = memory();
    let pages = pages(&memory);
    assert_eq!(word(&memory, PAGE + 0x1000), 0);
    pages.share(number(PAGE)).unwrap();
    assert_eq!(word(&memory, PAGE + 0x1000), KHZ);
    show(&pages, KHZ / 2);
    assert_eq!(word(&memory, PAGE + 0x1000), KHZ / 2);
    let mut all = vec![0; SIZE];
    memory.read_slice(&mut all, GuestAddress(RAM)).unwrap();
    assert_eq!(all.iter().filter(|byte| **byte != 0).count(), 3, "{KHZ:x}");
}

#[test]
fn pages_of_before_have_no_value_once_others_are_named() {
    let memory = memory();
    let pages = pages(&memory);
    let other = PAGE + 0x2000;
    for (next, used) in [(number(other), true), (1, false), (0, false)] {
        pages.share(number(PAGE)).unwrap();
        assert_eq!(word(&memory, PAGE + 0x1000), KHZ);
        assert_eq!(pages.share(next).is_ok(), next != 1);
        assert_eq!(word(&memory, PAGE + 0x1000), CUR_PERF_UNKNOWN);
        assert_eq!(word(&memory, other + 0x1000) == KHZ, used);
        show(&pages, KHZ);
        assert_eq!(word(&memory, PAGE + 0x1000), CUR_PERF_UNKNOWN);
    }
}

#[test]
fn a_page_that_is_not_shared_ends_it() {
    let memory = memory();
    forbid(&memory, PAGE + 0x1000);
    let pages = pages(&memory);
    let error = pages.share(number(PAGE)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    assert_eq!(word(&memory, PAGE), CUR_PERF_UNKNOWN);
    // Another try, and one that is taken back while it is in use.
    pages.share(number(PAGE + 0x2000)).unwrap();
    forbid(&memory, PAGE + 0x3000);
    show(&pages, KHZ);
    assert_eq!(word(&memory, PAGE + 0x2000), CUR_PERF_UNKNOWN);
}

#[test]
fn what_is_no_memory_of_the_guest_is_refused() {
    let memory = memory();
    let pages = pages(&memory);
    let last = RAM + SIZE as u64 - 0x1000;
    for page in [number(RAM - 0x1000), number(last), 1, u32::MAX] {
        pages.share(page).unwrap_err();
    }
    assert_eq!(word(&memory, last), CUR_PERF_UNKNOWN);
}

#[test]
fn a_path_that_is_lost_says_so_and_a_guest_that_has_ended_is_left_alone() {
    let memory = memory();
    let pages = pages(&memory);
    pages.share(number(PAGE)).unwrap();
    pages.withdraw();
    assert_eq!(word(&memory, PAGE + 0x1000), CUR_PERF_UNKNOWN);
    show(&pages, KHZ);
    assert_eq!(word(&memory, PAGE + 0x1000), CUR_PERF_UNKNOWN);
    pages.share(number(PAGE)).unwrap();
    pages.forget();
    show(&pages, KHZ / 2);
    assert_eq!(word(&memory, PAGE + 0x1000), KHZ);
    pages.share(number(PAGE)).unwrap_err();
}
