// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The emulated machine, a board or a PC: its device tree, its command line, and one run of it.
//!
//! Everything that a run depends on is fixed: instruction-counted time, the
//! clock, the seed, the kernel's placement. Two runs of the same parts give
//! the same output to the byte, unless the CPUs run at once.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::arch::Arch;
use crate::cache::{Cache, key};
use crate::cpu_time;
use crate::kernel::Kernel;
use crate::result_port::Far;
use crate::root::Root;
use crate::topology::Topology;

/// Memory of the emulated host: a guest of 512 MiB, the archive that holds
/// the guest's kernel twice (packed and unpacked), and room.
const MEM_MIB: u32 = 2048;
/// With room for a page of 1 GiB, which the kernel finds at run time where such a
/// piece is free.
const MEM_FOR_1_GIB_PAGE_MIB: u32 = 4096;

/// An emulator takes CPU time at each of its host's ticks, however busy this machine is.
const STANDSTILL: Duration = Duration::from_secs(600);
/// The host's kernel stays at its address. A panic ends the run: it reboots, and the emulator's
/// -no-reboot makes the reboot an end. Nothing here is verified by Debian's certificates, and reading
/// them takes 0.6 s of virtual time.
const CMDLINE: &str =
    "nokaslr panic=-1 initcall_blacklist=load_system_certificate_list rdinit=/init";

/// Of a PC. Its counters agree and are constant, which the emulator doesn't tell: Linux would take
/// them for the CPU's clock, which changes, and would switch no frequency in the scheduler. What keeps
/// guests from reading the host's memory has nothing to protect here, and costs time.
const CMDLINE_OF_PC: &str =
    " tsc=reliable setcpuid=constant_tsc,nonstop_tsc no_timer_check mitigations=off";
/// With AMD's virtualization, of which the emulator lacks x2APIC.
const CPU_OF_PC: &str = "EPYC-Rome,+svm,+npt,-x2apic";

/// Firmware's serial number, which no report may have.
const SERIAL_OF_PC: &str = "type=1,serial=LAB-4711";

/// For kernels with checks of their own: without this SLUB keeps pointers to what it has given away,
/// in lists per CPU, where kmemleak finds them. Modules of KUnit run their tests when they are loaded.
const CMDLINE_OF_CHECKS: &str = " slab_debug=F,kmalloc-* kunit.enable=1 kunit.autorun=1";

/// A disk of an emulated host.
#[derive(Debug)]
pub struct Disk {
    /// Its content, below the cache.
    pub image: PathBuf,
    /// Whether the host writes to it.
    pub writable: bool,
}

/// What an emulated host is made of.
#[derive(Debug)]
pub struct Board<'a> {
    /// The toolchain root with the emulator.
    pub root: &'a Root,
    /// Where the device tree is kept.
    pub cache: &'a Cache,
    /// The host's CPUs.
    pub topology: &'a Topology,
    /// The host's kernel.
    pub kernel: &'a Kernel,
    /// The emulated CPU of an Arm board: neoverse-v1 has FEAT_S2FWB, cortex-a76 hasn't.
    pub cpu: &'a str,
    /// The version of that board's interrupt controller, 2 or 3.
    pub gic: u8,
    /// Whether it has protected KVM.
    pub protected: bool,
    /// Whether its CPUs run at once, each in a thread of the emulator, and time is real.
    pub parallel: bool,
    /// Its disks, in turn.
    pub disks: Vec<Disk>,
    /// Whether a page of 1 GiB is wanted of it.
    pub gib_page: bool,
    /// Its CPUs that are out of the scheduler's domains from the boot on.
    pub isolated: Option<&'a str>,
}

/// How a run ended.
#[derive(Debug)]
pub struct EmulatorOutcome {
    /// What the host wrote to its result port.
    pub results: String,
    /// When each result came, in real time from the start.
    pub came: Vec<Duration>,
    /// The host's console.
    pub console: PathBuf,
    /// Real time that it took.
    pub wall: Duration,
}

impl Board<'_> {
    /// Boots, waits for the host to power itself off, and gives its results.
    ///
    /// `dir` is a folder in the cache for the run's files; `progress` learns how
    /// far it is, once a second. The emulator has ended when this returns,
    /// whatever happened.
    pub fn run(
        &self,
        initrd: &Path,
        dir: &Path,
        limit: Duration,
        mut progress: impl FnMut(Far),
    ) -> Result<EmulatorOutcome> {
        let results = dir.join("results");
        let console = dir.join("console.log");
        let started = Instant::now();
        let mut args = self.args(initrd, "quiet")?;
        args.extend(["-display", "none", "-monitor", "none"].map(String::from));
        args.extend([
            "-serial".into(),
            format!("file:{}", self.root.inside(&console)?),
        ]);
        args.extend([
            "-serial".into(),
            format!("file:{}", self.root.inside(&results)?),
        ]);
        let mut child = self
            .root
            .command(&self.kernel.arch.qemu())
            .args(&args)
            .stdout(Stdio::null())
            .stderr(File::create(dir.join("emulator.log"))?)
            .spawn()
            .context("cannot start the emulator")?;
        let mut came = Vec::new();
        let look = || {
            let far = Far::read(&text(&results));
            came.resize(far.ended, started.elapsed());
            progress(far);
        };
        let status = wait(&mut child, limit, look)
            .with_context(|| format!("the host's console is in {}", console.display()))?;
        if !status.success() {
            let log = fs::read_to_string(dir.join("emulator.log")).unwrap_or_default();
            bail!("the emulator failed ({status}): {}", log.trim());
        }
        let results = text(&results);
        Ok(EmulatorOutcome {
            results,
            came,
            console,
            wall: started.elapsed(),
        })
    }

    /// The key of all that its run depends on: the same gives the same results.
    pub fn key(&self, initrd: &Path) -> Result<String> {
        let inside = self.root.inside(initrd)?;
        let mut parts = vec![self.root.id().into_bytes(), fs::read(initrd)?];
        let args = self.args(initrd, "quiet")?;
        let args = args.into_iter().filter(|word| *word != inside);
        parts.extend(args.map(String::into_bytes));
        Ok(key(parts.iter().map(Vec::as_slice)))
    }

    /// Boots with the console on this terminal; Ctrl-A x ends it.
    pub fn shell(&self, initrd: &Path) -> Result<()> {
        let mut emulator = self.on_stdio(initrd)?;
        let status = emulator.stdin(Stdio::inherit()).status();
        let status = status.context("cannot start the emulator")?;
        if !status.success() {
            bail!("the emulator failed ({status})");
        }
        Ok(())
    }

    /// An emulator whose first serial port is its standard input and output.
    pub fn on_stdio(&self, initrd: &Path) -> Result<Command> {
        let mut args = self.args(initrd, "loglevel=4")?;
        args.extend(["-nographic", "-serial", "mon:stdio", "-serial", "null"].map(String::from));
        let mut emulator = self.root.command(&self.kernel.arch.qemu());
        emulator.args(&args);
        Ok(emulator)
    }

    fn args(&self, initrd: &Path, cmdline: &str) -> Result<Vec<String>> {
        let image = self.root.inside(&self.kernel.image)?;
        let mut args = self.machine("");
        let (console, more) = match (self.kernel.arch, &self.kernel.unpacked) {
            (Arch::X86_64, _) => ("ttyS0", CMDLINE_OF_PC),
            (_, Some(_)) => ("ttyAMA0", CMDLINE_OF_CHECKS),
            (_, None) => ("ttyAMA0", ""),
        };
        let isolated = self.isolated.map(|cpus| format!(" isolcpus={cpus}"));
        let isolated = isolated.unwrap_or_default();
        args.extend(match self.kernel.arch {
            Arch::Arm64 => ["-dtb".into(), self.root.inside(&self.device_tree()?)?],
            Arch::X86_64 => ["-smbios", SERIAL_OF_PC].map(String::from),
        });
        let mode = match self.protected {
            true => " kvm-arm.mode=protected",
            false => "",
        };
        let time = match self.parallel {
            true => ["-accel", "tcg,thread=multi"],
            false => ["-icount", "shift=1,sleep=off"],
        };
        args.extend(time.map(String::from));
        args.extend(
            [
                "-rtc",
                "base=2026-01-01,clock=vm",
                "-seed",
                "1",
                "-no-reboot",
                "-nic",
                "none",
                "-kernel",
                &image,
                "-initrd",
                &self.root.inside(initrd)?,
                "-append",
                &format!("console={console} {CMDLINE} {cmdline}{more}{mode}{isolated}"),
            ]
            .map(String::from),
        );
        for disk in &self.disks {
            let file = self.root.inside(&disk.image)?;
            // Of a run's own disk nothing has to outlive the machine.
            let access = if disk.writable {
                "cache=unsafe"
            } else {
                "readonly=on"
            };
            args.push("-drive".into());
            args.push(format!("file={file},format=raw,if=virtio,{access}"));
        }
        Ok(args)
    }

    fn mem_mib(&self) -> u32 {
        if self.gib_page {
            MEM_FOR_1_GIB_PAGE_MIB
        } else {
            MEM_MIB
        }
    }

    fn machine(&self, options: &str) -> Vec<String> {
        let gic = self.gic;
        let board = format!("virt,virtualization=on,gic-version={gic},dtb-randomness=off{options}");
        let (machine, cpu) = match self.kernel.arch {
            Arch::Arm64 => (&*board, self.cpu),
            Arch::X86_64 => ("q35", CPU_OF_PC),
        };
        let cpus = self.topology.cpus().to_string();
        let memory = self.mem_mib().to_string();
        let words = ["-M", machine, "-cpu", cpu, "-smp", &cpus, "-m", &memory];
        words.map(String::from).into()
    }

    /// The emulator's own tree with the topology added.
    fn device_tree(&self) -> Result<PathBuf> {
        let added = self.topology.dts();
        let key = key([
            self.root.id().as_bytes(),
            self.cpu.as_bytes(),
            added.as_bytes(),
            &self.mem_mib().to_le_bytes(),
            &[self.gic],
        ]);
        let dir = self.cache.entry("board", &key, |to| {
            let inside = self.root.inside(to)?;
            // Two serial ports, as in a run: the second is the result port.
            let mut args = self.machine(&format!(",dumpdtb={inside}/board.dtb"));
            args.extend(
                ["-display", "none", "-serial", "null", "-serial", "null"].map(String::from),
            );
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            self.root.run(
                "asking the emulator for its device tree",
                "qemu-system-aarch64",
                &args,
            )?;
            fs::write(to.join("topology.dts"), &added)?;
            let script = format!(
                "cd {inside} && dtc -q -O dts board.dtb > host.dts && cat topology.dts >> host.dts \
                 && dtc -q -@ -O dtb host.dts > host.dtb"
            );
            self.root
                .run("compiling the host's device tree", "sh", &["-ec", &script])?;
            Ok(())
        })?;
        Ok(dir.join("host.dtb"))
    }
}

/// A file that is being written; empty when it isn't there yet.
fn text(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Waits for the child, and looks each second. It is killed, and that is an error, when it has
/// taken more CPU time than `limit`: other load on this machine takes none of it. So it is when it
/// stands still for [`STANDSTILL`].
pub fn wait(child: &mut Child, limit: Duration, mut look: impl FnMut()) -> Result<ExitStatus> {
    let mut next = Instant::now();
    let mut took = Duration::ZERO;
    let mut went_on = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            look();
            return Ok(status);
        }
        if Instant::now() >= next {
            next += Duration::from_secs(1);
            look();
            let now = cpu_time::taken_by(child.id());
            if now > took {
                (took, went_on) = (now, Instant::now());
            }
        }
        let still = went_on.elapsed() > STANDSTILL;
        if took > limit || still {
            child.kill()?;
            child.wait()?;
            let (took, limit) = (took.as_secs(), limit.as_secs());
            let why = match still {
                true => format!("took no CPU time for {} s", STANDSTILL.as_secs()),
                false => format!("took more than {limit} s of CPU time"),
            };
            bail!("the emulated host {why} and has not ended ({took} s in all)");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
