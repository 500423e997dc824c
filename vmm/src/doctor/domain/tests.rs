// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: a domain as a real-time user of libvirt should write it has no finding. Each line of it
//! that is missing or wrong has one, with the line to write instead. In a domain without real-time
//! vCPUs that is `n/a`. No text makes this panic.

use proptest::prelude::*;
use vcpufreq_host::fakes::FakeHost;
use vcpufreq_rt::{Partition, PartitionGuest, Profile, Record};

use super::*;
use crate::doctor::{Level, text};

/// Two vCPUs, of which the second is real-time on CPU 3.
const GOOD: &str = include_str!("../../../docs/examples/libvirt-rt.xml");
const OPTIONS: &str = include_str!("../../../docs/examples/serve-rt.toml");
const OPTIONS_FILE: &str = "etc/vcpufreq/NAME.toml";

/// A host on which [`GOOD`] has no finding.
fn host() -> FakeHost {
    let host = FakeHost::two_plus_two();
    host.write("sys/devices/system/cpu/isolated", "3\n");
    host.write("var/lib/libvirt/guest.dtb.base", "");
    host.write(OPTIONS_FILE, OPTIONS);
    host
}

/// For a guest with CPU 3, without a cpuset.
fn record() -> Record {
    Record {
        boot_id: "boot".to_owned(),
        profile_name: "mine".to_owned(),
        profile: Profile::default(),
        partition: Partition {
            guests: vec![PartitionGuest {
                name: "plc".to_owned(),
                cpus: "3".parse().unwrap(),
            }],
            housekeeping: "0-2".parse().unwrap(),
        },
        owner: None,
        entries: Vec::new(),
    }
}

fn around(host: &FakeHost, xml: &DomainXml, record: Option<Record>) -> AroundDomain {
    let around = AroundDomain::read(&host.root(), "aarch64", &xml.name, xml.dtb.as_deref());
    AroundDomain {
        applied: Ok(record),
        ..around
    }
}

/// The findings of this domain on such a host that aren't good.
fn bad(host: &FakeHost, xml: &str, record: Option<Record>) -> Vec<DoctorFinding> {
    let xml = DomainXml::parse(xml).unwrap();
    let found = findings(&xml, &around(host, &xml, record));
    for finding in &found {
        let is_good = finding.level == Level::Good;
        assert_eq!(is_good, finding.change.is_none(), "{finding:?}");
        assert!(finding.subject.len() <= 14, "{finding:?}");
    }
    found
        .into_iter()
        .filter(|finding| finding.level != Level::Good)
        .collect()
}

/// [`GOOD`] with something else in a place.
fn with(old: &str, new: &str) -> String {
    assert_eq!(GOOD.matches(old).count(), 1, "{old}");
    GOOD.replace(old, new)
}

#[test]
fn a_domain_that_is_right_has_no_finding() {
    let found = bad(&host(), GOOD, Some(record()));
    assert!(found.is_empty(), "{}", text(&found));
}

/// What is there, what in its place, and the finding: how bad, about what, a part of its change.
type WrongLine = (
    &'static str,
    &'static str,
    Level,
    &'static str,
    &'static str,
);

const ROWS: &[WrongLine] = &[
    (
        "type='kvm'",
        "type='qemu'",
        Level::Limit,
        "type",
        "<domain type='kvm'>",
    ),
    (
        "type='kvm'",
        "type='xen'",
        Level::Blocker,
        "type",
        "<domain type='kvm'>",
    ),
    (
        "    <vcpusched vcpus='1' scheduler='fifo' priority='1'/>\n",
        "    <vcpusched vcpus='1' scheduler='rr' priority='1'/>\n",
        Level::Blocker,
        "vcpusched",
        "<vcpusched vcpus='1' scheduler='fifo' priority='1'/>",
    ),
    (
        "<vcpupin vcpu='1' cpuset='3'/>",
        "",
        Level::Limit,
        "vcpupin",
        "<vcpupin vcpu='1' cpuset='3'/>",
    ),
    (
        "<vcpupin vcpu='0' cpuset='1'/>",
        "<vcpupin vcpu='0' cpuset='2'/>",
        Level::Limit,
        "vcpupin",
        "<vcpupin vcpu='0' cpuset='1'/>",
    ),
    (
        "<vcpupin vcpu='0' cpuset='1'/>",
        "",
        Level::Absent,
        "vcpupin",
        "<vcpupin vcpu='0' cpuset='1'/>",
    ),
    (
        "<emulatorpin cpuset='0'/>",
        "",
        Level::Limit,
        "emulatorpin",
        "<emulatorpin cpuset='0-2'/>",
    ),
    (
        "<emulatorpin cpuset='0'",
        "<emulatorpin cpuset='2-3'",
        Level::Limit,
        "emulatorpin",
        "<emulatorpin cpuset='0-2'/>",
    ),
    (
        "<emulatorpin cpuset='0'",
        "<emulatorpin cpuset='3'",
        Level::Blocker,
        "emulatorpin",
        "<emulatorpin cpuset='0-2'/>",
    ),
    (
        "<iothreadpin iothread='1' cpuset='0'/>",
        "",
        Level::Limit,
        "iothreadpin",
        "<iothreadpin iothread='1' cpuset='0-2'/>",
    ),
    (
        "<iothreads>1</iothreads>",
        "<iothreads>2</iothreads><iothreadids><iothread id='4'/><iothread id='1'/></iothreadids>",
        Level::Limit,
        "iothreadpin",
        "<iothreadpin iothread='4' cpuset='0-2'/>",
    ),
    (
        "<emulatorpin",
        "<quota>-1</quota><emulator_quota>20000</emulator_quota><emulatorpin",
        Level::Limit,
        "quota",
        "<emulator_quota>-1</emulator_quota>",
    ),
    (
        "<locked/>",
        "",
        Level::Blocker,
        "locked",
        "<memoryBacking><locked/></memoryBacking>",
    ),
    (
        "<hugepages/>",
        "",
        Level::Limit,
        "hugepages",
        "<memoryBacking><hugepages/></memoryBacking>",
    ),
    (
        "<memballoon model='none'/>",
        "<memballoon model='virtio'/>",
        Level::Limit,
        "memballoon",
        "<memballoon model='none'/>",
    ),
    (
        "<memballoon model='none'/>",
        "",
        Level::Limit,
        "memballoon",
        "<memballoon model='none'/>",
    ),
    (
        "host-passthrough",
        "host-model",
        Level::Limit,
        "cpu mode",
        "<cpu mode='host-passthrough'/>",
    ),
    (
        "<cpu mode='host-passthrough'/>",
        "",
        Level::Limit,
        "cpu mode",
        "<cpu mode='host-passthrough'/>",
    ),
    (
        "<pmu state='off'/>",
        "",
        Level::Limit,
        "pmu",
        "<features><pmu state='off'/></features>",
    ),
    (
        "<devices>",
        "<clock offset='utc'><timer name='hpet'/><timer name='pit' present='no'/></clock><devices>",
        Level::Limit,
        "timer",
        "<timer name='hpet' present='no'/>",
    ),
    (
        "<devices>",
        "<clock offset='utc'><timer name='rtc' tickpolicy='catchup'/></clock><devices>",
        Level::Limit,
        "timer",
        "<timer name='rtc' tickpolicy='delay'/>",
    ),
    (
        "<shmem name='vcpufreq' role='master'>",
        "<shmem name='another'>",
        Level::Limit,
        "shmem",
        "<server path='/run/vcpufreq-NAME.sock'/><msi vectors='2' ioeventfd='on'/></shmem>",
    ),
    (
        "ivshmem-doorbell",
        "ivshmem-plain",
        Level::Blocker,
        "shmem",
        "ivshmem-doorbell",
    ),
    (
        "vectors='2' ",
        "vectors='1' ",
        Level::Limit,
        "shmem",
        "vectors='2'",
    ),
    (
        " ioeventfd='on'",
        "",
        Level::Limit,
        "shmem",
        "ioeventfd='on'",
    ),
    (
        " role='master'",
        "",
        Level::Absent,
        "shmem",
        "role='master'",
    ),
    (
        "<server path='/run/vcpufreq-NAME.sock'/>",
        "",
        Level::Blocker,
        "server",
        "<server path='/run/vcpufreq-NAME.sock'/>",
    ),
    (
        "/run/vcpufreq-NAME.sock",
        "/run/mine.sock",
        Level::Limit,
        "server",
        "<server path='/run/vcpufreq-NAME.sock'/>",
    ),
    (
        "    <dtb>/var/lib/libvirt/guest.dtb</dtb>\n",
        "",
        Level::Limit,
        "dtb",
        "<dtb>/var/lib/libvirt/guest.dtb</dtb>",
    ),
    (
        "guest.dtb",
        "none.dtb",
        Level::Blocker,
        "dtb",
        "vcpufreq dt --merge",
    ),
    (
        "value='on'",
        "value='off'",
        Level::Absent,
        "save",
        "name='master'",
    ),
];

#[test]
fn each_line_that_is_wrong_has_a_finding() {
    for (old, new, level, subject, change) in ROWS {
        let found = bad(&host(), &with(old, new), Some(record()));
        let [finding] = &found[..] else {
            panic!("{old} -> {new}: {}", text(&found));
        };
        let told = finding.change.as_deref().unwrap();
        assert_eq!(
            (finding.level, finding.subject),
            (*level, *subject),
            "{finding:?}"
        );
        assert!(told.contains(change), "{old} -> {new}: {told}");
    }
}

/// The first finding on this subject.
fn on<'a>(found: &'a [DoctorFinding], subject: &str) -> &'a DoctorFinding {
    let mut on = found.iter().filter(|finding| finding.subject == subject);
    on.next()
        .unwrap_or_else(|| panic!("{subject}: {}", text(found)))
}

#[test]
fn pins_that_no_real_time_vcpu_can_have_are_found() {
    const PIN: &str = "<vcpupin vcpu='1' cpuset='3'/>";
    for (cpus, level, said) in [
        (
            "1",
            Level::Blocker,
            "real-time vCPU 1 shares CPU 1 with vCPU 0",
        ),
        ("3,9", Level::Blocker, "CPU 9 of vCPU 1 is not online"),
        ("2,3", Level::Limit, "real-time vCPU 1 may run on CPU 2-3"),
        (
            "2",
            Level::Blocker,
            "vCPU 1: CPU 2 here, and 3 in /etc/vcpufreq/NAME.toml",
        ),
    ] {
        let xml = with(PIN, &format!("<vcpupin vcpu='1' cpuset='{cpus}'/>"));
        let found = bad(&host(), &xml, Some(record()));
        let pins = found.iter().filter(|finding| finding.subject == "vcpupin");
        let mut told = pins.filter(|finding| finding.what == said);
        assert_eq!(
            told.next().map(|told| told.level),
            Some(level),
            "{said}: {}",
            text(&found)
        );
    }
}

// What intersects, and what threads without a pin have, is accepted.
#[test]
fn a_pin_is_a_blocker_where_the_server_refuses_it() {
    const PIN: &str = "<vcpupin vcpu='1' cpuset='3'/>";
    for (cpus, emulator, level) in [
        ("2,3", "0", Level::Limit),
        ("0-3", "0", Level::Limit),
        ("2", "0", Level::Blocker),
        ("2", "2", Level::Limit),
        ("0-2", "0", Level::Limit),
    ] {
        let xml = with(PIN, &format!("<vcpupin vcpu='1' cpuset='{cpus}'/>"));
        let xml = xml.replace(
            "<emulatorpin cpuset='0'",
            &format!("<emulatorpin cpuset='{emulator}'"),
        );
        let found = bad(&host(), &xml, Some(record()));
        let what = format!("vCPU 1: CPU {} here", cpus.replace("2,3", "2-3"));
        let differs = found.iter().find(|one| one.what.starts_with(&what));
        assert_eq!(
            differs.map(|finding| finding.level),
            Some(level),
            "{cpus}: {}",
            text(&found)
        );
        // The server refuses another one.
        let pins = found.iter().filter(|one| one.subject == "vcpupin");
        let mut lines = pins.filter_map(|one| one.change.as_deref());
        assert!(
            lines.all(|line| !line.starts_with("<vcpupin vcpu='1'") || line == PIN),
            "{}",
            text(&found)
        );
    }
}

// Where libvirt lets it run on isolated CPUs, the server refuses it.
#[test]
fn an_ordinary_vcpu_without_any_pin_is_found() {
    let host = host();
    host.write(OPTIONS_FILE, OPTIONS.replace("pin = 1\n", "domain = 0\n"));
    for (isolated, level) in [("3", Level::Limit), ("", Level::Blocker)] {
        host.write("sys/devices/system/cpu/isolated", isolated);
        let xml = with("<vcpupin vcpu='0' cpuset='1'/>", "");
        let found = bad(&host, &xml, Some(record()));
        let finding = on(&found, "vcpupin");
        assert_eq!(finding.level, level, "{}", text(&found));
        assert!(finding.what.contains("vCPU 0"), "{}", text(&found));
        let line = "<vcpupin vcpu='0' cpuset='0-2'/>";
        assert_eq!(finding.change.as_deref(), Some(line));
    }
}

#[test]
fn a_pin_is_proposed_that_no_vcpu_has() {
    let host = host();
    host.remove(OPTIONS_FILE);
    let pins = [
        "<vcpupin vcpu='0' cpuset='1'/>",
        "<vcpupin vcpu='1' cpuset='3'/>",
    ];
    for (first, line) in [
        ("1", "<vcpupin vcpu='1' cpuset='3'/>"),
        ("3", "<vcpupin vcpu='1' cpuset='2'/>"),
        ("0-3", "fewer vCPUs"),
    ] {
        let first = format!("<vcpupin vcpu='0' cpuset='{first}'/>");
        let xml = with(pins[1], "").replace(pins[0], &first);
        let found = bad(&host, &xml, Some(record()));
        let change = on(&found, "vcpupin").change.clone().unwrap();
        assert!(change.contains(line), "{line}: {change}");
    }
    // Real-time vCPUs first.
    let found = bad(
        &host,
        &with(pins[1], "").replace(pins[0], ""),
        Some(record()),
    );
    let finding = on(&found, "vcpupin");
    assert_eq!(finding.what, "vCPU 0-1 has none");
    assert_eq!(finding.change.as_deref(), Some(pins[1]));
}

#[test]
fn a_vcpu_that_libvirt_alone_makes_real_time_has_no_options() {
    let host = host();
    host.write(
        OPTIONS_FILE,
        OPTIONS
            .replace("rt = \"fifo:1\"", "")
            .replace("resume-", "# "),
    );
    let found = bad(&host, GOOD, Some(record()));
    let finding = on(&found, "vcpusched");
    assert_eq!(
        (found.len(), finding.level),
        (1, Level::Limit),
        "{}",
        text(&found)
    );
    let line = "rt = \"fifo:1\" below [vcpu.1] in /etc/vcpufreq/NAME.toml";
    assert_eq!(finding.change.as_deref(), Some(line));
}

// The server refuses what is real-time beside one of its own.
#[test]
fn a_policy_that_a_real_time_server_leaves_out_is_a_blocker() {
    let xml = with("vcpusched vcpus='1'", "vcpusched vcpus='0-1'");
    let found = bad(&host(), &xml, Some(record()));
    let finding = on(&found, "vcpusched");
    assert_eq!(finding.level, Level::Blocker, "{}", text(&found));
    let what = "vCPU 0 is fifo:1 here, and has no rt in /etc/vcpufreq/NAME.toml";
    assert_eq!(
        (&*finding.what, &*finding.why),
        (what, "the server refuses the domain")
    );
}

#[test]
fn the_servers_own_policy_is_enough() {
    let xml = with(
        "    <vcpusched vcpus='1' scheduler='fifo' priority='1'/>\n",
        "",
    );
    assert_eq!(bad(&host(), &xml, Some(record())), []);
}

#[test]
fn cpus_that_are_not_set_apart_are_found() {
    let with_cpuset = || {
        let mut record = record();
        let profile = toml::from_str("[settings]\ncpuset = 'isolated'");
        record.profile = profile.unwrap();
        record
    };
    let of = |cpus: &str| {
        let mut record = record();
        record.partition.guests[0].cpus = cpus.parse().unwrap();
        record
    };
    for (isolated, record, said) in [
        ("", Some(record()), "CPU 3 is not isolated"),
        ("3", None, "CPU 3: by isolcpus alone"),
        ("3", Some(of("1")), "has given guests CPU 1, and not 3"),
        (
            "3",
            Some(of("1,3")),
            "vCPU 0 is not real-time, and may run on CPU 1",
        ),
        ("3", Some(with_cpuset()), "profile mine has made a cpuset"),
    ] {
        let host = host();
        host.write("sys/devices/system/cpu/isolated", isolated);
        let found = bad(&host, GOOD, record);
        let finding = on(&found, "set apart");
        assert_eq!(
            (found.len(), finding.level),
            (1, Level::Blocker),
            "{}",
            text(&found)
        );
        assert!(finding.what.contains(said), "{said}: {}", text(&found));
    }
    let xml = DomainXml::parse(GOOD).unwrap();
    let applied = Err("it can't be read; run as root".to_owned());
    let around = AroundDomain {
        applied,
        ..around(&host(), &xml, None)
    };
    let found = findings(&xml, &around);
    assert_eq!(on(&found, "set apart").level, Level::Absent);
}

#[test]
fn the_hook_sets_cpus_apart() {
    const EXAMPLE: &str = include_str!("../../../docs/examples/rt.toml");
    let host = host();
    host.write("etc/vcpufreq-rt.toml", EXAMPLE);
    assert_eq!(
        on(&bad(&host, GOOD, None), "set apart").what,
        "CPU 3: by isolcpus alone"
    );
    host.write("etc/libvirt/hooks/qemu.d/vcpufreq", "");
    assert_eq!(bad(&host, GOOD, None), []);
    let example: toml::Table = EXAMPLE.parse().unwrap();
    let profile = Profile::shipped(example["profile"].as_str().unwrap()).unwrap();
    let profile = profile.with("it", example["settings"].as_table().unwrap().clone());
    assert_eq!(profile.unwrap().settings.cpuset, None);
    let ours = "[guest]\nplc = '2'\n[settings]\ncpuset = 'none'\n";
    host.write("etc/vcpufreq-rt.toml", ours);
    assert_eq!(
        on(&bad(&host, GOOD, None), "set apart").what,
        "CPU 3: by isolcpus alone"
    );
}

/// What it is after that has applied it, and what libvirt says then.
#[test]
fn a_hook_that_stops_the_domain_is_a_blocker() {
    let host = host();
    host.write("etc/libvirt/hooks/qemu.d/vcpufreq", "");
    for (file, said) in [
        ("[guest]\nNAME = '3'\n", "profile kvm-rt makes a cpuset"),
        (
            "[guest]\nNAME = '3'\n[settings]\ncpuset = 'root'\n",
            "profile kvm-rt makes a cpuset",
        ),
        (
            "[guest]\nNAME = '1,3'\n[settings]\ncpuset = 'none'\n",
            "vCPU 0 is not real-time, and may run on CPU 1",
        ),
        ("[guest]\nNAME = 'three'\n", "/etc/vcpufreq-rt.toml: "),
        ("[guest]\nNAME = '9'\n", "CPU 9 doesn't exist here"),
        ("profile = 'mine'\n[guest]\nNAME = '3'\n", "no profile"),
    ] {
        host.write("etc/vcpufreq-rt.toml", file);
        let found = bad(&host, GOOD, None);
        let finding = on(&found, "set apart");
        assert_eq!(finding.level, Level::Blocker, "{}", text(&found));
        assert!(finding.what.contains(said), "{said}: {}", text(&found));
    }
}

#[test]
fn the_servers_options_are_compared() {
    for (options, said) in [
        (
            "cpus = 3\n[vcpu.1]\npin = 3\nrt = 'fifo:1'\n",
            "has 3 vCPUs, and the domain 2",
        ),
        ("cpus = 'two'\n", "line 1"),
    ] {
        let host = host();
        host.write(OPTIONS_FILE, options);
        let found = bad(&host, GOOD, Some(record()));
        let finding = on(&found, "server");
        assert_eq!(finding.level, Level::Blocker);
        assert!(finding.what.contains(said), "{said}: {}", text(&found));
    }
    let host = host();
    host.remove(OPTIONS_FILE);
    let found = bad(&host, GOOD, Some(record()));
    assert_eq!(
        on(&found, "server").what,
        "there is no /etc/vcpufreq/NAME.toml"
    );
    assert_eq!(exit_code(&found), 2);
}

/// As its own check at the start has it.
#[test]
fn options_by_which_no_server_starts_are_a_blocker() {
    const FLOOR: &str = "floor = 1200000";
    for (old, new, said) in [
        ("pin = 3", "", "has to be pinned to one pCPU"),
        ("pin = 3", "pin = '2-3'", "has to be pinned to one pCPU"),
        ("rt = \"fifo:1\"", "", "give --rt too"),
        ("[vcpu.1]", "[vcpu.2]", "there is no vCPU 2"),
        (FLOOR, "floor = 2800001", "its maximum of 2800000 kHz"),
        (FLOOR, "floor = 1200000\n[vcpu.2]\nfloor = 1", "no vCPU 2"),
        ("pin = 1", "pin = 3", "is real-time vCPU 1's alone"),
        ("pin = 1", "pin = 2\nrt = 'rr:1'\ndomain = 1", ""),
        (
            "pin = 1",
            "pin = 2\ndomain = 1",
            "has real-time vCPUs and others",
        ),
        (
            "cpus = 2",
            "cpus = 2\nactuator = 'none'",
            "can't keep a --floor",
        ),
        (
            "cpus = 2",
            "cpus = 2\nno-bridge = true",
            "leave --no-bridge out",
        ),
        ("pin = 1", "pin = 9", "which this host doesn't have"),
    ] {
        let host = host();
        assert_eq!(OPTIONS.matches(old).count(), 1, "{old}");
        host.write(OPTIONS_FILE, OPTIONS.replace(old, new));
        let found = bad(&host, GOOD, Some(record()));
        let wrong = found.iter().filter(|finding| finding.subject == "server");
        let wrong: Vec<_> = wrong.collect();
        assert_eq!(wrong.is_empty(), said.is_empty(), "{new}: {}", text(&found));
        for finding in wrong {
            assert_eq!(finding.level, Level::Blocker);
            assert!(finding.what.contains(said), "{said}: {}", text(&found));
            let change = finding.change.as_deref();
            assert_eq!(change, Some("correct /etc/vcpufreq/NAME.toml"));
        }
    }
}

/// libvirt starts the others when they are plugged in.
#[test]
fn a_domain_starts_with_all_that_is_served() {
    const ALL: &str = "<vcpu>2</vcpu>";
    const OFF: &str = "<vcpu>2</vcpu><vcpus><vcpu id='0' enabled='yes'/>\
        <vcpu id='1' enabled='no' hotpluggable='yes'/></vcpus>";
    for (vcpu, cpus, level, said) in [
        ("<vcpu current='2'>2</vcpu>", 2, None, ""),
        (
            "<vcpu current='1'>2</vcpu>",
            2,
            Some(Level::Blocker),
            "the domain starts with 1 of its 2 vCPUs",
        ),
        (OFF, 2, Some(Level::Blocker), "starts with 1 of its 2 vCPUs"),
        (OFF, 1, Some(Level::Limit), "starts with 1 of its 2 vCPUs"),
    ] {
        let host = host();
        host.write(OPTIONS_FILE, format!("cpus = {cpus}\n"));
        let sched = with(
            "    <vcpusched vcpus='1' scheduler='fifo' priority='1'/>\n",
            "",
        );
        let found = bad(&host, &sched.replace(ALL, vcpu), Some(record()));
        let server = found.iter().find(|finding| finding.subject == "server");
        assert_eq!(server.map(|one| one.level), level, "{}", text(&found));
        let what = server.map_or("", |finding| &finding.what);
        assert!(what.contains(said), "{}", text(&found));
    }
    let error = DomainXml::parse(&with("<vcpu>", "<vcpu current='0'>")).unwrap_err();
    assert!(error.to_string().contains("from 1 to 2"), "{error}");
}

/// As virt-install makes it, with the device.
#[test]
fn a_domain_without_real_time_vcpus_needs_its_bridge_alone() {
    let xml = "<domain type='kvm'><name>web</name><vcpu>2</vcpu><cputune/>
        <os><type arch='x86_64'>hvm</type></os><clock><timer name='rtc' tickpolicy='catchup'/></clock>
        <devices><shmem name='vcpufreq' role='master'><model type='ivshmem-doorbell'/>
        <server path='/run/vcpufreq-web.sock'/><msi vectors='2' ioeventfd='on'/></shmem>
        </devices></domain>";
    let host = host();
    host.write("etc/vcpufreq/web.toml", "cpus = 2\n");
    let found = bad(&host, xml, None);
    let levels: Vec<_> = found.iter().map(|finding| finding.level).collect();
    assert_eq!(levels, [Level::Absent; 11], "{}", text(&found));
    assert_eq!(exit_code(&found), 0);
    // Locked memory is for real-time vCPUs alone.
    let locked = xml.replace("<cputune/>", "<memoryBacking><locked/></memoryBacking>");
    assert_eq!(
        on(&bad(&host, &locked, None), "vcpusched").level,
        Level::Limit
    );
}

/// The example, with the options that its comment names.
#[test]
fn a_domain_with_registers_in_ram_needs_no_device() {
    const XML: &str = include_str!("../../../../docs/examples/libvirt-ram.xml");
    const OPTIONS: &str = "cpus = 2\ndtb = '/var/lib/libvirt/guest.dtb'\n\
        pid-file = '/run/libvirt/qemu/NAME.pid'\n";
    let host = host();
    for tree in ["guest", "other"] {
        host.write(&format!("var/lib/libvirt/{tree}.dtb.base"), "");
    }
    for (old, new, subject, line) in [
        ("", "", "", ""),
        (
            "mode='shared'",
            "mode='private'",
            "memoryBacking",
            "<access mode='shared'/>",
        ),
        (
            "libvirt/guest.dtb<",
            "libvirt/other.dtb<",
            "server",
            "name one path in <dtb> and as dtb",
        ),
        (
            "<dtb>",
            "<initrd>",
            "server",
            "name one path in <dtb> and as dtb",
        ),
        ("<kernel>", "<loader>", "server", "<kernel> in <os>"),
        (
            "</os>",
            "</os><devices><shmem name='vcpufreq'/></devices>",
            "server",
            "take one out",
        ),
        (
            "qemu/NAME.pid'",
            "NAME.pid'",
            "server",
            "pid-file = \"/run/libvirt/qemu/NAME.pid\" in",
        ),
        ("cpus = 2", "cpus = 3", "server", "cpus = 2 in"),
        (
            "cpus = 2",
            "cpus = 2\nsocket = '/s'",
            "server",
            "correct /etc/vcpufreq/NAME.toml",
        ),
        ("<os>", "<os firmware='efi'>", "server", "<kernel> in <os>"),
        (
            "cpus = 2",
            "cpus = two",
            "server",
            "correct /etc/vcpufreq/NAME.toml",
        ),
    ] {
        host.write(OPTIONS_FILE, OPTIONS.replace(old, new));
        let xml = XML.replace("cpuset='4'", "cpuset='3'");
        let xml = xml.replace(old, new).replace("</initrd>", "</dtb>");
        let xml = xml.replace("<initrd>/var/lib/libvirt/guest.dtb</dtb>", "");
        let xml = xml.replace("<loader>/var/lib/libvirt/Image</kernel>", "<loader/>");
        let found = bad(&host, &xml, None);
        let mut blockers = found.iter().filter(|one| one.level == Level::Blocker);
        let blocker = blockers.next();
        assert_eq!(
            blocker.map_or("", |one| one.subject),
            subject,
            "{old}: {}",
            text(&found)
        );
        let change = blocker.and_then(|one| one.change.as_deref());
        assert!(
            change.unwrap_or_default().contains(line),
            "{old}: {}",
            text(&found)
        );
        assert!(blockers.next().is_none(), "{old}: {}", text(&found));
    }
}

#[test]
fn what_is_no_domain_is_refused() {
    let laughs =
        "<!DOCTYPE d [<!ENTITY a 'ha'><!ENTITY b '&a;&a;'>]><domain><name>&b;</name></domain>";
    let deep = format!("<domain>{}", "<a>".repeat(40_000));
    let closed = format!("{deep}{}</domain>", "</a>".repeat(40_000));
    let wide = format!("<domain>{}</domain>", "<a/>".repeat(60_000));
    let list = |list: &str| {
        with(
            "<emulatorpin cpuset='0'",
            &format!("<emulatorpin cpuset='{list}'"),
        )
    };
    for (xml, said) in [
        ("", "it is no XML"),
        ("virsh", "it is no XML"),
        (laughs, "DTD"),
        (&deep, "it is no XML"),
        (&closed, "it has no <name>"),
        (&wide, "it is no XML"),
        ("<domainsnapshot/>", "not a <domain>"),
        ("<domain/>", "it has no <name>"),
        ("<domain><name> </name></domain>", "it has no <name>"),
        (&with("</vcpu>", "000</vcpu>"), "from 1 to 512"),
        (
            &with("<vcpupin vcpu='1'", "<vcpupin vcpu='-1'"),
            "line 16: <vcpupin>",
        ),
        (
            &with("<vcpusched vcpus='1'", "<vcpusched vcpus='1-'"),
            "is no list of CPUs",
        ),
        (
            &with("<iothreads>1", "<iothreads>9999999"),
            "line 13: <iothreads>",
        ),
        (&with("vectors='2'", "vectors='-2'"), "<msi>"),
        (&list("0-99999999"), "is no list of CPUs"),
        (&list("^0"), "is no list of CPUs"),
        (&list(&"0-65535,".repeat(1000)), "is no list of CPUs"),
        (&list(""), "is no list of CPUs"),
        (&list("8192"), "is no list of CPUs"),
        (&list("0-8191,0-8191,0"), "is no list of CPUs"),
        (
            &with("<vcpupin vcpu='1'", "<vcpupin vcpu='0'"),
            "is there twice",
        ),
        (
            &with(
                "<vcpusched",
                "<vcpusched vcpus='0-1' scheduler='rr' priority='1'/><vcpusched",
            ),
            "is there twice",
        ),
    ] {
        let error = DomainXml::parse(xml).unwrap_err().to_string();
        assert!(error.contains(said), "{said}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

/// The work is bounded, too: it is no more than a line for each vCPU and iothread.
#[test]
fn the_largest_domain_is_looked_at() {
    let pins = (0..512).map(|vcpu| format!("<vcpupin vcpu='{vcpu}' cpuset='0-8191'/>"));
    let pins: String = pins.collect();
    let xml = format!(
        "<domain type='kvm'><name>NAME</name><vcpu>512</vcpu><iothreads>512</iothreads><cputune>{pins}\
         <vcpusched vcpus='0-511' scheduler='fifo' priority='1'/></cputune></domain>"
    );
    let found = bad(&host(), &xml, Some(record()));
    let pins = found.iter().filter(|finding| finding.subject == "vcpupin");
    assert!(pins.count() >= 1024);
}

#[test]
fn nothing_of_it_acts_on_a_terminal() {
    let name = format!("a\u{9b}31m{}", "b".repeat(100_000));
    let xml = with("<name>NAME", &format!("<name>{name}"));
    let found = bad(&host(), &xml, None);
    let shown = text(&found);
    assert!(shown.contains("a?31mbb") && !shown.contains('\u{9b}'));
    assert!(shown.len() < 20_000, "{}", shown.len());
}

#[test]
fn json_has_the_name_and_the_exit_code() {
    let found = DomainFindings {
        name: "NAME".to_owned(),
        findings: bad(&host(), &with("<locked/>", ""), Some(record())),
    };
    let json = found.json();
    assert_eq!(
        (&json["domain"], &json["exit_code"]),
        (&"NAME".into(), &2.into())
    );
    assert_eq!(json["findings"][0]["level"], "blocker");
}

/// Where values are in [`GOOD`], between quotes.
fn values() -> Vec<std::ops::Range<usize>> {
    let quotes: Vec<_> = GOOD.match_indices('\'').map(|(at, _)| at).collect();
    let pairs = quotes.chunks(2);
    pairs.map(|pair| pair[0] + 1..pair[1]).collect()
}

proptest! {
    /// Something else is in the place of a value, or of any part of the XML.
    #[test]
    fn no_text_makes_it_panic(
        value in prop::sample::select(values()),
        at in 0..GOOD.len(),
        len in 0..200_usize,
        new in "[0-9a-z:,^ -]{0,9}",
        part in "[<>/&'=0-9a-z ^,-]{0,9}",
    ) {
        let end = (at + len).min(GOOD.len());
        for (range, new) in [(value, &new), (at..end, &part)] {
            let mut xml = GOOD.to_owned();
            xml.replace_range(range, new);
            if let Ok(xml) = DomainXml::parse(&xml) {
                let around = around(&host(), &xml, Some(record()));
                prop_assert!(!findings(&xml, &around).is_empty());
            }
        }
    }
}
