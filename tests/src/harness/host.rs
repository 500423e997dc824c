// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's side: set-up, the plan, the result port.

use std::fs::{File, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::reboot::RebootMode;
use nix::sys::termios::{SetArg, cfmakeraw, tcdrain, tcgetattr, tcsetattr};
use serde_json::Value;
use vcpufreq_tests::{LabVerdict, ScenarioReport};

use crate::harness::architecture::HERE;
use crate::harness::console_commands::{dmesg, insmod};
use crate::harness::machine::{calm_kernel, mount_at, mount_kernel_files, mount_traces, power_off};
use crate::harness::plan::Plan;
use crate::harness::vmm::Vmm;
use crate::harness::{kernel_log, sysfs, uclamp};

/// Results, a line of JSON each, and progress, `# DONE OF WHAT`.
const RESULTS: &str = HERE.results;

/// Modules of the kernel's own.
const GOVERNORS: [&str; 2] = ["cpufreq_userspace", "cpufreq_powersave"];

/// The host's init system, where a scenario wants one.
const SYSTEMD: &str = "/usr/lib/systemd/systemd";

/// What carries out a scenario by its name.
pub type RunScenario = fn(&str, &Plan) -> Result<LabVerdict>;

/// The host's first process, or a service of its init system, which is started first then.
pub fn main(run: RunScenario) {
    if is_init() && Path::new(SYSTEMD).exists() {
        let failed = Command::new(SYSTEMD).arg("--log-target=console").exec();
        println!("{SYSTEMD}: {failed}");
    }
    if let Err(error) = carry_out(run) {
        report("host", LabVerdict::broken_off(&format!("{error:#}")));
    }
    // What the port still has to send is lost with the power.
    if let Err(error) = result_port().and_then(|port| Ok(tcdrain(port)?)) {
        println!("{error:#}");
    }
    power_off(RebootMode::RB_POWER_OFF);
}

fn is_init() -> bool {
    std::process::id() == 1
}

fn carry_out(run: RunScenario) -> Result<()> {
    if is_init() {
        mount_all()?;
    } else {
        mount_traces()?;
        // In the root group, as without an init system: all scenarios count on that.
        sysfs::write("/sys/fs/cgroup/cgroup.procs", std::process::id())?;
    }
    raw_result_port()?;
    let plan: Value = serde_json::from_str(&sysfs::text("/lab/plan.json")?)?;
    calm_kernel()?;
    let watch = plan["watch"] == true;
    if plan["watch_guests"] == true {
        kernel_log::watch_guests();
    }
    uclamp::first_use(None)?;
    insmod("lab_cpufreq", plan["clocks"].as_str().unwrap_or_default())?;
    for module in HERE.modules.iter().chain(&GOVERNORS) {
        insmod(module, "")?;
    }
    // Work that the boot left behind would be measured otherwise.
    std::thread::sleep(Duration::from_secs(2));
    let wrong = uclamp::cpus_that_disobey()?;
    ensure!(wrong.is_empty(), "clamps have no effect on CPUs {wrong:?}");
    let settings = Plan {
        driver: plan["driver"]
            .as_str()
            .context("a plan without a driver")?
            .to_owned(),
        path: plan["path"].as_str().map(str::to_owned),
        vmm: match plan["vmm"].as_str() {
            Some("qemu") => Vmm::Qemu,
            _ => Vmm::Vcpufreq,
        },
        protected: plan["protected"] == true,
    };
    let scenarios = plan["scenarios"]
        .as_array()
        .context("a plan without scenarios")?;
    // Scenarios about it load it themselves.
    let names = scenarios.iter().filter_map(Value::as_str);
    if !names.into_iter().any(|name| name.starts_with("bpf-")) {
        insmod("vcpufreq_host", "")?;
    }
    let later = Duration::from_micros(plan["later_us"].as_u64().unwrap_or(0));
    for name in scenarios {
        std::thread::sleep(later);
        let name = name.as_str().context("a scenario's name")?;
        if name == "shell" {
            shell()?;
            continue;
        }
        let mut verdict = match run(name, &settings) {
            Ok(verdict) => verdict,
            // What a VMM's filters refused is in the kernel's log.
            Err(error) => LabVerdict::broken_off(&format!("{error:#}"))
                .figure("calls_refused", dmesg("type=1326").unwrap_or_default()),
        };
        if watch {
            verdict = with_reports(verdict)?;
        }
        report(name, verdict);
    }
    if watch && kernel_log::has_kmemleak() {
        let leaks = kernel_log::leaks()?;
        let verdict = LabVerdict::default().check_none("no leak", &leaks);
        report("leaks", verdict.figure("leaks", leaks));
    }
    Ok(())
}

/// Of a scenario in which the kernel found something wrong nothing holds.
fn with_reports(mut verdict: LabVerdict) -> Result<LabVerdict> {
    let found = kernel_log::look()?;
    verdict = verdict.check_none("the kernel reports nothing", &found.reports);
    if !found.reports.is_empty() {
        verdict = verdict.figure("kernel_reports", found.reports);
    }
    if !found.elsewhere.is_empty() {
        verdict = verdict.figure("kernel_reports_elsewhere", found.elsewhere);
    }
    Ok(verdict)
}

fn mount_all() -> Result<()> {
    mount_kernel_files()?;
    mount_at("tmpfs", "/run")?;
    // As on every system: a new tmpfs is everybody's.
    std::fs::set_permissions("/run", Permissions::from_mode(0o755))?;
    mount_at("cgroup2", "/sys/fs/cgroup")
}

fn raw_result_port() -> Result<()> {
    let port = result_port()?;
    let mut settings = tcgetattr(&port)?;
    cfmakeraw(&mut settings);
    tcsetattr(&port, SetArg::TCSANOW, &settings)?;
    // Kept open: the settings of a serial port go with its last user.
    std::mem::forget(port);
    Ok(())
}

fn result_port() -> Result<File> {
    let mut port = File::options();
    // A terminal of a service's children would have them ask there for passwords.
    port.write(true).read(true).custom_flags(libc::O_NOCTTY);
    port.open(RESULTS).context(RESULTS)
}

/// Tells the lab which of a scenario's parts begins. It is work of this CPU and an interrupt: none
/// while something is measured.
pub fn begins(done: u32, of: u32, what: &str) {
    // Progress that can't be shown is no reason to stop.
    let _ = result_port().and_then(|mut port| Ok(writeln!(port, "# {done} {of} {what}")?));
}

fn report(scenario: &str, verdict: LabVerdict) {
    let result = ScenarioReport {
        scenario: scenario.to_owned(),
        verdict,
    };
    let line = serde_json::to_string(&result);
    let written = line.map_err(Into::into).and_then(|line| {
        let mut port = result_port()?;
        Ok(writeln!(port, "{line}")?)
    });
    let written: Result<()> = written;
    if let Err(error) = written {
        println!("{error:#}; result: {}", result.json());
    }
}

/// A shell on the console, with job control.
fn shell() -> Result<()> {
    println!(
        "\nThe emulated host. vcpufreq is in the path; a guest's kernel and initial\n\
         file system are /lab/guest-kernel and /lab/guest-initramfs. 'exit' ends it.\n"
    );
    let applets = Path::new("/bin/busybox");
    Command::new(applets)
        .args(["--install", "-s", "/bin"])
        .status()?;
    Command::new(applets)
        .arg0("sh")
        .args(["-c", "exec setsid -c sh -i"])
        .env("PATH", "/bin")
        .env("PS1", "host# ")
        .status()
        .context("starting the shell")?;
    Ok(())
}
