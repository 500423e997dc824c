// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VMM refuses on a real arm64 host: one line, exit code 2, nothing left
//! behind. (All other bad input is tried on any machine: `vmm/tests/bad_input.rs`.)

use std::fs;
use std::os::unix::fs::chown;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use crate::harness::leftovers::leftovers;
use crate::harness::plan::Plan;
use crate::harness::policy::Policy;
use crate::harness::sysfs;
use crate::harness::vm::{Setup, Vm};

const RECORDS: &str = "/run/vcpufreq";
pub const NOBODY: u32 = 65534;
const BAD_TOML: &str = "/run/bad.toml";

/// A vCPU pinned to a pCPU that is offline; online again, the same guest
/// starts. Then what only shows once KVM is there, and some that is found
/// before.
pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let setup = plan.mirroring(&[policy.cpu()]);
    let online = format!("/sys/devices/system/cpu/cpu{}/online", policy.cpu());
    sysfs::write(&online, 0)?;
    let offline = refused(&setup, &["offline", "bring it online"]);
    sysfs::write(&online, 1)?;
    let mut cases = vec![offline?];
    fs::write(BAD_TOML, "cpus = \n")?;
    let sized = |mem_mib| Setup {
        mem_mib: Some(mem_mib),
        ..setup.clone()
    };
    let with = |options: &[&str]| setup.clone().with(options);
    for (setup, says) in [
        (sized(u32::MAX), ["has addresses for", "--mem"]),
        (sized(8), ["initrd", "larger than"]),
        (sized(32), ["too little", "--mem"]),
        (with(&["--kvm-device", "/dev/none"]), ["/dev/none", "KVM"]),
        (with(&["--table", "0=2000,1000"]), ["vCPU 0", "--table"]),
        (with(&["--config", BAD_TOML]), [BAD_TOML, "line 1"]),
    ] {
        cases.push(refused(&setup, &says)?);
    }
    cases.push(anothers_directory(&setup)?);
    Vm::boot(&setup)?.quit()?;
    Ok(LabVerdict::default().parts("cases", cases))
}

/// Another user's directory in the place of root's records.
fn anothers_directory(setup: &Setup) -> Result<LabVerdict> {
    fs::create_dir(RECORDS)?;
    chown(RECORDS, Some(NOBODY), None)?;
    let says = format!("{RECORDS} belongs to user {NOBODY}, not to root");
    let case = refused(setup, &[&says]);
    fs::remove_dir(RECORDS)?;
    case
}

/// Starts a VMM that has to refuse: exit code 2, one line that contains all of
/// `says`, and a second later nothing of it left.
pub fn refused(setup: &Setup, says: &[&str]) -> Result<LabVerdict> {
    refused_when(setup, says, |_| ())
}

/// The same for a VMM whose start `prepare` changes.
pub fn refused_when(
    setup: &Setup,
    says: &[&str],
    prepare: impl FnOnce(&mut Command),
) -> Result<LabVerdict> {
    let said = Vm::start_prepared(setup, prepare)?.finish(2)?;
    sleep(Duration::from_secs(1));
    let left = leftovers()?;
    let all = says.iter().all(|text| said.contains(text));
    let figures = json!({ "vmm_said": said, "left": left });
    Ok(LabVerdict::with_figures(figures)
        .check("it names the cause", all, &said)
        .check("one line", said.lines().count() == 1, &said)
        .check_none("nothing is left", &left))
}
