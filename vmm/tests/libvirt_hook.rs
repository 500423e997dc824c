// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of the hook of libvirt in `docs/examples`, with programs that stand for systemctl and
//! vcpufreq:
//!
//! - A domain as in the example has its socket started before it, and stopped after its end.
//! - Nothing is done for a domain without the device, for one with another server, or at other times.
//! - A device tree beside which QEMU's own lies is made anew. If that fails, the tree stays, and the
//!   domain starts, unless QEMU's own is newer, or there is none.
//! - A domain whose options have its tree has registers in its RAM: the tree gets them, and the service is
//!   started. One of another tree, or with the device too, is refused.
//! - If the socket can't be started, the hook fails, and libvirt doesn't start the domain.
//! - The host is prepared before the first real-time domain, and restored after the last one. A host that
//!   was prepared by hand stays so, also while such a domain runs. If it can't be prepared, one line says
//!   so, and libvirt doesn't start the domain. Other domains have nothing to do with that.

#![allow(clippy::unwrap_used)]

mod scripts;

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use scripts::write_script;
use tempfile::TempDir;

const HOOK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/examples/libvirt-hook");
const DOMAIN: &str = include_str!("../docs/examples/libvirt.xml");
const RAM_DOMAIN: &str = include_str!("../docs/examples/libvirt-ram.xml");
const PREPARE: [&str; 2] = ["prepare", "begin"];
const RELEASE: [&str; 2] = ["release", "end"];
/// Each writes its command line; systemctl fails for a domain of this name.
const SYSTEMCTL: &str =
    "#!/bin/sh\necho systemctl $* >>$CALLS\ncase $* in *broken*) exit 1;; esac\n";
/// It does as `rt` with a file in the place of the host; a file `fails` has the exit code of `rt apply`.
const VCPUFREQ: &str = "#!/bin/sh
echo vcpufreq $* >>$CALLS
case $1$2 in
dt*) for tree; do :; done; cat ${tree:?} ;;
rtapply)
	echo change
	if [ -e ${0%/*}/fails ]; then
		echo 'vcpufreq: warning' >&2
		echo 'vcpufreq: no' >&2
		exit $(cat ${0%/*}/fails)
	fi
	[ ! -e $RECORD ] && : >$RECORD
	;;
rtrestore) echo change; rm $RECORD ;;
esac
";
const APPLY: &str = "vcpufreq rt apply --config ";
const RESTORE: &str = "vcpufreq rt restore";

/// The folders that the hook has are in this one.
struct Host(TempDir);

/// What the hook did.
#[derive(Debug, PartialEq)]
struct Done {
    code: i32,
    /// The command lines of other programs.
    calls: Vec<String>,
    said: String,
}

impl Host {
    fn new() -> Self {
        let host = Self(tempfile::tempdir().unwrap());
        for (name, script) in [("systemctl", SYSTEMCTL), ("vcpufreq", VCPUFREQ)] {
            write_script(&host.path().join(name), script);
        }
        let mut hook = fs::read_to_string(HOOK).unwrap();
        for path in [
            "/etc/vcpufreq",
            "/run/vcpufreq-rt/",
            "/run/vcpufreq-libvirt",
        ] {
            let here = format!("{}{path}", host.path().display());
            assert!(hook.contains(&format!("={path}")), "{path}");
            hook = hook.replace(&format!("={path}"), &format!("={here}"));
            fs::create_dir_all(here.trim_end_matches("-libvirt")).unwrap();
        }
        write_script(&host.path().join("hook"), &hook);
        host
    }

    /// With what prepares the host.
    fn with_rt() -> Self {
        let host = Self::new();
        fs::write(host.rt_toml(), "").unwrap();
        host
    }

    fn rt_toml(&self) -> PathBuf {
        self.path().join("etc/vcpufreq-rt.toml")
    }

    /// Of what was applied.
    fn record(&self) -> PathBuf {
        self.path().join("run/vcpufreq-rt/rt.json")
    }

    fn apply(&self) -> String {
        format!("{APPLY}{}", self.rt_toml().display())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Calls the hook as libvirt does.
    fn call(&self, domain: &str, [operation, sub]: [&str; 2], xml: &str) -> Done {
        let calls = self.path().join("calls");
        fs::write(&calls, "").unwrap();
        let path = std::env::var("PATH").unwrap();
        let path = format!("{}:{path}", self.path().display());
        let mut hook = Command::new(self.path().join("hook"));
        hook.args([domain, operation, sub, "-"]);
        hook.env("PATH", path).env("CALLS", &calls);
        hook.env("RECORD", self.record());
        hook.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut hook = hook.stderr(Stdio::piped()).spawn().unwrap();
        // It has closed its input by then if it needs none.
        let _ = hook.stdin.take().unwrap().write_all(xml.as_bytes());
        let ended = hook.wait_with_output().unwrap();
        // libvirt would take it for another XML.
        assert_eq!(ended.stdout, b"");
        let calls = fs::read_to_string(calls).unwrap();
        Done {
            code: ended.status.code().unwrap(),
            calls: calls.lines().map(str::to_owned).collect(),
            said: String::from_utf8(ended.stderr).unwrap(),
        }
    }
}

fn silent(calls: &[&str]) -> Done {
    Done {
        code: 0,
        calls: calls.iter().map(|&call| call.to_owned()).collect(),
        said: String::new(),
    }
}

#[test]
fn a_domain_has_its_socket_from_its_start_to_its_end() {
    let host = Host::new();
    let start = silent(&["systemctl start vcpufreq-serve@NAME.socket"]);
    assert_eq!(host.call("NAME", PREPARE, DOMAIN), start);
    let stop = silent(&["systemctl stop vcpufreq-serve@NAME.socket"]);
    assert_eq!(host.call("NAME", RELEASE, DOMAIN), stop);
}

#[test]
fn others_are_left_alone() {
    let host = Host::new();
    let other_name = DOMAIN.replace("name='vcpufreq'", "name='other'");
    let rows = [
        ("NAME", ["start", "begin"], DOMAIN),
        ("NAME", ["migrate", "begin"], DOMAIN),
        ("NAME", PREPARE, &other_name),
        ("NAME", RELEASE, &other_name),
        ("other", PREPARE, DOMAIN),
        ("other", RELEASE, DOMAIN),
        ("other", PREPARE, ""),
    ];
    for (domain, when, xml) in rows {
        assert_eq!(
            host.call(domain, when, xml),
            silent(&[]),
            "{domain} {when:?}"
        );
    }
}

#[test]
fn a_tree_is_made_of_qemus_own() {
    let host = Host::new();
    let tree = host.path().join("guest.dtb");
    let base = host.path().join("guest.dtb.base");
    let xml = DOMAIN.replace("/var/lib/libvirt/guest.dtb", tree.to_str().unwrap());
    fs::write(&base, "made").unwrap();
    let shown = base.display();
    let options = host.path().join("etc/vcpufreq/NAME.toml");
    let made = format!("vcpufreq dt --config {} --merge {shown}", options.display());
    let start = "systemctl start vcpufreq-serve@NAME.socket";
    assert_eq!(host.call("NAME", PREPARE, &xml), silent(&[&made, start]));
    assert_eq!(fs::read_to_string(&tree).unwrap(), "made");

    let fails = "#!/bin/sh\necho half\nexit 2\n";
    write_script(&host.path().join("vcpufreq"), fails);
    let failed = host.call("NAME", PREPARE, &xml);
    assert_eq!((failed.code, failed.calls), (0, vec![start.to_owned()]));
    assert!(failed.said.contains("stays as it is"), "{}", failed.said);
    assert_eq!(fs::read_to_string(&tree).unwrap(), "made");
    assert!(!host.path().join("guest.dtb.new").exists());

    fs::rename(&tree, host.path().join("kept")).unwrap();
    let none = host.call("NAME", PREPARE, &xml);
    assert_eq!((none.code, none.calls.len()), (1, 0));
    let line = format!("vcpufreq: domain NAME: there is no {}\n", tree.display());
    assert_eq!(none.said, line);
    fs::rename(host.path().join("kept"), &tree).unwrap();

    let base = fs::File::options().write(true).open(&base);
    let later = SystemTime::now() + Duration::from_secs(60);
    base.unwrap().set_modified(later).unwrap();
    let stale = host.call("NAME", PREPARE, &xml);
    assert_eq!((stale.code, stale.calls.len()), (1, 0));
    assert!(stale.said.contains("is older than"), "{}", stale.said);
}

#[test]
fn a_domain_with_registers_in_ram_has_its_service() {
    let host = Host::new();
    let tree = host.path().join("guest.dtb");
    let tree = tree.to_str().unwrap();
    let of = |xml: &str| xml.replace("/var/lib/libvirt/guest.dtb", tree);
    let (xml, with_device) = (of(RAM_DOMAIN), of(DOMAIN));
    let base = format!("{tree}.base");
    fs::write(&base, "made").unwrap();
    let options = host.path().join("etc/vcpufreq/NAME.toml");
    let shown = options.display();
    // Without the key it is a domain without a bridge.
    assert_eq!(host.call("NAME", PREPARE, &xml), silent(&[]));
    for quote in ["'", "\""] {
        let line = format!("dtb = {quote}{tree}{quote} # was \"/b\" or '/b'");
        fs::write(&options, format!("cpus = 2\n {line}\n")).unwrap();
        let made = format!("vcpufreq dt --config {shown} --in-ram --merge {base}");
        let start = "systemctl restart vcpufreq-serve@NAME.service";
        assert_eq!(host.call("NAME", PREPARE, &xml), silent(&[&made, start]));
    }
    let stop = "systemctl stop vcpufreq-serve@NAME.socket";
    assert_eq!(host.call("NAME", RELEASE, &xml), silent(&[stop]));
    for (xml, line) in [
        (
            with_device,
            format!("it has <shmem>, and {shown} has dtb; take one out"),
        ),
        (
            RAM_DOMAIN.to_owned(),
            format!("its <dtb> isn't the dtb of {shown}"),
        ),
    ] {
        let done = host.call("NAME", PREPARE, &xml);
        assert_eq!((done.code, done.calls.len()), (1, 0), "{done:?}");
        assert_eq!(done.said, format!("vcpufreq: domain NAME: {line}\n"));
    }
}

#[test]
fn a_failure_stops_the_start_alone() {
    let host = Host::new();
    let of = |name: &str| DOMAIN.replace("NAME", name);
    for (name, when, code, said) in [
        (
            "broken",
            PREPARE,
            1,
            "can't start vcpufreq-serve@broken.socket",
        ),
        (
            "broken",
            RELEASE,
            0,
            "can't stop vcpufreq-serve@broken.socket",
        ),
        ("a*", PREPARE, 1, "rename the domain"),
    ] {
        let done = host.call(name, when, &of(name));
        assert_eq!(done.code, code, "{done:?}");
        let line = format!("vcpufreq: domain {name}: ");
        assert!(
            done.said.starts_with(&line) && done.said.contains(said),
            "{done:?}"
        );
        assert_eq!(done.said.lines().count(), 1, "{done:?}");
    }
}

/// The example with a real-time vCPU, as libvirt writes it.
fn real_time() -> String {
    let sched = "<vcpusched vcpus='1' scheduler='fifo' priority='1'/>\n  </cputune>";
    DOMAIN.replace("</cputune>", sched)
}

#[test]
fn the_host_is_prepared_from_the_first_real_time_domain_to_the_last() {
    let host = Host::with_rt();
    let (xml, apply) = (real_time(), host.apply());
    let of = |name: &str| xml.replace("NAME", name);
    let start = |name: &str| format!("systemctl start vcpufreq-serve@{name}.socket");
    let stop = |name: &str| format!("systemctl stop vcpufreq-serve@{name}.socket");
    // Twice, as a hook may be called again.
    for calls in [&[&*apply, &start("a")][..], &[&start("a")]] {
        assert_eq!(host.call("a", PREPARE, &of("a")), silent(calls));
    }
    assert_eq!(host.call("b", PREPARE, &of("b")), silent(&[&start("b")]));
    // One without a bridge.
    let bare = xml.replace("name='vcpufreq'", "name='other'");
    assert_eq!(host.call("c", PREPARE, &bare), silent(&[]));
    assert_eq!(host.call("a", RELEASE, &of("a")), silent(&[&stop("a")]));
    assert_eq!(host.call("c", RELEASE, &bare), silent(&[]));
    assert!(host.record().exists());
    // Its server is gone before.
    assert_eq!(
        host.call("b", RELEASE, &of("b")),
        silent(&[&stop("b"), RESTORE])
    );
    assert_eq!(host.call("b", RELEASE, &of("b")), silent(&[&stop("b")]));
    assert_eq!(
        host.call("a", PREPARE, &of("a")),
        silent(&[&apply, &start("a")])
    );
}

#[test]
fn what_makes_a_domain_real_time() {
    let host = Host::with_rt();
    let start = "systemctl start vcpufreq-serve@NAME.socket";
    let options = host.path().join("etc/vcpufreq/NAME.toml");
    let batch = real_time().replace("'fifo' priority='1'", "'batch'");
    let round_robin = real_time().replace("'fifo'", "'rr'");
    for (xml, toml, is) in [
        (DOMAIN, "cpus = 2\n# rt = 'fifo:1'\nmart = 1\n", false),
        (&batch, "", false),
        (&round_robin, "", true),
        (DOMAIN, "[vcpu.1]\n  rt = 'fifo:1'\n", true),
        (DOMAIN, "vcpu.1.rt = 'fifo:1'\n", true),
        (DOMAIN, "vcpu.1 = {pin = 3, rt = 'fifo:1'}\n", true),
        (DOMAIN, "[vcpu]\n1 = {rt='fifo:1'}\n", true),
        (DOMAIN, "[vcpu.1]\n\"rt\" = 'fifo:1'\n", true),
        (DOMAIN, "vcpu.1.'rt' = 'fifo:1'\n", true),
        (DOMAIN, "vcpu.1.pin = 3 # vcpu.1.rt = 'fifo:1'\n", false),
    ] {
        fs::write(&options, toml).unwrap();
        let calls = host.call("NAME", PREPARE, xml).calls;
        let applied = calls.first() == Some(&host.apply());
        assert_eq!(
            (applied, calls.last().map(String::as_str)),
            (is, Some(start)),
            "{toml} {xml}"
        );
        let ended = host.call("NAME", RELEASE, xml).calls;
        assert_eq!(
            ended.last().map(String::as_str) == Some(RESTORE),
            is,
            "{toml} {xml}"
        );
    }
    fs::remove_file(host.rt_toml()).unwrap();
    assert_eq!(host.call("NAME", PREPARE, &real_time()), silent(&[start]));
}

#[test]
fn a_host_that_was_prepared_by_hand_stays_so() {
    let host = Host::with_rt();
    fs::write(host.record(), "").unwrap();
    let [start, stop] =
        ["start", "stop"].map(|how| format!("systemctl {how} vcpufreq-serve@NAME.socket"));
    assert_eq!(host.call("NAME", PREPARE, &real_time()), silent(&[&start]));
    assert_eq!(host.call("NAME", RELEASE, &real_time()), silent(&[&stop]));
    // By a hook, and then restored by hand.
    fs::remove_file(host.record()).unwrap();
    host.call("NAME", PREPARE, &real_time());
    fs::remove_file(host.record()).unwrap();
    let again = silent(&[&host.apply(), &start]);
    assert_eq!(host.call("NAME", PREPARE, &real_time()), again);
}

// What the hook had applied was restored by hand, and something else was applied.
#[test]
fn what_was_applied_by_hand_meanwhile_stays() {
    let host = Host::with_rt();
    let [start, stop] =
        ["start", "stop"].map(|how| format!("systemctl {how} vcpufreq-serve@NAME.socket"));
    let applied = silent(&[&host.apply(), &start]);
    assert_eq!(host.call("NAME", PREPARE, &real_time()), applied);
    fs::remove_file(host.record()).unwrap();
    // Even with the inode of the first.
    let record = fs::File::create(host.record()).unwrap();
    let later = SystemTime::now() + Duration::from_secs(60);
    record.set_modified(later).unwrap();
    assert_eq!(host.call("NAME", RELEASE, &real_time()), silent(&[&stop]));
    // By hand or not, the next one begins anew.
    fs::remove_file(host.record()).unwrap();
    assert_eq!(host.call("NAME", PREPARE, &real_time()), applied);
    let restored = silent(&[&stop, RESTORE]);
    assert_eq!(host.call("NAME", RELEASE, &real_time()), restored);
}

#[test]
fn a_host_that_can_not_be_prepared_stops_real_time_domains() {
    let host = Host::with_rt();
    let fails = |code: &str| fs::write(host.path().join("fails"), code).unwrap();
    let start = "systemctl start vcpufreq-serve@NAME.socket";
    for (code, calls) in [
        ("2", &[&*host.apply()][..]),
        ("137", &[&host.apply(), RESTORE]),
    ] {
        fails(code);
        let done = host.call("NAME", PREPARE, &real_time());
        assert_eq!(
            (done.code, &done.calls[..]),
            (
                1,
                &calls
                    .iter()
                    .map(|&call| call.to_owned())
                    .collect::<Vec<_>>()[..]
            )
        );
        assert_eq!(
            done.said,
            "vcpufreq: domain NAME: the host can't be prepared: no\n"
        );
    }
    assert_eq!(host.call("NAME", PREPARE, DOMAIN), silent(&[start]));
    // Only some settings.
    fails("1");
    let done = host.call("NAME", PREPARE, &real_time());
    assert_eq!((done.code, done.said.lines().count()), (0, 1), "{done:?}");
    assert!(done.said.contains("vcpufreq rt check"), "{done:?}");
}

#[test]
fn a_domain_that_is_refused_leaves_the_host_as_it_was() {
    let host = Host::with_rt();
    let xml = real_time().replace("NAME", "broken");
    let start = "systemctl start vcpufreq-serve@broken.socket";
    let done = host.call("broken", PREPARE, &xml);
    assert_eq!(
        (done.code, done.calls),
        (1, vec![host.apply(), start.to_owned(), RESTORE.to_owned()])
    );
    assert!(!host.record().exists());
    // libvirt calls it all the same.
    let ended = host.call("broken", RELEASE, &xml);
    assert_eq!(ended.calls, ["systemctl stop vcpufreq-serve@broken.socket"]);
}
