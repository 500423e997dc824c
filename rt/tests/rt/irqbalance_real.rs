// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise: the real irqbalance understands what it is told and answers as the tests' one does. It
//! runs in namespaces of its own, without interrupts that it could move.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::Duration,
};

use vcpufreq_rt::{
    CpuList, KernelHost, Look, Partition, Profile, Restored, Target, apply, check, plan, restore,
};

use crate::partition::guest;

/// What this machine's own have in /run and /proc/irq isn't there.
const ALONE: &str = "mount -t tmpfs none /run; mkdir /run/irqbalance; mount -t tmpfs none /proc/irq
exec \"$0\" --foreground --interval=1";
const NAMESPACES: [&str; 3] = ["--user", "--map-root-user", "--mount"];

/// Why it can't be tried here, or where it is.
fn found() -> Result<PathBuf, &'static str> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    let mut programs = dirs.map(|dir| dir.join("irqbalance"));
    let program = programs.find(|program| program.is_file());
    let program = program.ok_or("irqbalance isn't installed")?;
    let online = KernelHost::default().read("/sys/devices/system/cpu/online");
    if online.is_ok_and(|online| !online.contains(['-', ','])) {
        return Err("irqbalance ends on a machine with one CPU");
    }
    let mut namespaces = Command::new("unshare");
    let made = namespaces.args(NAMESPACES).arg("true").output();
    match made.is_ok_and(|output| output.status.success()) {
        true => Ok(program),
        false => Err("no namespaces here"),
    }
}

/// Killed when dropped.
struct Real(Child);

impl Real {
    fn start(program: &Path, own: Option<&str>) -> Self {
        let mut command = Command::new("unshare");
        command.args(NAMESPACES).args(["sh", "-ec", ALONE]);
        command.arg(program).env_remove("IRQBALANCE_BANNED_CPUS");
        match own {
            Some(own) => command.env("IRQBALANCE_BANNED_CPULIST", own),
            None => command.env_remove("IRQBALANCE_BANNED_CPULIST"),
        };
        let mut real = Self(command.stdout(Stdio::null()).spawn().unwrap());
        while real.setup().is_none() {
            assert_eq!(real.0.try_wait().unwrap(), None, "it has ended");
            sleep(Duration::from_millis(20));
        }
        real
    }

    /// As it sees it.
    fn host(&self) -> KernelHost {
        KernelHost::at(Path::new(&format!("/proc/{}/root", self.0.id())))
    }

    fn setup(&self) -> Option<String> {
        let socket = format!("/run/irqbalance/irqbalance{}.sock", self.0.id());
        self.host().ask(&socket, self.0.id(), "setup").ok()
    }

    fn keeps_off(&self) -> CpuList {
        let setup = self.setup().unwrap();
        CpuList::from_mask(setup.rsplit_once("BANNED ").unwrap().1).unwrap()
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn it_keeps_off_these_cpus_and_has_its_list_back() {
    let program = match found() {
        Ok(program) => program,
        Err(why) => return println!("SKIP: {why}"),
    };
    for own in [None, Some("0")] {
        let real = Real::start(&program, own);
        let before = real.keeps_off();
        let host = real.host();
        let profile = Profile::parse("test", "settings.interrupts = 'housekeeping'").unwrap();
        let partition = Partition::new(&host, vec![guest("plc", "1")], None, None).unwrap();
        let planned = plan(&host, &partition, &profile);
        let targets: Vec<&Target> = planned
            .changes()
            .map(|(_, change)| &change.target)
            .collect();
        let [Target::BannedCpus { pid, .. }] = targets[..] else {
            panic!("{targets:?}");
        };
        assert_eq!(*pid, real.0.id());
        let applied = apply(&host, &planned, ("test", &profile), &mut |_, _, _| {}).unwrap();
        assert_eq!((applied.made, applied.refused), (1, vec![]));
        assert_eq!(real.keeps_off(), before.or(&"1".parse().unwrap()));
        let checked = check(&host, &plan(&host, &partition, &profile), &profile);
        assert!(checked.len() == 1 && checked[0].is_good(), "{checked:?}");
        let restored = restore(&host, &mut |_, _, _| {}).unwrap();
        let (brought_back, gone, left) = (1, vec![], vec![]);
        assert_eq!(
            restored,
            Restored::Done {
                brought_back,
                gone,
                left
            }
        );
        assert_eq!(real.keeps_off(), before);
    }
}
