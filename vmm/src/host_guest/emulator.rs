// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The QEMU that runs guests on a machine that `vcpufreq run` has none for.

use std::ffi::OsStr;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use vcpufreq_bench::GuestArgs;

/// Where a program is looked for without a PATH, as execvp(3) does.
const PATH: &str = "/bin:/usr/bin";

/// Gives the guests of `args` the QEMU of this architecture, unless they have one.
///
/// # Errors
/// When there is none, or an option of `vcpufreq run` alone.
pub fn choose(args: &mut GuestArgs, arch: &str, path: Option<&OsStr>) -> anyhow::Result<()> {
    let given = [
        ("--path", args.path != "auto"),
        ("--protected", args.protected),
    ];
    for (option, given) in given {
        ensure!(
            !given,
            "{option} is of vcpufreq run's guests, and those of {arch} are QEMU's; leave it out"
        );
    }
    if args.qemu.is_none() {
        let name = format!("qemu-system-{arch}");
        let found = find(&name, path.unwrap_or(PATH.as_ref()));
        let found = found.with_context(|| {
            format!("guests of {arch} are QEMU's, and no folder of PATH has {name}; install qemu-system-x86")
        })?;
        args.qemu = Some(found);
    }
    Ok(())
}

fn find(name: &str, path: &OsStr) -> Option<PathBuf> {
    let mut files = std::env::split_paths(path).map(|folder| folder.join(name));
    files.find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    //! Promises: the first QEMU of PATH is taken, one that is named goes before it, and without one
    //! there is a line with what to install.
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Demo {
        #[command(flatten)]
        args: GuestArgs,
    }

    #[test]
    fn the_first_qemu_of_path_is_taken() {
        let [without, with] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let qemu = with.path().join("qemu-system-x86_64");
        std::fs::write(&qemu, "").unwrap();
        let chosen = |folders: &[&tempfile::TempDir], own: Option<&str>, words: &[&str]| {
            let mut args = Demo::parse_from([&["demo"], words].concat()).args;
            args.qemu = own.map(PathBuf::from);
            let path = std::env::join_paths(folders.iter().map(|dir| dir.path())).unwrap();
            choose(&mut args, "x86_64", Some(&path)).map(|()| args.qemu.unwrap())
        };
        assert_eq!(chosen(&[&without, &with], None, &[]).unwrap(), qemu);
        let own = chosen(&[&with], Some("qemu"), &[]).unwrap();
        assert_eq!(own, PathBuf::from("qemu"));
        for (folder, words, line) in [
            (&without, &[][..], "; install qemu-system-x86"),
            (&with, &["--path", "exit"], "are QEMU's; leave it out"),
            (&with, &["--protected"], "are QEMU's; leave it out"),
        ] {
            let error = chosen(&[folder], None, words).unwrap_err().to_string();
            assert!(error.ends_with(line), "{error}");
        }
    }
}
