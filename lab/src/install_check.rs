// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The packages on clean Debian systems for amd64: they install, their parts are there and run, DKMS
//! builds the modules, empty ones where they cannot work, another kernel comes and goes, and a purge
//! leaves nothing. After it the archive for other distributions runs in their place.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::clean_debian::CleanDebian;
use crate::progress::Step;
use crate::verdict::{TestResult, tell};

const RELEASES: [&str; 2] = ["bookworm", "trixie"];
/// As seen inside a system.
const PACKAGES: &str = "opt/packages";
/// Which files come there, by the ends of their names.
const TAKEN: [&str; 3] = ["_amd64.deb", "_all.deb", "-amd64.tar.xz"];

const INSTALL: &str = "apt-get install --yes --no-install-recommends /opt/packages/*.deb";
const PURGE: &str = "apt-get purge --yes vcpufreq vcpufreq-dkms";

/// As howto.md has it, on a machine whose folders have links and modes of its own.
const UNPACK: &str = "
    mv /usr/src /opt/src; ln -s /opt/src /usr/src; chmod 700 /usr/bin
    tar -C / --strip-components=1 -xf /opt/packages/vcpufreq-*-amd64.tar.xz
    [ -L /usr/src ]; [ $(stat -c %a /usr/bin) = 700 ]
    test -s /opt/src/vcpufreq-guest-*/dkms.conf; test -d /etc/vcpufreq
    cd /usr/share/doc/vcpufreq; test -s third-party-licences; test -s LICENSES/LGPL-3
";
const DOCTOR: &str = "
    code=0; vcpufreq doctor >/tmp/doctor || code=$?; cat /tmp/doctor; [ $code -le 2 ]
    head -n 1 /tmp/doctor | grep 'x86_64; run.s guests need arm64; .* by qemu and serve'
    rm /tmp/doctor
";

/// A name, and a script that fails when the promise is broken.
const PARTS: [(&str, &str); 7] = [
    ("doctor's first line lists what amd64 can't do", DOCTOR),
    (
        "the unit's command answers a scrape",
        "cd /usr/share/doc/vcpufreq/examples
         command=$(sed -n 's/^ExecStart=//p' vcpufreq-metrics@.service)
         printf 'GET /metrics HTTP/1.1\\r\\n\\r\\n' | $command | tr -d '\\r' >/tmp/answer
         head -n 1 /tmp/answer | grep -x 'HTTP/1.1 200 OK'
         tail -n 1 /tmp/answer | grep -x '# EOF'
         rm /tmp/answer",
    ),
    (
        "each command has its page, and three shells complete",
        "for name in vcpufreq $(vcpufreq --help | sed -n '/^Commands:/,/^$/s/^  \\([a-z]*\\) .*/vcpufreq-\\1/p' | grep -v -e -help); do
             gzip -t /usr/share/man/man1/$name.1.gz
         done
         test -s /usr/share/man/man1/vcpufreq-rt-apply.1.gz
         bash -n /usr/share/bash-completion/completions/vcpufreq
         test -s /usr/share/zsh/vendor-completions/_vcpufreq
         test -s /usr/share/fish/vendor_completions.d/vcpufreq.fish",
    ),
    (
        "systemd takes the units",
        "cd /usr/lib/systemd/system
         systemd-analyze verify --man=no ./vcpufreq-scx.service ./vcpufreq@.service \
             ./vcpufreq-serve@.socket ./vcpufreq-serve@.service \
             /usr/share/doc/vcpufreq/examples/vcpufreq-metrics.socket \
             /usr/share/doc/vcpufreq/examples/vcpufreq-metrics@.service 2>&1",
    ),
    (
        "pages and examples are there",
        "cd /usr/share/doc/vcpufreq
         for file in howto.md qemu.md vcpufreq.md examples/guest.toml examples/libvirt.xml \
             examples/libvirt-hook; do
             test -s $file
         done
         code=0; vcpufreq serve --config examples/serve.toml 2>/tmp/said || code=$?
         cat /tmp/said; [ $code = 2 ]
         if grep 'config file' /tmp/said; then exit 1; fi
         rm /tmp/said",
    ),
    (
        "the guest driver is loaded before Linux' own",
        "modprobe --showconfig | grep '^softdep virtual_cpufreq pre: vcpufreq_guest'",
    ),
    (
        "DKMS builds the modules, which are empty before Linux 6.12",
        "dkms status; [ $(dkms status | grep -c '^vcpufreq-.*: installed') = 3 ]
         is() { modinfo -k $release -F description $1 | grep \"$2\"; }
         release=$(ls /lib/modules)
         case $release in
         6.1.*) is vcpufreq_guest '^Empty: needs Linux 6.12$'
             is vcpufreq_rt_loop '^Empty: needs Linux 6.12$'
             is vcpufreq_host '^Empty: needs Linux 6.12$';;
         *) is vcpufreq_guest '^Guest driver'
             is vcpufreq_rt_loop '^Periodic loop'
             is vcpufreq_host '^Guests. frequency requests';;
         esac",
    ),
];

/// What the steps of `OTHER_KERNEL_STEPS` begin with.
const KERNEL: &str = "kernel=$(ls /opt/kernel | sed -n 's/^linux-image-\\([0-9][^_]*\\)_.*/\\1/p')";

/// A kernel comes and goes. The hooks of these scripts stand behind those of DKMS, and leave marks.
const OTHER_KERNEL_STEPS: [(&str, &str); 3] = [
    (
        "another kernel is installed, and all hooks run",
        "for stage in header_postinst postinst prerm postrm; do
             hook=/etc/kernel/$stage.d/zz-later
             printf '#!/bin/sh\necho $1 >>/tmp/ran-%s\n' $stage >$hook
             chmod 755 $hook
         done
         apt-get install --yes --no-install-recommends /opt/kernel/*.deb
         grep -x $kernel /tmp/ran-header_postinst
         grep -x $kernel /tmp/ran-postinst
         [ -z \"$(dpkg --audit)\" ]
         for package in linux-image-$kernel linux-headers-$kernel; do
             dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' $package | grep '^ii '
         done
         [ $(dkms status -k $kernel | grep -c '^vcpufreq-.*: installed') = 3 ]",
    ),
    (
        "a module that does not build for a kernel is empty, and no hook fails",
        "cd /usr/src/vcpufreq-rt-loop-*
         dkms remove -m vcpufreq-rt-loop -v ${PWD##*-} -k $kernel
         sed -i 's/hrtimer/no_&/; s/6\\.12/0/' rt_loop.c module.mk
         /etc/kernel/postinst.d/dkms $kernel
         modinfo -k $kernel -F description vcpufreq_rt_loop | grep '^Empty: did not build'",
    ),
    (
        "that kernel is purged, and all hooks run",
        "apt-get purge --yes linux-image-$kernel linux-headers-$kernel
         grep -x $kernel /tmp/ran-prerm
         grep -x $kernel /tmp/ran-postrm
         [ -z \"$(dpkg --audit)\" ]
         [ ! -e /lib/modules/$kernel ]
         rm /etc/kernel/*/zz-later",
    ),
];

/// What a user of the package leaves: instances, settings, records.
const USE: &str = "
    cp /usr/share/doc/vcpufreq/examples/guest.toml /etc/vcpufreq/
    systemctl enable vcpufreq@guest.service vcpufreq-serve@guest.socket vcpufreq-scx.service
    mkdir -p /etc/systemd/system/vcpufreq@guest.service.d /run/vcpufreq /run/vcpufreq-bench
    touch /run/vcpufreq-guest.sock
    echo '[Service]' >/etc/systemd/system/vcpufreq@guest.service.d/override.conf
";

/// Every file: kind, mode, size of a regular file, name, a link's target.
const FILES: &str =
    "find / -xdev \\( -type f -printf '%y %m %s %p\\n' \\) -o -printf '%y %m %p %l\\n'";

/// What package managers write: state, caches, logs. depmod's lists of a kernel's modules and DKMS'
/// key stay from the first module of any package; systemctl notes when it looked at units.
const OTHERS: [&str; 7] = [
    "/var/lib/dpkg/",
    "/var/lib/apt/",
    "/var/lib/dkms/mok.",
    "/var/cache/",
    "/var/log/",
    "/run/systemd",
    "/tmp/",
];

/// Fetches what the checks need from the network.
pub fn prepare(cache: &Cache) -> Result<()> {
    for release in RELEASES {
        CleanDebian::prepare(cache, release)?;
    }
    Ok(())
}

/// Tries the packages of this folder on each release.
pub fn check(cache: &Cache, packages: &Path) -> Result<Vec<TestResult>> {
    let mut tried = Vec::new();
    for release in RELEASES {
        let system = CleanDebian::copy(cache, release)?;
        let step = Step::start(format!("packages on Debian {release}"));
        for file in fs::read_dir(packages)? {
            let file = file?.path();
            let name = file.to_string_lossy();
            if TAKEN.iter().any(|end| name.ends_with(end)) {
                system.take(&file, PACKAGES)?;
            }
        }
        let news = on(&system)?;
        step.done();
        for (name, held, seen) in news {
            let one = TestResult::new(format!("{release}: {name}"), held, || seen);
            tell(&one);
            tried.push(one);
        }
    }
    Ok(tried)
}

/// What came of each promise: its name, whether it held, what was seen.
fn on(system: &CleanDebian) -> Result<Vec<(String, bool, String)>> {
    let before = files(system)?;
    let mut news = Vec::new();
    let mut carry_out = |name: &str, script: &str| -> Result<()> {
        let (held, seen) = system.shell(script)?;
        news.push((name.to_owned(), held, seen));
        Ok(())
    };
    carry_out("the packages install", INSTALL)?;
    for (name, script) in PARTS {
        carry_out(name, script)?;
    }
    for (name, script) in OTHER_KERNEL_STEPS {
        carry_out(name, &format!("{KERNEL}\n{script}"))?;
    }
    carry_out("instances are enabled", USE)?;
    carry_out("the packages are purged", PURGE)?;
    let after = files(system)?;
    let left = differences(&before, &after);
    let name = "a purge leaves nothing".to_owned();
    news.push((name, left.is_empty(), left.join("; ")));
    let (held, seen) = system.shell(&format!("{UNPACK}\n{DOCTOR}"))?;
    let name = "the archive leaves folders as they are, and its program runs".to_owned();
    news.push((name, held, seen));
    Ok(news)
}

fn files(system: &CleanDebian) -> Result<BTreeSet<String>> {
    let (done, text) = system.shell(FILES)?;
    anyhow::ensure!(done, "listing a Debian system's files failed: {text}");
    let lines = text.lines().map(str::to_owned);
    let files: BTreeSet<String> = lines.filter(|line| !is_others(line)).collect();
    files.first().context("a Debian system without files")?;
    Ok(files)
}

fn is_others(line: &str) -> bool {
    let depmod = line.contains("/lib/modules/") && line.contains("/modules.");
    depmod || OTHERS.iter().any(|part| line.contains(&format!(" {part}")))
}

/// Each line that only one of them has, with the sign of a diff.
fn differences(before: &BTreeSet<String>, after: &BTreeSet<String>) -> Vec<String> {
    let gone = before.difference(after).map(|line| format!("-{line}"));
    let left = after.difference(before).map(|line| format!("+{line}"));
    gone.chain(left).collect()
}

#[cfg(test)]
mod tests {
    //! Promises: a file that is left, gone or changed is named; package managers' own state is not.
    use super::*;

    #[test]
    fn what_is_left_is_named() {
        let of = |lines: &[&str]| -> BTreeSet<String> {
            let lines = lines.iter().map(|line| (*line).to_owned());
            lines.filter(|line| !is_others(line)).collect()
        };
        let before = of(&[
            "d 755 /etc ",
            "f 644 3 /etc/passwd",
            "f 644 9 /var/log/apt/x",
        ]);
        let after = of(&[
            "d 755 /etc ",
            "f 644 4 /etc/passwd",
            "l 777 /etc/systemd/system/a.wants/vcpufreq@a.service /lib/x",
            "f 644 1 /usr/lib/modules/6.12/modules.dep",
            "f 644 1 /var/lib/dpkg/status",
        ]);
        let left = differences(&before, &after);
        assert_eq!(
            left,
            [
                "-f 644 3 /etc/passwd",
                "+f 644 4 /etc/passwd",
                "+l 777 /etc/systemd/system/a.wants/vcpufreq@a.service /lib/x",
            ]
        );
        assert!(differences(&before, &before).is_empty());
    }
}
