// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is looked at of a QEMU command line. QEMU takes each option with one dash or two.

mod config_file;

use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail};
use serde_json::{Map, Value};

/// A QEMU command line.
pub struct QemuCommand<'a> {
    /// Programs that become QEMU, with their arguments.
    before: &'a [OsString],
    program: &'a OsStr,
    arguments: &'a [OsString],
    /// The arguments, with the options of -readconfig's files in its place.
    seen: Vec<OsString>,
}

/// What the guest learns of its machine from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Described {
    /// QEMU's device tree.
    ByTree,
    /// A device tree of the user's.
    ByFile(PathBuf),
    /// ACPI, or what this machine type has.
    Otherwise,
}

impl<'a> QemuCommand<'a> {
    /// Of a program and its arguments.
    ///
    /// # Errors
    /// When there is no program, one that leaves the foreground, or a file that can't be read.
    pub fn read(words: &'a [OsString]) -> anyhow::Result<Self> {
        let (before, words) = words.split_at(place_of_qemu(words)?);
        let (program, arguments) = words.split_first().context("no QEMU is named")?;
        let command = Self {
            before,
            program,
            arguments,
            seen: with_files(arguments)?,
        };
        if command.has("daemonize") {
            bail!(
                "the server of a VM ends with QEMU, which stays in the foreground; leave -daemonize out"
            );
        }
        Ok(command)
    }

    /// That of a process. What its -readconfig reads isn't known.
    pub fn of_process(words: &'a [OsString]) -> anyhow::Result<Self> {
        let (program, arguments) = words.split_first().context("it has no command line")?;
        Ok(Self {
            before: &[],
            program,
            arguments,
            seen: arguments.to_vec(),
        })
    }

    /// Whether it reads options from files.
    pub fn has_config_file(&self) -> bool {
        self.has("readconfig")
    }

    pub fn program(&self) -> &OsStr {
        self.program
    }

    pub fn arguments(&self) -> &[OsString] {
        self.arguments
    }

    /// Starts QEMU, by what stands before it.
    pub fn start(&self) -> Command {
        let mut words = self.before.iter().map(OsString::as_os_str);
        let mut command = Command::new(words.next().unwrap_or(self.program));
        command.args(words);
        if !self.before.is_empty() {
            command.arg(self.program);
        }
        command
    }

    /// The name of QEMU's program, without a folder.
    fn name(&self) -> &str {
        name_of(self.program)
    }

    /// The arguments of a QEMU that makes the same device tree: of machine, CPUs, memory and kernel.
    /// Without devices, disks, sockets and files that it would write: they are the guest's.
    ///
    /// # Errors
    /// When an object is in a form of JSON that QEMU alone takes.
    pub fn of_tree(&self) -> anyhow::Result<Vec<OsString>> {
        for json in self.texts("object").filter(|text| text.starts_with('{')) {
            serde_json::from_str::<Map<String, Value>>(json).with_context(|| {
                format!(
                    "-object {json} can't be read; write it with double quotes, as libvirt does"
                )
            })?;
        }
        let mut kept: Vec<OsString> = ["-nodefaults", "-display", "none"].map(Into::into).into();
        let mut words = self.seen.iter();
        while let Some(word) = words.next() {
            let Some(name) = word.to_str().and_then(option) else {
                continue;
            };
            if FLAGS.contains(&name) {
                kept.push(word.clone());
            } else if let Some(value) = taken(name).and_then(|take| take(words.next()?)) {
                kept.extend([word.clone(), value]);
            }
        }
        Ok(kept)
    }

    /// The values of an option, in order.
    fn values(&self, name: &str) -> impl Iterator<Item = &OsStr> {
        let pairs = self.seen.iter().zip(self.seen.iter().skip(1));
        pairs.filter_map(move |(option, value)| {
            (option.to_str().and_then(self::option)? == name).then_some(value.as_os_str())
        })
    }

    fn texts(&self, name: &str) -> impl Iterator<Item = &str> {
        self.values(name).filter_map(OsStr::to_str)
    }

    /// The vCPUs that the guest starts with: `-smp 4`, `-smp cpus=4,...`; without, 1.
    ///
    /// # Errors
    /// When -smp has a topology without `cpus`.
    pub fn cpus(&self) -> anyhow::Result<u32> {
        let Some(smp) = self.texts("smp").last() else {
            return Ok(1);
        };
        let mut parts = smp.split(',');
        let cpus = parts.clone().find_map(|part| part.strip_prefix("cpus="));
        let bare = parts.next().filter(|part| !part.contains('='));
        match cpus.or(bare).map(str::parse) {
            Some(Ok(cpus)) => Ok(cpus),
            _ => bail!("-smp {smp} doesn't give the number of vCPUs; add cpus=N"),
        }
    }

    /// What describes the guest's CPUs to it.
    pub fn described(&self) -> Described {
        let virt = self.is_machine("virt") && !self.is_of_another_architecture();
        let no_acpi = self.has("no-acpi")
            || (self.machines()).any(|text| text.split(',').any(|part| part == "acpi=off"));
        let direct = self.kernel().is_some() && !self.has_firmware();
        match self.file("dtb") {
            Some(file) => Described::ByFile(file),
            None if virt && (direct || no_acpi) => Described::ByTree,
            None => Described::Otherwise,
        }
    }

    /// Whether it is one for x86-64.
    pub fn is_x86(&self) -> bool {
        self.name().contains("x86_64")
            || self.is_kvm() && cfg!(target_arch = "x86_64")
            || ["q35", "pc", "microvm"]
                .iter()
                .any(|kind| self.is_machine(kind))
    }

    /// Whether it is the name of this machine's QEMU with KVM: Debian's `kvm`, Fedora's `qemu-kvm`.
    fn is_kvm(&self) -> bool {
        ["kvm", "qemu-kvm"].contains(&self.name())
    }

    fn machines(&self) -> impl Iterator<Item = &str> {
        (["machine", "M"].into_iter()).flat_map(|name| self.texts(name))
    }

    /// Whether the machine is of this kind, of any version.
    fn is_machine(&self, kind: &str) -> bool {
        self.machines().any(|text| {
            let own = text.split(',').next().unwrap_or(text);
            let version = own.strip_prefix("type=").unwrap_or(own).strip_prefix(kind);
            version.is_some_and(|version| version.is_empty() || version.starts_with('-'))
        })
    }

    /// Whether KVM runs the guest.
    pub fn has_kvm(&self) -> bool {
        let accelerators = self.texts("accel").chain(self.texts("machine"));
        let kvm = |text: &str| {
            let mut parts = text.split(',');
            parts.any(|part| ["kvm", "accel=kvm", "accel=kvm:tcg"].contains(&part))
        };
        self.is_kvm() || self.has("enable-kvm") || accelerators.chain(self.texts("M")).any(kvm)
    }

    /// Whether QEMU locks its memory, all of it at once: `-overcommit mem-lock=on`, without `on-fault`.
    pub fn locks_memory(&self) -> bool {
        let parts = self.texts("overcommit").flat_map(|text| text.split(','));
        let lock = parts.filter_map(|part| part.strip_prefix("mem-lock="));
        lock.last()
            .is_some_and(|value| ["on", "yes", "true", "y"].contains(&value))
    }

    fn has(&self, name: &str) -> bool {
        let is = |word: &OsString| word.to_str().and_then(option) == Some(name);
        self.seen.iter().any(is)
    }

    /// Whether it has memory of its own: a memory object, or a folder for one.
    pub fn names_memory(&self) -> bool {
        let of_machine = |text: &str| {
            text.split(',')
                .any(|part| part.starts_with("memory-backend="))
        };
        let of_node = |text: &str| text.split(',').any(|part| part.starts_with("memdev="));
        self.has("mem-path") || self.machines().any(of_machine) || self.texts("numa").any(of_node)
    }

    /// Whether the guest starts with firmware.
    pub fn has_firmware(&self) -> bool {
        let flash = self.texts("drive").any(|text| text.contains("if=pflash"));
        let of_machine = ["machine", "M"].into_iter();
        let mut of_machine = of_machine.flat_map(|name| self.texts(name));
        let firmware = |part: &str| part.starts_with("pflash") || part.starts_with("firmware=");
        flash
            || of_machine.any(|text| text.split(',').any(firmware))
            || ["bios", "pflash"].iter().any(|name| self.has(name))
    }

    /// Its `virt` is another machine than Arm's.
    fn is_of_another_architecture(&self) -> bool {
        ["riscv", "loongarch", "m68k", "or1k", "xtensa"]
            .iter()
            .any(|other| self.name().contains(other))
    }

    /// The guest's kernel, if QEMU loads it.
    pub fn kernel(&self) -> Option<PathBuf> {
        self.file("kernel")
    }

    /// The file of an option that is a property of the machine, too.
    fn file(&self, name: &str) -> Option<PathBuf> {
        let of_machine = self.machines().flat_map(|text| text.split(','));
        let of_machine = of_machine.filter_map(|part| part.split_once('='));
        let of_machine = of_machine.filter(|(property, _)| *property == name);
        let file = self.values(name).last();
        file.or(of_machine.last().map(|(_, file)| OsStr::new(file)))
            .map(PathBuf::from)
    }
}

/// Programs that become the one that they start, so that its process is theirs; which of their short
/// and long options take the next word.
const BECOME: [(&str, &str, &[&str]); 9] = [
    (
        "chrt",
        "DPT",
        &["sched-deadline", "sched-period", "sched-runtime"],
    ),
    ("env", "CSau", &["argv0", "chdir", "split-string", "unset"]),
    ("ionice", "cn", &["class", "classdata"]),
    ("nice", "n", &["adjustment"]),
    ("nohup", "", &[]),
    (
        "numactl",
        "CNPcimpw",
        &[
            "cpubind",
            "cpunodebind",
            "interleave",
            "membind",
            "physcpubind",
            "preferred",
            "preferred-many",
            "weighted-interleave",
        ],
    ),
    ("prlimit", "", &[]),
    (
        "setpriv",
        "",
        &[
            "ambient-caps",
            "apparmor-profile",
            "bounding-set",
            "egid",
            "euid",
            "groups",
            "inh-caps",
            "landlock-access",
            "landlock-rule",
            "pdeathsig",
            "ptracer",
            "regid",
            "reuid",
            "rgid",
            "ruid",
            "seccomp-filter",
            "securebits",
            "selinux-label",
        ],
    ),
    ("taskset", "", &[]),
];
/// Programs that stay between the server and QEMU, or close what QEMU is to inherit.
const STAY: [&str; 11] = [
    "doas",
    "flock",
    "gdb",
    "nsenter",
    "perf",
    "strace",
    "sudo",
    "systemd-run",
    "timeout",
    "unshare",
    "valgrind",
];

/// Where QEMU is among these words: behind programs that become it.
fn place_of_qemu(words: &[OsString]) -> anyhow::Result<usize> {
    let mut place = 0;
    while let Some(behind) = behind(&words[place..]) {
        place += behind;
    }
    let program = words.get(place).map_or("", |word| name_of(word));
    let is_qemu = program.starts_with("qemu") || program == "kvm";
    // An unknown program may stay, too.
    let hides_qemu = || !is_qemu && words.iter().skip(place + 1).any(is_emulator);
    if STAY.contains(&program) || hides_qemu() {
        bail!("put {program} before vcpufreq: behind \"--\" QEMU takes its place");
    }
    if place > 0 && !is_qemu {
        let first = name_of(&words[0]);
        bail!("no QEMU is found behind {first}; put {first} before vcpufreq, which QEMU inherits");
    }
    Ok(place)
}

/// Where the program is that the first of these words becomes, if it becomes one: behind its options with
/// their values, which may be named as a QEMU, and behind variables, CPUs and priorities.
fn behind(words: &[OsString]) -> Option<usize> {
    let name = name_of(words.first()?);
    let (_, short, long) = BECOME.iter().find(|(known, ..)| *known == name)?;
    let mut place = 1;
    while let Some(word) = words.get(place).map(|word| word.to_string_lossy()) {
        let takes_next = match (word.strip_prefix("--"), word.strip_prefix('-')) {
            // It may be shortened, and "--" itself is none.
            (Some(name), _) => !name.is_empty() && long.iter().any(|long| long.starts_with(name)),
            // What is behind a letter that takes a value is that value.
            (_, Some(letters)) => {
                let takes = letters.find(|letter| short.contains(letter));
                takes.is_some_and(|at| at + 1 == letters.len())
            }
            _ if word.contains('=') || word.chars().all(is_of_list) => false,
            _ => break,
        };
        place += 1 + usize::from(takes_next);
    }
    Some(place.min(words.len()))
}

/// Whether it may be part of a priority, a mask or a list of CPUs.
fn is_of_list(char: char) -> bool {
    char.is_ascii_hexdigit() || "x,-:".contains(char)
}

/// Whether a word is the name of QEMU's program for an architecture.
fn is_emulator(word: &OsString) -> bool {
    let architecture = name_of(word).strip_prefix("qemu-system-");
    architecture.is_some_and(|name| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'))
        && !word.to_string_lossy().contains('=')
}

fn name_of(program: &OsStr) -> &str {
    let name = Path::new(program).file_name();
    name.and_then(OsStr::to_str).unwrap_or_default()
}

/// The arguments, with the options of -readconfig's files in its place.
fn with_files(arguments: &[OsString]) -> anyhow::Result<Vec<OsString>> {
    let mut seen = Vec::new();
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        let is_file = word.to_str().and_then(option) == Some("readconfig");
        match words.as_slice().first().filter(|_| is_file) {
            Some(path) => {
                seen.extend(config_file::options_of(Path::new(path))?);
                words.next();
            }
            None => seen.push(word.clone()),
        }
    }
    Ok(seen)
}

/// Options without a value that a device tree depends on.
const FLAGS: [&str; 2] = ["enable-kvm", "no-acpi"];

/// The name of an option: QEMU takes it with one dash or two.
fn option(word: &str) -> Option<&str> {
    let name = word.strip_prefix('-')?;
    Some(name.strip_prefix('-').unwrap_or(name))
}

/// What to make of an option's value for a device tree; none of an option that it does not depend on.
fn taken(name: &str) -> Option<fn(&OsString) -> Option<OsString>> {
    match name {
        "accel" | "append" | "bios" | "cpu" | "initrd" | "kernel" | "L" | "m" | "numa" | "smp" => {
            Some(|value| Some(value.clone()))
        }
        "machine" | "M" => Some(machine_alone),
        "object" => Some(memory_alone),
        // A second one is in the tree.
        "serial" => Some(|_| Some("null".into())),
        _ => None,
    }
}

/// A machine without properties that name other objects than memory.
fn machine_alone(value: &OsString) -> Option<OsString> {
    let parts = value.to_str()?.split(',');
    let named = [
        "pflash",
        "confidential-guest-support=",
        "memory-encryption=",
        "dumpdtb=",
    ];
    let parts = parts.filter(|part| !named.iter().any(|name| part.starts_with(name)));
    Some(parts.collect::<Vec<_>>().join(",").into())
}

/// Memory of the same name and size that is not allocated yet; none of another object.
fn memory_alone(value: &OsString) -> Option<OsString> {
    let text = value.to_str()?;
    if text.starts_with('{') {
        return memory_of_json(text);
    }
    let parts = text.split(',');
    // The first may be without its key.
    let bare = parts.clone().next().filter(|part| !part.contains('='));
    let kind = parts
        .clone()
        .find_map(|part| part.strip_prefix("qom-type="));
    kind.or(bare).filter(|kind| is_memory(kind))?;
    let kept = parts.filter(|part| part.starts_with("id=") || part.starts_with("size="));
    let parts = [RAM].into_iter().chain(kept);
    Some(parts.collect::<Vec<_>>().join(",").into())
}

/// The same in the form of JSON, which libvirt writes.
fn memory_of_json(text: &str) -> Option<OsString> {
    let mut object: Map<String, Value> = serde_json::from_str(text).ok()?;
    let kind = object.get_mut("qom-type")?;
    kind.as_str().filter(|kind| is_memory(kind))?;
    *kind = RAM.into();
    object.retain(|key, _| ["qom-type", "id", "size"].contains(&&**key));
    Some(Value::from(object).to_string().into())
}

const RAM: &str = "memory-backend-ram";

fn is_memory(kind: &str) -> bool {
    kind.starts_with("memory-backend-")
}

#[cfg(test)]
mod tests {
    //! vCPUs and machine are read as QEMU reads its options.
    use super::*;

    fn of<T>(line: &str, ask: impl Fn(&QemuCommand<'_>) -> T) -> T {
        let words: Vec<_> = line.split(' ').map(OsString::from).collect();
        ask(&QemuCommand::read(&words).unwrap())
    }

    #[test]
    fn the_number_of_vcpus_is_smps() {
        for (line, cpus) in [
            ("qemu -nographic", 1),
            ("qemu -smp 4", 4),
            ("qemu --smp 4,maxcpus=8", 4),
            ("qemu -smp maxcpus=8,cpus=3", 3),
            ("qemu -smp 1 -smp cpus=2", 2),
        ] {
            assert_eq!(of(line, |line| line.cpus().unwrap()), cpus, "{line}");
        }
        for line in ["qemu -smp sockets=2,cores=2", "qemu -smp many"] {
            assert!(of(line, |line| line.cpus().is_err()), "{line}");
        }
    }

    #[test]
    fn memory_is_locked_by_the_last_word() {
        for (line, locks) in [
            ("qemu -smp 2", false),
            ("qemu -overcommit mem-lock=on", true),
            ("qemu --overcommit cpu-pm=on,mem-lock=on", true),
            ("qemu -overcommit mem-lock=on-fault", false),
            (
                "qemu -overcommit mem-lock=on -overcommit mem-lock=off",
                false,
            ),
        ] {
            assert_eq!(of(line, |line| line.locks_memory()), locks, "{line}");
        }
    }

    #[test]
    fn a_tree_is_made_without_devices_and_files() {
        for (line, of_tree) in [
            (
                "qemu -M virt,pflash0=rom,gic-version=3 -cpu host -accel kvm -smp 2 -m 1G",
                "-M virt,gic-version=3 -cpu host -accel kvm -smp 2 -m 1G",
            ),
            (
                "qemu -kernel Image --append quiet -serial file:log -device virtio-net-pci -no-acpi",
                "-kernel Image --append quiet -serial null -no-acpi",
            ),
            (
                "qemu -object memory-backend-file,id=m,size=1G,prealloc=on -numa node,memdev=m \
                 -object rng-random,id=r -qmp unix:q,server=on -chardev socket,path=s,id=c",
                "-object memory-backend-ram,id=m,size=1G -numa node,memdev=m",
            ),
            (
                "qemu -object qom-type=memory-backend-memfd,id=m,size=1G,share=on \
                 -object id=n,qom-type=memory-backend-file,mem-path=f,size=2G \
                 -object {\"qom-type\":\"memory-backend-memfd\",\"id\":\"r\",\"share\":true,\"size\":7} \
                 -object {\"qom-type\":\"secret\",\"id\":\"s\"}",
                "-object memory-backend-ram,id=m,size=1G -object memory-backend-ram,id=n,size=2G \
                 -object {\"id\":\"r\",\"qom-type\":\"memory-backend-ram\",\"size\":7}",
            ),
        ] {
            let words = of(line, |line| line.of_tree().unwrap());
            let words: Vec<_> = words.iter().map(|word| word.to_str().unwrap()).collect();
            assert_eq!(
                words.join(" "),
                format!("-nodefaults -display none {of_tree}")
            );
        }
    }

    // Else the tree's memory would be another than the guest's.
    #[test]
    fn an_object_that_cannot_be_read_is_a_line() {
        for object in ["{'qom-type':'memory-backend-ram','id':'m','size':7}", "{"] {
            let line = format!("qemu -M virt -object {object}");
            let error = of(&line, |line| line.of_tree()).unwrap_err().to_string();
            assert!(error.contains("write it with double quotes"), "{error}");
        }
    }

    #[test]
    fn programs_that_become_qemu_may_stand_before_it() {
        for (line, started, arguments) in [
            (
                "taskset -c 4-7 /bin/qemu-system-x86_64 -m 1G",
                "taskset -c 4-7 /bin/qemu-system-x86_64",
                2,
            ),
            ("env Q=/bin/qemu kvm", "env Q=/bin/qemu kvm", 0),
            ("nice numactl -l qemu -M virt", "nice numactl -l qemu", 2),
            ("my-qemu taskset", "my-qemu", 1),
            ("kvm -name qemu -m 1G", "kvm", 4),
            ("my-qemu -pidfile /qemu-system-1.pid", "my-qemu", 2),
            (
                "setpriv --reuid qemu --regid=kvm --clear-groups qemu-system-aarch64 -m 1G",
                "setpriv --reuid qemu --regid=kvm --clear-groups qemu-system-aarch64",
                2,
            ),
            (
                "setpriv --reu kvm qemu -name qemu-system-1",
                "setpriv --reu kvm qemu",
                2,
            ),
            (
                "env -iu qemu -C /kvm -- Q=1 nice -n 5 chrt -f 9 numactl -N 0 -m0 kvm -smp 2",
                "env -iu qemu -C /kvm -- Q=1 nice -n 5 chrt -f 9 numactl -N 0 -m0 kvm",
                2,
            ),
            (
                "ionice -c2 -n 7 taskset f0 qemu",
                "ionice -c2 -n 7 taskset f0 qemu",
                0,
            ),
        ] {
            let (words, seen) = of(line, |line| {
                let start = line.start();
                let words = [start.get_program()].into_iter().chain(start.get_args());
                let words: Vec<_> = words.map(|word| word.to_str().unwrap()).collect();
                (words.join(" "), line.arguments().len())
            });
            assert_eq!((&*words, seen), (started, arguments), "{line}");
        }
        for line in [
            "sudo qemu-system-x86_64",
            "/usr/bin/timeout 9 qemu",
            "taskset 1 ./mine",
            "nice sudo -u qemu qemu-system-x86_64",
            "setpriv --reuid qemu",
            "setpriv --reuid",
            "stdbuf -o0 /usr/bin/qemu-system-aarch64 -M virt",
            "mine qemu-system-aarch64",
        ] {
            let words: Vec<_> = line.split(' ').map(OsString::from).collect();
            let said = QemuCommand::read(&words).err().unwrap().to_string();
            assert!(said.contains("before vcpufreq"), "{line}: {said}");
        }
    }

    #[test]
    fn a_file_of_options_is_read_in_its_place() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text =
            "[machine]\n type = \"virt\"\n[smp-opts]\n cpus = \"2\"\n[device]\n driver = \"x\"\n";
        std::fs::write(file.path(), text).unwrap();
        let line = format!("qemu -readconfig {} -kernel Image", file.path().display());
        let (cpus, described, tree) = of(&line, |line| {
            (
                line.cpus().unwrap(),
                line.described(),
                line.of_tree().unwrap(),
            )
        });
        assert_eq!((cpus, described), (2, Described::ByTree));
        let tree = tree[3..].join(OsStr::new(" "));
        assert_eq!(tree, "-machine type=virt -smp cpus=2 -kernel Image");
    }

    #[test]
    fn a_qemu_that_leaves_the_foreground_is_refused() {
        let words = ["qemu", "-daemonize"].map(OsString::from);
        let line = QemuCommand::read(&words).err().unwrap().to_string();
        assert!(line.contains("leave -daemonize out"), "{line}");
    }

    #[test]
    fn memory_of_its_own_is_found() {
        for (line, names) in [
            ("qemu -M virt,memory-backend=m -m 1G", true),
            ("qemu -numa node,memdev=m", true),
            ("qemu -mem-path /dev/hugepages", true),
            (
                "qemu -M virt -object memory-backend-memfd,id=unused,size=1G",
                false,
            ),
        ] {
            assert_eq!(of(line, |line| line.names_memory()), names, "{line}");
        }
    }

    #[test]
    fn kvm_is_found_in_each_form() {
        for (line, kvm) in [
            ("qemu -accel kvm", true),
            ("qemu -enable-kvm", true),
            ("qemu -M virt,accel=kvm:tcg", true),
            ("qemu -machine virt -accel tcg", false),
            ("/usr/bin/kvm -M virt", true),
            ("/opt/kvm/qemu -M virt", false),
        ] {
            assert_eq!(of(line, |line| line.has_kvm()), kvm, "{line}");
        }
    }

    #[test]
    fn a_tree_describes_direct_kernels_and_firmware_without_acpi() {
        use Described::{ByFile, ByTree, Otherwise};
        for (line, described) in [
            ("qemu -M virt -kernel Image", ByTree),
            ("qemu -machine virt-9.2,gic-version=3 -kernel Image", ByTree),
            ("qemu -machine type=virt,acpi=off -bios EFI", ByTree),
            ("qemu -M virt -no-acpi -bios EFI", ByTree),
            ("qemu -M virt,kernel=Image", ByTree),
            ("/opt/riscv/qemu -M virt -kernel Image", ByTree),
            ("qemu -M virt,firmware=EFI,kernel=Image", Otherwise),
            ("qemu -M virt,kernel=Image,dtb=mine", ByFile("mine".into())),
            ("qemu -M virt -bios EFI -kernel Image", Otherwise),
            ("qemu -M virt -drive if=pflash,file=EFI", Otherwise),
            ("qemu -M virt,pflash0=rom -kernel Image", Otherwise),
            ("qemu-system-riscv64 -M virt -kernel Image", Otherwise),
            ("qemu -M q35 -kernel bzImage", Otherwise),
            (
                "qemu -M virt -kernel Image -dtb mine",
                ByFile("mine".into()),
            ),
        ] {
            assert_eq!(of(line, |line| line.described()), described, "{line}");
        }
    }
}
