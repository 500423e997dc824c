// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq dt`: the device-tree part alone, for other VMMs.

use anyhow::Context;
use vcpufreq_device::host::{CpuList, HostRoot};

use crate::{
    cli::{DtArgs, DtFormat},
    config::{likeness::Likeness, resolve, topology},
    message::warn,
    options::{VcpuArgs, values::PerVcpu},
};
use vcpufreq_device::host::HostCpus;

/// The device tree that the arguments ask for, as it is printed.
///
/// # Errors
/// What is wrong with the options, or the host doesn't tell.
pub fn dt(args: &DtArgs, root: &HostRoot) -> anyhow::Result<Vec<u8>> {
    let host = HostCpus::read(root);
    let asked = args.config.is_some() || args.vcpus != VcpuArgs::default();
    let options = match asked {
        true => args.vcpus.clone(),
        false => mirror(&host),
    };
    let count = resolve::vcpu_count(&options)?;
    let vcpus = resolve::vcpus(&options, &host, count)?;
    let base = (!options.no_bridge).then_some(args.base);
    // Which kernel will read it isn't known.
    let standby = true;
    let machine = topology::machine(&vcpus, base, standby)
        .context("can't describe these CPUs; correct --table, --capacity or --base")?;
    warn(&Likeness::of(&options, &host, count).text(&vcpus));
    Ok(match args.format {
        DtFormat::Dts => vcpufreq_dt::dts(&machine).into_bytes(),
        DtFormat::Dtb => vcpufreq_dt::dtb(&machine).context("can't make the device tree")?,
    })
}

/// One vCPU for each online pCPU.
fn mirror(host: &HostCpus) -> VcpuArgs {
    let online = host.online();
    let pins = (0..).zip(online.iter()).map(|(vcpu, pcpu)| PerVcpu {
        vcpus: CpuList::from_iter([vcpu]),
        value: CpuList::from_iter([pcpu]),
    });
    VcpuArgs {
        cpus: u32::try_from(online.len()).ok(),
        host_topology: Some(true),
        pin: pins.collect(),
        ..VcpuArgs::default()
    }
}

#[cfg(test)]
mod tests {
    //! Without options the tree mirrors the host; with options it is theirs.

    use clap::Parser;

    use vcpufreq_device::fakes::FakeHost;

    use super::*;
    use crate::{cli::Cli, cli::Command};

    fn printed(flags: &[&str]) -> anyhow::Result<Vec<u8>> {
        let line = ["vcpufreq", "dt"].iter().chain(flags);
        match Cli::try_parse_from(line).unwrap().command {
            Command::Dt(args) => dt(&args, &FakeHost::two_plus_two().root()),
            other => panic!("{other:?}"),
        }
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
}
