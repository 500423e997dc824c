// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest with Debian's own userland on a disk, and a network, behind `vcpufreq qemu`. systemd has
//! booted, udev has loaded the drivers, including this project's, networkd has an address, and the
//! host follows each OPP.

use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use crate::harness::console_commands::insmod;
use crate::harness::guest_shell::ask;
use crate::harness::host::begins;
use crate::harness::plan::{first_cpus, guest_policy};
use crate::harness::policy::Policy;
use crate::harness::vm::{Setup, Vm};
use crate::harness::vmm::Vmm;
use crate::scenarios::device::opps::{SweepRow, sweep};

/// In place of the lab's own guest: its disk is the host's, as QEMU alone writes to it.
const DISK: [&str; 4] = [
    "-initrd",
    "/lab/disk-initramfs",
    "-drive",
    "file=/dev/vda,format=raw,if=virtio,snapshot=on",
];
const NETWORK: [&str; 4] = [
    "-netdev",
    "user,id=net",
    "-device",
    "virtio-net-pci,netdev=net,romfile=",
];
/// What the guest fetches from the host.
const WORD: &str = "vcpufreq-lab";
/// The host, in QEMU's network.
const HOST: &str = "10.0.2.2";
/// Its address by DHCP.
const ADDRESS: &str = "10.0.2.15";
const MEM_MIB: u32 = 384;

pub fn run() -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let setup = Setup {
        vmm: Vmm::Qemu,
        mem_mib: Some(MEM_MIB),
        ..Setup::mirroring(&first_cpus(&policies))
    };
    let setup = setup.with(&["--clamp", "exact"]);
    insmod("virtio_blk", "")?;
    // What the guest writes.
    fs::create_dir_all("/var/tmp")?;
    let mut vm = Vm::boot_prepared(&setup, |qemu| {
        qemu.args(DISK).args(NETWORK);
    })?;
    begins(1, 4, "the guest has booted");
    let system = system(&mut vm)?;
    begins(2, 4, "the network");
    let network = network(&mut vm)?;
    begins(3, 4, "each OPP");
    let driver = vm.ask(format!("read {}/scaling_driver", guest_policy(0)))?;
    let mut rows = Vec::new();
    for (vcpu, policy) in policies.iter().enumerate() {
        vm.ask(format!("start busy busy {vcpu}"))?;
        rows.extend(sweep(&mut vm, vcpu, policy, SweepRow::exact)?);
        vm.ask("stop busy")?;
    }
    let said = vm.quit()?;
    let wrong = rows.iter().filter(|row| !row.exact()).count();
    let figures = json!({
        "driver": driver, "opps_checked": rows.len(), "opps_wrong": wrong,
        "rows": rows.iter().map(SweepRow::json).collect::<Vec<_>>(), "said": said,
    });
    Ok(LabVerdict::with_figures(figures)
        .part("system", system)
        .part("network", network)
        .check_eq("no OPP is wrong", &wrong, 0))
}

/// Whether it is Debian's, from the disk, with nothing failed; and the disk can be written.
fn system(vm: &mut Vm) -> Result<LabVerdict> {
    let name = ask(vm, ". /etc/os-release; echo $PRETTY_NAME")?;
    let root = ask(vm, "findmnt -no SOURCE,FSTYPE /")?;
    let init = ask(vm, "readlink /proc/1/exe")?;
    let failed = ask(vm, "systemctl list-units --failed --plain --no-legend")?;
    let written = ask(vm, "echo here > /root/file && sync && cat /root/file")?;
    let loaded = ask(vm, "cut -d ' ' -f 1 /proc/modules")?;
    let loaded = loaded.lines().any(|module| module == "vcpufreq_guest");
    let on_disk = root.split_whitespace().eq(["/dev/vda", "ext4"]);
    let figures = json!({
        "name": name.trim(), "root": root.trim(), "init": init.trim(),
        "failed": failed, "driver_loaded_by_udev": loaded,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("it is Debian", name.contains("Debian"), &name)
        .check("its root is a disk", on_disk, &root)
        .check(
            "its init is systemd",
            init.trim().ends_with("/systemd"),
            &init,
        )
        .check("no unit failed", failed.is_empty(), &failed)
        .check("its disk is written", written.trim() == "here", &written)
        .check("udev loads the driver", loaded, ()))
}

/// Whether it has an address, and reaches the host.
fn network(vm: &mut Vm) -> Result<LabVerdict> {
    let mut loopback = Command::new("/bin/busybox");
    let status = loopback.args(["ifconfig", "lo", "up"]);
    ensure!(status.status()?.success(), "no loopback interface");
    let listener = TcpListener::bind("127.0.0.1:0").context("listening")?;
    let port = listener.local_addr()?.port();
    let sent = thread::spawn(move || listener.accept()?.0.write_all(WORD.as_bytes()));
    // Debian's grep is in none of the packages.
    let show = "ip -4 -brief address show scope global dynamic";
    let script = format!("for _ in $(seq 40); do [ -n \"$({show})\" ] && break; sleep 0.5; done");
    ask(vm, &script)?;
    let address = ask(vm, show)?;
    let fetch = format!("bash -c 'cat < /dev/tcp/{HOST}/{port}'");
    let fetched = ask(vm, &fetch)?;
    let sent = sent.join().is_ok_and(|sent| sent.is_ok());
    let figures = json!({ "address": address.trim(), "fetched": fetched });
    Ok(LabVerdict::with_figures(figures)
        .check("it has an address", address.contains(ADDRESS), &address)
        .check_eq("it fetches the word", &fetched, WORD)
        .check("the word was sent", sent, ()))
}
