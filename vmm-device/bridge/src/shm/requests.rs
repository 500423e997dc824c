// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The requests of a guest in shared memory: a doorbell for each vCPU, whose request is in its page.
//!
//! A doorbell that rings again before it is answered gets one answer: the guest stores a request
//! before it rings, so the page has the newest. If two vCPUs of a domain ring, the doorbell that is
//! answered last counts. This project's driver uses one page per domain.
//!
//! A VMM that loads a snapshot, or receives a migrated guest, replaces the memory without a ring.
//! So the worker reads the memory, too. In a guest's RAM there are no doorbells: the worker reads each
//! request at each of its turns.

#![expect(unsafe_code, reason = "preadv2 has no safe wrapper")]

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use vcpufreq_device::{Actuator, Device, DeviceConfig, Events, Source, VcpuId, WriteReg};
use vmm_sys_util::eventfd::EventFd;

use super::memory::SharedMemory;
use crate::embedder::Embedder;
use crate::ioeventfd::RequestQueue;
use crate::sync::unpoisoned;

/// How often the memory is looked at. A guest that has stored a request rings sooner.
pub const LOOK_EVERY: Duration = Duration::from_millis(250);

const ANOTHER_HOSTS: &str = "the guest comes from a host, or a snapshot, with other OPPs or capacities; \
    it has this host's after a reboot";

/// What a server has the worker do for all vCPUs.
#[derive(Clone)]
pub struct AllVcpus {
    bell: Arc<EventFd>,
    paused: Arc<AtomicBool>,
}

impl AllVcpus {
    /// They run.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE`: no more open files.
    pub fn new() -> io::Result<Self> {
        let bell = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
        Ok(Self {
            bell: Arc::new(bell),
            paused: Arc::default(),
        })
    }

    /// Has what each vCPU has requested carried out: a request of before there was a server, of a
    /// server before this one, or of before a pause.
    pub fn carry_out(&self) {
        self.tell(false);
    }

    /// The VMM has paused them: has their requests withdrawn. None is carried out until
    /// [`Self::carry_out`].
    pub fn withdraw(&self) {
        self.tell(true);
    }

    fn tell(&self, paused: bool) {
        self.paused.store(paused, SeqCst);
        // Fails when the counter is full only, and then the worker hears it anyway.
        let _ = self.bell.write(1);
    }
}

/// The worker's queue of a guest's requests.
pub struct ShmRequests {
    memory: Arc<SharedMemory>,
    /// None in a guest's RAM.
    bells: Arc<[EventFd]>,
    all: AllVcpus,
    /// Locked while a request is carried out. The vCPU whose doorbell has announced it: if the worker
    /// dies meanwhile, [`Self::drain`] carries it out again.
    answering: Mutex<Option<VcpuId>>,
    looks: Mutex<Looks>,
    embedder: Arc<dyn Embedder>,
    /// Whether `embedder` was warned that the guest comes from another host. Any guest can bring that
    /// about, so it is one line.
    told: AtomicBool,
}

/// What the memory had at the last look, and when the next one is due.
struct Looks {
    every: Duration,
    next: Instant,
    vcpus: Vec<LastRequest>,
}

/// The newest request of a vCPU.
#[derive(Clone, Copy, Default)]
struct LastRequest {
    /// The one that was carried out last.
    carried_out: u32,
    /// The one of the last look, if no doorbell has rung since.
    found: Option<u32>,
}

impl LastRequest {
    /// Whether `found` was there at the last look too, and is not carried out: a guest that has
    /// stored a request may be about to ring.
    fn is_left(&mut self, found: u32) -> bool {
        let before = self.found.replace(found);
        before == Some(found) && found != self.carried_out
    }
}

impl ShmRequests {
    /// Reads requests from `memory`, when a doorbell rings: a vCPU's own in `bells`, or the server's
    /// for all, `all`. `embedder` is told once if the guest was another host's.
    pub fn new(
        memory: Arc<SharedMemory>,
        bells: Arc<[EventFd]>,
        all: AllVcpus,
        embedder: Arc<dyn Embedder>,
    ) -> Self {
        let vcpus = vec![LastRequest::default(); usize::from(memory.vcpus())];
        let (every, next) = (LOOK_EVERY, Instant::now() + LOOK_EVERY);
        Self {
            memory,
            bells,
            all,
            answering: Mutex::default(),
            looks: Mutex::new(Looks { every, next, vcpus }),
            embedder,
            told: AtomicBool::new(false),
        }
    }

    /// The same, which looks at the memory so often.
    pub fn looking_every(self, every: Duration) -> Self {
        let mut looks = self.looks();
        (looks.every, looks.next) = (every, Instant::now() + every);
        drop(looks);
        self
    }

    /// Carries out the requests whose doorbells have rung, and one that a dead worker was carrying
    /// out.
    pub fn drain<A: Actuator, S: Source, E: Events>(&self, device: &Device<A, S, E>) {
        let in_hand = self.answering().take();
        if let Some(vcpu) = in_hand {
            device.write(vcpu, WriteReg::SetPerf, self.memory.requested(vcpu));
        }
        (0..self.bells.len()).for_each(|index| self.drain_one(index, device));
        if self.memory.offset_in_ram().is_some() {
            self.read_all(device);
        }
    }

    /// Carries out each request that is another than the last one; whether one is.
    fn read_all<A: Actuator, S: Source, E: Events>(&self, device: &Device<A, S, E>) -> bool {
        let mut in_hand = self.answering();
        let mut found = false;
        if self.all.paused.load(SeqCst) {
            return found;
        }
        for vcpu in (0..self.memory.vcpus()).map(VcpuId) {
            let requested = self.memory.requested(vcpu);
            let looks = self.looks();
            let last = looks.vcpus.get(vcpu.index());
            let is_new = last.is_some_and(|last| last.carried_out != requested);
            drop(looks);
            if is_new {
                *in_hand = Some(vcpu);
                device.count_in_kernel(vcpu, 1);
                self.carry_out((vcpu, requested), device);
                *in_hand = None;
                found = true;
            }
        }
        found
    }

    /// Drops rings and requests, for a guest that starts anew.
    pub fn start_anew(&self, config: &DeviceConfig) {
        let mut in_hand = self.answering();
        *in_hand = None;
        for bell in self.bells.iter() {
            let _ = rings(bell);
        }
        self.memory.start_anew(config);
        self.looks().vcpus.fill(LastRequest::default());
    }

    fn answering(&self) -> MutexGuard<'_, Option<VcpuId>> {
        unpoisoned(self.answering.lock())
    }

    /// Carries out a request of `vcpu`, unless that is paused.
    fn carry_out<A: Actuator, S: Source, E: Events>(
        &self,
        (vcpu, requested): (VcpuId, u32),
        device: &Device<A, S, E>,
    ) {
        if let Some(seen) = self.looks().vcpus.get_mut(vcpu.index()) {
            (seen.carried_out, seen.found) = (requested, None);
        }
        if !self.all.paused.load(SeqCst) {
            device.write(vcpu, WriteReg::SetPerf, requested);
        }
    }

    fn looks(&self) -> MutexGuard<'_, Looks> {
        unpoisoned(self.looks.lock())
    }

    /// Whether the next look is due; then another one is, later.
    fn is_due(&self) -> bool {
        let (mut looks, now) = (self.looks(), Instant::now());
        let due = now >= looks.next;
        if due {
            looks.next = now + looks.every;
        }
        due
    }

    /// Describes the vCPUs again, and carries out requests that no doorbell has announced.
    pub fn look<A: Actuator, S: Source, E: Events>(&self, device: &Device<A, S, E>) {
        let _alone = self.answering();
        let left = self.left();
        self.describe_again(device);
        for request in left {
            self.carry_out(request, device);
        }
    }

    /// Makes the memory tell of this host, also if it came from another one.
    fn describe_again<A: Actuator, S: Source, E: Events>(&self, device: &Device<A, S, E>) {
        if self.memory.tell_again() && !self.told.swap(true, SeqCst) {
            self.embedder.warn(ANOTHER_HOSTS);
        }
        for vcpu in (0..self.memory.vcpus()).map(VcpuId) {
            device.show_given(vcpu);
        }
    }

    /// The requests that no doorbell has announced.
    fn left(&self) -> Vec<(VcpuId, u32)> {
        let mut looks = self.looks();
        let vcpus = (0..).map(VcpuId).zip(&mut looks.vcpus);
        let left = vcpus.filter_map(|(vcpu, seen)| {
            let requested = self.memory.requested(vcpu);
            seen.is_left(requested).then_some((vcpu, requested))
        });
        left.collect()
    }

    /// Carries out what each vCPU has requested, if any has; withdraws it while they are paused.
    fn carry_out_all<A: Actuator, S: Source, E: Events>(&self, device: &Device<A, S, E>) {
        if self.all.paused.load(SeqCst) {
            return device.withdraw();
        }
        for vcpu in (0..self.memory.vcpus()).map(VcpuId) {
            let requested = self.memory.requested(vcpu);
            if requested != 0 {
                self.carry_out((vcpu, requested), device);
            }
        }
    }
}

/// How often `bell` has rung since the last time, unless it hasn't.
///
/// The VMM has the same open file, and may make it one whose reads wait: so the read itself is one
/// that doesn't.
fn rings(bell: &EventFd) -> Option<u64> {
    let mut rings = 0u64;
    let into = libc::iovec {
        iov_base: (&raw mut rings).cast(),
        iov_len: size_of::<u64>(),
    };
    // SAFETY: `into` is one buffer of 8 bytes, which lives longer than the call.
    let read = unsafe { libc::preadv2(bell.as_raw_fd(), &raw const into, 1, -1, libc::RWF_NOWAIT) };
    (read == 8).then_some(rings)
}

impl<A: Actuator, S: Source, E: Events> RequestQueue<Device<A, S, E>> for ShmRequests {
    fn fds(&self) -> Vec<RawFd> {
        let all = self.bells.iter().chain([&*self.all.bell]);
        all.map(AsRawFd::as_raw_fd).collect()
    }

    fn drain_one(&self, index: usize, device: &Device<A, S, E>) {
        if index == self.bells.len() && self.all.bell.read().is_ok() {
            let _alone = self.answering();
            // The VMM may have loaded another memory while it was paused.
            self.describe_again(device);
            return self.carry_out_all(device);
        }
        let vcpu = u16::try_from(index).map(VcpuId);
        let (Ok(vcpu), Some(bell)) = (vcpu, self.bells.get(index)) else {
            return;
        };
        let mut in_hand = self.answering();
        // Before the request is loaded: a ring after this one is another turn's.
        let Some(rings @ 1..) = rings(bell) else {
            return;
        };
        *in_hand = Some(vcpu);
        // A VMM can ring as often as a counter can count.
        let rings = rings.min(u32::MAX.into());
        device.count_in_kernel(vcpu, rings);
        if rings > 1 {
            device.count_coalesced(vcpu, rings - 1);
        }
        self.carry_out((vcpu, self.memory.requested(vcpu)), device);
        *in_hand = None;
    }

    fn finish(&self, device: &Device<A, S, E>) -> bool {
        let in_ram = self.memory.offset_in_ram().is_some();
        let found = in_ram && self.read_all(device);
        if self.is_due() {
            self.look(device);
        }
        found
    }

    fn is_unfinished(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    //! A VMM can't make the server wait. No unanswered ring is lost, except those of a guest that
    //! starts anew. A request without a doorbell is carried out, and an announced one is carried
    //! out once.
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use super::*;
    use crate::embedder::Silent;
    use crate::ioeventfd::fake_device::{fake_device, requests};
    use crate::shm::sealed_memory;
    use vcpufreq_device::fakes::{FixedSource, NullActuator, RecordingActuator};
    use vcpufreq_device::{
        ActuateError, Clamp, DomainId, Khz, NoEvents, PageMemory, PerfTable, RegisterPages,
        SET_PERF_KHZ, Util, VcpuSpec,
    };

    const SET_PERF: usize = 1;

    fn rung() -> (
        ShmRequests,
        Device<RecordingActuator, FixedSource, NoEvents>,
    ) {
        let spec = |domain| VcpuSpec {
            table: PerfTable::try_from(vec![Khz(500), Khz(1000)]).unwrap(),
            capacity: Util::MAX,
            domain: DomainId(domain),
        };
        let config = DeviceConfig::new(vec![spec(0), spec(1)]);
        let memory = Arc::new(SharedMemory::create(&config).unwrap());
        let bell = || EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let bells: Arc<[EventFd]> = [bell(), bell()].into();
        for vcpu in [0, 1] {
            memory.store_request(VcpuId(vcpu), 500);
        }
        bells[1].write(2).unwrap();
        let requests = ShmRequests::new(memory, bells, AllVcpus::new().unwrap(), Arc::new(Silent));
        let (actuator, source) = (RecordingActuator::default(), FixedSource::default());
        let device = Device::new(config, actuator, source, NoEvents).unwrap();
        (requests, device)
    }

    #[test]
    fn what_has_rung_is_carried_out_without_a_worker() {
        let (requests, device) = rung();
        requests.drain(&device);
        let domains: Vec<_> = device.actuator().applied().iter().map(|a| a.0).collect();
        assert_eq!(domains, [DomainId(1)]);
        assert_eq!(device.counters(VcpuId(1)).unwrap().coalesced, 1);
    }

    struct Panics;

    impl Actuator for Panics {
        fn apply(&self, _: DomainId, _: Clamp) -> Result<(), ActuateError> {
            panic!("as the test wants");
        }

        fn serves_any_vcpu(&self) -> bool {
            false
        }
    }

    #[test]
    fn what_a_worker_had_in_hand_is_carried_out_after_its_death() {
        let (requests, device) = rung();
        let config = device.config().clone();
        let panics = Device::new(config, Panics, FixedSource::default(), NoEvents).unwrap();
        let worker = || requests.drain_one(1, &panics);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(worker)).is_err());
        requests.drain(&device);
        assert_eq!(device.actuator().applied()[0].0, DomainId(1));
    }

    #[test]
    fn a_guest_that_starts_anew_has_requested_nothing() {
        let (requests, device) = rung();
        requests.start_anew(device.config());
        requests.drain(&device);
        assert!(device.actuator().applied().is_empty());
        assert_eq!(requests.memory.requested(VcpuId(1)), 0);
    }

    #[test]
    fn a_paused_guest_has_no_request_until_it_goes_on() {
        let (requests, device) = rung();
        let answer_all = || {
            (0..=2).for_each(|index| requests.drain_one(index, &device));
            [0, 1].map(|vcpu| {
                let status = device.domain_status(VcpuId(vcpu)).unwrap();
                status.requested.map(|khz| khz.0)
            })
        };
        requests.all.carry_out();
        assert_eq!(answer_all(), [Some(500); 2]);
        requests.all.withdraw();
        assert_eq!(answer_all(), [None; 2]);
        // A doorbell of before the pause, and memory that is replaced meanwhile.
        requests.bells[1].write(1).unwrap();
        requests.memory.store_request(VcpuId(0), 1000);
        (0..3).for_each(|_| requests.look(&device));
        assert_eq!(answer_all(), [None; 2]);
        requests.all.carry_out();
        assert_eq!(answer_all(), [Some(1000), Some(500)]);
    }

    #[test]
    fn a_request_of_replaced_memory_is_found_at_the_second_look() {
        let device = fake_device(1, NullActuator);
        let memory = Arc::new(SharedMemory::new(1).unwrap());
        let bell = || EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let all = AllVcpus::new().unwrap();
        let queue = ShmRequests::new(memory.clone(), [bell()].into(), all, Arc::new(Silent));
        let look = || {
            queue.looks().next = Instant::now();
            queue.finish(&device);
            requests(&device)
        };
        let store = |khz| memory.words()[SET_PERF].store(khz, Relaxed);
        store(2);
        assert_eq!([look(), look(), look()], [vec![], vec![2], vec![2]]);
        queue.finish(&device);
        store(1);
        assert_eq!(look(), [2]);
        queue.bells[0].write(1).unwrap();
        queue.drain_one(0, &*device);
        assert_eq!([look(), look(), look()], [[2, 1]; 3]);
        // Withdrawn.
        store(0);
        look();
        assert_eq!(look(), [2, 1, 0]);
    }

    /// Counts what it is told.
    #[derive(Debug, Default)]
    struct Told(AtomicU32);

    impl Embedder for Told {
        fn warn(&self, _: &str) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    /// Memory of a snapshot of another host's is named once, however often a guest makes it so.
    #[test]
    fn a_guest_of_another_host_is_named_once() {
        let (_, device) = rung();
        let spec = |khz| VcpuSpec {
            table: PerfTable::try_from(vec![Khz(khz)]).unwrap(),
            capacity: Util::MAX,
            domain: DomainId(0),
        };
        let config = |khz| DeviceConfig::new(vec![spec(khz)]);
        let memory = Arc::new(SharedMemory::create(&config(500)).unwrap());
        let (all, told) = (AllVcpus::new().unwrap(), Arc::new(Told::default()));
        let bells: Arc<[EventFd]> = [].into();
        let requests = ShmRequests::new(memory.clone(), bells, all, told.clone());
        let other = SharedMemory::create(&config(700)).unwrap();
        let look = |there: Option<&SharedMemory>| {
            for (to, from) in memory
                .words()
                .iter()
                .zip(there.iter().flat_map(|m| m.words()))
            {
                to.store(from.load(Relaxed), Relaxed);
            }
            requests.look(&device);
            told.0.load(Relaxed)
        };
        let blank = SharedMemory::new(1).unwrap();
        assert_eq!([look(None), look(Some(&blank)), look(None)], [0; 3]);
        assert_eq!([look(Some(&other)), look(None), look(Some(&other))], [1; 3]);
    }

    #[test]
    fn a_guest_that_goes_on_reads_this_hosts_facts_at_once() {
        let (requests, device) = served_in_ram();
        let facts = || {
            let page = requests.memory.words();
            [2, 4, 5].map(|word: usize| page[word].load(Relaxed))
        };
        let ours = facts();
        let words = requests.memory.words().iter();
        words.for_each(|word| word.store(700, Relaxed));
        requests.all.carry_out();
        requests.drain_one(0, &device);
        assert_eq!(facts(), ours);
    }

    /// A guest's own RAM, with pages at its end.
    fn in_ram(config: &DeviceConfig) -> Arc<SharedMemory> {
        let file = sealed_memory(1 << 20).unwrap();
        let memory = SharedMemory::in_guest_ram(file, 0xf_0000, 2).unwrap();
        memory.start_anew(config);
        Arc::new(memory)
    }

    /// A device of two domains whose registers are there, and its requests.
    fn served_in_ram() -> (
        ShmRequests,
        Device<RecordingActuator, FixedSource, NoEvents>,
    ) {
        let config = rung().1.config().clone().without_steps();
        let memory = in_ram(&config);
        let (actuator, source) = (RecordingActuator::default(), FixedSource::default());
        let device = Device::new(config, actuator, source, NoEvents).unwrap();
        let pages = RegisterPages::new(Box::new(memory.clone()), 2).unwrap();
        device.attach_pages(pages).unwrap();
        let all = AllVcpus::new().unwrap();
        let requests = ShmRequests::new(memory, [].into(), all, Arc::new(Silent));
        (requests, device)
    }

    #[test]
    fn a_store_to_ram_is_read_at_the_next_turn() {
        let (requests, device) = served_in_ram();
        let turn = |khz| {
            requests.memory.store_request(VcpuId(1), khz);
            let found = requests.finish(&device);
            let status = device.domain_status(VcpuId(1)).unwrap();
            (found, status.requested.map(|khz| khz.0))
        };
        assert_eq!(turn(0), (false, None));
        assert_eq!(turn(700), (true, Some(700)));
        assert_eq!(turn(700), (false, Some(700)));
        requests.all.withdraw();
        requests.drain_one(0, &device);
        assert_eq!(turn(800), (false, None), "paused");
        requests.all.carry_out();
        requests.drain_one(0, &device);
        assert_eq!(turn(800), (false, Some(800)));
        assert_eq!(turn(0), (true, None));
    }

    #[test]
    fn a_request_in_ram_of_a_dead_workers_is_carried_out() {
        let (requests, device) = served_in_ram();
        let config = device.config().clone();
        let panics = Device::new(config, Panics, FixedSource::default(), NoEvents).unwrap();
        requests.memory.store_request(VcpuId(1), 700);
        let worker = || requests.finish(&panics);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(worker)).is_err());
        requests.drain(&device);
        assert_eq!(device.actuator().applied()[0].0, DomainId(1));
    }

    /// Whatever a guest makes of its pages, and whenever: a clamp is at most its vCPU's, and what the
    /// server says there is there again.
    #[test]
    fn any_bytes_in_ram_are_requests_within_the_limits() {
        let (requests, device) = served_in_ram();
        let most = device.config().vcpus[0].capacity;
        let mut seed = 1_u32;
        let mut any = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let kinds = [0, 1, 999, 1000, 1001, u32::MAX, 0xf000_0001, 1 << 28];
            kinds.get(seed as usize >> 28).copied().unwrap_or(seed)
        };
        for _ in 0..2_000 {
            let words = requests.memory.words().iter();
            words.for_each(|word| word.store(any(), Relaxed));
            requests.finish(&device);
            requests.look(&device);
            for vcpu in [VcpuId(0), VcpuId(1)] {
                let page = &requests.memory.words()[0x400 * vcpu.index()..][..6];
                let page: Vec<_> = page.iter().map(|word| word.load(Relaxed)).collect();
                assert_eq!([page[2], page[4], page[5]], [1, 1000, vcpu.0.into()]);
                let requested = device.domain_status(vcpu).unwrap().requested;
                assert_eq!(requested.map_or(0, |khz| khz.0), page[1].min(SET_PERF_KHZ));
            }
        }
        let applied = device.actuator().applied();
        assert!(applied.len() > 1_000, "{}", applied.len());
        let clamps = applied.iter().map(|(_, clamp)| clamp);
        assert!(
            clamps
                .clone()
                .all(|clamp| clamp.min <= most && clamp.max == Util::MAX)
        );
    }

    #[test]
    fn a_doorbell_that_is_made_to_wait_is_not_waited_for() {
        let bell = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        bell.write(3).unwrap();
        // SAFETY: takes an open file; the flags are none.
        let set = unsafe { libc::fcntl(bell.as_raw_fd(), libc::F_SETFL, 0) };
        assert_eq!(set, 0);
        assert_eq!(rings(&bell), Some(3));
        assert_eq!(rings(&bell), None);
    }
}
