// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq dt`: the device-tree part alone, for other VMMs.

use std::path::Path;

use anyhow::{Context, bail};
use vcpufreq_host::{CpuList, HostRoot};

use crate::{
    cli::{DtArgs, DtFormat},
    config::{
        no_frequencies::with_next_step,
        ram_place::RamPlace,
        resolve,
        topology::{self, read_tree},
        topology_source,
    },
    message::warn,
    options::{VcpuArgs, values::PerVcpu},
};
use vcpufreq_dt::{Machine, Seeds};
use vcpufreq_host::HostCpus;
use vcpufreq_vm::layout::CPUFREQ_BASE;

/// The device tree that the arguments ask for, as it is printed.
///
/// # Errors
/// What is wrong with the options, or the host doesn't tell.
pub fn dt(args: &DtArgs, root: &HostRoot) -> anyhow::Result<Vec<u8>> {
    const INSTEAD: &str = "--no-bridge to leave the device out";
    let host = HostCpus::read(root);
    let options = match args.config.is_some() || names_vcpus(&args.vcpus) {
        true => args.vcpus.clone(),
        false => mirror(&host, &args.vcpus),
    };
    if args.in_ram && options.no_bridge {
        bail!("--in-ram is where the bridge's registers are; leave --no-bridge out");
    }
    let count = resolve::vcpu_count(&options)?;
    let vcpus = resolve::vcpus(&options, &host, count);
    let vcpus = vcpus.map_err(|error| with_next_step(error, false, INSTEAD))?;
    let base = (!options.no_bridge).then_some(args.base.unwrap_or(CPUFREQ_BASE));
    // Which kernel will read it isn't known. QEMU without KVM never wakes a CPU that stands by.
    let standby = args.merge.is_none() || vcpus.iter().any(|vcpu| vcpu.rt.is_some());
    let tree = args.merge.as_deref().map(read_tree).transpose()?;
    let in_ram = tree.as_deref().filter(|_| args.in_ram);
    let cpufreq = match in_ram.map(RamPlace::of_base).transpose()? {
        Some(place) => Some(topology::in_guest_ram(&vcpus, place.base)),
        None => base.map(|base| topology::registers(&vcpus, base)),
    };
    let machine = topology::machine(&vcpus, cpufreq, standby)
        .context("can't describe these CPUs; correct --table, --capacity or --base")?;
    let has_registers = in_ram.is_some() || args.base.is_some();
    let printed = match (args.merge.as_deref().zip(tree.as_deref()), args.format) {
        (_, Some(DtFormat::Dtbo)) => {
            let region = cpufreq.filter(|_| in_ram.is_some());
            let region = region.context("an overlay has the registers of --in-ram; give that")?;
            vcpufreq_dt::overlay(region).context("can't make the overlay")?
        }
        (Some(_), Some(DtFormat::Dts)) => bail!("--merge writes a dtb; leave --format dts out"),
        (Some((file, tree)), _) if has_registers => merged(file, tree, &machine)?,
        (Some((file, tree)), _) => merged(file, tree, &machine.without_cpufreq())?,
        (None, Some(DtFormat::Dtb)) => {
            vcpufreq_dt::dtb(&machine).context("can't make the device tree")?
        }
        (None, _) => vcpufreq_dt::dts(&machine).into_bytes(),
    };
    warn(&topology_source::line(&options, &host, &vcpus));
    Ok(printed)
}

/// The tree of `file` with the machine's CPUs, for more than one boot.
fn merged(file: &Path, tree: &[u8], machine: &Machine) -> anyhow::Result<Vec<u8>> {
    let merged = vcpufreq_dt::merge(tree, machine, Seeds::Drop).with_context(|| {
        let file = file.display();
        format!("can't merge with {file}; dump it from a VMM with the vCPUs of --cpus")
    })?;
    merged.notes.iter().for_each(|note| warn(&note.to_string()));
    Ok(merged.blob)
}

/// Whether the options tell how many or which vCPUs: what is of all alike doesn't.
fn names_vcpus(options: &VcpuArgs) -> bool {
    let alike = VcpuArgs {
        no_bridge: options.no_bridge,
        host_topology: options.host_topology,
        ..VcpuArgs::default()
    };
    *options != alike
}

/// One vCPU for each online pCPU.
fn mirror(host: &HostCpus, options: &VcpuArgs) -> VcpuArgs {
    let online = host.online();
    let pins = (0..).zip(online.iter()).map(|(vcpu, pcpu)| PerVcpu {
        vcpus: CpuList::from_iter([vcpu]),
        value: CpuList::from_iter([pcpu]),
    });
    VcpuArgs {
        cpus: u32::try_from(online.len()).ok(),
        host_topology: options.host_topology.or(Some(true)),
        no_bridge: options.no_bridge,
        pin: pins.collect(),
        ..VcpuArgs::default()
    }
}

#[cfg(test)]
mod tests {
    //! Without options the tree mirrors the host; with options it is theirs. Merged with a VMM's
    //! own, it is a blob without registers.

    use clap::Parser;

    use vcpufreq_host::fakes::FakeHost;
    use vcpufreq_vm::fakes::qemu_tree;

    use super::*;
    use crate::{cli::Cli, cli::Command, message::chain};

    fn printed_on(host: &FakeHost, flags: &[&str]) -> anyhow::Result<Vec<u8>> {
        let line = ["vcpufreq", "dt"].iter().chain(flags);
        match Cli::try_parse_from(line).unwrap().command {
            Command::Dt(args) => dt(&args, &host.root()),
            other => panic!("{other:?}"),
        }
    }

    fn printed(flags: &[&str]) -> anyhow::Result<Vec<u8>> {
        printed_on(&FakeHost::two_plus_two(), flags)
    }

    fn text(flags: &[&str]) -> String {
        String::from_utf8(printed(flags).unwrap()).unwrap()
    }

    #[test]
    fn without_options_it_mirrors_the_host() {
        let dts = text(&[]);
        assert_eq!(dts.matches("device_type = \"cpu\"").count(), 4, "{dts}");
        assert!(dts.contains("qemu,virtual-cpufreq"), "{dts}");
        assert_eq!(dts.matches("opp-shared").count(), 2, "{dts}");
    }

    #[test]
    fn an_option_of_all_vcpus_leaves_one_for_each_online_pcpu() {
        let server = FakeHost::two_plus_two();
        server.remove("sys/devices/system/cpu/cpufreq");
        let error = printed_on(&server, &[]).unwrap_err();
        assert!(chain(&error).contains("--no-bridge"), "{error:?}");
        let board = FakeHost::two_plus_two();
        for (host, flags) in [
            (&server, "--no-bridge"),
            (&board, "--no-bridge"),
            (&board, "--host-topology=false"),
        ] {
            let dts = String::from_utf8(printed_on(host, &[flags]).unwrap()).unwrap();
            assert_eq!(dts.matches("device_type = \"cpu\"").count(), 4, "{dts}");
        }
    }

    #[test]
    fn options_replace_the_host() {
        let dts = text(&[
            "--table=0=1000,2000",
            "--capacity=0=1024",
            "--base=0xb000000",
        ]);
        assert_eq!(dts.matches("device_type = \"cpu\"").count(), 1, "{dts}");
        assert!(dts.contains("b000000"), "{dts}");
    }

    #[test]
    fn pinned_vcpus_mirror_their_pcpus_unless_told() {
        let dts = text(&["--cpus=2", "--pin=0=0", "--pin=1=2"]);
        assert_eq!(dts.matches("opp-shared").count(), 2, "{dts}");
        let dts = text(&[
            "--cpus=2",
            "--pin=0=0",
            "--pin=1=2",
            "--host-topology=false",
        ]);
        assert_eq!(dts.matches("opp-shared").count(), 0, "{dts}");
    }

    #[test]
    fn the_binary_form_is_a_flattened_tree() {
        assert!(
            printed(&["--format=dtb"])
                .unwrap()
                .starts_with(&[0xd0, 0x0d, 0xfe, 0xed])
        );
    }

    #[test]
    fn an_unaligned_base_is_refused() {
        assert!(printed(&["--base=0xb000100"]).is_err());
    }

    /// A file with the tree of a VMM with two vCPUs, padded.
    fn base() -> tempfile::NamedTempFile {
        let mut blob = printed(&["--cpus=2", "--pin=0=0", "--pin=1=2", "--format=dtb"]).unwrap();
        blob.resize(1 << 20, 0);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), blob).unwrap();
        file
    }

    #[test]
    fn a_merged_tree_has_registers_only_if_their_address_is_given() {
        let file = base();
        let merge = format!("--merge={}", file.path().display());
        let flags = [
            "--cpus=2",
            "--table=0-1=1000,2000",
            "--capacity=0-1=512",
            &merge,
        ];
        for (base, node) in [(None, false), (Some("--base=0xb000000"), true)] {
            let flags: Vec<_> = flags.into_iter().chain(base).collect();
            let blob = printed(&flags).unwrap();
            assert!(blob.starts_with(&[0xd0, 0x0d, 0xfe, 0xed]) && blob.len() < 4096);
            let has = |name: &[u8]| blob.windows(name.len()).any(|found| found == name);
            assert_eq!(has(b"cpufreq@b000000\0"), node);
            assert!(has(b"opp-2000000\0") && !has(b"opp-1800000000\0"));
        }
    }

    #[test]
    fn a_server_finds_registers_in_ram_by_the_tree() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), qemu_tree(2, 64 << 20).unwrap()).unwrap();
        let merge = format!("--merge={}", file.path().display());
        let vcpus = ["--cpus=2", "--pin=0=0", "--pin=1=2"];
        let host = HostCpus::read(&FakeHost::two_plus_two().root());
        let of = |flags: &[&str]| {
            let line = ["vcpufreq", "dt"].iter().chain(flags);
            let Command::Dt(args) = Cli::try_parse_from(line).unwrap().command else {
                panic!("no dt")
            };
            let count = resolve::vcpu_count(&args.vcpus).unwrap();
            resolve::vcpus(&args.vcpus, &host, count).unwrap()
        };
        let blob = printed(&[&vcpus[..], &[&merge, "--in-ram"]].concat()).unwrap();
        let place = RamPlace::of_tree(&blob, &of(&vcpus)).unwrap();
        assert_eq!((place.base, place.size), (0x43e0_0000, 64 << 20));
        let overlay = ["--in-ram", "--format=dtbo", &merge];
        let overlay = printed(&[&vcpus[..], &overlay].concat()).unwrap();
        let region = vcpufreq_dt::registers_in_ram(&blob).unwrap();
        assert_eq!(vcpufreq_dt::registers_in_ram(&overlay).unwrap(), region);
        let error = printed(&["--format=dtbo"]).unwrap_err();
        assert!(chain(&error).contains("--in-ram"), "{error:?}");
        let more: Vec<_> = of(&["--cpus=17"]);
        // As if they were of less RAM.
        let mut other = blob.clone();
        let at = other
            .windows(8)
            .position(|word| word == (64_u64 << 20).to_be_bytes());
        other[at.unwrap()..][..8].copy_from_slice(&(128_u64 << 20).to_be_bytes());
        let without = printed(&[&vcpus[..], &[&merge]].concat()).unwrap();
        let moved = printed(&[&vcpus[..], &[&merge, "--base=0x43c00000"]].concat()).unwrap();
        for (blob, vcpus, line) in [
            (&blob, &more, "aren't those of 17 vCPUs at the end"),
            (&other, &of(&vcpus), "aren't those of 2 vCPUs at the end"),
            (&without, &of(&vcpus), "no registers in RAM"),
            (&moved, &of(&vcpus), "no registers in RAM"),
            (&vec![0; 64], &of(&vcpus), "it begins with"),
        ] {
            let error = RamPlace::of_tree(blob, vcpus).unwrap_err();
            assert!(chain(&error).contains(line), "{error:?}");
        }
    }

    #[test]
    fn a_wrong_base_is_one_line_with_its_file() {
        let file = base();
        let empty = tempfile::NamedTempFile::new().unwrap();
        let path = |file: &tempfile::NamedTempFile| file.path().display().to_string();
        let rows: [(&str, &[&str], &str); 5] = [
            (
                &path(&file),
                &["--cpus=3"],
                "2 CPUs in the tree, 3 asked for",
            ),
            (
                &path(&empty),
                &["--cpus=2"],
                "no whole flattened device tree",
            ),
            ("/dev/zero", &["--cpus=2"], "no whole flattened device tree"),
            ("/no/such", &["--cpus=2"], "No such file"),
            (&path(&file), &["--format=dts"], "leave --format dts out"),
        ];
        for (file, flags, said) in rows {
            let merge = format!("--merge={file}");
            let error = printed(&[&[merge.as_str()], flags].concat()).unwrap_err();
            let line = chain(&error);
            assert!(line.contains(said) && !line.contains('\n'), "{line}");
        }
    }
}
