// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq bench` on the lab's host, as anyone calls it.

use std::fs;
use std::io::{BufRead as _, BufReader, Read};
use std::process::{self, Command, Output, Stdio};
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};
use vcpufreq_load::NULL_BLK;
use vcpufreq_tests::LabVerdict;

use crate::harness::console_commands::{insmod, rmmod};
use crate::harness::host::begins;
use crate::harness::leftovers::CGROUPS;
use crate::harness::machine::mount_bpffs;
use crate::harness::plan::Plan;
use crate::harness::sysfs;
use crate::harness::vmm::{QEMU, Vmm};

const OUT: &str = "/run/ramp.json";
const HTML: &str = "/run/ramp.html";
const SPEED_MODEL: &str = "/sys/module/lab_cpufreq/parameters/speed_model";
/// Of host and guest, HZ = 250.
const TICK_US: u64 = 4_000;
/// An ordinary guest's, for its disk.
const DISK_MODULES: [&str; 4] = [
    "--guest-module",
    "/lab/modules/virtio_mmio.ko",
    "--guest-module",
    "/lab/modules/virtio_blk.ko",
];
const GUEST_CMDLINE: &str = "nokaslr";
const SLICE: &str = "/sys/fs/cgroup/user.slice";
const SCOPE: &str = "/sys/fs/cgroup/user.slice/session-1.scope";

/// `bench`, or `bench:SCENARIO:SCENARIO...` for these alone; what begins with `--`
/// goes to the program as it is: `bench:step-down:--variant=host:--repeats=10`.
pub fn run(plan: &Plan, name: &str) -> Result<LabVerdict> {
    let mut options = vec!["--html", HTML];
    if let Some(path) = &plan.path {
        options.extend(["--path", path]);
    }
    if plan.vmm == Vmm::Qemu {
        options.extend(["--qemu", QEMU]);
    }
    if plan.protected {
        options.push("--protected");
    }
    // fio's guests need modules for their disk, which the kernel of protected guests has built in.
    let fio = name.split(':').any(|word| word.starts_with("fio"));
    if fio && !plan.protected {
        options.extend(DISK_MODULES);
    }
    for word in name.split(':').skip(1) {
        if !word.starts_with("--") {
            options.push("--scenario");
        }
        options.push(word);
    }
    let (output, report) = bench(plan, &options)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    let code = output.status.code();
    let figures = json!({
        "exit_code": code,
        "report": report, "html": fs::read_to_string(HTML).unwrap_or_default(),
        "table": text(&output.stdout), "said": text(&output.stderr),
    });
    let succeeds = output.status.success();
    Ok(LabVerdict::with_figures(figures).check(
        "the bench succeeds",
        succeeds,
        (code, text(&output.stderr)),
    ))
}

/// The ramp of a thread that begins on an idle vCPU, by each path: how long until
/// the pCPU runs at its highest frequency. A ramp is two requests, which may each
/// miss the host's tick, and begins anywhere between two ticks of the guest.
pub fn ramps(plan: &Plan) -> Result<LabVerdict> {
    let mut rows = Vec::new();
    for path in ["exit", "ioeventfd", "bpf"] {
        let options = [
            "--scenario",
            "new-thread",
            "--variant",
            "vm+bridge",
            "--repeats",
            "3",
            "--path",
            path,
        ];
        let (output, report) = bench(plan, &options)?;
        ensure!(
            output.status.success(),
            "path {path}: {} results {} failures {}",
            String::from_utf8_lossy(&output.stderr).trim(),
            report["results"],
            report["failures"]
        );
        let row = &report["results"][0];
        let median = row["median"].as_u64();
        let median = median.with_context(|| format!("path {path}: no ramp"))?;
        rows.push((path, median, row["values"].clone()));
    }
    let most = rows[0].1 + 3 * TICK_US;
    let soon = rows.iter().all(|(_, median, _)| *median <= most);
    let rows: Vec<_> = rows
        .into_iter()
        .map(|(path, median, values)| json!({ "path": path, "to_fmax_us": median, "values": values }))
        .collect();
    let figures = json!({ "at_most_us": most, "rows": rows });
    Ok(LabVerdict::with_figures(figures).check("within three ticks of exit's", soon, &rows))
}

/// Runs the program with more options; its output, and its report.
fn bench(plan: &Plan, options: &[&str]) -> Result<(Output, Value)> {
    // A CPU that leaves a deep idle state spends its exit latency in the one
    // stream of instructions that all emulated CPUs share.
    rmmod("lab_cpuidle")?;
    insmod("configfs", "")?;
    insmod("null_blk", NULL_BLK)?;
    mount_bpffs()?;
    // Of the run before.
    let _ = fs::remove_file(OUT);
    let session = SessionGroup::enter()?;
    let mut output = Command::new("/bin/vcpufreq")
        .args([
            "bench",
            "--kernel",
            "/lab/guest-kernel",
            "--initrd",
            "/lab/guest-initramfs",
        ])
        .args([
            "--guest-module",
            "/lab/modules/configfs.ko",
            "--guest-module",
        ])
        .arg(format!("/lab/modules/null_blk.ko {NULL_BLK}"))
        .arg("--guest-module")
        .arg(format!("/lab/modules/{}.ko", plan.driver))
        .args(["--guest-cmdline", GUEST_CMDLINE])
        .args(["--speed-switch", SPEED_MODEL])
        .args(["--cgroup-parent", CGROUPS])
        .args(["--out", OUT])
        .args(options)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("starting vcpufreq bench")?;
    let said = output.stderr.take().context("no stderr")?;
    let said = thread::spawn(move || without_repeats(said));
    let mut output = output.wait_with_output()?;
    let said = said.join().map_err(|_| anyhow!("a thread panicked"))?;
    output.stderr = said?.into_bytes();
    drop(session);
    rmmod("null_blk")?;
    rmmod("configfs")?;
    insmod("lab_cpuidle", "")?;
    let report: Value = fs::read_to_string(OUT)
        .ok()
        .and_then(|text| serde_json::from_str(&text).ok())
        .unwrap_or_default();
    Ok((output, report))
}

/// The output of the program but for its progress, which goes to the lab: `vcpufreq: 36 repeats,
/// about 3 min`, and `vcpufreq: vm: big-ramp, repeat 2 of 5; 16 of 36 done, 4 min left` before each of them.
fn without_repeats(said: impl Read) -> Result<String> {
    let mut others = String::new();
    let (mut done, mut of) = (0, 0);
    for line in BufReader::new(said).lines() {
        let line = line?;
        let text = line.strip_prefix("vcpufreq: ").unwrap_or(&line);
        if let Some((number, _)) = text.split_once(" repeats, about ") {
            of += number.parse::<u32>()?;
        } else if text.contains(", repeat ") {
            // The lab counts those of all benches of the boot.
            begins(done, of, text.split(';').next().unwrap_or(text));
            done += 1;
        } else {
            others.push_str(&line);
            others.push('\n');
        }
    }
    Ok(others)
}

/// Starts child processes in a cgroup with the cpu controller, two levels below the root, as
/// systemd does for a login (with one level more). On a host with an init system no load is in the
/// root group, and each level makes a thread's ticks and switches slower. A VM's own groups are two
/// levels deep, too: below the root, where a VMM goes with --cgroup-parent only, which is accepted
/// because nothing is limited here.
struct SessionGroup;

impl SessionGroup {
    fn enter() -> Result<Self> {
        // The root has the cpu controller on since `cpus_that_disobey`.
        fs::create_dir_all(SLICE)?;
        sysfs::write(format!("{SLICE}/cgroup.subtree_control"), "+cpu")?;
        // What a bench before this one could not remove is as good.
        fs::create_dir_all(SCOPE)?;
        sysfs::write(format!("{SCOPE}/cgroup.procs"), process::id())?;
        Ok(Self)
    }
}

impl Drop for SessionGroup {
    fn drop(&mut self) {
        let left = sysfs::write("/sys/fs/cgroup/cgroup.procs", process::id())
            .and_then(|()| Ok(fs::remove_dir(SCOPE)?))
            .and_then(|()| Ok(fs::remove_dir(SLICE)?));
        if let Err(error) = left {
            println!("the bench's cgroup stays: {error:#}");
        }
    }
}

#[cfg(test)]
mod tests {
    //! Promise: progress is no part of the output of the program.
    use super::*;

    #[test]
    fn progress_is_left_out() {
        let said = "vcpufreq: 2 repeats, about 8 s\nvcpufreq: host\nvcpufreq: host: work, repeat 1 of 2; 0 of 2 done\n\
                    vcpufreq: host: work, repeat 2 of 2; 1 of 2 done, 5 s left\nvcpufreq: work on host failed: x\n";
        assert_eq!(
            without_repeats(said.as_bytes()).unwrap(),
            "vcpufreq: host\nvcpufreq: work on host failed: x\n"
        );
    }
}
