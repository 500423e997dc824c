// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How the VMMs of `peer` are started, so that both give a guest the same vCPUs.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::harness::plan::{cur_perf, first_cpus, registers};
use crate::harness::policy::Policy;
use crate::harness::server::ServeProcess;
use crate::harness::sysfs;
use crate::harness::vm::{Setup, Vm};
use crate::harness::vmm;
use crate::harness::wait::{SOON, settled, wait_for};

/// A cgroup for each domain is in it, made before crosvm starts: it makes none.
const GROUPS: &str = "/sys/fs/cgroup/cros";

/// How the names of crosvm's rows with vcpufreq begin.
pub const SERVED: &str = "vcpufreq serves crosvm";
/// The tree that crosvm makes, the same with registers in RAM, and these alone.
const BASE: &str = "/run/base.dtb";
const TREE: &str = "/run/guest.dtb";
const OVERLAY: &str = "/run/guest.dtbo";

/// A VMM, and how it clamps.
#[derive(Clone, Copy)]
pub enum PeerVmm {
    /// By sched_setattr.
    Crosvm,
    /// By a cgroup for each domain.
    CrosvmGroups,
    /// Without a device of its own: `vcpufreq serve` has the registers in its guest's RAM, and clamps so.
    CrosvmServed(&'static str),
    /// One vCPU, on this policy, with frequencies of its own: only then is there a uclamp.max.
    CrosvmExact(usize),
    /// Its options.
    Ours {
        path: &'static str,
        clamp: &'static str,
        actuator: &'static str,
    },
}

impl PeerVmm {
    /// As the rows name it.
    pub fn name(self) -> String {
        match self {
            Self::Crosvm => "crosvm sched_setattr".to_owned(),
            Self::CrosvmGroups => "crosvm cgroup".to_owned(),
            Self::CrosvmExact(policy) => format!("crosvm exact {policy}"),
            Self::CrosvmServed(clamp) => format!("{SERVED} {clamp}"),
            Self::Ours {
                path,
                clamp,
                actuator,
            } => format!("vcpufreq {path} {clamp} {actuator}"),
        }
    }

    /// How to start it, and the vCPUs with what each is pinned to.
    pub fn setup(self, policies: &[Policy]) -> Result<(Setup, Vec<(usize, Policy)>)> {
        let all = policies.iter().cloned().enumerate().collect();
        Ok(match self {
            Self::Ours {
                path,
                clamp,
                actuator,
            } => {
                let setup = Setup {
                    silent: true,
                    ..Setup::mirroring(&first_cpus(policies))
                };
                let options = ["--path", path, "--clamp", clamp, "--actuator", actuator];
                (setup.with(&options).with(&["--rate-limit", "0"]), all)
            }
            Self::Crosvm => (with_device(crosvm(policies, "")?), all),
            Self::CrosvmServed(_) => (in_ram(crosvm(policies, "")?, policies)?, all),
            Self::CrosvmGroups => {
                make_groups(policies.len())?;
                let domains: Vec<_> = (0..policies.len()).map(|n| format!("[{n}]")).collect();
                let domains = format!(",freq-domains=[{}]", domains.join(","));
                let setup = with_device(crosvm(policies, &domains)?);
                (setup.with(&["--vcpu-cgroup-path", GROUPS]), all)
            }
            Self::CrosvmExact(index) => {
                let policy = policies.get(index).context("no such policy")?;
                let mut opps = policy.opps.clone();
                // With the pCPU's own maximum it neither caps nor throttles.
                *opps.last_mut().context("no OPP")? -= 1;
                let opps: Vec<_> = opps.iter().map(u32::to_string).collect();
                let setup = with_device(crosvm(std::slice::from_ref(policy), "")?);
                let table = format!("0={}", opps.join(","));
                let setup = setup.with(&["--cpu-frequencies-khz", &table]);
                (setup, vec![(0, policy.clone())])
            }
        })
    }
}

/// crosvm with a vCPU on the first CPU of each policy, which the vCPU mirrors.
fn crosvm(policies: &[Policy], domains: &str) -> Result<Setup> {
    let each = |of: &dyn Fn(&Policy) -> Result<u32>, sign: &str| {
        let each = policies.iter().enumerate();
        let each = each.map(|(n, policy)| Ok(format!("{n}={}", of(policy)?)));
        anyhow::Ok(each.collect::<Result<Vec<_>>>()?.join(sign))
    };
    let pins = each(&|policy| Ok(policy.cpu()), ":")?;
    let ratio = each(&per_mhz, ",")?;
    let cpus = format!("num-cores={}{domains}", policies.len());
    let setup = Setup {
        vmm: vmm::Vmm::Crosvm,
        // As many as there are vCPUs.
        pins: policies
            .iter()
            .map(|policy| policy.cpu().to_string())
            .collect(),
        ..Setup::default()
    };
    Ok(setup.with(&[
        "--cpus",
        &cpus,
        "--cpu-affinity",
        &pins,
        "--cpu-capacity",
        &ratio,
        "--cpu-ipc-ratio",
        &ratio,
    ]))
}

/// With crosvm's own device.
fn with_device(setup: Setup) -> Setup {
    setup.with(&["--virt-cpufreq-upstream"])
}

/// With registers in its guest's RAM, by docs/qemu.md: crosvm dumps its tree, of which an overlay is made.
fn in_ram(setup: Setup, policies: &[Policy]) -> Result<Setup> {
    // By itself it puts the tree where the registers go.
    let setup = setup.with(&["--fdt-position", "after-payload"]);
    let dump = setup.clone().with(&["--dump-device-tree-blob", BASE]);
    let mut dumping = vmm::command(&dump);
    let mut dumping = dumping.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
    let size = || fs::metadata(BASE).map(|file| file.len());
    let dumped = settled(SOON, || Ok(size()), |size| matches!(size, Ok(1..)));
    dumping.kill()?;
    dumping.wait()?;
    dumped?.context(BASE)?;
    fs::write(TREE, tree(policies, &[])?)?;
    fs::write(OVERLAY, tree(policies, &["--format", "dtbo"])?)?;
    Ok(setup.with(&["--device-tree-overlay", OVERLAY]))
}

fn tree(policies: &[Policy], form: &[&str]) -> Result<Vec<u8>> {
    let mut dt = Command::new("/bin/vcpufreq");
    dt.args(["dt", "--in-ram", "--merge", BASE]).args(form);
    dt.args(["--cpus", &policies.len().to_string()]);
    for (vcpu, policy) in policies.iter().enumerate() {
        dt.args(["--pin", &format!("{vcpu}={}", policy.cpu())]);
    }
    let made = dt.output()?;
    let said = String::from_utf8_lossy(&made.stderr);
    ensure!(made.status.success(), "no tree: {said}");
    Ok(made.stdout)
}

/// The server of such a guest, once that reads a frequency.
pub fn served(clamp: &str, policies: &[Policy], vm: &mut Vm) -> Result<ServeProcess> {
    let setup = Setup {
        silent: true,
        ..Setup::mirroring(&first_cpus(policies))
    };
    let setup = setup.with(&["--clamp", clamp, "--rate-limit", "0"]);
    let command = vmm::serve_in_ram(&setup, TREE, vm.pid());
    let server = ServeProcess::start_by(command, &["mirror CPUs"])?;
    let base = registers(vm)?;
    wait_for("its frequency", SOON, || {
        Ok(Some(cur_perf(vm, base, 0)?).filter(|khz| *khz > 0))
    })?;
    Ok(server)
}

/// A policy's performance for each MHz, as the host's device tree has it.
fn per_mhz(policy: &Policy) -> Result<u32> {
    let cpu = policy.cpu();
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/of_node/capacity-dmips-mhz");
    let bytes = fs::read(&path).with_context(|| path.clone())?;
    let bytes = bytes.first_chunk::<4>().context(path)?;
    Ok(u32::from_be_bytes(*bytes))
}

fn make_groups(domains: usize) -> Result<()> {
    sysfs::write("/sys/fs/cgroup/cgroup.subtree_control", "+cpu")?;
    for n in 0..domains {
        let path = format!("{GROUPS}/vcpu-domain{n}");
        fs::create_dir_all(&path)?;
        sysfs::write(format!("{path}/cgroup.type"), "threaded")?;
    }
    // A group below can't be held up otherwise, for the default is 0.
    sysfs::write(format!("{GROUPS}/cpu.uclamp.min"), "max")?;
    sysfs::write(format!("{GROUPS}/cgroup.subtree_control"), "+cpu")
}

/// crosvm leaves them behind, with their clamps.
pub fn remove_groups() -> Result<()> {
    let Ok(entries) = fs::read_dir(GROUPS) else {
        return Ok(());
    };
    let groups = entries.flatten().map(|entry| entry.path());
    let groups: Vec<_> = groups.filter(|path| path.is_dir()).collect();
    for group in groups.into_iter().chain([GROUPS.into()]) {
        // The threads of a process that has ended go a little later.
        let removed = settled(SOON, || Ok(fs::remove_dir(&group)), Result::is_ok)?;
        removed.with_context(|| group.display().to_string())?;
    }
    Ok(())
}
