// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of `vcpufreq` for wrong input: exit code 2, nothing on stdout, and one line on stderr
//! with the cause and the next step. Nothing is left on the host: no file, record, cgroup or
//! process. Every refusal here is checked for all of it.
//!
//! What this machine can't show (an offline CPU, a kernel without uclamp) is
//! skipped with its reason; unit tests show it on fake trees.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use tempfile::TempDir;
use vcpufreq::lifecycle::state::ROOT_DIR;

/// Files for a guest that would boot, and the program.
struct Scene {
    dir: TempDir,
}

impl Scene {
    fn new() -> Self {
        let scene = Self {
            dir: TempDir::new().expect("a temporary directory"),
        };
        // An arm64 boot header: image size at 16, magic at 56.
        let mut image = vec![0; 4096];
        image[16..24].copy_from_slice(&4096_u64.to_le_bytes());
        image[56..60].copy_from_slice(b"ARM\x64");
        scene.write("Image", &image);
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        fs::write(self.path(name), bytes).expect("a file in the temporary directory");
        self.path(name)
    }

    /// `vcpufreq run` with the kernel and these options.
    fn run(&self, options: &[&str]) -> Ran {
        let kernel = self.path("Image");
        let mut line = vec!["run", "--kernel", kernel.to_str().expect("a UTF-8 path")];
        line.extend(options);
        self.program(&line)
    }

    /// The program, to its end. What it leaves in its folder, a runtime
    /// directory or among temporary files is in the scene's.
    fn program(&self, line: &[&str]) -> Ran {
        let dir = self.dir.path();
        let before = below(dir);
        let child = Command::new(env!("CARGO_BIN_EXE_vcpufreq"))
            .args(line)
            .current_dir(dir)
            .env("XDG_RUNTIME_DIR", dir)
            .env("TMPDIR", dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let pid = child.id();
        let output = child.wait_with_output().expect("the program ends");
        let mut left = below(dir);
        left.retain(|path| !before.contains(path));
        left.extend(named_after(pid).chain(processes(dir)));
        Ran { output, left }
    }
}

/// The output of a run, and what is left of it.
struct Ran {
    output: Output,
    left: Vec<PathBuf>,
}

/// All files and folders below this one.
fn below(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        found.push(entry.path());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(below(&entry.path()));
        }
    }
    found
}

/// A process' record and socket, if root started it (others' are in the scene),
/// and its cgroup, where there is cgroup v2.
fn named_after(pid: u32) -> impl Iterator<Item = PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounts = mounts.lines().filter(|line| line.contains(" - cgroup2 "));
    let places = mounts.filter_map(|line| line.split(' ').nth(4));
    let all: Vec<_> = places
        .chain([ROOT_DIR])
        .map(Path::new)
        .flat_map(below)
        .collect();
    let (file, group) = (format!("{pid}."), format!("vcpufreq.{pid}"));
    all.into_iter().filter(move |path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(&file) || name == group
    })
}

/// Processes that got this folder in their environment.
fn processes(dir: &Path) -> impl Iterator<Item = PathBuf> {
    let dir = dir.as_os_str().as_encoded_bytes();
    let all = fs::read_dir("/proc").expect("/proc is mounted").flatten();
    all.map(|process| process.path()).filter(move |process| {
        // Processes come and go meanwhile, and others' can't be read.
        let settings = fs::read(process.join("environ")).unwrap_or_default();
        settings.windows(dir.len()).any(|part| part == dir)
    })
}

/// Checks the promise; `said` is part of the line.
fn assert_refused(ran: &Ran, said: &[&str]) {
    let line = String::from_utf8_lossy(&ran.output.stderr);
    assert_eq!(ran.output.status.code(), Some(2), "{line}");
    assert_eq!(line.lines().count(), 1, "{line}");
    assert!(ran.output.stdout.is_empty(), "{line}");
    for part in said {
        assert!(line.contains(part), "no '{part}' in: {line}");
    }
    assert!(
        line.contains(';') || line.contains("--"),
        "no next step in: {line}"
    );
    assert!(
        ran.left.is_empty(),
        "left behind: {:?} by: {line}",
        ran.left
    );
}

const TABLE: &str = "--table=0=600000,1800000";

#[test]
fn files_that_no_guest_boots_from() {
    let missing = |scene: &Scene| scene.program(&["run", "--kernel", "/nonexistent/Image", TABLE]);
    let none = |scene: &Scene| scene.program(&["run"]);
    let pipe = |scene: &Scene| {
        let pipe = scene.path("pipe");
        let made = Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        scene.program(&["run", "--kernel", pipe.to_str().unwrap(), TABLE])
    };
    let truncated = |scene: &Scene| {
        scene.write("Image", &[0; 40]);
        scene.run(&[TABLE])
    };
    let large_initrd = |scene: &Scene| {
        let initrd = scene.path("initrd");
        File::create(&initrd).unwrap().set_len(200 << 20).unwrap();
        scene.run(&[TABLE, "--mem=128", "--initrd", initrd.to_str().unwrap()])
    };
    let no_disk = |scene: &Scene| scene.run(&[TABLE, "--disk", "/nonexistent/disk"]);
    type Try<'a> = &'a dyn Fn(&Scene) -> Ran;
    let rows: [(Try, &[&str]); 6] = [
        (
            &no_disk,
            &["/nonexistent/disk", "No such file", "check the path"],
        ),
        (
            &missing,
            &["/nonexistent/Image", "No such file", "check the path"],
        ),
        (&none, &["no kernel", "--kernel"]),
        (&pipe, &["not a regular file", "check the path"]),
        (&truncated, &["truncated", "40", "copy it again"]),
        (&large_initrd, &["larger than", "128 MiB", "--mem 20"]),
    ];
    for (ran, said) in rows {
        assert_refused(&ran(&Scene::new()), said);
    }
}

#[test]
fn options_that_no_guest_can_have() {
    let scene = Scene::new();
    let long: Vec<_> = (1..=65).map(|khz: u32| khz.to_string()).collect();
    let long = format!("--table=0={}", long.join(","));
    let table = |said| ["vCPU 0", said, "--table"];
    let rows: [(&[&str], [&str; 3]); 12] = [
        (&["--cpus=0"], ["0 vCPUs", "--cpus", "1 to 512"]),
        (&["--cpus=513"], ["513 vCPUs", "--cpus", "1 to 512"]),
        (&["--pin=1=0"], ["no vCPU 1", "numbers from 0", "--cpus"]),
        (
            &[TABLE, "--pin=0=65535"],
            ["CPU 65535", "doesn't have", "online CPUs"],
        ),
        (&["--table=0="], table("empty")),
        (&["--table=0=2000,1000"], table("1000")),
        (&["--table=0=1000,1000"], table("1000")),
        (&["--table=0=0,1000"], table("0 kHz")),
        (&[&long], table("65")),
        (
            &["--table=0=600000000,1800000000", "--capacity=0=1024"],
            ["--table is in kHz", "if these are Hz", "write 1800000"],
        ),
        (
            &[TABLE, "--protected", "--hugepages=2M"],
            ["huge pages", "a protected guest", "leave --hugepages out"],
        ),
        (
            &[TABLE, "--protected", "--actuator=scx"],
            ["path bpf", "a protected guest", "leave --actuator out"],
        ),
    ];
    for (options, said) in rows {
        assert_refused(&scene.run(options), &said);
    }
}

#[test]
fn real_time_vcpus_of_another_program_that_cannot_be() {
    let scene = Scene::new();
    let one = "--table=0=600000,1800000";
    let two = "--table=0-1=600000,1800000";
    let rows: [(&[&str], [&str; 2]); 5] = [
        (&[one, "--rt=0=fifo:1"], ["pinned to one pCPU", "--pin 0="]),
        (
            &[two, "--cpus=2", "--rt=0=fifo:1", "--pin=0-1=0"],
            ["CPU 0 is real-time vCPU 0's alone", "pin vCPU 1"],
        ),
        (
            &[one, "--resume-latency-us=50"],
            ["--resume-latency-us", "--rt"],
        ),
        (&[one, "--floor=1=600000"], ["no vCPU 1", "--cpus"]),
        (
            &[one, "--floor=0=600000", "--actuator=none"],
            ["--actuator none", "--floor"],
        ),
    ];
    for (options, said) in rows {
        let served = [&["serve", "--socket=socket"][..], options].concat();
        assert_refused(&scene.program(&served), &said);
        let lock = ["--", "false", "-overcommit", "mem-lock=on"];
        let prefix = [&["qemu"][..], options, &lock].concat();
        assert_refused(&scene.program(&prefix), &said);
    }
    let rt = ["qemu", one, "--rt=0=fifo:1", "--pin=0=0", "--", "false"];
    let unlocked = scene.program(&rt);
    assert_refused(&unlocked, &["locked", "-overcommit mem-lock=on"]);
}

#[test]
fn sums_of_another_program_that_cannot_be() {
    let scene = Scene::new();
    let rows: [(&[&str], [&str; 2]); 3] = [
        (
            &["--clamp=exact"],
            ["--clamp exact", "leave one of them out"],
        ),
        (
            &["--actuator=thread"],
            ["cgroups", "take another --actuator"],
        ),
        (&["--actuator=none"], ["cgroups", "take another --actuator"]),
    ];
    for (options, said) in rows {
        let served = [&["serve", "--socket=socket", TABLE, "--sum"][..], options].concat();
        assert_refused(&scene.program(&served), &said);
        let prefix = [&["qemu", TABLE, "--sum"][..], options, &["--", "false"]].concat();
        assert_refused(&scene.program(&prefix), &said);
    }
}

#[test]
fn a_real_time_vcpu_of_another_program_takes_a_partition() {
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    if online.trim() == "0" || Path::new("/run/vcpufreq-rt/rt.json").exists() {
        println!("SKIP: this host has one CPU, or a partition");
        return;
    }
    let scene = Scene::new();
    let options = [TABLE, "--rt=0=fifo:1", "--pin=0=0"];
    let served = [&["serve", "--socket=socket"][..], &options].concat();
    let said = ["CPU 0 is not set apart", "rt apply --guest NAME=0"];
    assert_refused(&scene.program(&served), &said);
}

#[test]
fn a_pin_to_a_cpu_that_is_offline() {
    let Some(offline) = offline_cpu() else {
        println!("SKIP: all CPUs of this machine are online");
        return;
    };
    let scene = Scene::new();
    let output = scene.run(&[TABLE, &format!("--pin=0={offline}")]);
    assert_refused(&output, &["offline", "bring it online"]);
}

fn offline_cpu() -> Option<String> {
    (1..1024).find_map(|cpu: u32| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/online");
        let online = fs::read_to_string(path).ok()?;
        (online.trim() == "0").then(|| cpu.to_string())
    })
}

#[test]
fn no_kvm() {
    let scene = Scene::new();
    let events = format!("--events={}", scene.path("events").display());
    let dtb = format!("--dump-dtb={}", scene.path("guest.dtb").display());
    for option in ["--no-bridge", &events, &dtb] {
        let output = scene.run(&[TABLE, option, "--kvm-device=/nonexistent/kvm"]);
        assert_refused(&output, &["/nonexistent/kvm", "No such file", "KVM"]);
    }
    let output = scene.run(&[TABLE, "--kvm-device=/dev/null"]);
    assert_refused(
        &output,
        &["/dev/null", "no usable KVM device", "--kvm-device"],
    );
}

fn kvm_is_usable() -> bool {
    File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_ok()
}

#[test]
fn no_uclamp() {
    if Path::new("/proc/sys/kernel/sched_util_clamp_min").exists() {
        println!("SKIP: this kernel has uclamp");
        return;
    }
    if !kvm_is_usable() {
        println!("SKIP: no usable /dev/kvm, which is looked at first");
        return;
    }
    let scene = Scene::new();
    let said = ["CONFIG_UCLAMP_TASK", "--no-bridge"];
    assert_refused(&scene.run(&[TABLE]), &said);
}

#[test]
fn a_linux_guest_on_another_architecture() {
    if cfg!(target_arch = "aarch64") {
        println!("SKIP: this is arm64");
        return;
    }
    if !kvm_is_usable() {
        println!("SKIP: no usable /dev/kvm, which is looked at first");
        return;
    }
    let output = Scene::new().run(&["--no-bridge"]);
    assert_refused(&output, &["isn't there yet", "arm64"]);
}

#[test]
fn a_protected_guest_on_a_host_without() {
    let mode = fs::read_to_string("/proc/cmdline").unwrap();
    if mode.contains("kvm-arm.mode=protected") {
        println!("SKIP: this host may have protected VMs");
        return;
    }
    if !kvm_is_usable() {
        println!("SKIP: no usable /dev/kvm, which is looked at first");
        return;
    }
    let said = match cfg!(target_arch = "aarch64") {
        true => ["protected", "on the kernel's command line"],
        false => ["no protected VMs", "use an arm64 host"],
    };
    assert_refused(&Scene::new().run(&[TABLE, "--protected"]), &said);
}

#[test]
fn toml_that_is_malformed_or_has_unknown_keys() {
    let scene = Scene::new();
    let rows = [
        ("cpus = = 2", "line 1"),
        ("cpus = 1\n[vcpu.0]\npins = 0\n", "pins"),
        ("kernal = 'Image'\n", "kernal"),
        ("cpus = 'two'\n", "line 1"),
        ("cpus = 0\n", "0 vCPUs"),
    ];
    for (text, said) in rows {
        let config = scene.write("guest.toml", text.as_bytes());
        let output = scene.run(&["--config", config.to_str().unwrap()]);
        assert_refused(&output, &[said]);
    }
    let output = scene.run(&["--config", "/nonexistent/guest.toml"]);
    assert_refused(&output, &["/nonexistent/guest.toml", "check the path"]);
}

#[test]
fn a_flag_that_does_not_exist_or_has_no_value() {
    let scene = Scene::new();
    for line in [
        &["run", "--nope"][..],
        &["run", "--pin", "0"],
        &["run", "--pin", "0=one"],
        &["run", "--table", "0=fast"],
        &["run", "--mem", "lots"],
        &["run", "--clamp", "soft"],
        &["dt", "--base", "here"],
        &["go"],
        &[],
    ] {
        assert_refused(&scene.program(line), &["--help"]);
    }
}
