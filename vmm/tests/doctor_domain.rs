// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of `vcpufreq doctor --domain`, with a script that stands for virsh:
//!
//! - A name is libvirt's, a path with `/` or `.xml` is a file's.
//! - The exit code is the worst finding's: 0 of none, 1 of a limit, 2 of a blocker, as `--help` has it.
//! - What can't be read, or is no domain, is one line on stderr and exit code 2.

#![allow(clippy::unwrap_used)]

mod scripts;

use std::fs;
use std::process::Command;

use scripts::write_script;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_vcpufreq");
const EXAMPLE: &str = include_str!("../docs/examples/libvirt.xml");
/// Writes its command line. It knows two domains; the second one's XML never ends.
const VIRSH: &str = "#!/bin/sh
echo $* >>$CALLS
case $* in
*--domain=NAME) cat $0.xml ;;
*--domain=endless) while :; do echo '<a/>'; done ;;
*) echo >&2; echo 'error: failed to get domain' >&2; exit 1 ;;
esac
";

/// Starts a program with a server's options in an /etc of its own.
const WITH_OPTIONS: &str = r#"
mount -t tmpfs tmpfs /etc && mkdir /etc/vcpufreq && echo "$1" >/etc/vcpufreq/NAME.toml &&
shift && exec "$@""#;

struct Scene(TempDir);

struct Ran {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Scene {
    fn new() -> Self {
        let scene = Self(tempfile::tempdir().unwrap());
        write_script(&scene.0.path().join("virsh"), VIRSH);
        scene.write("virsh.xml", EXAMPLE);
        scene
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) -> String {
        let path = self.0.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn doctor(&self, words: &[&str]) -> Ran {
        self.run(Command::new(PROGRAM).arg("doctor").args(words))
    }

    fn run(&self, doctor: &mut Command) -> Ran {
        let dir = self.0.path();
        let path = std::env::var("PATH").unwrap();
        doctor.env("PATH", format!("{}:{path}", dir.display()));
        let done = doctor.env("CALLS", dir.join("calls")).output().unwrap();
        Ran {
            code: done.status.code().unwrap(),
            stdout: String::from_utf8(done.stdout).unwrap(),
            stderr: String::from_utf8(done.stderr).unwrap(),
        }
    }

    fn calls(&self) -> String {
        fs::read_to_string(self.0.path().join("calls")).unwrap_or_default()
    }
}

/// The example has no options on this host, so that its server can't start.
#[test]
fn a_name_is_asked_of_libvirt() {
    let scene = Scene::new();
    let ran = scene.doctor(&["--domain=NAME"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (2, ""));
    assert!(
        ran.stdout.contains("ok       shmem           2 vectors"),
        "{}",
        ran.stdout
    );
    let missing = "BLOCKER  server          there is no /etc/vcpufreq/NAME.toml";
    assert!(ran.stdout.contains(missing), "{}", ran.stdout);
    assert_eq!(
        scene.calls(),
        "--readonly dumpxml --inactive --domain=NAME\n"
    );
    let json: serde_json::Value =
        serde_json::from_str(&scene.doctor(&["--domain=NAME", "--json"]).stdout).unwrap();
    assert_eq!(
        (&json["domain"], &json["exit_code"]),
        (&"NAME".into(), &2.into())
    );
}

#[test]
fn a_path_is_a_files() {
    let scene = Scene::new();
    let other = EXAMPLE.replace("/run/vcpufreq-NAME.sock", "/run/other.sock");
    // Without the device tree, which this host doesn't have.
    let (start, end) = (other.find("<dtb>").unwrap(), other.find("</os>").unwrap());
    let other = format!("{}{}", &other[..start], &other[end..]);
    let path = scene.write("domain", other.replace("cpuset='4'", "cpuset='0'"));
    let ran = scene.doctor(&["--domain", &path]);
    assert_eq!((ran.code, ran.stderr.as_str()), (1, ""), "{}", ran.stdout);
    assert_eq!(scene.calls(), "");
}

/// [`EXAMPLE`] with one vCPU of a PC, without pins and device tree: this host may have neither.
fn one_vcpu() -> String {
    let mut xml = EXAMPLE.to_owned();
    for (from, to, new) in [
        ("<cputune>", "</cputune>", ""),
        ("<dtb>", "</dtb>", ""),
        ("<vcpu>", "</vcpu>", "<vcpu>1</vcpu>"),
        ("<msi", "/>", "<msi vectors='1' ioeventfd='on'/>"),
    ] {
        let start = xml.find(from).unwrap();
        let end = start + xml[start..].find(to).unwrap() + to.len();
        xml.replace_range(start..end, new);
    }
    xml.replace("aarch64", "x86_64")
}

#[test]
fn the_exit_code_is_the_worst_findings() {
    let scene = Scene::new();
    // This host may have no frequencies, without which no server starts.
    let options = "cpus = 1\n[vcpu.0]\ntable = '1000000,2000000'";
    let mut unshare = vec!["--mount", "--", "sh", "-c", WITH_OPTIONS, "sh", options];
    if !nix::unistd::geteuid().is_root() {
        unshare.insert(0, "--map-root-user");
    }
    let unshared = || {
        let mut command = Command::new("unshare");
        command.args(&unshare);
        command
    };
    if !unshared().arg("true").status().unwrap().success() {
        eprintln!("SKIP: no mount namespaces here");
        return;
    }
    let fits = one_vcpu();
    for (xml, code, mark) in [
        (fits.clone(), 0, "\nok       server "),
        (fits.replace(" ioeventfd='on'", ""), 1, "\nlimit    shmem "),
        (
            fits.replace("ivshmem-doorbell", "ivshmem-plain"),
            2,
            "\nBLOCKER  shmem ",
        ),
    ] {
        let path = scene.write("one.xml", xml);
        let mut doctor = unshared();
        let ran = scene.run(doctor.args([PROGRAM, "doctor", "--domain", &path]));
        assert_eq!((ran.code, &*ran.stderr), (code, ""), "{}", ran.stdout);
        assert!(ran.stdout.contains(mark), "{}", ran.stdout);
    }
}

#[test]
fn what_is_no_domain_is_one_line() {
    let scene = Scene::new();
    let dir = scene.0.path().to_str().unwrap();
    let deep = format!("<domain>{}", "<a>".repeat(1_000_000));
    for (name, said) in [
        ("gone", "failed to get domain; see virsh list --all"),
        ("--gone", "failed to get domain; see virsh list --all"),
        ("gone.xml", "check the path, or give a domain's name"),
        ("endless", "no domain's XML has more than 4 MiB"),
        (dir, "it is no file"),
        ("/dev/zero", "it is no file"),
        (
            &scene.write("a", b"<domain>\xff</domain>"),
            "it is not UTF-8",
        ),
        (&scene.write("b", "<network/>"), "not a <domain> of libvirt"),
        (&scene.write("c", deep), "it is no XML"),
        (
            &scene.write("d", vec![b' '; 5 << 20]),
            "no domain's XML has more than 4 MiB",
        ),
        (&scene.write("e", "<domain>\u{1b}[31m"), "it is no XML"),
    ] {
        let Ran {
            code,
            stdout,
            stderr,
        } = scene.doctor(&[&format!("--domain={name}")]);
        assert_eq!((code, stdout.as_str()), (2, ""), "{name}");
        assert!(
            stderr.contains(said) && stderr.lines().count() == 1,
            "{name}: {stderr}"
        );
        assert!(!stderr.contains('\u{1b}'), "{stderr}");
    }
}
