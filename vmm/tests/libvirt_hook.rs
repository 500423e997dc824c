// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of the hook of libvirt in `docs/examples`, with programs that stand for systemctl and
//! vcpufreq:
//!
//! - A domain as in the example has its socket started before it, and stopped after its end.
//! - Nothing is done for a domain without the device, for one with another server, or at other times.
//! - A device tree beside which QEMU's own lies is made anew. If that fails, the tree stays, and the
//!   domain starts, unless QEMU's own is newer, or there is none.
//! - If the socket can't be started, the hook fails, and libvirt doesn't start the domain.

#![allow(clippy::unwrap_used)]

mod scripts;

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use scripts::write_script;
use tempfile::TempDir;

const HOOK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/examples/libvirt-hook");
const DOMAIN: &str = include_str!("../docs/examples/libvirt.xml");
const PREPARE: [&str; 2] = ["prepare", "begin"];
const RELEASE: [&str; 2] = ["release", "end"];
/// Each writes its command line; systemctl fails for a domain of this name.
const SYSTEMCTL: &str =
    "#!/bin/sh\necho systemctl $* >>$CALLS\ncase $* in *broken*) exit 1;; esac\n";
const VCPUFREQ: &str = "#!/bin/sh\necho vcpufreq $* >>$CALLS\ncat ${5:?}\n";

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
        host
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
        let mut hook = Command::new(HOOK);
        hook.args([domain, operation, sub, "-"]);
        hook.env("PATH", path).env("CALLS", &calls);
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
    let made = format!("vcpufreq dt --config /etc/vcpufreq/NAME.toml --merge {shown}");
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
