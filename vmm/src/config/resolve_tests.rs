// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Each vCPU gets the table, capacity, domain and cluster that the options and
//! the host give; each broken rule is refused with its values.

use vcpufreq_device::{PcpuPerf, clamp, performance};
use vcpufreq_host::fakes::FakeHost;

use super::*;
use vcpufreq_vm::console_output::ConsoleEnd;
use vcpufreq_vm::fakes::{FILE_LEN, image};

fn options(toml: &str) -> VcpuArgs {
    RunArgs::of_toml(toml).vcpus
}

fn resolve(toml: &str) -> anyhow::Result<Vec<VcpuConfig>> {
    let host = HostCpus::read(&FakeHost::two_plus_two().root());
    let options = options(toml);
    vcpus(&options, &host, vcpu_count(&options)?)
}

fn khz(vcpu: &VcpuConfig) -> Vec<u32> {
    vcpu.opps.iter().map(|opp| opp.khz).collect()
}

const MIRRORED: &str = "host-topology = true\n";

#[test]
fn a_mirrored_vcpu_is_its_pcpu() {
    let vcpus = resolve(&format!(
        "{MIRRORED}cpus = 2\n[vcpu.0]\npin = 0\n[vcpu.1]\npin = 3"
    ))
    .unwrap();
    let [little, big] = &vcpus[..] else { panic!() };
    assert_eq!(khz(little), [600_000, 1_000_000, 1_400_000, 1_800_000]);
    assert_eq!((little.capacity.get(), big.capacity.get()), (329, 1024));
    assert_eq!((little.place.cluster, big.place.cluster), (0, 1));
    assert_eq!((little.domain, big.domain), (DomainId(0), DomainId(1)));
}

#[test]
fn vcpus_within_one_policy_share_a_domain() {
    let rows = [
        ("pin = 2", "pin = 3", [0, 0]),
        ("pin = '2-3'", "pin = '2-3'", [0, 0]),
        ("pin = 1", "pin = 2", [0, 1]),
        ("pin = '0-3'", "pin = '0-3'", [0, 1]),
        ("", "", [0, 1]),
        ("pin = 2\ndomain = 7", "pin = 3", [7, 1]),
    ];
    for (zero, one, expected) in rows {
        let toml = format!("{MIRRORED}cpus = 2\n[vcpu.0]\n{zero}\n[vcpu.1]\n{one}");
        let domains: Vec<_> = resolve(&toml).unwrap().iter().map(|v| v.domain.0).collect();
        assert_eq!(domains, expected, "{zero} / {one}");
    }
}

#[test]
fn without_host_topology_each_vcpu_is_alone_and_has_no_table() {
    let vcpus = resolve("cpus = 2\nhost-topology = false\n[vcpu.0-1]\npin = 0").unwrap();
    assert_eq!(
        (vcpus[0].domain, vcpus[1].domain),
        (DomainId(0), DomainId(1))
    );
    assert_eq!((vcpus[0].place.cluster, vcpus[1].place.cluster), (0, 0));
    assert_eq!(khz(&vcpus[1]), [1_800_000]);
    assert_eq!(vcpus[1].capacity.get(), 329);
}

/// Whether the vCPUs of these options mirror, and why.
fn topology_source(toml: &str) -> TopologySource {
    let host = HostCpus::read(&FakeHost::two_plus_two().root());
    let options = options(toml);
    TopologySource::choose(&options, &host, vcpu_count(&options).unwrap())
}

#[test]
fn vcpus_mirror_the_host_by_default_where_they_are_pinned() {
    use TopologySource::{Asked, Described, NotPinned, Pinned};
    let rows = [
        ("", NotPinned, 1),
        ("host-topology = true", Asked(true), 5),
        ("[vcpu.0]\npin = 0", Pinned, 4),
        ("[vcpu.0]\npin = '2-3'", Pinned, 5),
        ("[vcpu.0]\npin = 3\nipc-ratio = 0.5", Pinned, 5),
        ("[vcpu.0]\npin = '1-2'", NotPinned, 1),
        ("cpus = 2\n[vcpu.0]\npin = 0", NotPinned, 1),
        ("host-topology = false\n[vcpu.0]\npin = 0", Asked(false), 1),
        ("[vcpu.0]\npin = 0\ntable = [900000, 1800000]", Described, 2),
        ("[vcpu.0]\npin = 0\ncapacity = 5", Described, 1),
        ("[vcpu.0]\npin = 0\ndomain = 5", Described, 1),
    ];
    for (toml, expected, entries) in rows {
        assert_eq!(topology_source(toml), expected, "{toml}");
        let vcpus = resolve(toml).unwrap();
        assert_eq!(vcpus[0].opps.len(), entries, "{toml}");
        let text = expected.text(&vcpus);
        assert!(!text.contains('\n') && !text.contains("  "), "{text}");
    }
}

#[test]
fn the_line_tells_of_tables_that_are_there_and_of_a_maximum_that_looks_like_mhz() {
    let line = |toml: &str| {
        let host = HostCpus::read(&FakeHost::two_plus_two().root());
        let options = options(toml);
        let vcpus = vcpus(&options, &host, vcpu_count(&options).unwrap()).unwrap();
        topology_source::line(&options, &host, &vcpus)
    };
    let table = "[vcpu.0]\ntable = [600000, 1800000]";
    let rows = [
        ("host-topology = false", "the vCPUs have no tables", ""),
        (
            &format!("host-topology = false\n{table}"),
            "the tables of --table alone",
            "no tables",
        ),
        (
            &format!("cpus = 2\nhost-topology = false\n{table}"),
            "all vCPUs but 0, which --table describes, have no tables",
            "",
        ),
        (
            &format!("host-topology = true\n{table}"),
            "--capacity go before these",
            "",
        ),
        (table, "as --table, --domain and --capacity describe", "kHz"),
        (
            "cpus = 2\n[vcpu.0-1]\ntable = [600, 1800]\ncapacity = 9",
            "vCPUs 0-1 have at most 1800 kHz; for 1800 MHz write 1800000",
            "",
        ),
        ("[vcpu.0]\ntable = [9999]\ncapacity = 9", "for 9999 MHz", ""),
        (
            "[vcpu.0]\ntable = [10000]\ncapacity = 9",
            "as --table",
            "MHz",
        ),
        (
            "[vcpu.0]\ntable = [10000000]\ncapacity = 9",
            "as --table",
            "Hz write",
        ),
    ];
    for (toml, has, lacks) in rows {
        let line = line(toml);
        assert!(line.contains(has), "{line}");
        assert!(lacks.is_empty() || !line.contains(lacks), "{line}");
    }
}

#[test]
fn a_real_time_vcpu_shares_no_domain_with_others() {
    let rt = "rt = 'fifo:1'";
    let vcpus = resolve(&format!(
        "cpus = 4\n[vcpu.0]\npin = 0\n[vcpu.1]\npin = 1\n{rt}\n\
         [vcpu.2]\npin = 2\n{rt}\n[vcpu.3]\npin = 3\n{rt}"
    ));
    let domains: Vec<_> = vcpus.unwrap().iter().map(|vcpu| vcpu.domain.0).collect();
    assert_eq!(domains, [0, 1, 2, 2]);
}

#[test]
fn an_unpinned_vcpu_mirrors_the_largest_pcpu() {
    let vcpus = resolve(MIRRORED).unwrap();
    assert_eq!(khz(&vcpus[0]).last(), Some(&2_800_000));
    assert_eq!(vcpus[0].capacity.get(), 1024);
    let spread = resolve(&format!("{MIRRORED}[vcpu.0]\npin = '0-2'")).unwrap();
    assert_eq!(spread[0].capacity.get(), 1024);
}

#[test]
fn capacity_follows_frequency_and_ipc_ratio() {
    let rows = [
        ("pin = 2\ntable = [1400000]", 512),
        ("pin = 2\ntable = [1400000]\nipc-ratio = '0.75'", 384),
        ("pin = 2\nipc-ratio = 0.5", 512),
        ("pin = 0\nipc-ratio = 2", 658),
        ("pin = 0\ncapacity = 100", 100),
        ("pin = 0\ntable = [900000]\ncapacity = 1024", 1024),
    ];
    for (text, expected) in rows {
        let vcpus = resolve(&format!("[vcpu.0]\n{text}")).unwrap();
        assert_eq!(vcpus[0].rated().at_top(), expected, "{text}");
    }
}

/// A laptop with an SDM850: the capacity of its big CPUs refers to 2,841,600 kHz, and boost adds
/// 2,956,800.
const LITTLE_KHZ: &str = "300000 576000 825600 1056000 1324800 1516800 1766400";
const BIG_KHZ: &str = "825600 902400 979200 1056000 1209600 1286400 1363200 1459200 1536000 \
    1612800 1689600 1766400 1843200 1920000 1996800 2092800 2169600 2246400 2323200 2400000 \
    2476800 2553600 2649600 2745600 2841600";
const BOOST_KHZ: u32 = 2_956_800;

fn sdm850(kernel: &str, boost: bool) -> FakeHost {
    let host = FakeHost::empty();
    host.kernel(kernel);
    host.write("sys/devices/system/cpu/online", "0-7");
    for cpu in 0..8 {
        let capacity = format!("sys/devices/system/cpu/cpu{cpu}/cpu_capacity");
        host.write(&capacity, if cpu < 4 { "371" } else { "1024" });
    }
    host.policy(0, "0 1 2 3", LITTLE_KHZ, "1766400");
    let top = if boost { "2956800" } else { "2841600" };
    host.policy(4, "4 5 6 7", BIG_KHZ, top);
    host.boost(4, "2956800", boost);
    host
}

/// What schedutil makes of a clamp: `map_util_freq()`, with the quarter that Linux before 6.8 adds
/// to it, and the first OPP from there on.
fn schedutil(clamp: Util, (capacity, reference): (u64, u64), opps: &[u32], quarter: bool) -> u32 {
    let util = u64::from(clamp.get());
    let util = if quarter { util + (util >> 2) } else { util };
    let khz = reference * util / capacity;
    let at_least = opps.iter().find(|opp| u64::from(**opp) >= khz);
    *at_least.or(opps.last()).unwrap()
}

#[test]
fn each_request_gets_its_own_frequency_whatever_boost_is() {
    let base: Vec<u32> = BIG_KHZ.split(' ').map(|khz| khz.parse().unwrap()).collect();
    let boosted = [&base[..], &[BOOST_KHZ]].concat();
    // The kernel, boost now, its reference, and the most that a request gets.
    for (kernel, boost, reference, most) in [
        ("7.3.4", false, 2_841_600, 2_841_600),
        ("6.8.0", true, 2_841_600, 2_841_600),
        ("6.7.0", false, 2_841_600, 2_841_600),
        ("6.7.0", true, u64::from(BOOST_KHZ), BOOST_KHZ),
    ] {
        let host = HostCpus::read(&sdm850(kernel, boost).root());
        let options = options("cpus = 2\n[vcpu.0]\npin = 0\n[vcpu.1]\npin = 4");
        let headroom = match kernel {
            "6.7.0" => Headroom::Quarter,
            _ => Headroom::None,
        };
        let vcpus = vcpus(&options, &host, 2).unwrap();
        let device = device_config(&vcpus, ClampMode::Floor, headroom).unwrap();
        let spec = &device.vcpus[1];
        let entries: Vec<_> = spec.table.entries().iter().map(|khz| khz.0).collect();
        assert_eq!(entries, boosted, "{kernel} {boost}");
        let opps = if boost { &boosted } else { &base };
        for &khz in &boosted {
            let clamp = clamp(spec, Khz(khz), ClampMode::Floor, headroom).clamp.min;
            let quarter = headroom == Headroom::Quarter;
            let got = schedutil(clamp, (1024, reference), opps, quarter);
            assert_eq!(got, khz.min(most), "{kernel} {boost}");
            let pcpu = PcpuPerf {
                pcpu: 4,
                khz: Khz(khz),
                reference: Khz(host.cpu(4).unwrap().reference_khz.unwrap()),
                capacity: Util::MAX,
            };
            assert_eq!(performance(spec, &pcpu), Some(Khz(khz)));
        }
        // 371 * 2841600 / 2956800, where the kernel's own scale is of 2,841,600 kHz.
        let little = if reference == 2_841_600 { 356 } else { 371 };
        let capacities = device.guest_capacities();
        let capacities: Vec<_> = capacities.into_iter().map(Util::get).collect();
        assert_eq!(capacities, [little, 1024], "{kernel} {boost}");
    }
}

#[test]
fn a_reference_that_is_not_known_and_boost_beyond_a_clamp_are_told() {
    for (kernel, boost, unknown, beyond, stale) in [
        ("", true, true, true, false),
        ("6.12.48", false, false, true, false),
        ("6.6.0", true, false, false, true),
        ("6.6.0", false, false, true, false),
    ] {
        let host = HostCpus::read(&sdm850(kernel, boost).root());
        let options = options("[vcpu.0]\npin = 4");
        let line = topology_source::line(&options, &host, &vcpus(&options, &host, 1).unwrap());
        assert_eq!(
            line.contains("so 2841600 kHz is assumed"),
            unknown,
            "{line}"
        );
        assert_eq!(
            line.contains("a request above 2841600 kHz"),
            beyond,
            "{line}"
        );
        let told = line.contains("lacks the boost that is on now");
        assert_eq!(told, stale, "{line}");
        assert!(!line.contains('\n') && !line.contains("  "), "{line}");
    }
}

/// As a DGX GB10: the highest performance of CPU 3 is 4,004 MHz, which it has with boost alone.
#[test]
fn equal_frequencies_of_equal_cpus_are_equal_capacities_with_cppc() {
    let host = FakeHost::two_plus_two();
    host.kernel("6.17.0");
    for (policy, cpu, capacity, highest) in [(0, 1, "997", 150), (2, 3, "1024", 154)] {
        let policy = format!("sys/devices/system/cpu/cpufreq/policy{policy}");
        host.remove(&format!("{policy}/scaling_available_frequencies"));
        host.write(&format!("{policy}/cpuinfo_max_freq"), "3900000");
        host.write(&format!("{policy}/scaling_driver"), "cppc_cpufreq\n");
        let path = format!("sys/devices/system/cpu/cpu{cpu}/cpu_capacity");
        host.write(&path, capacity);
        host.cppc(cpu, [highest, 150, 53], [3900, 1378]);
    }
    let options = options("cpus = 2\n[vcpu.0]\npin = 1\n[vcpu.1]\npin = 3");
    let vcpus = vcpus(&options, &HostCpus::read(&host.root()), 2).unwrap();
    let tops: Vec<_> = vcpus.iter().map(|vcpu| vcpu.rated().at_top()).collect();
    assert_eq!(tops, [997, 997]);
    let device = device_config(&vcpus, ClampMode::Floor, Headroom::None).unwrap();
    for (spec, reference) in device.vcpus.iter().zip([3_900_000, 4_004_000]) {
        for khz in [1_378_000, 2_000_000, 3_900_000] {
            let clamp = clamp(spec, Khz(khz), ClampMode::Floor, Headroom::None)
                .clamp
                .min;
            let capacity = u64::from(spec.capacity.get());
            let got = reference * u64::from(clamp.get()) / capacity;
            // CPPC has no steps: a clamp's own step is what is lost.
            let step = reference / capacity + 1;
            assert!(
                (u64::from(khz) - step..=u64::from(khz)).contains(&got),
                "{got}"
            );
        }
    }
}

#[test]
fn clusters_follow_the_topology_and_domains_the_policies() {
    // Cluster lists of the CPUs, CPUs of policies 0 and 2; clusters and domains of the vCPUs.
    type Row<'a> = (&'a str, [&'a str; 4], [&'a str; 2], [u32; 4], [u32; 4]);
    let rows: [Row; 3] = [
        // As an R-Car V4H: two clusters in one policy.
        (
            "V4H",
            ["0-1", "0-1", "2-3", "2-3"],
            ["0 1 2 3", ""],
            [0, 0, 1, 1],
            [0; 4],
        ),
        // As a QCS6490: two policies in one cluster.
        ("QCS6490", ["0-3"; 4], ["0 1", "2 3"], [0; 4], [0, 0, 2, 2]),
        (
            "both",
            ["0-2", "0-2", "0-2", "3"],
            ["0 1", "2 3"],
            [0, 0, 0, 1],
            [0, 0, 2, 2],
        ),
    ];
    let options = options(
        "cpus = 4\n[vcpu.0]\npin = 0\n[vcpu.1]\npin = 1\n[vcpu.2]\npin = 2\n[vcpu.3]\npin = 3",
    );
    for (name, lists, policies, clusters, domains) in rows {
        let host = FakeHost::two_plus_two();
        for (cpu, list) in (0..).zip(lists) {
            host.topology(cpu, list, "0-3");
            let capacity = format!("sys/devices/system/cpu/cpu{cpu}/cpu_capacity");
            host.write(&capacity, "1024");
        }
        for (policy, cpus) in [0, 2].into_iter().zip(policies) {
            let path = format!("sys/devices/system/cpu/cpufreq/policy{policy}/related_cpus");
            host.write(&path, cpus);
        }
        let vcpus = vcpus(&options, &HostCpus::read(&host.root()), 4).unwrap();
        let of = |value: fn(&VcpuConfig) -> u32| vcpus.iter().map(value).collect::<Vec<_>>();
        assert_eq!(of(|vcpu| vcpu.place.cluster), clusters, "{name}");
        assert_eq!(of(|vcpu| vcpu.domain.0), domains, "{name}");
    }
}

#[test]
fn broken_rules_are_refused_with_cause_and_next_step() {
    let long: Vec<_> = (1..=65).map(|n: u32| n.to_string()).collect();
    let long = format!("[vcpu.0]\ntable = [{}]", long.join(","));
    let rows = [
        ("cpus = 0", "0 vCPUs; give --cpus a number from 1 to 512"),
        (
            "cpus = 513",
            "513 vCPUs; give --cpus a number from 1 to 512",
        ),
        (
            "cpus = 1\n[vcpu.1]\ncapacity = 1",
            "there is no vCPU 1: the guest has 1",
        ),
        (
            "[vcpu.0]\npin = 4",
            "pinned to CPU 4, which this host doesn't have; choose from its online CPUs 0-3",
        ),
        ("[vcpu.0]\ntable = []", "the performance table is empty"),
        ("[vcpu.0]\ntable = [2, 1]", "not above the 2 kHz before it"),
        ("[vcpu.0]\ntable = [0, 1]", "0 kHz"),
        (&long, "65 entries"),
        (
            "[vcpu.0]\ntable = [600000000, 1800000000]\ncapacity = 9",
            "vCPU 0 has up to 1800000000 kHz; if these are Hz write 1800000",
        ),
        (
            "[vcpu.0]\ntable = [10000001]\ncapacity = 9",
            "Hz write 10000",
        ),
        (
            "[vcpu.0]\ncapacity = 1025",
            "capacity 1025 isn't within 1 to 1024",
        ),
        (
            "[vcpu.0]\ncapacity = 0",
            "capacity 0 isn't within 1 to 1024",
        ),
        (
            "[vcpu.0]\ntable = [4000000]",
            "capacity 1462 isn't within 1 to 1024",
        ),
        (
            "[vcpu.0]\ncapacity = 5\nipc-ratio = 1",
            "has both --capacity and --ipc-ratio",
        ),
        (
            "cpus = 2\n[vcpu.0]\npin = 0\ndomain = 1\n[vcpu.1]\npin = 2",
            "in domain 1 but differ",
        ),
    ];
    for (toml, expected) in rows {
        let message = resolve(toml).unwrap_err().to_string();
        assert!(message.contains(expected), "{toml}: {message}");
        assert!(
            message.contains(';') && !message.contains('\n'),
            "{message}"
        );
    }
}

#[test]
fn threads_of_a_core_and_sockets_are_the_hosts() {
    let one_each = "cpus = 4\n[vcpu.0]\npin = 0\n[vcpu.1]\npin = 1\n[vcpu.2]\npin = 2\n\
        [vcpu.3]\npin = 3";
    let rows = [
        (
            one_each,
            "6.12.48",
            [0, 0, 2, 2],
            [Some(0), Some(0), Some(2), Some(2)],
        ),
        // Their packages are clusters, perhaps.
        (
            one_each,
            "5.15.0",
            [0; 4],
            [Some(0), Some(0), Some(2), Some(2)],
        ),
        // Two vCPUs on one thread, and one that moves between cores.
        (
            "cpus = 4\n[vcpu.0]\npin = 0\n[vcpu.1]\npin = 0\n[vcpu.2]\npin = '2-3'\n\
             [vcpu.3]\npin = '1,3'",
            "6.12.48",
            [0, 0, 2, 2],
            [Some(0), None, Some(2), None],
        ),
    ];
    for (toml, kernel, sockets, cores) in rows {
        let host = FakeHost::two_plus_two();
        host.kernel(kernel);
        for (cpu, siblings) in (0..).zip(["0-1", "0-1", "2-3", "2-3"]) {
            host.topology(cpu, siblings, siblings);
            let dir = format!("sys/devices/system/cpu/cpu{cpu}/topology");
            host.write(&format!("{dir}/core_cpus_list"), siblings);
        }
        let options = VcpuArgs {
            host_topology: Some(true),
            ..options(toml)
        };
        let vcpus = vcpus(&options, &HostCpus::read(&host.root()), 4).unwrap();
        let places = vcpus
            .iter()
            .map(|vcpu| (vcpu.place.socket, vcpu.place.core));
        let expected = sockets.into_iter().zip(cores);
        assert_eq!(
            places.collect::<Vec<_>>(),
            expected.collect::<Vec<_>>(),
            "{toml} {kernel}"
        );
    }
}

#[test]
fn an_offline_pcpu_is_refused() {
    let host = FakeHost::two_plus_two();
    host.write("sys/devices/system/cpu/online", "0,2-3");
    let options = options("[vcpu.0]\npin = '0-1'");
    let error = vcpus(&options, &HostCpus::read(&host.root()), 1).unwrap_err();
    let line = "vCPU 0 is pinned to CPU 1, which is offline";
    assert!(error.to_string().contains(line), "{error}");
    assert!(error.to_string().contains("choose from 0,2-3"), "{error}");
}

#[test]
fn without_cpufreq_only_the_bridge_needs_a_table() {
    let host = FakeHost::two_plus_two();
    host.remove("sys/devices/system/cpu/cpufreq");
    let host = HostCpus::read(&host.root());
    let error = vcpus(&options(""), &host, 1).unwrap_err();
    let line = "vCPU 0 has no frequencies";
    assert!(error.to_string().contains(line), "{error}");
    let bare = vcpus(&options("no-bridge = true"), &host, 1).unwrap();
    assert!(bare[0].opps.is_empty());
    let own = vcpus(&options("[vcpu.0]\ntable = [5]"), &host, 1).unwrap();
    assert_eq!(khz(&own[0]), [5]);
}

#[test]
fn standby_is_for_kernels_that_need_it() {
    let standby = |banner: &str, more: &str| {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut bytes = image(0x10000);
        bytes.extend_from_slice(banner.as_bytes());
        std::fs::write(file.path(), bytes).unwrap();
        file.as_file().set_len(FILE_LEN).unwrap();
        let kernel = file.path().display();
        let toml = format!("kernel = '{kernel}'\n{MIRRORED}cpus = 2\n{more}");
        let host = HostCpus::read(&FakeHost::two_plus_two().root());
        run_config(RunArgs::of_toml(&toml), &host).unwrap().standby
    };
    let banner = |kind: &str| format!("Linux version 7.3.4 (a@b) #1 SMP {kind} Debian\n");
    assert!(!standby(&banner("PREEMPT"), ""));
    assert!(standby(&banner("PREEMPT_RT"), ""));
    assert!(standby("", ""), "any kernel");
    let rt = "[vcpu.0]\npin = 0\n[vcpu.1]\npin = 2\nrt = 'fifo:1'";
    assert!(standby(&banner("PREEMPT"), rt), "a real-time vCPU");
}

#[test]
fn scx_is_refused_with_what_it_cannot_do() {
    for (toml, word) in [
        ("clamp = 'exact'", "--clamp"),
        ("path = 'exit'", "--path"),
        ("path = 'shm'", "--path"),
        ("path = 'bpf'", ""),
        ("", ""),
    ] {
        let checked = check_sums(&RunArgs::of_toml(&format!("actuator = 'scx'\n{toml}")));
        let why = checked.err().map(|error| error.to_string());
        let told = why.as_ref().is_some_and(|why| why.contains(word));
        assert!(told != word.is_empty(), "{toml}: {why:?}");
        assert!(check_sums(&RunArgs::of_toml(toml)).is_ok(), "{toml}");
    }
}

#[test]
fn multi_tenant_is_all_of_it_or_an_error() {
    let of = |toml: &str| RunArgs::of_toml(&format!("multi-tenant = true\n{toml}"));
    let options = of("");
    assert_eq!(options.bridge.cur_perf, CurPerfVisibility::Request);
    assert_eq!(options.console, ConsoleEnd::Nothing);
    assert!(options.sandbox.is_on && options.sandbox.is_required);
    assert!(!RunArgs::of_toml("").sandbox.is_required);
    assert_eq!(options.bridge.rate_limit, "1000:100".parse().unwrap());
    for (toml, word) in [
        ("", ""),
        ("cur-perf = 'request'", ""),
        ("cur-perf = 'table'", "--cur-perf"),
        ("cur-perf = 'exact'", "--cur-perf"),
        ("console = 'file:/x,max=1M'", ""),
        ("console = 'stdio'", "--console"),
        ("sandbox = 'off'", "--sandbox"),
        ("rate-limit = '100:10'", ""),
        ("rate-limit = 0", "--rate-limit"),
        ("rate-limit = '1001:100'", "--rate-limit"),
        ("rate-limit = '1000:101'", "--rate-limit"),
        ("events = '/x'", "--events"),
        ("actuator = 'cgroup'", ""),
        ("actuator = 'scx'", "--actuator"),
    ] {
        let why = of(toml).check_multi_tenant().err();
        let why = why.map(|error| error.to_string());
        let told = why.as_ref().is_some_and(|why| why.contains(word));
        assert!(told != word.is_empty(), "{toml}: {why:?}");
        assert!(
            RunArgs::of_toml(toml).check_multi_tenant().is_ok(),
            "{toml}"
        );
    }
}

#[test]
fn a_cgroup_that_is_named_is_the_one_or_an_error() {
    let rows = [
        ("", Some(ActuatorChoice::Auto)),
        ("cgroup-parent = '/x'", Some(ActuatorChoice::Cgroup)),
        (
            "cgroup-parent = '/x'\nactuator = 'auto'",
            Some(ActuatorChoice::Cgroup),
        ),
        ("cgroup-parent = '/x'\nactuator = 'thread'", None),
        ("cgroup-parent = '/x'\nactuator = 'none'", None),
    ];
    for (toml, expected) in rows {
        let choice = actuator_choice(&RunArgs::of_toml(toml).bridge);
        assert_eq!(choice.as_ref().ok(), expected.as_ref(), "{toml}");
        let why = choice.err().map(|error| error.to_string());
        assert!(
            why.is_none_or(|why| why.contains("--cgroup-parent")),
            "{toml}"
        );
    }
}
