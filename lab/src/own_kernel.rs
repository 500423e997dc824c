// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernels of the lab's own, built from Debian's source by the configurations in
//! `lab/kernels`: once, and kept in the cache.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;

use anyhow::{Context, Result, ensure};

use crate::arch::Arch;
use crate::cache::{Cache, key};
use crate::kernel::{Flavor, Kernel};
use crate::kernel_source;
use crate::progress::Step;
use crate::root::Root;

/// Measured, in MiB: source 540, objects with debug information 1,900.
const NEEDED_MIB: u64 = 3_000;

/// What compiles a kernel.
const COMPILERS: [&str; 2] = ["gcc-14-aarch64-linux-gnu", "pahole"];
/// What that takes besides, and its source.
const NEEDS: [&str; 3] = ["bc:amd64", "bison:amd64", "flex:amd64"];

/// Unpacks the source without what no configuration here compiles, two files in three: to remove
/// them took minutes. Leaves the image, the modules, the release's name, and what modules are built against; the
/// latter by the kernel's own script for packages, which would make arm64 programs of the host's
/// if it saw another CC. A module's BTF needs vmlinux with BTF alone.
const SCRIPT: &str = r#"
    to=$1 archive=$2 jobs=$3
    cd "$to"
    mkdir source build modules
    top=$(basename "$archive" .tar.xz)
    drop() { printf -- "--exclude=$top/%s\n" "$@"; }
    {
        drop 'arch/[b-z]*.[chS]' 'arch/*/boot/dts/*.dts*' 'Documentation/*/*' 'sound/*.[ch]'
        drop tools/testing/selftests tools/perf 'drivers/net/*/*.[ch]'
        for part in gpu iio infiniband media scsi staging usb; do
            drop "drivers/$part/*.[ch]"
        done
    } | xargs tar -xJf "$archive" -C source --strip-components=1 --anchored
    export KBUILD_BUILD_TIMESTAMP=2026-01-01 KBUILD_BUILD_USER=lab KBUILD_BUILD_HOST=lab
    build() {
        nice make -s -C source "O=$to/build" ARCH=arm64 CROSS_COMPILE=aarch64-linux-gnu- "$@"
    }
    build "KCONFIG_ALLCONFIG=$to/wanted" allnoconfig
    grep ^CONFIG wanted | while read -r line; do
        case $line in
        *=n) ! grep -q "^${line%n}" build/.config ;;
        *) grep -qxF "$line" build/.config ;;
        esac || echo "the configuration lacks $line"
    done > lacks
    if grep . lacks; then exit 1; fi
    build "-j$jobs" Image modules
    build run-command KBUILD_RUN_COMMAND='CC=$(HOSTCC) sh $(srctree)/scripts/package/install-extmod-build '"$to/headers"
    aarch64-linux-gnu-objcopy --strip-debug build/vmlinux headers/vmlinux
    (cd build && find . -name '*.ko' | xargs cp --parents -t ../modules)
    find modules -name '*.ko' | xargs aarch64-linux-gnu-strip --strip-debug
    mv build/arch/arm64/boot/Image build/.config build/include/config/kernel.release .
    rm -r source build lacks
"#;

/// The configuration's name, of a flavor that isn't Debian's.
pub fn name(flavor: Flavor) -> Option<&'static str> {
    match flavor {
        Flavor::Checked => Some("checked"),
        Flavor::Kcsan => Some("kcsan"),
        Flavor::Protected => Some("protected"),
        Flavor::Standard | Flavor::Rt | Flavor::Old => None,
    }
}

/// Whether a kernel of this flavor reports what is wrong in it.
pub fn has_checks(flavor: Flavor) -> bool {
    matches!(flavor, Flavor::Checked | Flavor::Kcsan)
}

/// The kernel of `lab/kernels/NAME.config`; builds it when it isn't there yet.
pub fn built(cache: &Cache, root: &Root, repo: &Path, name: &str) -> Result<Kernel> {
    root.require(&NEEDS)?;
    root.require(&[&root.source_package()])?;
    let folder = repo.join("lab/kernels");
    let read = |file: &str| {
        let path = folder.join(format!("{file}.config"));
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    };
    let wanted = configuration(&read("host")?, &read(name)?);
    let parts = [SCRIPT, &wanted, &versions(root)?];
    let dir = cache.entry(
        &format!("kernel-{name}"),
        &key(parts.map(str::as_bytes)),
        |to| {
            cache.require_free(NEEDED_MIB)?;
            let step = Step::start(format!(
                "kernel {name} (once, up to 22 minutes of CPU time)"
            ));
            fs::write(to.join("wanted"), &wanted)?;
            let archive = format!("/usr/src/{}", kernel_source::packed(root)?);
            let jobs = available_parallelism()?.to_string();
            let to = root.inside(to)?;
            root.run(
                "building a kernel",
                "sh",
                &["-ec", SCRIPT, "sh", &to, &archive, &jobs],
            )?;
            step.done();
            Ok(())
        },
    )?;
    let release = fs::read_to_string(dir.join("kernel.release"))?;
    Ok(Kernel {
        release: release.trim().to_owned(),
        image: dir.join("Image"),
        arch: Arch::Arm64,
        headers: root.inside(&dir.join("headers"))?,
        packed: PathBuf::new(),
        unpacked: Some(dir.join("modules")),
    })
}

/// The host's configuration with a kernel's own, whose lines replace those of the same symbol.
fn configuration(host: &str, own: &str) -> String {
    let symbol = |line: &str| line.split_once('=').map(|(symbol, _)| symbol.to_owned());
    let set: BTreeSet<String> = own.lines().filter_map(symbol).collect();
    let kept = host
        .split_inclusive('\n')
        .filter(|line| symbol(line).is_none_or(|symbol| !set.contains(&symbol)));
    kept.chain([own]).collect()
}

/// Names and versions of the packages that a kernel depends on.
fn versions(root: &Root) -> Result<String> {
    let status = root.dir().join("var/lib/dpkg/status");
    let status = fs::read_to_string(&status).with_context(|| status.display().to_string())?;
    let source = kernel_source::packed(root)?;
    let source = source.trim_end_matches(".tar.xz");
    let packages = [source, COMPILERS[0], COMPILERS[1]];
    let versions = versions_in(&status, &packages);
    ensure!(
        versions.len() == packages.len(),
        "of {packages:?} the root has {versions:?} alone"
    );
    Ok(versions.join("\n"))
}

fn versions_in(status: &str, packages: &[&str]) -> Vec<String> {
    let field = |package: &str, name: &str| {
        let mut lines = package.lines();
        lines
            .find_map(|line| line.strip_prefix(name))
            .map(str::to_owned)
    };
    let each = status.split("\n\n").filter_map(|package| {
        let name = field(package, "Package: ")?;
        let wanted = packages.contains(&name.as_str());
        wanted.then(|| Some(format!("{name} {}", field(package, "Version: ")?)))?
    });
    let mut found: Vec<String> = each.collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    //! Promises: a kernel is built anew with another version of what it is made of, and then alone.
    //! What it sets stands in place of what hosts need.
    use super::*;

    #[test]
    fn a_kernel_has_each_symbol_once() {
        let host = "# Hosts.\nCONFIG_KVM=y\nCONFIG_KVM_X=y\nCONFIG_TTY=y\n";
        let own = "CONFIG_KVM=n\nCONFIG_NEW=y\n";
        assert_eq!(
            configuration(host, own),
            "# Hosts.\nCONFIG_KVM_X=y\nCONFIG_TTY=y\nCONFIG_KVM=n\nCONFIG_NEW=y\n"
        );
        assert_eq!(configuration(host, ""), host);
    }

    #[test]
    fn versions_of_its_packages_alone() {
        let status = "Package: pahole\nStatus: install ok installed\nVersion: 1.31\n\n\
                      Package: pahole-doc\nVersion: 1.31\n\n\
                      Package: linux-source-7.3\nArchitecture: all\nVersion: 7.3.4-1\n";
        assert_eq!(
            versions_in(status, &["pahole", "linux-source-7.3"]),
            ["linux-source-7.3 7.3.4-1", "pahole 1.31"]
        );
    }
}
