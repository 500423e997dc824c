// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device tree compiler, and QEMU. They are looked for on the PATH, then in the toolchain root
//! that `VCPUFREQ_LAB_ROOT` names.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What a test prints where there is none.
pub const NO_DTC: &str = "SKIP: no dtc on the PATH or in VCPUFREQ_LAB_ROOT";

pub fn dtc() -> Option<Command> {
    tool("dtc")
}

/// The program here, or the root's run by the root's own loader.
pub fn tool(name: &str) -> Option<Command> {
    let path = env::var_os("PATH").unwrap_or_default();
    if env::split_paths(&path).any(|dir| dir.join(name).is_file()) {
        return Some(Command::new(name));
    }
    let root = PathBuf::from(env::var_os("VCPUFREQ_LAB_ROOT")?);
    let libs = root.join(format!("usr/lib/{}-linux-gnu", env::consts::ARCH));
    let loader = fs::read_dir(&libs).ok()?.find_map(|entry| {
        let path = entry.ok()?.path();
        let name = path.file_name()?.to_str()?;
        name.starts_with("ld-linux-").then_some(path)
    })?;
    let mut command = Command::new(loader);
    command
        .arg("--library-path")
        .arg(libs)
        .arg(root.join("usr/bin").join(name));
    Some(command)
}

/// Compiles a file to a blob; warnings are findings.
pub fn compile(mut dtc: Command, form: &str, file: &Path) -> Vec<u8> {
    let output = dtc
        .args(["-I", form, "-O", "dtb"])
        .arg(file)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.is_empty(),
        "{}: {said}",
        file.display()
    );
    output.stdout
}

/// The tree of a QEMU with four vCPUs, if there is a dtc.
pub fn tree_of_qemu() -> Option<Vec<u8>> {
    let mut dtc = dtc()?;
    // QEMU pads to 1 MiB; some of its nodes have no unit address for dtc's taste.
    dtc.args(["-q", "-S", "0x100000"]);
    let source = tempfile::NamedTempFile::new().unwrap();
    fs::write(source.path(), include_str!("../qemu-virt.dts")).unwrap();
    let tree = compile(dtc, "dts", source.path());
    assert_eq!(tree.len(), 1 << 20);
    Some(tree)
}
