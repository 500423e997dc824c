// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The service by its unit in `docs/`, under systemd, with no more rights than the unit grants. It is
//! started once its scheduler is in force. systemd starts one anew that was killed, and none after an
//! administrator has ended the scheduler. After a stop nothing is left.

use anyhow::Result;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use super::service::{in_force, left, sysrq};
use crate::harness::systemctl::systemctl;
use crate::harness::wait::{SOON, settled};

const UNIT: &str = "vcpufreq-scx.service";
/// Of a service whose scheduler the kernel has ended.
const ENDED: &str = "3";

pub fn run() -> Result<LabVerdict> {
    systemctl(&["daemon-reload"])?;
    systemctl(&["start", UNIT])?;
    let started = in_force();
    let first = show("MainPID")?;
    kill(Pid::from_raw(first.parse()?), Signal::SIGKILL)?;
    // RestartSec is 5 s.
    let restarts = settled(10 * SOON, || show("NRestarts"), |now| now == "1")?;
    // The scheduler is in force before the service is ready to see its end.
    settled(10 * SOON, || show("ActiveState"), |now| now == "active")?;
    let restarted = in_force();
    sysrq()?;
    let after_sysrq = settled(10 * SOON, || show("ActiveState"), |now| now == "failed")?;
    let code = show("ExecMainStatus")?;
    let left_by_sysrq = left()?;
    systemctl(&["start", UNIT])?;
    let again = in_force();
    systemctl(&["stop", UNIT])?;
    let (result, left) = (show("Result")?, left()?);
    let in_force = [started, restarted, again];
    let figures = json!({
        "in_force": in_force, "restarts": restarts, "after_sysrq": after_sysrq,
        "code": code, "result": result, "left_by_sysrq": left_by_sysrq, "left": left,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("in force after each start", &in_force, [true; 3])
        .check_eq("a killed one is restarted once", &restarts, "1")
        .check_eq("one that SysRq ends has failed", &after_sysrq, "failed")
        .check_eq("its exit code", &code, ENDED)
        .check_eq("the last one ends well", &result, "success")
        .check(
            "nothing is left by SysRq",
            left_by_sysrq.is_empty(),
            &left_by_sysrq,
        )
        .check("nothing is left", left.is_empty(), &left))
}

fn show(property: &str) -> Result<String> {
    systemctl(&["show", "--property", property, "--value", UNIT])
}
