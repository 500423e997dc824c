// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of a server's shared memory. A doorbell carries the newest request. The guest reads the
//! source's values. The server takes nothing that a guest stores for its own.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::thread::sleep;
use std::time::{Duration, Instant};

use vcpufreq_bridge::shm::{SHM, SharedMemory, ShmBackend, hand_over};
use vcpufreq_bridge::{AccessPath, Bridge, BridgeConfig, EventStats, Offered, Silent, Totals};
use vcpufreq_device::*;
use vcpufreq_host::fakes::FakeHost;
use vcpufreq_host::{ActuatorKind, HostActuator, KernelTree, SysfsSource, Tid};
use vm_memory::{FileOffset, MmapRegion};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Ends a test that would hang. No test waits for it.
const PATIENCE: Duration = Duration::from_secs(600);
/// No test lasts as long: only doorbells announce requests.
const NEVER: Duration = Duration::from_secs(24 * 3600);
const PID: u32 = 4242;
const LITTLE: usize = 0x1000;
const BIG: usize = 0x2000;
const CUR_PERF: usize = 0;
const SET_PERF: usize = 4;
const PERFTBL: usize = 0x200;

/// A server with two vCPUs, and what its VMM has of it.
struct Scene {
    host: FakeHost,
    bridge: Bridge,
    memory: MmapRegion,
    bells: Vec<File>,
}

impl Scene {
    fn new(rate_limit: Option<RateLimit>) -> Self {
        let host = FakeHost::empty();
        host.write("sys/devices/system/cpu/possible", "0-1\n");
        for (cpu, capacity, khz) in [(0, 329, 1_800_000), (1, 1024, 2_800_000)] {
            let dir = format!("sys/devices/system/cpu/cpu{cpu}");
            host.write(&format!("{dir}/cpu_capacity"), capacity.to_string());
            for file in ["cpuinfo_max_freq", "scaling_cur_freq"] {
                host.write(&format!("{dir}/cpufreq/{file}"), khz.to_string());
            }
            let stat = format!("9 (CPU {cpu}/KVM) {}{cpu} 0\n", "0 ".repeat(36));
            host.write(&format!("proc/{PID}/task/{}/stat", 90 + cpu), stat);
        }
        let spec = |top, capacity, domain| VcpuSpec {
            table: PerfTable::try_from(vec![Khz(600_000), Khz(top)]).unwrap(),
            capacity: Util::new(capacity).unwrap(),
            domain: DomainId(domain),
        };
        let config = DeviceConfig {
            rate_limit,
            ..DeviceConfig::new(vec![spec(1_800_000, 329, 0), spec(2_800_000, 1024, 1)])
        };
        let memory = Arc::new(SharedMemory::new(2).unwrap());
        for (vcpu, spec) in (0..).map(VcpuId).zip(&config.vcpus) {
            memory.describe(vcpu, spec, spec.capacity, &[]);
        }
        let domains = config.domains();
        let nothing = HostActuator::build(&ActuatorKind::Nothing, &KernelTree, &domains).unwrap();
        let source = SysfsSource::new(&host.root(), 2).unwrap().for_process(PID);
        let stats = Arc::new(EventStats::new(2, None));
        let device = Device::new(config, nothing, Arc::new(source), stats).unwrap();
        let bells = || EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let bells: Arc<[EventFd]> = [bells(), bells()].into();
        let backend = ShmBackend::new(memory.clone(), bells.clone()).unwrap();
        let backend = backend.looking_every(NEVER);
        let offered = Offered {
            backend: Box::new(backend),
            required: Some("no server".to_owned()),
        };
        let config = BridgeConfig::new(0, 2, Arc::new(Silent));
        let bridge = Bridge::start(device, &config, &[offered]).unwrap();
        let (server, vmm) = UnixStream::pair().unwrap();
        hand_over(&server, &memory, &bells, PATIENCE).unwrap();
        drop(server);
        let (memory, bells) = connect(&vmm);
        Self {
            host,
            bridge,
            memory,
            bells,
        }
    }

    /// The vCPUs' threads have started.
    fn with_threads(self) -> Self {
        for vcpu in 0..2 {
            let tid = Tid::new(90 + i32::from(vcpu)).unwrap();
            self.bridge
                .handle()
                .register_thread(VcpuId(vcpu), tid)
                .unwrap();
        }
        self
    }

    #[expect(unsafe_code, reason = "a guest's words are atomics")]
    fn word(&self, byte: usize) -> &AtomicU32 {
        assert!(byte + 4 <= self.memory.size());
        // SAFETY: the word is in the mapping, which the scene keeps; all its users use atomics.
        unsafe { AtomicU32::from_ptr(self.memory.as_ptr().wrapping_add(byte).cast()) }
    }

    fn ring(&self, vcpu: usize) {
        let ring = 1_u64.to_ne_bytes();
        (&self.bells[vcpu]).write_all(&ring).unwrap();
    }

    fn requested(&self, vcpu: usize) -> Option<Khz> {
        self.bridge.handle().snapshot().vcpus[vcpu].request
    }
}

/// What QEMU makes of what it is sent.
fn connect(vmm: &UnixStream) -> (MmapRegion, Vec<File>) {
    let (mut memory, mut bells) = (None, Vec::new());
    loop {
        let mut number = [0; 8];
        let (len, file) = vmm.recv_with_fd(&mut number).unwrap();
        match (len, i64::from_le_bytes(number), file) {
            (0, ..) => return (memory.unwrap(), bells),
            (_, -1, Some(file)) => {
                let size = usize::try_from(file.metadata().unwrap().len()).unwrap();
                let whole = FileOffset::new(file, 0);
                memory = Some(MmapRegion::from_file(whole, size).unwrap());
            }
            (_, 1, Some(file)) => bells.push(file),
            _ => {}
        }
    }
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "{what}");
        sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_ring_carries_the_newest_request_of_its_vcpu() {
    let scene = Scene::new(None).with_threads();
    assert_eq!(scene.requested(1), None);
    scene.word(LITTLE + SET_PERF).store(1, Relaxed);
    for khz in [600_000, 2_800_000] {
        scene.word(BIG + SET_PERF).store(khz, Relaxed);
        scene.ring(1);
    }
    eventually("the request", || scene.requested(1) == Some(Khz(2_800_000)));
    assert_eq!(scene.requested(0), None, "vCPU 0 hasn't rung");
    let snapshot = scene.bridge.handle().snapshot();
    assert_eq!(snapshot.vcpus[1].path, AccessPath::Backend(SHM));
    let Totals { counters, .. } = scene.bridge.stop();
    assert_eq!(counters.requests, 2, "one of them may be coalesced");
}

#[test]
fn a_guest_reads_its_frequency_and_its_table() {
    let scene = Scene::new(None).with_threads();
    let table = [0, 4].map(|entry| scene.word(BIG + PERFTBL + entry).load(Relaxed));
    assert_eq!(table, [600_000, 2_800_000]);
    for khz in [700_000, 1_400_000] {
        let file = "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq";
        scene.host.write(file, khz.to_string());
        let cur_perf = scene.word(BIG + CUR_PERF);
        eventually("cur_perf", || cur_perf.load(Relaxed) == khz);
    }
    let _ = scene.bridge.stop();
}

/// Whatever a guest stores, what the server shows in `stats`, and clamps by, is its own.
#[test]
fn a_guest_that_scribbles_changes_its_own_requests_alone() {
    let limit = RateLimit {
        per_second: 1000.try_into().unwrap(),
        burst: 100.try_into().unwrap(),
    };
    let scene = Scene::new(Some(limit)).with_threads();
    let mut value = 0x1234_5678_u32;
    for _ in 0..20 {
        for byte in (0..scene.memory.size()).step_by(4) {
            value = value.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            scene.word(byte).store(value, Relaxed);
        }
        for vcpu in [0, 1] {
            scene.ring(vcpu);
        }
    }
    eventually("its requests", || {
        scene.requested(0).is_some() && scene.requested(1).is_some()
    });
    let vcpus = scene.bridge.handle().snapshot().vcpus;
    for (vcpu, capacity) in [(0, 329), (1, 1024)] {
        assert!(
            vcpus[vcpu].clamp.min <= Util::new(capacity).unwrap(),
            "vCPU {vcpu}"
        );
    }
    assert_eq!(vcpus[1].cur_perf, Khz(2_800_000));
    eventually("cur_perf again", || {
        scene.host.write(
            "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq",
            "1000000",
        );
        scene.word(BIG + CUR_PERF).load(Relaxed) == 1_000_000
    });
    let _ = scene.bridge.stop();
}
