// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest of the real QEMU with the real driver: that of guest-driver/tests, in the toolchain root
//! that `VCPUFREQ_LAB_ROOT` names.

use std::{
    env, fs,
    io::{BufRead, BufReader, Lines, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use nix::sys::signal::Signal;

use super::{dir, server::Server, wait_until};

/// The guest's CPUs, as guest-driver/tests/served.py has them.
const VM: [&str; 4] = [
    "--cpus=3",
    "--table=0-2=600000,1000000,2000000",
    "--capacity=0-2=1024",
    "--cur-perf=request",
];
/// In the root, with the checkout and a folder in it: builds the driver, and boots the guest.
const BOOT: &str = r#"
    set -e
    root=$1 src=$2 folder=$3 release=$4 vectors=$5
    mount --bind "$src" "$root/src"
    mount --bind "$folder" "$root/mnt"
    mount --rbind /dev "$root/dev"
    mount --rbind /proc "$root/proc"
    mount -t tmpfs tmpfs "$root/tmp"
    exec chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin sh -ec '
        cp -r /src/guest-driver /src/abi /src/module.mk /tmp
        exec make --silent -C /tmp/guest-driver test-served ARCH=x86 CROSS_COMPILE= MO=/tmp/out \
            KDIR="/lib/modules/$0/build" KERNEL="/opt/amd64/vmlinuz-$0" SOCKET=/mnt/vm VECTORS="$1"
    ' "$release" "$vectors"
"#;

/// The root, and the release of its kernel for x86-64; else what is missing.
fn root() -> Result<(PathBuf, String), &'static str> {
    let root = env::var_os("VCPUFREQ_LAB_ROOT").ok_or("toolchain root; set VCPUFREQ_LAB_ROOT")?;
    let root = PathBuf::from(root);
    if !root.join("usr/bin/qemu-system-x86_64").exists() {
        return Err("QEMU for x86-64 in VCPUFREQ_LAB_ROOT");
    }
    let kernels = fs::read_dir(root.join("opt/amd64")).into_iter().flatten();
    let release = kernels.flatten().find_map(|file| {
        let name = file.file_name().into_string().ok()?;
        name.strip_prefix("vmlinuz-").map(str::to_owned)
    });
    let release = release.ok_or("kernel for x86-64 in VCPUFREQ_LAB_ROOT")?;
    match root
        .join(format!("lib/modules/{release}/build"))
        .is_symlink()
    {
        true => Ok((root, release)),
        false => Err("headers of the kernel for x86-64 in VCPUFREQ_LAB_ROOT"),
    }
}

#[test]
fn a_guest_of_qemu_reads_answers_to_its_requests_also_with_other_vcpus() {
    let Some((dir, socket)) = dir() else { return };
    let (root, release) = match root() {
        Ok(root) => root,
        Err(missing) => return println!("SKIP: no {missing}"),
    };
    let server = Server::start_for(&socket, &VM).that_says("waits at");
    let mut guest = Guest::boot(&root, dir.path(), (&release, "3"));
    guest.expect("@answered");
    let stats = server.stats();
    // KiloHertz, and the requests that the server has carried out at least.
    for (vcpu, khz, requests) in [(0, 2_000_000, 1), (1, 1_000_000, 3), (2, 2_000_000, 1)] {
        let vcpu = &stats["vcpus"][vcpu];
        assert_answered(vcpu, khz);
        // A doorbell that comes late announces a request that the server has found.
        assert!(
            vcpu["counts"]["requests"].as_u64() >= Some(requests),
            "{vcpu}"
        );
    }
    guest.tell("unplug");
    server.hear("has ended vCPU 2");
    guest.expect("@unplug");
    // The bridge begins anew.
    wait_until("the requests of the vCPUs that are left", || {
        let vcpus = &server.stats()["vcpus"];
        let asks = [0, 1, 2].map(|vcpu| vcpus[vcpu]["asks_khz"].as_u64());
        asks == [Some(600_000), Some(1_000_000), None]
    });
    let stats = server.stats();
    for (vcpu, khz) in [(0, 600_000), (1, 1_000_000)] {
        assert_answered(&stats["vcpus"][vcpu], khz);
    }
    guest.tell("plug");
    server.hear("has vCPU 2 again");
    guest.expect("@plug");
    assert_answered(&server.stats()["vcpus"][2], 1_000_000);
    guest.tell("suspend");
    guest.expect("@suspend");
    guest.end();
    server.hear("has ended");
    server.end(Signal::SIGTERM);
}

#[test]
fn a_guest_of_qemu_with_too_few_vectors_reads_answers_too() {
    let Some((dir, socket)) = dir() else { return };
    let (root, release) = match root() {
        Ok(root) => root,
        Err(missing) => return println!("SKIP: no {missing}"),
    };
    let server = Server::start_for(&socket, &VM).that_says("waits at");
    let mut guest = Guest::boot(&root, dir.path(), (&release, "1"));
    let line = server.hear("has no doorbell of vCPU 1-2");
    assert!(line.contains("ivshmem-doorbell vectors=3 ("), "{line}");
    guest.expect("@answered");
    let vcpu = &server.stats()["vcpus"][1];
    assert_answered(vcpu, 1_000_000);
    assert!(
        vcpu["accesses"]["writes_in_kernel"].as_u64() > Some(0),
        "{vcpu}"
    );
    guest.end();
    server.hear("has ended");
    server.end(Signal::SIGTERM);
}

fn assert_answered(vcpu: &serde_json::Value, khz: u64) {
    assert_eq!(
        (&vcpu["asks_khz"], &vcpu["gets_khz"], &vcpu["path"]),
        (&khz.into(), &khz.into(), &"shm".into()),
        "{vcpu}"
    );
}

/// The test of the guest driver that boots the guest.
struct Guest {
    test: Child,
    stdin: ChildStdin,
    said: Lines<BufReader<ChildStdout>>,
}

impl Guest {
    /// With this kernel, and a device with so many vectors.
    fn boot(root: &Path, folder: &Path, (release, vectors): (&str, &str)) -> Self {
        let mut test = Command::new("unshare")
            .args(["--mount", "sh", "-c", BOOT, "sh"])
            .arg(root)
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
            .args([folder.as_os_str(), release.as_ref(), vectors.as_ref()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            stdin: test.stdin.take().unwrap(),
            said: BufReader::new(test.stdout.take().unwrap()).lines(),
            test,
        }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    /// Reads up to this line.
    fn expect(&mut self, line: &str) {
        let mut lines = Vec::new();
        while lines.last().is_none_or(|last| last != line) {
            let next = self.said.next().unwrap_or_else(|| panic!("{lines:#?}"));
            lines.push(next.unwrap());
        }
    }

    fn end(mut self) {
        drop(self.stdin);
        let lines: Vec<_> = self.said.map_while(Result::ok).collect();
        assert!(self.test.wait().unwrap().success(), "{lines:#?}");
    }
}
