// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A domain of libvirt's, started as a person would: `serve`, its device tree by `dt --merge`, and
//! XML with the `<shmem>` of docs/examples/libvirt.xml. libvirt makes the vCPUs' cgroups and pins
//! them; the server clamps those, on every OPP, and puts them back. That they aren't there at first
//! is no alarm. No access leaves KVM for userspace. A domain that is saved and restored has its
//! requests again.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use vcpufreq_bench::piped::child;

use crate::harness::host::begins;
use crate::harness::leftovers::{CGROUPS, leftovers};
use crate::harness::plan::{GuestDevice, Plan, ask_for, first_cpus, last_of, set_governor};
use crate::harness::policy::Policy;
use crate::harness::server::{NO_GROUPS, ServeProcess};
use crate::harness::sys::adopt_orphans;
use crate::harness::sysfs;
use crate::harness::vm::{BOOT, Setup, Vm};
use crate::harness::vmm::{QEMU, SOCKET};
use crate::harness::wait::{SOON, wait_until};
use crate::scenarios::device::driver::follows;
use crate::scenarios::device::opps::{SweepRow, sweep};
use crate::scenarios::qemu::accesses;

/// libvirt's user for QEMU.
const USER: &str = "libvirt-qemu";
/// A group's clamps where nothing is clamped.
const FREE: (u32, u32) = (0, 1024);
/// In which the domain ends when its guest powers off, and libvirt removes its groups then.
const ENDS: Duration = Duration::from_secs(60);
/// Without the daemon that would keep logs. QEMU 11 takes no file that libvirt 11.3 has opened, but a
/// pipe, which it gets of a compressed one.
const QEMU_CONF: &str = "stdio_handler = \"file\"\nsave_image_format = \"gzip\"\n";
const LIBVIRTD_CONF: &str = "/run/libvirtd.conf";
/// The XML that a person starts from.
const EXAMPLE: &str = include_str!("../../../../../docs/examples/libvirt.xml");
const DOMAIN: &str = "/run/lab.xml";
const SAVED: &str = "/run/lab.saved";
const BASE: &str = "/run/base.dtb";
const TREE: &str = "/run/guest.dtb";
/// Both pipes of the console begin so.
const CONSOLE: &str = "/run/console";
/// Between them and its own input and output; ends as libvirt does. libvirt opens and closes both
/// pipes before QEMU opens them, at which either `cat` would end: the shell holds them open.
/// libvirt leaves a QEMU process behind whenever it probes QEMU's capabilities, and waits until
/// that is gone: `wait` reaps all.
const RUN: &str = "exec 3<&0 4<>/run/console.in 5<>/run/console.out
cat < /run/console.out 3<&- 4<&- 5<&- &
cat <&3 >&4 5<&- 2>/dev/null &
libvirtd -f /run/libvirtd.conf </dev/null 3<&- 4<&- 5<&- &
until [ -S /run/libvirt/libvirt-sock ]; do sleep 0.1; done
virsh create /run/lab.xml </dev/null 3<&- 4<&- 5<&-
wait $!";

pub fn run(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let setup = Setup::mirroring(&first_cpus(&policies)).with(&["--clamp", "exact"]);
    prepare(&setup)?;
    let server = ServeProcess::start(&setup.clone().with(&["--user", USER]))?;
    let (mut vm, shell, libvirt) = start()?;
    begins(1, 5, "the domain has booted");
    vm.settle(setup.pins.len())?;
    let device = GuestDevice::of(&mut vm)?;
    let (last, policy) = last_of(&policies)?;
    let accesses = accesses(&mut vm, &device, last, policy)?;
    plan.load_driver(&mut vm)?;
    begins(2, 5, "each OPP");
    let rows = each_opp(&mut vm, &policies)?;
    let groups = groups_of(&vm, &policies)?;
    begins(3, 5, "the domain is saved and restored");
    let (restored, after) = restored(&mut vm, shell, &policies, &groups)?;
    begins(4, 5, "the domain ends");
    let said = end(vm, libvirt)?;
    let server_said = server.stop()?;
    let wrong = rows.iter().filter(|row| !row.exact()).count();
    let groups: Vec<_> = groups.into_iter().chain(after).collect();
    let left = [leftovers()?, still_clamped(&groups)?].concat();
    let held = accesses["held"] == true
        && wrong == 0
        && groups.iter().all(VcpuGroup::held)
        && restored["held"] == true
        && !server_said.contains(NO_GROUPS)
        && left.is_empty();
    Ok(json!({
        "held": held, "accesses": accesses, "opps_checked": rows.len(), "opps_wrong": wrong,
        "rows": rows.iter().map(SweepRow::json).collect::<Vec<_>>(),
        "groups": groups.iter().map(VcpuGroup::json).collect::<Vec<_>>(), "restored": restored,
        "left": left, "libvirt_said": said, "server_said": server_said,
    }))
}

fn each_opp(vm: &mut Vm, policies: &[Policy]) -> Result<Vec<SweepRow>> {
    let mut rows = Vec::new();
    for (vcpu, policy) in policies.iter().enumerate() {
        vm.ask(format!("start busy busy {vcpu}"))?;
        rows.extend(sweep(vm, vcpu, policy, SweepRow::exact)?);
        vm.ask("stop busy")?;
    }
    Ok(rows)
}

fn groups_of(vm: &Vm, policies: &[Policy]) -> Result<Vec<VcpuGroup>> {
    (0..policies.len())
        .map(|vcpu| VcpuGroup::of(vm, vcpu))
        .collect()
}

/// Saves the domain while each vCPU requests its highest OPP, and restores it. What becomes of that,
/// and its new groups.
fn restored(
    vm: &mut Vm,
    shell: u32,
    policies: &[Policy],
    groups: &[VcpuGroup],
) -> Result<(Value, Vec<VcpuGroup>)> {
    for (vcpu, policy) in policies.iter().enumerate() {
        set_governor(vm, vcpu, "userspace")?;
        ask_for(vm, vcpu, policy.max())?;
    }
    virsh(&["save", "lab", SAVED])?;
    sleep(SOON);
    let left = still_clamped(groups)?;
    virsh(&["restore", SAVED])?;
    fs::remove_file(SAVED)?;
    vm.set_vmm(child(shell, "qemu-system").context("no QEMU")?);
    sleep(2 * SOON);
    let clamps = (0..policies.len()).map(|vcpu| vm.clamp(vcpu));
    let clamps: Vec<(u32, u32)> = clamps.collect::<Result<_>>()?;
    let wanted = policies.iter().map(|policy| policy.util(policy.max()));
    let in_force = wanted.eq(clamps.iter().map(|clamp| clamp.0));
    let follows = follows(vm, policies).map_err(|error| format!("{error:#}"));
    let restored = json!({
        "held": in_force && follows.is_ok() && left.is_empty(), "clamps": clamps,
        "follows": follows.err(), "left_while_saved": left,
    });
    Ok((restored, groups_of(vm, policies)?))
}

fn virsh(command: &[&str]) -> Result<()> {
    let ran = Command::new("/bin/virsh").args(command).output()?;
    let said = String::from_utf8_lossy(&ran.stderr);
    ensure!(ran.status.success(), "virsh {command:?}: {}", said.trim());
    Ok(())
}

/// A vCPU's cgroup.
struct VcpuGroup {
    vcpu: usize,
    path: PathBuf,
    /// What it holds, and what is in force for its thread.
    own: (u32, u32),
    clamp: (u32, u32),
}

impl VcpuGroup {
    fn of(vm: &Vm, vcpu: usize) -> Result<Self> {
        let text = sysfs::text(format!(
            "/proc/{}/task/{}/cgroup",
            vm.pid(),
            vm.vcpu_tid(vcpu)?
        ))?;
        let name = text.trim().strip_prefix("0::/").context("no cgroup")?;
        let path = Path::new(CGROUPS).join(name);
        Ok(Self {
            vcpu,
            own: clamps(&path)?,
            clamp: vm.clamp(vcpu)?,
            path,
        })
    }

    /// Whether it is libvirt's, and clamps the vCPU.
    fn held(&self) -> bool {
        let vcpu = format!("vcpu{}", self.vcpu);
        self.path.ends_with(vcpu) && self.own != FREE && self.own == self.clamp
    }

    fn json(&self) -> Value {
        json!({
            "held": self.held(), "group": self.path, "own": self.own, "in_force": self.clamp,
        })
    }
}

/// A group's clamps as utilization.
fn clamps(group: &Path) -> Result<(u32, u32)> {
    let util = |file: &str| {
        let path = group.join(file);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        // Two decimals, as the kernel writes them.
        let percent = text.trim().replace("max", "100.00").replace('.', "");
        let hundredths: u32 = percent.parse().context(text)?;
        anyhow::Ok((hundredths * 1024 + 5_000) / 10_000)
    };
    Ok((util("cpu.uclamp.min")?, util("cpu.uclamp.max")?))
}

/// Groups of libvirt's that are there after the end, and hold a clamp.
fn still_clamped(groups: &[VcpuGroup]) -> Result<Vec<String>> {
    let all = groups.iter().flat_map(|group| group.path.ancestors());
    let below = all.filter(|group| *group != Path::new(CGROUPS) && group.starts_with(CGROUPS));
    let mut left = Vec::new();
    for group in below.filter(|group| group.exists()) {
        if clamps(group)? != FREE {
            left.push(group.display().to_string());
        }
    }
    Ok(left)
}

fn prepare(setup: &Setup) -> Result<()> {
    let vcpus = setup.pins.len().to_string();
    // libvirt's sockets are there.
    fs::create_dir_all("/var")?;
    symlink("/run", "/var/run")?;
    symlink("/bin/busybox", "/bin/gzip")?;
    fs::create_dir_all("/etc/libvirt")?;
    fs::write("/etc/libvirt/qemu.conf", QEMU_CONF)?;
    fs::write(
        LIBVIRTD_CONF,
        "auth_unix_rw = \"none\"\nunix_sock_group = \"root\"\n",
    )?;
    // As udev's rule of libvirt's group.
    fs::set_permissions("/dev/kvm", Permissions::from_mode(0o666))?;
    let status = Command::new(QEMU)
        .args(["-accel", "kvm", "-cpu", "host", "-smp", &vcpus, "-m", "256"])
        .args([
            "-machine",
            "virt,gic-version=3,acpi=off,dumpdtb=/run/base.dtb",
        ])
        .args(["-nodefaults", "-display", "none"])
        .status()?;
    ensure!(status.success(), "no device tree: {status}");
    let mut dt = Command::new("/bin/vcpufreq");
    dt.args(["dt", "--cpus", &vcpus, "--host-topology"]);
    for (vcpu, pcpus) in setup.pins.iter().enumerate() {
        dt.args(["--pin", &format!("{vcpu}={pcpus}")]);
    }
    let dt = dt.args(["--merge", BASE]).output()?;
    ensure!(
        dt.status.success(),
        "dt: {}",
        String::from_utf8_lossy(&dt.stderr)
    );
    fs::write(TREE, dt.stdout)?;
    for end in ["in", "out"] {
        nix::unistd::mkfifo(
            format!("{CONSOLE}.{end}").as_str(),
            nix::sys::stat::Mode::from_bits_truncate(0o666),
        )?;
    }
    fs::write(DOMAIN, domain(setup)?)?;
    Ok(())
}

/// The example's device, for so many vCPUs and this host's server.
fn shmem(vcpus: usize) -> Result<String> {
    const END: &str = "</shmem>";
    let start = EXAMPLE.find("<shmem").context("no <shmem>")?;
    let end = EXAMPLE.find(END).context("no </shmem>")? + END.len();
    let mut device = EXAMPLE[start..end].to_owned();
    for (of_example, here) in [
        ("path='/run/vcpufreq-NAME.sock'", format!("path='{SOCKET}'")),
        ("vectors='2'", format!("vectors='{vcpus}'")),
    ] {
        ensure!(
            device.contains(of_example),
            "no {of_example} in the example"
        );
        device = device.replace(of_example, &here);
    }
    Ok(device)
}

/// Its XML.
fn domain(setup: &Setup) -> Result<String> {
    let vcpus = setup.pins.len();
    let shmem = shmem(vcpus)?;
    let pins = setup.pins.iter().enumerate();
    let pins: String = pins
        .map(|(vcpu, pcpus)| format!("<vcpupin vcpu='{vcpu}' cpuset='{pcpus}'/>"))
        .collect();
    Ok(format!(
        "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>lab</name>
  <memory unit='MiB'>256</memory>
  <vcpu>{vcpus}</vcpu>
  <cputune>{pins}</cputune>
  <os>
    <type arch='aarch64' machine='virt'>hvm</type>
    <kernel>/lab/guest-kernel</kernel>
    <initrd>/lab/guest-initramfs</initrd>
    <cmdline>console=ttyAMA0 quiet nokaslr panic=-1 iomem=relaxed rdinit=/init</cmdline>
    <dtb>{TREE}</dtb>
  </os>
  <features><gic version='3'/></features>
  <cpu mode='host-passthrough'/>
  <devices>
    <emulator>{QEMU}</emulator>
    <controller type='usb' model='none'/>
    <serial type='pipe'><source path='{CONSOLE}'/></serial>
    {shmem}
    <memballoon model='none'/>
  </devices>
  <qemu:override>
    <qemu:device alias='shmem0'>
      <qemu:frontend><qemu:property name='master' type='string' value='on'/></qemu:frontend>
    </qemu:device>
  </qemu:override>
</domain>
"
    ))
}

/// The domain, booted; the shell around it, and libvirt's process.
fn start() -> Result<(Vm, u32, u32)> {
    let mut shell = Command::new("/bin/busybox");
    shell.args(["sh", "-c", RUN]);
    adopt_orphans(&mut shell);
    let mut vm = Vm::spawn(&mut shell)?;
    vm.expect("@ready", BOOT)?;
    let shell = vm.program();
    let libvirt = child(shell, "libvirtd").context("no libvirt")?;
    // Its parent has ended, as a daemon's does.
    vm.set_vmm(child(shell, "qemu-system").context("no QEMU")?);
    Ok((vm, shell, libvirt))
}

/// Powers the domain off, and ends libvirt, which stays when its domain has ended; its stderr.
fn end(mut vm: Vm, libvirt: u32) -> Result<String> {
    let qemu = PathBuf::from(format!("/proc/{}", vm.pid()));
    vm.tell("quit")?;
    wait_until("the domain's end", ENDS, || Ok(!qemu.exists()))?;
    // In which libvirt has seen it.
    sleep(SOON);
    kill(Pid::from_raw(libvirt.try_into()?), Signal::SIGTERM)?;
    vm.finish(0)
}

#[cfg(test)]
mod tests {
    //! The page and its example have one device, and the scenario tries that.
    use super::*;

    const PAGE: &str = include_str!("../../../../../docs/qemu.md");

    #[test]
    fn the_page_the_example_and_the_scenario_have_one_device() {
        let bare = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let here = shmem(2).unwrap().replace(SOCKET, "/run/vcpufreq-NAME.sock");
        for text in [PAGE, EXAMPLE] {
            assert!(bare(text).contains(&bare(&here)), "{here}");
        }
        assert!(shmem(4).unwrap().contains("vectors='4'"));
    }
}
