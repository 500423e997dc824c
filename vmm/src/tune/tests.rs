// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises, on a directory that stands for the host: a call's floor and ceiling are in the domain's
//! cgroup; they go with their time, with a call, and with the client's connection, and others' stay. A
//! call that isn't one changes nothing and has one line. A process that wants too much, or sends without
//! an end, harms itself alone, over however many connections. Another user sets nothing. What the host
//! refuses is no tuning, and an end that it refuses is tried again.

use std::{
    fmt::Debug,
    fs,
    io::{self, BufRead as _, BufReader, Write as _},
    os::unix::{
        fs::{PermissionsExt as _, symlink},
        net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU16, Ordering::SeqCst},
    },
    time::Duration,
};

use tempfile::TempDir;
use vcpufreq_bridge::{Bridge, BridgeConfig, BridgeDevice, EventStats, Silent};
use vcpufreq_device::{
    Clamp, Device, DeviceConfig, DomainId, Khz, PerfTable, Util, VcpuId, VcpuSpec,
};
use vcpufreq_host::{
    ActuatorKind, CgroupTree, HostActuator, HostRoot, Placement, SysfsSource, Tid, fakes::DirTree,
};

use super::{
    client::TuneConnection,
    server::start_taking_calls,
    wire::{Lasts, TuneAnswer, TuneReply, TuneVerb},
};
use crate::{
    as_other::{as_user, connected_by_another},
    patience::patience,
    socket_thread::SocketThread,
};

const MOUNTS: &str = "\
22 1 0:20 / /proc rw - proc proc rw
30 22 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate
";
const LONG: u64 = 3_600_000;
const FLOOR: TuneVerb = TuneVerb::Tune {
    vcpu: 1,
    floor_khz: Some(512),
    ceiling_khz: None,
    for_ms: LONG,
};

/// A bridge of two vCPUs in a domain each, and what takes calls for it.
struct TuneScene {
    dir: TempDir,
    bridge: Bridge,
    server: SocketThread,
}

/// Its domains' maximum takes no other value than the one that it has.
#[derive(Default)]
struct FullTree(DirTree);

impl CgroupTree for FullTree {
    fn make(&self, dir: &Path) -> io::Result<()> {
        self.0.make(dir)?;
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        if !name.starts_with("domain") {
            return Ok(());
        }
        let max = dir.join("cpu.uclamp.max");
        fs::remove_file(&max)?;
        symlink("/dev/full", max)
    }

    fn remove(&self, dir: &Path) -> io::Result<()> {
        self.0.remove(dir)
    }
}

impl TuneScene {
    fn new() -> Self {
        Self::on(&DirTree::default(), |_| ())
    }

    /// Its host refuses clamps as long as that is true.
    fn that_refuses(refuses: &Arc<AtomicBool>) -> Self {
        let refuses = refuses.clone();
        let last_min = AtomicU16::new(0);
        Self::on(&FullTree::default(), move |actuator| {
            actuator.add_to_clamps(move |_, clamp| match refuses.load(SeqCst) {
                true => Clamp {
                    min: Util::saturating(last_min.load(SeqCst).into()),
                    max: Util::saturating(1000),
                },
                false => {
                    last_min.store(clamp.min.get(), SeqCst);
                    clamp
                }
            });
        })
    }

    fn on(tree: &dyn CgroupTree, prepare: impl FnOnce(&HostActuator)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let groups = dir.path().join("sys/fs/cgroup");
        for (path, text) in [
            ("proc/self/mountinfo", MOUNTS),
            ("proc/self/cgroup", "0::/unit\n"),
            ("sys/devices/system/cpu/possible", "0-1\n"),
            (
                "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq",
                "1024\n",
            ),
            (
                "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq",
                "1024\n",
            ),
        ] {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        fs::create_dir_all(groups.parent().unwrap()).unwrap();
        tree.make(&groups).unwrap();
        fs::remove_file(groups.join("cgroup.type")).unwrap();
        tree.make(&groups.join("unit")).unwrap();
        let root = HostRoot::at(dir.path());
        let place = Placement::find(&root, Some(Path::new("/sys/fs/cgroup"))).unwrap();
        let domains = [DomainId(0), DomainId(1)];
        let actuator = HostActuator::build(&ActuatorKind::Cgroup(place), tree, &domains).unwrap();
        prepare(&actuator);
        for vcpu in [0, 1].map(VcpuId) {
            // Without uclamp, taking the thread's own clamp away fails, but only that.
            let _ = actuator.register_thread(vcpu, Tid::current());
        }
        let spec = |domain| VcpuSpec {
            table: PerfTable::try_from(vec![Khz(256), Khz(512), Khz(1024)]).unwrap(),
            capacity: Util::MAX,
            domain,
        };
        let config = DeviceConfig::new(domains.map(spec).into());
        let source = Arc::new(SysfsSource::new(&root, 2).unwrap());
        let stats = Arc::new(EventStats::new(2, None));
        let device: BridgeDevice = Device::new(config, actuator, source, stats).unwrap();
        let bridge =
            Bridge::start(device, &BridgeConfig::new(0, 2, Arc::new(Silent)), &[]).unwrap();
        let path = dir.path().join("42.tune");
        let server = start_taking_calls(&path, None, bridge.handle()).unwrap();
        Self {
            dir,
            bridge,
            server,
        }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("42.tune")
    }

    fn client(&self) -> TuneCaller {
        TuneCaller::new(UnixStream::connect(self.socket()).unwrap())
    }

    /// So many clients of another process, which is another one each time.
    fn others(&self, count: usize) -> Vec<TuneCaller> {
        let streams = connected_by_another(&self.socket(), count);
        streams.into_iter().map(TuneCaller::new).collect()
    }

    /// The clamp in the group of a domain, of 1024.
    fn clamp(&self, domain: u32) -> [u32; 2] {
        ["cpu.uclamp.min", "cpu.uclamp.max"].map(|name| self.value(domain, name))
    }

    fn value(&self, domain: u32, name: &str) -> u32 {
        let group = group(&self.dir.path().join("sys/fs/cgroup"), domain);
        let text = fs::read_to_string(group.join(name)).unwrap();
        match text.trim() {
            "max" => 1024,
            percent => {
                let hundredths: String = percent.chars().filter(|c| *c != '.').collect();
                let hundredths: u32 = hundredths.trim().parse().unwrap();
                (hundredths * 1024 + 5_000) / 10_000
            }
        }
    }

    /// The same of its minimum alone.
    fn floor(&self, domain: u32) -> u32 {
        self.value(domain, "cpu.uclamp.min")
    }

    /// Waits for a clamp, which another thread sets.
    fn becomes(&self, domain: u32, clamp: [u32; 2]) {
        awaited(|| self.clamp(domain), clamp);
    }

    fn end(self) {
        self.server.stop();
        let _ = self.bridge.stop();
    }
}

fn awaited<T: PartialEq + Debug>(now: impl Fn() -> T, value: T) {
    // What takes longer than ten minutes hangs.
    for _ in 0..60_000 {
        if now() == value {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{:?} and not {value:?}", now());
}

fn group(groups: &Path, domain: u32) -> PathBuf {
    let own = format!("vcpufreq.{}", std::process::id());
    let mut all = vec![groups.join(own)];
    // The group of a domain may be in one of the VM's.
    while let Some(dir) = all.pop() {
        if dir.ends_with(format!("domain{domain}")) {
            return dir;
        }
        let entries = fs::read_dir(&dir)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        all.extend(entries.filter(|path| path.is_dir()));
    }
    panic!("no group of domain {domain}");
}

struct TuneCaller(BufReader<UnixStream>);

impl TuneCaller {
    fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(patience(60))).unwrap();
        Self(BufReader::new(stream))
    }

    fn send(&mut self, line: &str) {
        self.0.get_mut().write_all(line.as_bytes()).unwrap();
    }

    /// Why a call is refused, or the connection.
    fn refusal(&mut self) -> String {
        match self.answer() {
            TuneAnswer::Error(why) => why,
            taken => panic!("{taken:?}"),
        }
    }

    fn answer(&mut self) -> TuneAnswer {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str::<TuneReply>(&line).expect(&line).reply
    }

    fn call(&mut self, call: TuneVerb) -> TuneAnswer {
        self.send(&call.line().unwrap());
        self.answer()
    }

    fn tune(&mut self, floor_khz: Option<u32>, ceiling_khz: Option<u32>, for_ms: u64) -> u64 {
        let answer = self.call(TuneVerb::Tune {
            vcpu: 1,
            floor_khz,
            ceiling_khz,
            for_ms,
        });
        let TuneAnswer::Handle(handle) = answer else {
            panic!("{answer:?}");
        };
        handle
    }
}

#[test]
fn floors_and_ceilings_aggregate_with_the_guests_request_and_end_with_their_clients() {
    let scene = TuneScene::new();
    let (mut one, mut other) = (scene.client(), scene.client());
    let first = one.tune(Some(512), None, LONG);
    assert_eq!(scene.clamp(1), [512, 1024]);
    assert_eq!(scene.clamp(0), [0, 1024], "of another domain");
    // Its request is below the floor, then above it.
    let device = scene.bridge.mmio();
    let set_perf = 0x1000 + 4;
    for (khz, min) in [(256_u32, 512), (1024, 1024), (0, 512)] {
        device.write(set_perf, &khz.to_le_bytes());
        assert_eq!(scene.clamp(1), [min, 1024], "{khz}");
    }
    assert!(other.tune(Some(600), Some(800), LONG) > first);
    assert_eq!(scene.clamp(1), [600, 800]);
    device.write(set_perf, &1024_u32.to_le_bytes());
    assert_eq!(scene.clamp(1), [800, 800]);
    drop(other);
    scene.becomes(1, [1024, 1024]);
    device.write(set_perf, &0_u32.to_le_bytes());
    assert_eq!(scene.clamp(1), [512, 1024]);
    drop(one);
    scene.becomes(1, [0, 1024]);
    scene.end();
}

#[test]
fn what_the_host_refuses_is_no_tuning() {
    let refuses = Arc::new(AtomicBool::new(true));
    let scene = TuneScene::that_refuses(&refuses);
    let mut client = scene.client();
    let TuneAnswer::Error(why) = client.call(FLOOR) else {
        panic!("it is tuned");
    };
    let said = "nothing is tuned: the host refused a write of cpu.uclamp.max";
    assert!(why.starts_with(said), "{why}");
    assert_eq!(scene.bridge.handle().tunings(), []);
    refuses.store(false, SeqCst);
    client.tune(Some(512), None, LONG);
    assert_eq!(scene.floor(1), 512);
    scene.end();
}

#[test]
fn an_end_that_the_host_refuses_is_tried_again_without_the_guest() {
    let refuses = Arc::new(AtomicBool::new(false));
    let scene = TuneScene::that_refuses(&refuses);
    let mut client = scene.client();
    let handle = client.tune(Some(512), None, LONG);
    assert_eq!(scene.floor(1), 512);
    refuses.store(true, SeqCst);
    let ended = client.call(TuneVerb::Untune { handle });
    assert_eq!(ended, TuneAnswer::Handle(handle));
    assert_eq!((scene.floor(1), scene.floor(0)), (512, 0));
    refuses.store(false, SeqCst);
    awaited(|| scene.floor(1), 0);
    scene.end();
}

#[test]
fn a_tuning_ends_with_its_time_or_by_any_clients_call() {
    let scene = TuneScene::new();
    let (mut one, mut other) = (scene.client(), scene.client());
    let handle = one.tune(Some(512), None, 1);
    assert_eq!(one.answer(), TuneAnswer::Ended(handle));
    assert_eq!(scene.clamp(1), [0, 1024]);
    let handle = one.tune(None, Some(512), LONG / 2);
    let for_ms = LONG;
    let longer = other.call(TuneVerb::Retune { handle, for_ms });
    assert_eq!(longer, TuneAnswer::Handle(handle));
    let left = scene.bridge.handle().tunings()[0].until_ns - vcpufreq_host::monotonic_ns();
    assert!(left > 3_000_000_000_000, "{left}");
    assert_eq!(scene.clamp(1), [0, 512]);
    let ended = other.call(TuneVerb::Untune { handle });
    assert_eq!(ended, TuneAnswer::Handle(handle));
    assert_eq!(one.answer(), TuneAnswer::Ended(handle));
    assert_eq!(scene.clamp(1), [0, 1024]);
    scene.end();
}

#[test]
fn what_is_no_call_changes_nothing_and_has_one_line() {
    let scene = TuneScene::new();
    let tune = |fields: &str| format!("{{\"version\":1,\"call\":{{\"tune\":{{{fields}}}}}}}");
    let rows = [
        ("{}".to_owned(), "version 1 alone"),
        ("x".to_owned(), "no call"),
        (tune("\"vcpu\":1").replace(":1,", ":2,"), "version 1 alone"),
        (tune("\"vcpu\":1"), "tune, retune or untune"),
        (
            tune("\"vcpu\":-1,\"floor_khz\":512,\"for_ms\":1"),
            "tune, retune or",
        ),
        (tune("\"vcpu\":1,\"for_ms\":1"), "give a floor or a ceiling"),
        (
            tune("\"vcpu\":2,\"floor_khz\":512,\"for_ms\":1"),
            "no vCPU 2",
        ),
        (
            tune("\"vcpu\":1,\"floor_khz\":2000,\"for_ms\":1"),
            "give 256 kHz to 1024",
        ),
        (
            tune("\"vcpu\":1,\"floor_khz\":512,\"for_ms\":0"),
            "lasts 1 ms to",
        ),
        (
            "{\"version\":1,\"call\":{\"untune\":{\"handle\":9}}}".to_owned(),
            "no tuning 9",
        ),
        (
            "{\"version\":1,\"call\":{\"retune\":{\"handle\":9,\"for_ms\":5}}}".to_owned(),
            "no tuning 9",
        ),
    ];
    for (line, said) in rows {
        let mut client = scene.client();
        client.send(&(line.clone() + "\n"));
        let TuneAnswer::Error(why) = client.answer() else {
            panic!("{line} is taken");
        };
        assert!(why.contains(said) && !why.contains('\n'), "{line}: {why}");
    }
    assert_eq!(scene.bridge.handle().tunings(), []);
    assert_eq!(scene.clamp(1), [0, 1024]);
    scene.end();
}

#[test]
fn a_process_that_floods_harms_itself_alone() {
    let scene = TuneScene::new();
    let mut flood = scene.client();
    let handles: Vec<_> = (0..16).map(|_| flood.tune(Some(512), None, LONG)).collect();
    assert!(handles.windows(2).all(|two| two[0] < two[1]), "{handles:?}");
    // A new connection is no new client.
    let mut second = scene.client();
    for again in [&mut flood, &mut second] {
        again.send(&FLOOR.line().unwrap());
        let why = again.refusal();
        assert!(why.contains("16 tunings at once"), "{why}");
    }
    let mut endless = scene.client();
    endless.send(&" ".repeat(10_000));
    let why = endless.refusal();
    assert!(why.contains("at most 4096 bytes"), "{why}");
    let mut other = scene.others(1);
    assert!(other[0].tune(None, Some(512), LONG) > handles[15]);
    scene.end();
}

#[test]
fn a_process_that_connects_again_has_the_same_bucket() {
    let scene = TuneScene::new();
    // Two bursts within 200 ms are too many.
    let is_refused = |_| {
        let mut client = scene.client();
        client.send(&"x\n".repeat(20));
        (0..20).any(|_| client.refusal().contains("too many calls"))
    };
    assert!((0..1_000).any(is_refused));
    scene.end();
}

#[test]
fn a_process_leaves_connections_to_others() {
    let scene = TuneScene::new();
    let mut clients: Vec<_> = (0..17).map(|_| scene.client()).collect();
    let why = clients[16].refusal();
    assert!(why.contains("16 connections at once"), "{why}");
    // One that is closed makes room.
    drop(clients.swap_remove(0));
    clients[0] = scene.client();
    clients[0].tune(Some(512), None, LONG);
    let mut others: Vec<_> = (0..7).flat_map(|_| scene.others(16)).collect();
    others[111].tune(Some(512), None, LONG);
    let why = scene.others(1)[0].refusal();
    assert!(why.contains("128 clients"), "{why}");
    scene.end();
}

#[test]
fn another_user_sets_nothing() {
    let scene = TuneScene::new();
    // What keeps others off is neither directory nor socket.
    for (path, mode) in [(scene.dir.path(), 0o755), (&scene.socket(), 0o777)] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let called = as_user(65534, || {
        TuneConnection::at(&scene.socket(), patience(60))?.call(FLOOR)
    });
    match called {
        Ok(called) => {
            let line = called.unwrap_err().to_string();
            assert!(line.contains("calls of") && !line.contains('\n'), "{line}");
        }
        Err(error) => println!("SKIP: only root can be another user: {error}"),
    }
    assert_eq!(scene.bridge.handle().tunings(), []);
    scene.end();
}

#[test]
fn a_time_is_written_with_its_unit() {
    let rows = [("200ms", 200), ("5s", 5_000)];
    for (text, ms) in rows {
        assert_eq!(text.parse(), Ok(Lasts(Duration::from_millis(ms))));
    }
    for text in ["", "5", "ms", "s", "-1s", "1m", "5 s", "99999999999s"] {
        let line = text.parse::<Lasts>().unwrap_err();
        assert!(line.contains("write 200ms or 5s"), "{line}");
    }
}

#[test]
fn a_reset_of_the_guest_leaves_it_in_force() {
    let scene = TuneScene::new();
    let mut client = scene.client();
    client.tune(None, Some(512), LONG);
    let handle = scene.bridge.handle();
    assert_eq!(handle.snapshot().vcpus[1].clamp.max.get(), 512);
    assert_eq!(handle.snapshot().tunings.len(), 1);
    handle.reset();
    assert_eq!(scene.clamp(1), [0, 512], "a reset keeps it");
    scene.end();
}
