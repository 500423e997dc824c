// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises, with a script that stands for QEMU:
//! - One line names what the guest will see. QEMU gets the device, and the tree that the line names.
//! - QEMU has the terminal.
//! - QEMU gets every signal, also before it has vCPUs, and its exit code is the program's.
#![allow(clippy::unwrap_used)]

#[cfg(test)]
#[path = "../../dt/tests/dt/blob.rs"]
mod blob;
#[cfg(test)]
#[path = "../../dt/tests/dt/dtc.rs"]
mod dtc;
mod scripts;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

use nix::pty::openpty;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use blob::{cell, read_resolved};
use dtc::{NO_DTC, tree_of_qemu};
use scripts::write_script;

const PROGRAM: &str = env!("CARGO_BIN_EXE_vcpufreq");

/// Writes the tree `base` where it is asked for its own. Else it writes what it was given, with `N`
/// for the numbers of open files, and the tree that it got.
const QEMU: &str = r#"#!/bin/sh
dir=${0%/*}
for word; do
    case $word in dumpdtb=*)
        echo "$*" > "$dir/asked"
        exec cp "$dir/base" "${word#*=}" ;;
    esac
done
echo "$*" | sed 's,fd\([=/]\)[0-9]*,fd\1N,g' > "$dir/given"
while [ $# -gt 1 ]; do
    case $1 in
        -dtb) cat "$2" > "$dir/tree" ;;
        -chardev) [ -S "/proc/self/fd/${2##*=}" ] || exit 1 ;;
    esac
    shift
done
exit 7
"#;
/// What is added to every command line.
const DEVICE: &str = "-name debug-threads=on -chardev socket,id=vcpufreq,fd=N \
                      -device ivshmem-doorbell,master=on,chardev=vcpufreq,vectors=4";
const TREE: &str = "-dtb /proc/self/fd/N";
/// The vCPUs: two of half a big one's work per MHz, and two big ones.
const VCPUS: [&str; 6] = [
    "--table=0-1=500000::100000,1000000::300000",
    "--table=2-3=1000000::400000,2000000::1200000",
    "--domain=0-1=0",
    "--domain=2-3=1",
    "--capacity=0-1=256",
    "--capacity=2-3=1024",
];
/// How the line begins that says so.
const DESCRIBED: &str = "vcpufreq: the vCPUs are as --table, --domain and --capacity describe \
                         them; --host-topology adds what these leave out; ";

/// A folder with a program for QEMU in it.
fn qemu(script: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let qemu = dir.path().join("qemu");
    write_script(&qemu, script);
    (dir, qemu)
}

/// Boots four such vCPUs of a QEMU whose own tree is `base`; the folder that it wrote to, and what
/// the guest will see, of the only line that says so.
fn boot(line: &str, base: &[u8]) -> (TempDir, String) {
    let (dir, qemu) = qemu(QEMU);
    fs::write(dir.path().join("base"), base).unwrap();
    let Output { status, stderr, .. } = Command::new(PROGRAM)
        .arg("qemu")
        .args(VCPUS)
        .arg("--")
        .arg(qemu)
        .args(line.split(' '))
        // Root's records have a place of their own.
        .env("XDG_RUNTIME_DIR", dir.path())
        .current_dir(dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(7), "{line}: {said}");
    let seen = said.lines().filter_map(|line| line.strip_prefix(DESCRIBED));
    let seen: Vec<_> = seen.map(str::to_owned).collect();
    assert!(seen.len() == 1 && said.lines().count() == 2, "{said}");
    (dir, seen.concat())
}

fn text(dir: &TempDir, file: &str) -> String {
    fs::read_to_string(dir.path().join(file)).unwrap()
}

#[test]
fn a_guest_of_a_device_tree_has_capacities_opps_and_energy_in_it() {
    let Some(base) = tree_of_qemu() else {
        println!("{NO_DTC}");
        return;
    };
    for line in [
        "-machine virt -smp 4 -kernel Image",
        "-machine virt,acpi=off -smp 4 -bios EFI",
    ] {
        let (dir, seen) = boot(line, &base);
        let described = "the guest has capacities, OPPs and energy in its device tree; QEMU gets \
                         -dtb -name -chardev -device too";
        assert_eq!(seen, described, "{line}");
        assert_eq!(text(&dir, "given"), format!("{line} {TREE} {DEVICE}\n"));
        let asked = text(&dir, "asked");
        let (asked, dump) = asked.trim_end().split_once("dumpdtb=").unwrap();
        assert_eq!(asked, format!("-nodefaults -display none {line} -machine "));
        assert!(!fs::exists(dump).unwrap(), "{dump} is left");
        let tree = read_resolved(&fs::read(dir.path().join("tree")).unwrap());
        let opps = |cluster| format!("/opp-table-{cluster}").into_bytes();
        for (cpu, dmips_mhz, cluster) in [(0, 512, 0), (1, 512, 0), (2, 1024, 1), (3, 1024, 1)] {
            let cpu = format!("/cpus/cpu@{cpu}");
            assert_eq!(cell(&tree, &cpu, "capacity-dmips-mhz"), dmips_mhz, "{cpu}");
            assert_eq!(tree[&cpu]["operating-points-v2"], opps(cluster), "{cpu}");
            assert_eq!(tree[&cpu]["compatible"], b"arm,cortex-a57\0", "{cpu}");
        }
        for (opp, microwatts) in [
            ("0/opp-500000000", 100_000),
            ("0/opp-1000000000", 300_000),
            ("1/opp-1000000000", 400_000),
            ("1/opp-2000000000", 1_200_000),
        ] {
            let opp = format!("/opp-table-{opp}");
            assert_eq!(cell(&tree, &opp, "opp-microwatt"), microwatts, "{opp}");
        }
        // Of QEMU's own.
        assert!(tree.contains_key("/pl011@9000000"));
    }
}

#[test]
fn a_guest_of_acpi_has_what_its_driver_sets() {
    let by_driver = "the guest has no device tree: its driver sets capacities in sysfs, but its \
                     scheduler balances as if CPUs were equal";
    let equal = "the guest takes its CPUs for equal: x86-64 has no capacities";
    for (line, described) in [
        ("-machine virt -smp 4 -bios EFI", by_driver),
        ("-machine q35 -smp 4", equal),
        ("-machine pc-q35-9.2 -smp 4", equal),
    ] {
        let (dir, seen) = boot(line, b"");
        let described = format!("{described}; QEMU gets -name -chardev -device too");
        assert_eq!(seen, described, "{line}");
        assert_eq!(text(&dir, "given"), format!("{line} {DEVICE}\n"));
        assert!(!dir.path().join("asked").exists(), "{line}");
    }
}

#[test]
fn a_users_own_device_tree_stays_as_it_is() {
    let line = "-machine virt -smp 4 -kernel Image -dtb base";
    let (dir, seen) = boot(line, b"mine");
    let described = "the guest has the device tree of -dtb: put capacities into it by vcpufreq dt \
                     --merge; QEMU gets -name -chardev -device too";
    assert_eq!(seen, described);
    assert_eq!(text(&dir, "given"), format!("{line} {DEVICE}\n"));
    assert_eq!(text(&dir, "tree"), "mine");
    assert!(!dir.path().join("asked").exists());
}

#[test]
fn qemu_has_the_terminal() {
    let script = "#!/bin/sh\n[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && read -r line && echo \"<$line>\"\n\
                  exit 7\n";
    let (_dir, qemu) = qemu(script);
    let terminal = openpty(None, None).unwrap();
    let [stdin, stdout, stderr] = [(); 3].map(|()| terminal.slave.try_clone().unwrap());
    // A program in the background could not read from its controlling terminal.
    let mut prefix = Command::new("setsid")
        .args(["--wait", "--ctty", PROGRAM])
        .args(["qemu", "--cpus=1", "--table=0=1000000", "--"])
        .arg(&qemu)
        .stdin(stdin)
        .stdout(stdout)
        .stderr(stderr)
        .spawn()
        .unwrap();
    drop(terminal.slave);
    let mut terminal = File::from(terminal.master);
    terminal.write_all(b"typed\n").unwrap();
    let mut shown = Vec::new();
    // EIO when no program has it any longer.
    let _ = terminal.read_to_end(&mut shown);
    let shown = String::from_utf8(shown).unwrap();
    assert_eq!(prefix.wait().unwrap().code(), Some(7), "{shown}");
    assert!(shown.contains("<typed>"), "{shown}");
}

#[test]
fn it_blocks_no_signal_of_qemu_and_returns_its_exit_code() {
    // By the shell alone: it blocks signals while it starts a program.
    let script = "#!/bin/sh\nwhile read -r name mask; do\n\
                  [ \"$name\" != SigBlk: ] || echo \"$name $mask\" >&2\n\
                  done < /proc/$$/status\nexit 7\n";
    let (_dir, qemu) = qemu(script);
    let ended = Command::new(PROGRAM)
        .args(["qemu", "--cpus=1", "--table=0=1000000", "--"])
        .arg(&qemu)
        .output()
        .unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(7), "{said}");
    assert!(said.contains("SigBlk: 0000000000000000"), "{said}");
    assert!(said.contains("isn't served: it has ended"), "{said}");
}

#[test]
fn each_signal_comes_before_the_vcpus_do() {
    const CATCHES: &str = "trap 'exit 5' HUP INT QUIT TERM USR1 USR2\n";
    const BY_SIGNAL: i32 = 128;
    for signal in [
        Signal::SIGHUP,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGTERM,
        Signal::SIGUSR1,
        Signal::SIGUSR2,
    ] {
        assert_eq!(code_after(signal, CATCHES), 5, "{signal}");
    }
    let signal = Signal::SIGTERM;
    assert_eq!(code_after(signal, ""), BY_SIGNAL + signal as i32);
}

/// The exit code when `signal` is sent to the prefix of a QEMU that does this about signals.
fn code_after(signal: Signal, catches: &str) -> i32 {
    let script = format!("#!/bin/sh\n{catches}echo ready\nwhile :; do sleep 0.1; done\n");
    let (_dir, qemu) = qemu(&script);
    // A shell can't catch what is ignored when it starts, as in a background job.
    let mut prefix = Command::new("env")
        .args(["--default-signal", PROGRAM])
        .args(["qemu", "--cpus=1", "--table=0=1000000", "--"])
        .arg(&qemu)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = [0; 6];
    prefix
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut ready)
        .unwrap();
    // HUP, INT, QUIT, USR1, USR2, TERM and CHLD: it waits for them.
    let waits = |status: String| status.contains("SigBlk:\t0000000000014a07");
    while !waits(fs::read_to_string(format!("/proc/{}/status", prefix.id())).unwrap()) {
        sleep(Duration::from_millis(1));
    }
    let pid = Pid::from_raw(prefix.id().try_into().unwrap());
    kill(pid, signal).unwrap();
    let ended = prefix.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(said.contains("isn't served: it has ended"), "{said}");
    ended.status.code().unwrap()
}
