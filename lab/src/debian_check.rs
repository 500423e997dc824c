// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The packages on a clean Debian system that the emulated host boots, with systemd and apt: they
//! install, DKMS builds the modules, and after another boot the program works as it does on a board,
//! or on a PC; a purge leaves nothing. After it the archive's program runs.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use vcpufreq_tests::LabCheck;

use crate::arch::Arch;
use crate::artifacts::HOST_MODULES;
use crate::cache::{Cache, remove_tree};
use crate::choice::RootPart;
use crate::disk_debian::{DiskDebian, Start};
use crate::kernel::files_below;
use crate::progress::Step;
use crate::result_port;
use crate::root::Root;
use crate::verdict::{TestResult, tell};

/// Real time that a boot may take.
const AT_MOST: Duration = Duration::from_secs(3600);

/// A promise, and a script that fails when it is broken.
type Promise = (&'static str, &'static str);

/// Every file: kind, mode, owner, size of a regular file, name, a link's target. `-xdev` leaves out
/// /proc, /sys, /dev, /run, and what the lab mounts (/lab, /srv/archive). Left out besides: state,
/// caches and logs of package managers (/var/lib/dpkg, /var/lib/apt, /var/cache, /var/log); what
/// systemd itself keeps from boot to boot; temporary files; depmod's lists of modules, which any
/// package's first module makes; DKMS' key for signatures.
const FILES: &str = r"
    find / -xdev \( -type f -printf '%y %m %U %s %p\n' \) -o -printf '%y %m %U %p %l\n' |
        grep -v -E -e ' /var/(lib/(dpkg|apt|systemd/(random-seed|timers|timesync|catalog|rfkill))|cache|log|tmp)(/| )' -e ' /tmp(/| )' \
            -e '/lib/modules/[^/]*/modules\.' -e ' /var/lib/dkms/mok\.' |
        sort
";

/// Of the first boot. Other packages come first: a purge doesn't take them along.
const INSTALL: [Promise; 3] = [
    (
        "apt installs DKMS, pahole and QEMU",
        "useradd --uid 1000 --create-home --groups kvm board
         apt-get update
         apt-get install --yes --no-install-recommends dkms pahole $vmms
         ( . /lab/files ) >/var/log/files-before",
    ),
    (
        "apt installs the packages",
        "apt-get install --yes --no-install-recommends /lab/packages/*.deb >/lab/installed 2>&1 ||
             echo failed >>/lab/installed
         cat /lab/installed
         if grep -i -E '^syntax|error|failed' /lab/installed; then exit 1; fi",
    ),
    (
        "DKMS builds all modules for the running kernel",
        "dkms status
         for name in vcpufreq-guest vcpufreq-host vcpufreq-rt-loop; do
             dkms status -k $(uname -r) $name | grep -q ': installed'
         done
         for name in vcpufreq_guest vcpufreq_host vcpufreq_rt_loop; do
             modinfo -F vermagic $name | grep -F $(uname -r)
             if modinfo -F description $name | grep ^Empty; then exit 1; fi
         done",
    ),
];

/// Of the second boot. The board's drivers are the lab's: a real board has its own. A task that ended
/// during the boot can leave its clamp on a CPU, which then ignores lower requests
/// (docs/design.md); a CPU that was off has none.
const USE: [Promise; 8] = [
    (
        "the board has its drivers",
        "for cpu in 1 2 3; do echo 0 >/sys/devices/system/cpu/cpu$cpu/online; done
         chrt -f 99 sh -c 'cd /proc/sys/kernel; f=sched_util_clamp_min_rt_default
             is=$(cat $f); echo $((is - 1)) >$f; echo $is >$f'
         for cpu in 1 2 3; do echo 1 >/sys/devices/system/cpu/cpu$cpu/online; done
         . /lab/drivers
         modprobe vcpufreq_host
         systemctl is-system-running --wait || true
         cat /sys/devices/system/cpu/cpufreq/policy*/scaling_governor
         [ -z \"$(systemctl --failed --no-legend)\" ]",
    ),
    (
        "doctor is green where a unit has its cgroup",
        "systemd-run --quiet --wait --pipe --slice vcpufreq.slice -p Delegate=cpu sh -c '
             echo max >/sys/fs/cgroup/vcpufreq.slice/cpu.uclamp.min
             exec vcpufreq doctor' >/lab/doctor || [ $? = $doctor ]
         cat /lab/doctor
         if grep -v -E '^(ok|n/a) ' /lab/doctor | grep -E '^[^ ]' |
             grep -v '^limit  *architecture '; then exit 1; fi",
    ),
    (
        "demo needs no arguments, and 0 OPPs are wrong",
        "vcpufreq demo --out /lab/demo.json
         grep -q '\"opps_wrong\": *0' /lab/demo.json",
    ),
    (
        "doctor and demo need no root, by the page's delegation",
        "install -d -o board -m 700 /run/user/1000
         cd /sys/fs/cgroup
         echo +cpu >cgroup.subtree_control
         mkdir -p vms/start
         echo max >vms/cpu.uclamp.min
         chown -R 1000 vms
         echo $$ >vms/start/cgroup.procs
         cd /run/user/1000
         XDG_RUNTIME_DIR=/run/user/1000 setpriv --reuid 1000 --regid 1000 --init-groups --inh-caps=-all \
             sh -e -c 'vcpufreq doctor >doctor || [ $? = 1 ]
                 cat doctor; grep -E \"^[a-z]+ +path +($path);\" doctor
                 if grep -E \"^limit +(uclamp|cgroup|governor|kvm)\" doctor; then exit 1; fi
                 vcpufreq demo --out demo.json'
         grep -q '\"opps_wrong\": *0' demo.json",
    ),
    (
        "the delegation can be taken back",
        "rm -r /run/user/1000
         rmdir /sys/fs/cgroup/vms/start /sys/fs/cgroup/vms",
    ),
    (
        "vcpufreq-serve.socket serves a QEMU guest",
        ". /lab/make-guest
         printf 'cpus = 2\nclamp = \"exact\"\n[vcpu.0]\npin = 0\n[vcpu.1]\npin = 2\n' >/etc/vcpufreq/guest.toml
         systemctl start vcpufreq-serve@guest.socket
         set -- -chardev socket,path=/run/vcpufreq-guest.sock,id=vcpufreq \
             -device ivshmem-doorbell,master=on,chardev=vcpufreq,vectors=2
         . /lab/qemu
         systemctl show -P ActiveState vcpufreq-serve@guest.service | grep -x active",
    ),
    (
        "vcpufreq qemu before a QEMU command line closes the loop",
        "prefix='vcpufreq qemu --clamp exact --pin 0=0 --pin 1=2 --'
         . /lab/qemu",
    ),
    ("the metrics units answer on loopback, then on a unix socket", SCRAPE),
];

/// As the socket unit's file has it, with a guest that has made requests. QEMU stays when its guest
/// ends: there is time for both sockets.
const SCRAPE: &str = r#"
units=/etc/systemd/system
cp /usr/share/doc/vcpufreq/examples/vcpufreq-metrics* $units
systemctl enable --now vcpufreq-metrics.socket
systemd-run --unit=scraped --collect sh -c '
    prefix="vcpufreq qemu --clamp exact --pin 0=0 --pin 1=2 --"
    set -- -no-shutdown
    . /lab/qemu'
shows_requests() {
    for _ in $(seq 200); do
        "$@" >/lab/answer || true
        if grep '^vcpufreq_requests_total{.*} [1-9]' /lab/answer; then return; fi
        sleep 1
    done
    cat /lab/answer
    return 1
}
shows_requests bash -c 'exec 3<>/dev/tcp/127.0.0.1/9598
    printf "GET /metrics HTTP/1.1\r\n\r\n" >&3; cat <&3'
mkdir $units/vcpufreq-metrics.socket.d
printf '%s\n' '[Socket]' ListenStream= ListenStream=/run/vcpufreq-metrics.sock SocketMode=0600 \
    >$units/vcpufreq-metrics.socket.d/override.conf
systemctl daemon-reload
systemctl restart vcpufreq-metrics.socket
[ $(stat -c %a /run/vcpufreq-metrics.sock) = 600 ]
if bash -c 'exec 3<>/dev/tcp/127.0.0.1/9598'; then exit 1; fi
shows_requests perl -MIO::Socket::UNIX -e '
    my $at = IO::Socket::UNIX->new("/run/vcpufreq-metrics.sock") or die $!;
    print {$at} "GET /metrics HTTP/1.1\r\n\r\n"; print while <$at>'
systemctl disable --now vcpufreq-metrics.socket
systemctl stop scraped.service 'system-vcpufreq\x2dmetrics.slice' || true
rm -r $units/vcpufreq-metrics* /run/vcpufreq-metrics.sock
systemctl daemon-reload
vcpufreq cleanup
"#;

/// At the end of the second boot. systemd lists a slice that has ended for a while; it has no file.
const PURGE: [Promise; 6] = [
    (
        "units are enabled, a socket waits, modules are loaded",
        "cp /usr/share/doc/vcpufreq/examples/serve.toml /etc/vcpufreq/guest.toml
         systemctl enable --now vcpufreq-serve@guest.socket
         systemctl enable vcpufreq@guest.service vcpufreq-scx.service
         systemctl is-active vcpufreq-serve@guest.socket
         modprobe -a vcpufreq_host vcpufreq_rt_loop
         [ $(grep -c ^vcpufreq_ /proc/modules) = 2 ]",
    ),
    (
        "apt purges the packages",
        "apt-get purge --yes vcpufreq vcpufreq-dkms",
    ),
    (
        "no file is left",
        "( . /lab/files ) >/var/log/files-after
         diff /var/log/files-before /var/log/files-after",
    ),
    (
        "no cgroup and no clamp is left",
        "find /sys/fs/cgroup -name '*vcpufreq*' >/lab/left
         grep -r -v '^0.00$' /sys/fs/cgroup --include=cpu.uclamp.min >>/lab/left || true
         cat /lab/left; [ ! -s /lab/left ]",
    ),
    (
        "no module, unit, process or file of the run is left",
        "{ grep vcpufreq_ /proc/modules
           systemctl list-units --all --full --no-legend 'vcpufreq*' |
               grep -v -E ' loaded +inactive +dead +Slice '
           systemctl list-unit-files --no-legend 'vcpufreq*'
           ls -l /proc/[0-9]*/exe 2>/dev/null | grep 'bin/vcpufreq'
           find /run /tmp /var/tmp -name '*vcpufreq*'
         } >/lab/left || true
         cat /lab/left; [ ! -s /lab/left ]",
    ),
    (
        "the archive's program runs without the packages",
        "mkdir /lab/archive
         tar -C /lab/archive --strip-components=1 -xf /lab/packages/vcpufreq-*-$debian.tar.xz
         cd /lab/archive/usr/bin
         ./vcpufreq --version | grep '^vcpufreq [0-9]'
         code=0; ./vcpufreq doctor >/lab/doctor || code=$?
         cat /lab/doctor; [ $code -le 1 ]
         head -n 1 /lab/doctor | grep -E \"^$level +architecture +$machine; \"",
    ),
];

/// A guest's initial file system, of files that the host has by now.
const MAKE_GUEST: &str = r#"
rm -rf /lab/guest; mkdir -p /lab/guest/bin /lab/guest/modules /lab/guest/dev /lab/guest/proc /lab/guest/sys
cp /lab/busybox /lab/guest/bin/busybox
ln -s busybox /lab/guest/bin/sh
install /lab/guest-init /lab/guest/init
for name in cpufreq_userspace vcpufreq_guest; do
    file=$(modinfo -n $name)
    case $file in
    *builtin*) ;;
    *.xz) xz -dc $file >/lab/guest/modules/$name.ko ;;
    *) cp $file /lab/guest/modules/$name.ko ;;
    esac
done
mknod /lab/guest/dev/console c 5 1
(cd /lab/guest && find . | /lab/busybox cpio -o -H newc) >/lab/guest-initrd
"#;

/// A person's command line for QEMU; each OPP has to be what the driver reads.
const QEMU: &str = r#"
. /lab/settings
timeout 300 ${prefix-} $qemu -accel kvm -cpu host -smp 2 -m 256M \
    -name guest,debug-threads=on -kernel /boot/vmlinuz-$(uname -r) -initrd /lab/guest-initrd \
    -append "console=$console quiet nokaslr panic=-1" -no-reboot -nic none -nographic "$@" \
    </dev/null >/lab/guest-said
tail -n 20 /lab/guest-said
grep '^@' /lab/guest-said | tr -d '\r' >/lab/rows
[ $(wc -l </lab/rows) = 9 ]
while read -r _ _ cpu _ asked _ reads _; do [ $asked = $reads ]; done </lab/rows
"#;

/// The architectures that the packages are for.
const ALL: [Arch; 2] = [Arch::Arm64, Arch::X86_64];

/// Fetches and installs what the checks need.
pub fn prepare(cache: &Cache, root: &Root, repo: &Path) -> Result<()> {
    let there = ALL.into_iter().filter(|arch| lacks(root, *arch).is_none());
    for arch in there {
        DiskDebian::prepare((cache, root), repo, arch)?;
    }
    Ok(())
}

/// Why the lab has no host of this architecture.
fn lacks(root: &Root, arch: Arch) -> Option<&str> {
    let parts: &[RootPart] = match arch {
        Arch::Arm64 => &[],
        Arch::X86_64 => &[RootPart::X86Guest, RootPart::X86Host],
    };
    parts.iter().find_map(|part| root.lacks(*part))
}

/// Tries the packages of this folder on each architecture.
pub fn check(cache: &Cache, root: &Root, repo: &Path, packages: &Path) -> Result<Vec<TestResult>> {
    let mut tried = Vec::new();
    for arch in ALL {
        if let Some(why) = lacks(root, arch) {
            let skipped = TestResult::skipped(format!("{}: packages", arch.debian()), why);
            tell(&skipped);
            tried.push(skipped);
            continue;
        }
        tried.extend(check_on((cache, root), repo, arch, packages)?);
    }
    Ok(tried)
}

/// Tries them on one.
pub fn check_on(
    (cache, root): (&Cache, &Root),
    repo: &Path,
    arch: Arch,
    packages: &Path,
) -> Result<Vec<TestResult>> {
    let system = DiskDebian::prepare((cache, root), repo, arch)?;
    let debian = arch.debian();
    let name = format!("{}-{debian}", std::process::id());
    let dir = cache.dir().join("runs").join(name);
    remove_tree(&dir)?;
    fs::create_dir_all(&dir)?;
    let disk = system.copy(&dir)?;
    let files = files(&system, (cache, root), repo, packages)?;
    let boots = [
        ("install", INSTALL.to_vec()),
        ("use and purge", [&USE[..], &PURGE].concat()),
    ];
    let mut tried = Vec::new();
    for (what, promises) in boots {
        let step = Step::start(format!("packages on Debian trixie for {debian}: {what}"));
        let mut files = files.clone();
        for (number, (name, script)) in promises.iter().enumerate() {
            let text = format!("# {name}\n{script}\n");
            files.push((format!("steps/{number:02}"), text.into()));
        }
        let start = Start {
            program: "/sbin/init",
            files: &files,
        };
        let outcome = system.boot((&disk, &dir), start, AT_MOST, &step)?;
        step.done();
        let results: Vec<&str> = result_port::results(&outcome.results).collect();
        ensure!(
            results.len() == promises.len(),
            "the host ended early; its console is in {}",
            outcome.console.display()
        );
        for line in results {
            let one = read(line, debian)?;
            tell(&one);
            tried.push(one);
        }
    }
    remove_tree(&dir)?;
    Ok(tried)
}

/// What the host has of this at `/lab`.
fn files(
    system: &DiskDebian<'_>,
    (cache, root): (&Cache, &Root),
    repo: &Path,
    packages: &Path,
) -> Result<Vec<(String, Vec<u8>)>> {
    let kernel = system.kernel();
    let mut files = vec![
        ("lab.service".to_owned(), system.own("lab.service")?),
        ("check".to_owned(), system.own("check")?),
        ("guest-init".to_owned(), system.own("guest-init")?),
        ("make-guest".to_owned(), MAKE_GUEST.into()),
        ("qemu".to_owned(), QEMU.into()),
        ("files".to_owned(), FILES.into()),
        ("drivers".to_owned(), drivers(system)?.into()),
    ];
    let debian = kernel.arch.debian();
    let (program, archive) = (format!("_{debian}.deb"), format!("-{debian}.tar.xz"));
    add_folder(&mut files, packages, "packages", |name| {
        let program = name.starts_with("vcpufreq_") && name.ends_with(&program);
        program || name.ends_with("_all.deb") || name.ends_with(&archive)
    })?;
    let modules = kernel.modules(cache, root, repo, &HOST_MODULES)?;
    add_folder(&mut files, &modules, "modules", |name| {
        name.ends_with(".ko")
    })?;
    Ok(files)
}

/// Loads what a real machine has of its own: its clocks, and what its KVM needs in the emulator.
fn drivers(system: &DiskDebian<'_>) -> Result<String> {
    let load = |name: &str, options: &str| format!("insmod /lab/modules/{name}.ko {options}\n");
    Ok(match system.kernel().arch {
        Arch::Arm64 => load("lab_cpufreq", "") + &load("lab_cpuidle", ""),
        Arch::X86_64 => {
            let clocks = format!("'{}'", system.topology()?.parameter());
            load("lab_cpufreq", &clocks) + "modprobe kvm-amd\n" + &load("lab_svm", "")
        }
    })
}

fn read(line: &str, debian: &str) -> Result<TestResult> {
    let check: LabCheck =
        serde_json::from_str(line.trim()).with_context(|| format!("result line '{line}'"))?;
    let name = format!("{debian}: {}", check.name);
    Ok(TestResult::new(name, check.held, || check.seen))
}

/// Adds the files of a folder that are wanted, below `to`.
fn add_folder(
    files: &mut Vec<(String, Vec<u8>)>,
    folder: &Path,
    to: &str,
    wanted: impl Fn(&str) -> bool,
) -> Result<()> {
    for file in files_below(folder)? {
        let name = file.file_name().and_then(|name| name.to_str());
        if let Some(name) = name.filter(|name| wanted(name)) {
            files.push((format!("{to}/{name}"), fs::read(&file)?));
        }
    }
    Ok(())
}
